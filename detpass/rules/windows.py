"""The adjoint of a sliding window: every input cell gathers what the windows over it send back.

Pooling and ``fold`` share one geometry per axis: window ``o`` covers the cells ``o * stride - padding + j * dilation``
for ``j`` in ``[0, kernel)``. Seen from a cell, at padded coordinate ``cell + padding = stride * q + phase``, the
windows over it are ``o = q - back`` for a few small ``back``, which depend on the phase alone. So the adjoint is a sum
of shifted slices, one small set of slices per phase: no index tensor, no atomic, no sort; sizes may be symbolic.

Two layouts hold the phases. *Sliced*: each combination of phases is a tensor of its own, summed over its own windows
and woven into the result at the end; slices are contiguous, so Inductor vectorises them. *Blocked*: the phases are
broadcast dimensions of one expression; for large strides, where there would be too many slices.

Terms are added in the row-major order of the windows, the order in which a sequential loop over them would add.

Neighbours: ``pooling.py``, ``max_pooling.py`` and ``folding.py`` (who use it), ``axis_maps.py`` (index maps that are
no windows).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

SLICED_PHASES = 16
"""Up to this many phases are sliced; above, they are blocked."""


@dataclass(frozen=True)
class Reach:
    """A window over a cell: ``back`` windows before the cell's own ``q``, meeting it with ``element``."""

    back: int
    element: int


@dataclass(frozen=True)
class Window:
    """The sliding window along one axis. The sizes of the axis may be symbolic and are given apart."""

    kernel: int
    stride: int
    padding: int = 0
    dilation: int = 1

    def reaches(self, phase: int) -> tuple[Reach, ...]:
        """The windows over a cell of this phase, first window first."""
        offsets = ((phase - j * self.dilation, j) for j in range(self.kernel))
        found = (Reach(-(offset // self.stride), j) for offset, j in offsets if offset % self.stride == 0)
        return tuple(sorted(found, key=lambda reach: -reach.back))

    @property
    def backs(self) -> tuple[int, ...]:
        """Every ``back`` that some phase has, first window first."""
        return tuple(sorted({r.back for phase in range(self.stride) for r in self.reaches(phase)}, reverse=True))

    def element_by_phase(self, back: int, device: torch.device) -> torch.Tensor:
        """``int64[stride]``: the element of the window ``back`` before that meets a cell of each phase; -1 for none."""
        phase = torch.arange(self.stride, device=device)
        distance = phase + back * self.stride
        element = distance // self.dilation
        met = (distance % self.dilation == 0) & (element < self.kernel)
        return torch.where(met, element, -1)

    def blocks(self, cells: Any) -> Any:
        """How many values ``q`` takes over ``cells`` cells."""
        return (cells + self.padding + self.stride - 1) // self.stride


def are_sliced(windows: Sequence[Window]) -> bool:
    """Whether the sliced layout is used for these windows."""
    return prod(window.stride for window in windows) <= SLICED_PHASES


def overlap(windows: Sequence[Window]) -> bool:
    """Whether two windows can share a cell."""
    return any(len(window.reaches(phase)) > 1 for window in windows for phase in range(window.stride))


class Shifter:
    """Slices ``[..., q_1, .., q_n]`` of a tensor over window positions ``[..., o_1, .., o_n]``, shifted."""

    def __init__(self, source: torch.Tensor, windows: Sequence[Window], cells: Sequence[Any], fill: float) -> None:
        self._lengths = [window.blocks(size) for window, size in zip(windows, cells, strict=True)]
        self._before = [window.backs[0] for window in windows]
        margins: list[Any] = []
        positions = source.shape[source.dim() - len(windows) :]
        for before, length, position in zip(self._before, self._lengths, positions, strict=True):
            # A negative margin drops windows that lie wholly in the padding behind the last cell.
            margins = [before, length - position, *margins]
        self._padded = torch.constant_pad_nd(source, margins, fill)

    def __call__(self, backs: Sequence[int]) -> torch.Tensor:
        result = self._padded
        for axis, (back, before, length) in enumerate(zip(backs, self._before, self._lengths, strict=True)):
            result = result.narrow(axis - len(self._lengths), before - back, length)
        return result


SlicedTerm = Callable[[tuple[int, ...], tuple[Reach, ...]], torch.Tensor]


def sliced_adjoint(windows: Sequence[Window], cells: Sequence[Any], term: SlicedTerm) -> torch.Tensor:
    """``[..., *cells]``: for each phase the sum of ``term(phases, reaches): [..., q_1, .., q_n]`` over its windows.

    A phase that no window reaches is zero.
    """
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for phases in itertools.product(*(range(window.stride) for window in windows)):
        choices = [window.reaches(phase) for window, phase in zip(windows, phases, strict=True)]
        for reaches in itertools.product(*choices):
            value = term(phases, reaches)
            parts[phases] = parts[phases] + value if phases in parts else value
    nothing = torch.zeros_like(next(iter(parts.values())))

    def weave(phases: tuple[int, ...]) -> torch.Tensor:
        axis = len(phases)
        if axis == len(windows):
            return parts.get(phases, nothing)
        window, dim = windows[axis], axis - len(windows)
        rows = [weave((*phases, phase)) for phase in range(window.stride)]
        # stack puts the phase after q: [.., q, phase, ..] flattens to the padded coordinate.
        woven = rows[0] if len(rows) == 1 else torch.stack(rows, rows[0].dim() + dim + 1).flatten(dim - 1, dim)
        return woven.narrow(dim, window.padding, cells[axis])

    return weave(())


BlockedTerm = Callable[[tuple[int, ...]], torch.Tensor]


def blocked_adjoint(windows: Sequence[Window], cells: Sequence[Any], term: BlockedTerm) -> torch.Tensor:
    """``[..., *cells]``: the sum of ``term(backs): [..., q_1, phase_1, .., q_n, phase_n]`` over all windows.

    The term is zero at a phase which its window does not reach.
    """
    total = None
    for backs in itertools.product(*(window.backs for window in windows)):
        value = term(backs)
        total = value if total is None else total + value
    assert total is not None
    count = len(windows)
    lead = total.dim() - 2 * count
    result = total.reshape(*total.shape[:lead], *(total.shape[lead + 2 * i] * w.stride for i, w in enumerate(windows)))
    for axis, window in enumerate(windows):
        result = result.narrow(lead + axis, window.padding, cells[axis])
    return result


def blocked(slice_: torch.Tensor, count: int) -> torch.Tensor:
    """``[..., q_1, .., q_n]`` to ``[..., q_1, 1, .., q_n, 1]``."""
    for axis in range(count):
        slice_ = slice_.unsqueeze(slice_.dim() - axis * 2)
    return slice_
