"""What each output of a resampled axis reads and with what weight: nearest, linear, cubic, antialiased.

Written in torch operations over an :class:`Axis` whose sizes may be symbolic, in eager's arithmetic and order of
operations (ATen ``native/UpSample.h`` and ``native/cpu/UpSampleKernel.cpp``), so that a rounding at a boundary between
two cells falls as it does in the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from detpass.rules.axis_maps import Taps

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Axis:
    """One resampled axis."""

    cells: Any
    """Its input size."""
    outputs: Any
    """Its output size."""
    scale: Any
    """The ``scale_factor`` that eager was told to use for the map, or None: then the ratio of the sizes."""
    aligned: bool
    """``align_corners``."""
    dtype: torch.dtype
    """The dtype of weights and source positions."""
    device: torch.device = CPU

    @property
    def step(self) -> Any:
        """Input cells for each output."""
        if self.aligned:
            return (self.cells - 1) / (self.outputs - 1) if self.outputs > 1 else 0.0
        if self.scale is not None and self.scale > 0:
            return 1.0 / self.scale
        return self.cells / self.outputs

    def positions(self, dtype: torch.dtype) -> torch.Tensor:
        """``[outputs]``: the output positions."""
        return torch.arange(self.outputs, dtype=dtype, device=self.device)

    def sources(self) -> torch.Tensor:
        """``[outputs]``: where each output's centre lies among the input cells."""
        positions = self.positions(self.dtype)
        source: torch.Tensor = positions * self.step if self.aligned else (positions + 0.5) * self.step - 0.5
        return source


def nearest_taps(shift: float) -> Callable[[Axis], Taps]:
    """Taps of nearest (``shift`` 0) and nearest-exact (0.5): one a position, in float32 whatever the dtype."""

    def taps(axis: Axis) -> Taps:
        source = (axis.positions(torch.float32) + shift) * axis.step
        index = torch.clamp(source.floor().to(torch.int64), max=axis.cells - 1).unsqueeze(0)
        return Taps(index, torch.ones_like(index, dtype=axis.dtype))

    return taps


def linear_taps(axis: Axis) -> Taps:
    """Two taps a position; before the first cell both are that cell."""
    source = axis.sources().clamp(min=0)
    low = torch.clamp(source.floor().to(torch.int64), max=axis.cells - 1)
    high = torch.clamp(low + 1, max=axis.cells - 1)
    fraction = torch.clamp(source - low, 0.0, 1.0)
    return Taps(torch.stack([low, high]), torch.stack([1.0 - fraction, fraction]))


def cubic_taps(axis: Axis) -> Taps:
    """Four taps a position, Keys' kernel with a = -0.75, clamped to the border."""
    source = axis.sources()
    base = torch.clamp(source.floor().to(torch.int64), max=axis.cells - 1)
    t = torch.clamp(source - base, 0.0, 1.0)
    weights = torch.stack([_keys(t + 1.0, -0.75), _keys(t, -0.75), _keys(1.0 - t, -0.75), _keys(2.0 - t, -0.75)])
    offsets = torch.arange(-1, 3, device=axis.device).unsqueeze(1)
    return Taps(torch.clamp(base + offsets, 0, axis.cells - 1), weights)


def _keys(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic at distances ``0 <= x < 2``."""
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(1.0 - x.abs(), min=0.0)


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    window = torch.sinc(x) * torch.sinc(x / 3.0)
    return torch.where(x.abs() < 3.0, window, 0.0)


@dataclass(frozen=True)
class _Filter:
    half_width: float
    function: Callable[[torch.Tensor], torch.Tensor]


_FILTERS = {
    "triangle": _Filter(1.0, _triangle),
    "cubic": _Filter(2.0, lambda x: _keys(x.abs(), -0.5)),
    "lanczos": _Filter(3.0, _lanczos),
}


def area_taps(name: str) -> Callable[[Axis], Taps]:
    """Taps of antialiased resampling: a filter as wide as the step, normalised over the cells that it meets."""
    chosen = _FILTERS[name]

    def taps(axis: Axis) -> Taps:
        step = axis.step
        shrinks = step >= 1.0
        support = chosen.half_width * step if shrinks else chosen.half_width
        inverse = 1.0 / step if shrinks else 1.0
        centre = (axis.positions(axis.dtype) + 0.5) * step
        first = torch.clamp((centre - support + 0.5).to(torch.int64), min=0)
        last = torch.clamp((centre + support + 0.5).to(torch.int64), max=axis.cells)
        width = axis.cells
        if isinstance(support, float) and isinstance(axis.cells, int):
            width = min(axis.cells, 2 * math.ceil(support) + 1)
        offsets = torch.arange(width, device=axis.device).unsqueeze(1)
        index = first + offsets
        weight = chosen.function((index - centre + 0.5) * inverse)
        weight = torch.where(index < last, weight, 0.0).to(axis.dtype)
        total = weight.sum(0)
        weight = torch.where(total != 0, weight / total, weight)
        return Taps(torch.clamp(index, max=axis.cells - 1), weight)

    return taps
