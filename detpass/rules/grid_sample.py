"""Backward of ``grid_sample``: one segment sum for the input's gradient, plain gathers for the grid's.

Before::

    grad_input, grad_grid = aten.grid_sampler_2d_backward(grad_output, input, grid, mode, padding, align, mask)

After, with the taps of every output point (4 corners for bilinear, 16 for bicubic, 8 in 3-d, 1 for nearest)::

    grad_input = segment_reduce(grad_output[point] * weight[point, tap], cell[point, tap])
    grad_grid  = sum over taps of (sum over channels of grad_output * input[cell]) * d weight / d coordinate

All taps share one index, so one sort; additions to a cell follow the points row-major and the taps of a point in
order. On a CPU ATen's kernel walks each sample on one thread and is left alone.

Neighbours: ``grid_taps.py`` (which cells a point reads, with what weight), ``plane_scatter.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass import segment
from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.grid_taps import PointTaps, point_taps
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten

BILINEAR, ZEROS = 0, 0


class GridSampleBackward(Rule):
    """``grid_sampler_2d/3d_backward`` and cuDNN's as a segment sum over cells; all modes and paddings."""

    name = "grid_sample_backward"
    targets = (
        aten.grid_sampler_2d_backward.default,
        aten.grid_sampler_3d_backward.default,
        aten.cudnn_grid_sampler_backward.default,
    )

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return Safe("ATen's CPU kernel walks each sample on one thread, in order")
        given = arguments(node)
        if node.target is self.targets[2]:
            given = {**given, "input": given["self"], "interpolation_mode": BILINEAR, "padding_mode": ZEROS}
            given = {**given, "align_corners": True, "output_mask": [True, True]}
        source = tensor_of(given["input"])
        if source is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        parameters = {
            "mode": given["interpolation_mode"],
            "padding": given["padding_mode"],
            "aligned": bool(given["align_corners"]),
            "wanted": tuple(bool(flag) for flag in given["output_mask"]),
        }
        operands = (given["grad_output"], given["input"], given["grid"])
        return Match(operands, "points share cells; the grid is data", parameters, Treatment.SEGMENT)

    def replacement(
        self,
        grad: torch.Tensor,
        source: torch.Tensor,
        grid: torch.Tensor,
        *,
        mode: int,
        padding: int,
        aligned: bool,
        wanted: tuple[bool, ...],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dtype = accumulation_dtype(grad.dtype)
        cells = source.shape[2:]
        taps = point_taps(grid.to(dtype), cells, mode, padding, aligned)
        rows = grad.to(dtype).flatten(2)
        grad_input = _to_input(rows, taps, source) if wanted[0] else None
        grad_grid = _to_grid(rows, taps, source.to(dtype), grid) if wanted[1] else None
        return grad_input, grad_grid


def _to_input(rows: torch.Tensor, taps: PointTaps, source: torch.Tensor) -> torch.Tensor:
    """``rows: [n, c, p]`` to ``[n, c, *cells]``."""
    n, c = source.shape[:2]
    size = _product(source.shape[2:])
    skipped = segment.skipped_value(torch.int64)
    sample = torch.arange(n, device=rows.device).reshape(-1, 1, 1) * size
    index = torch.where(taps.inside, taps.cell + sample, skipped)  # [n, p, k]
    shares = rows.transpose(1, 2).unsqueeze(2) * taps.weight.unsqueeze(-1)  # [n, p, k, c]
    total = segment.segment_reduce(
        shares.reshape(1, -1, c), index.reshape(-1), n * size, "sum", False, "grid_sampler_backward"
    )
    return total.reshape(n, *source.shape[2:], c).movedim(-1, 1).to(source.dtype)


def _to_grid(rows: torch.Tensor, taps: PointTaps, source: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """``rows: [n, c, p]`` to the gradient of ``grid: [n, *points, axes]``."""
    if not taps.slopes:
        return torch.zeros_like(grid, memory_format=torch.contiguous_format)
    flat = source.flatten(2)
    totals: list[Any] = [0] * len(taps.slopes)
    for k in range(taps.cell.shape[2]):
        cell = torch.where(taps.inside[:, :, k], taps.cell[:, :, k], 0)
        value = flat.gather(2, cell.unsqueeze(1).expand(-1, flat.shape[1], -1))
        meets = torch.where(taps.inside[:, :, k], (rows * value).sum(1), 0)
        totals = [total + meets * slope[:, :, k] for total, slope in zip(totals, taps.slopes, strict=True)]
    # The last axis of a grid counts x, y, z: innermost axis first.
    return torch.stack(totals[::-1], -1).reshape(grid.shape).to(grid.dtype)


def _product(sizes: Any) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result
