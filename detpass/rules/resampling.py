"""Backward of resampling (``interpolate``, ``Upsample``): separable sums of gathers.

Before, with autograd meeting the forward whole::

    grad_input = aten.upsample_bilinear2d_backward(grad_output, output_size, input_size, ...)     # atomics on CUDA

(or, decomposed as torch does by default, 4, 8 or 16 accumulating ``index_put``). After: along each axis in turn, every
input cell adds up the outputs that read it, with the forward's own weights (``axis_maps.py``).

The weights follow eager: float32 arithmetic for half and single precision, float64 for double; nearest in float32.
The formulas are those of ATen's ``UpSample.h``, restated in :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from detpass.constant_tables import real_tensors
from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Treatment, Verdict
from detpass.rules.axis_maps import Members, Taps, apply_dense, apply_members, transpose
from detpass.rules.plane_scatter import accumulation_dtype
from detpass.rules.resampling_taps import Axis, area_taps, cubic_taps, linear_taps, nearest_taps

aten = torch.ops.aten

TapsOf = Callable[[Axis], Taps]


@dataclass(frozen=True)
class Resampling:
    """One family of forwards: where its taps come from and how many axes it resamples."""

    taps: TapsOf
    axes: int


def _overloads(name: str) -> tuple[Any, ...]:
    packet = getattr(aten, name, None)
    return () if packet is None else (packet.vec, packet.default)


KINDS: dict[str, Resampling] = {
    "upsample_nearest1d": Resampling(nearest_taps(0.0), 1),
    "upsample_nearest2d": Resampling(nearest_taps(0.0), 2),
    "upsample_nearest3d": Resampling(nearest_taps(0.0), 3),
    "_upsample_nearest_exact1d": Resampling(nearest_taps(0.5), 1),
    "_upsample_nearest_exact2d": Resampling(nearest_taps(0.5), 2),
    "_upsample_nearest_exact3d": Resampling(nearest_taps(0.5), 3),
    "upsample_linear1d": Resampling(linear_taps, 1),
    "upsample_bilinear2d": Resampling(linear_taps, 2),
    "upsample_trilinear3d": Resampling(linear_taps, 3),
    "upsample_bicubic2d": Resampling(cubic_taps, 2),
    "_upsample_bilinear2d_aa": Resampling(area_taps("triangle"), 2),
    "_upsample_bicubic2d_aa": Resampling(area_taps("cubic"), 2),
    "_upsample_lanczos2d_aa": Resampling(area_taps("lanczos"), 2),
}
"""Forwards by ATen name. A torch that lacks one (lanczos came in 2.13) has nothing to rewrite."""

_BACKWARDS = {
    getattr(aten, f"{name}_backward").default: kind
    for name, kind in KINDS.items()
    if getattr(aten, f"{name}_backward", None) is not None
}


class ResamplingBackward(Rule):
    """``upsample_*_backward`` as sums of gathers along each axis, or products with small matrices."""

    name = "resampling_backward"
    targets = tuple(_BACKWARDS)
    differentiated_whole = tuple(overload for name in KINDS for overload in _overloads(name))

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        grad = tensor_of(given["grad_output"])
        if grad is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "no known gradient")
        kind = _BACKWARDS[node.target]
        aligned = bool(given.get("align_corners", False))
        scales = [given[name] for name in ("scales_d", "scales_h", "scales_w", "scales") if name in given]
        dtype = accumulation_dtype(grad.dtype)
        cells = list(given["input_size"])[2:]
        outputs = list(given["output_size"])
        if all(isinstance(size, int) for size in (*cells, *outputs)) and all(
            scale is None or isinstance(scale, (int, float)) for scale in scales
        ):
            axes = [Axis(*row, aligned, dtype) for row in zip(cells, outputs, scales, strict=True)]
            with real_tensors():
                members = tuple(transpose(kind.taps(axis), axis.cells) for axis in axes)
            deepest = max(m.count for m in members)
            reason = f"each cell is read by at most {deepest} outputs along an axis, known from the sizes"
            return Match((given["grad_output"],), reason, {"members": members}, Treatment.CLOSED_FORM)
        operands = (given["grad_output"], cells, outputs, scales)
        reason = "the map along each axis is a small matrix that the sizes determine"
        return Match(operands, reason, {"kind": kind, "aligned": aligned}, Treatment.CLOSED_FORM)

    def replacement(
        self,
        grad: torch.Tensor,
        cells: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        scales: Sequence[Any] = (),
        *,
        members: tuple[Members, ...] = (),
        kind: Resampling | None = None,
        aligned: bool = False,
    ) -> torch.Tensor:
        dtype = accumulation_dtype(grad.dtype)
        total = grad.to(dtype)
        if kind is None:
            for axis, of_axis in enumerate(members):
                total = apply_members(total, axis - len(members), of_axis)
            return total.to(grad.dtype)
        for axis, row in enumerate(zip(cells, outputs, scales, strict=True)):
            taps = kind.taps(Axis(*row, aligned, dtype, grad.device))
            total = apply_dense(total, axis - kind.axes, taps, row[0])
        return total.to(grad.dtype)
