"""Backward of average pooling: each cell adds up its share of the windows over it.

Before::

    grad_input = aten.avg_pool2d_backward(grad_output, input, kernel, ..., divisor_override)

After: ``grad_output / divisor``, then one sum of shifted slices along each axis (``windows.py``). The divisor is that
of the forward: the window clipped to the padded input, or to the input itself without ``count_include_pad``, or the
override. (Inductor's own lowering of the backward divides a window that hangs over the end, which ``ceil_mode``
allows, by the whole kernel: pytorch/pytorch#198119. Eager's divisor is taken here.)

Neighbours: ``max_pooling.py``, ``adaptive_pooling.py``. ``lp_pool`` is an average pool of powers and needs no rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass.constant_tables import constant, real_tensors
from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Treatment, Verdict
from detpass.rules.max_pooling import pool_windows
from detpass.rules.plane_scatter import accumulation_dtype
from detpass.rules.windows import Reach, Shifter, Window, are_sliced, blocked, blocked_adjoint, sliced_adjoint

aten = torch.ops.aten


class AvgPoolBackward(Rule):
    """``avg_pool2d/3d_backward`` as separable sums of slices; ``avg_pool1d`` arrives as 2-d."""

    name = "avg_pool_backward"
    targets = (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        source = tensor_of(given["self"])
        if source is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        axes = 2 if node.target is self.targets[0] else 3
        windows = pool_windows(axes, given["kernel_size"], given["stride"], given["padding"], 1)
        if windows is None:
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the kernel, stride and padding must be numbers")
        parameters = {
            "windows": windows,
            "include_padding": bool(given["count_include_pad"]),
            "divisor": given["divisor_override"],
        }
        reason = "the windows over a cell are known from the shapes"
        return Match((given["grad_output"], given["self"]), reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self,
        grad: torch.Tensor,
        source: torch.Tensor,
        *,
        windows: tuple[Window, ...],
        include_padding: bool,
        divisor: int | None,
    ) -> torch.Tensor:
        cells = source.shape[source.dim() - len(windows) :]
        share = grad.to(accumulation_dtype(grad.dtype))
        count: Any = divisor
        if divisor is None:
            count = 1
            for axis, (window, size) in enumerate(zip(windows, cells, strict=True)):
                positions = grad.shape[grad.dim() - len(windows) + axis]
                covered = covered_cells(window, positions, size, include_padding, grad.device)
                if isinstance(covered, torch.Tensor):
                    covered = covered.reshape(-1, *[1] * (len(windows) - 1 - axis))
                count = count * covered
        share = share / count
        for axis, (window, size) in enumerate(zip(windows, cells, strict=True)):
            share = sum_windows(share, axis - len(windows), window, size)
        return share.to(grad.dtype)


def covered_cells(
    window: Window, positions: Any, cells: Any, include_padding: bool, device: torch.device
) -> torch.Tensor | int:
    """How many cells each window averages over along one axis: ``int64[positions]``, or one number for all."""

    def count(position: torch.Tensor) -> torch.Tensor:
        start = position * window.stride - window.padding
        end = torch.clamp(start + window.kernel, max=cells + window.padding)
        return end - start if include_padding else torch.clamp(end, max=cells) - torch.clamp(start, min=0)

    if not (isinstance(positions, int) and isinstance(cells, int)):
        return count(torch.arange(positions, device=device))
    with real_tensors():
        # As a constant: clamps of positions become index expressions that Inductor for CUDA cannot always simplify.
        table = count(torch.arange(positions))
        first = int(table[0]) if positions else 1
        same = bool((table == first).all())
    return first if same else constant(table, device)


def sum_windows(values: torch.Tensor, dim: int, window: Window, cells: Any) -> torch.Tensor:
    """Replace axis ``dim`` (negative) of window values by cells, each the sum over the windows that cover it."""
    moved = values.transpose(dim, -1) if dim != -1 else values
    shifted = Shifter(moved, (window,), (cells,), 0.0)
    if are_sliced((window,)):

        def term(phases: tuple[int, ...], reaches: tuple[Reach, ...]) -> torch.Tensor:
            return shifted([reach.back for reach in reaches])

        total = sliced_adjoint((window,), (cells,), term)
    else:

        def blocked_term(backs: tuple[int, ...]) -> torch.Tensor:
            reached = window.element_by_phase(backs[0], values.device) >= 0
            return torch.where(reached, blocked(shifted(backs), 1), 0)

        total = blocked_adjoint((window,), (cells,), blocked_term)
    return total.transpose(dim, -1) if dim != -1 else total
