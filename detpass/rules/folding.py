"""``fold`` and the backward of ``unfold``: overlapping blocks summed as shifted slices.

Before: ``aten.col2im(columns, output_size, kernel, dilation, padding, stride)``, which Inductor decomposes into an
accumulating ``index_put``. After, with ``columns`` seen as ``[n, channels, *kernel, *positions]``: each cell adds the
one entry of every block over it (``windows.py``); disjoint blocks are a permutation.

``aten.unfold_backward`` is the same along one dimension of a tensor (``Tensor.unfold``, the overlap-add of ``istft``).
Where very many windows cover a cell, it is a segment sum over the cells' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from detpass import segment
from detpass.graph_query import arguments, int_argument, label, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Treatment, Verdict
from detpass.rules.buffers import materialised
from detpass.rules.canonical import product
from detpass.rules.max_pooling import pool_windows
from detpass.rules.plane_scatter import accumulation_dtype
from detpass.rules.windows import Reach, Shifter, Window, are_sliced, blocked_adjoint, overlap, sliced_adjoint

aten = torch.ops.aten

MOST_WINDOWS = 32
"""Up to this many windows over a cell are summed as slices, each a load in the generated code."""


class Col2Im(Rule):
    """``col2im`` as a sum of shifted slices."""

    name = "col2im"
    targets = (aten.col2im.default,)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        columns = tensor_of(given["self"])
        windows = pool_windows(2, given["kernel_size"], given["stride"], given["padding"], given["dilation"])
        if columns is None or windows is None:
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the kernel, stride, padding and dilation must be numbers")
        reason = "the blocks over a cell are known from the shapes" if overlap(windows) else "blocks are disjoint"
        operands = (given["self"], list(given["output_size"]))
        return Match(operands, reason, {"windows": windows}, Treatment.CLOSED_FORM)

    def replacement(self, columns: torch.Tensor, cells: Sequence[Any], *, windows: tuple[Window, ...]) -> torch.Tensor:
        kernels = [window.kernel for window in windows]
        positions = [
            (size + 2 * w.padding - w.dilation * (w.kernel - 1) - 1) // w.stride + 1
            for w, size in zip(windows, cells, strict=True)
        ]
        lead = columns.shape[:-2]
        channels = columns.shape[-2] // prod(kernels)
        entries = columns.reshape(*lead, channels, *kernels, *positions).to(accumulation_dtype(columns.dtype))
        return _summed(entries, windows, cells).to(columns.dtype)


class UnfoldBackward(Rule):
    """``unfold_backward`` as a sum of shifted slices, or a segment sum."""

    name = "unfold_backward"
    targets = (aten.unfold_backward.default,)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        cells = list(given["input_sizes"])
        window = Window(int_argument(node, "size"), int_argument(node, "step"))
        operands = (given["grad_in"], cells)
        parameters = {"window": window, "dim": int_argument(node, "dim") % max(len(cells), 1), "op": label(node)}
        if not _are_few(window):
            return Match(operands, "very many windows cover a cell", parameters)
        reason = "the windows over a cell are known from the shapes" if overlap([window]) else "windows are disjoint"
        return Match(operands, reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self, grad: torch.Tensor, cells: Sequence[Any], *, window: Window, dim: int, op: str
    ) -> torch.Tensor:
        if not cells:
            return grad.reshape(())
        # Sizes of 1 are repeated: ``istft`` asks so for its window.
        grad = grad.expand(*cells[:dim], grad.shape[dim], *cells[dim + 1 :], window.kernel)
        if _are_few(window):
            entries = grad.movedim(dim, -1).to(accumulation_dtype(grad.dtype))
            return _summed(entries, (window,), [cells[dim]]).movedim(-1, dim).to(grad.dtype).contiguous()
        begins = torch.arange(grad.shape[dim], device=grad.device) * window.stride
        index = (begins.unsqueeze(1) + torch.arange(window.kernel, device=grad.device)).reshape(-1)
        before, after = product(cells[:dim]), product(cells[dim + 1 :])
        source = grad.movedim(-1, dim + 1).reshape(before, index.shape[0], after)
        return segment.segment_reduce(source, index, cells[dim], "sum", False, op).reshape(cells)


def _are_few(window: Window) -> bool:
    return window.kernel <= MOST_WINDOWS * window.stride


def _summed(entries: torch.Tensor, windows: tuple[Window, ...], cells: Sequence[Any]) -> torch.Tensor:
    """``[..., *cells]`` of ``entries [..., *kernels, *positions]``: each cell's entries of all windows, summed."""
    # The entries are often a gather (``unfold``); read through the padding's mask, its index can make Inductor's
    # tiling analysis for CUDA fail.
    shifted = Shifter(materialised(entries), windows, cells, 0.0)
    form = _sliced if are_sliced(windows) else _blocked
    return form(shifted, windows, cells)


def _sliced(shifted: Shifter, windows: tuple[Window, ...], cells: Sequence[Any]) -> torch.Tensor:
    def term(phases: tuple[int, ...], reaches: tuple[Reach, ...]) -> torch.Tensor:
        value = shifted([reach.back for reach in reaches])
        for axis, reach in enumerate(reaches):
            value = value.select(axis - 2 * len(windows), reach.element)
        return value

    return sliced_adjoint(windows, cells, term)


def _blocked(shifted: Shifter, windows: tuple[Window, ...], cells: Sequence[Any]) -> torch.Tensor:
    count = len(windows)

    def term(backs: tuple[int, ...]) -> torch.Tensor:
        value = shifted(backs)
        for axis, (window, back) in enumerate(zip(windows, backs, strict=True)):
            # Each phase meets one element of the block, or none: pick them along the block's own axis.
            of_phase = window.element_by_phase(back, value.device)
            dim = axis - 2 * count
            picked = value.index_select(dim, torch.clamp(of_phase, min=0))
            value = torch.where((of_phase >= 0).reshape(-1, *[1] * (-1 - dim)), picked, 0)
        lead = value.dim() - 2 * count
        order = [*range(lead), *(lead + d for axis in range(count) for d in (count + axis, axis))]
        return value.permute(order)

    return blocked_adjoint(windows, cells, term)
