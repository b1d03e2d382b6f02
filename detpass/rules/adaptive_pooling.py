"""Backward of pooling whose windows vary in size: adaptive average, adaptive max and fractional max pooling.

Output ``i`` of an adaptive axis covers the cells ``floor(i * n_in / n_out)`` to ``ceil((i + 1) * n_in / n_out) - 1``.
Before: ``aten._adaptive_avg_pool2d_backward(grad_output, input)`` and the like (atomics on CUDA). After: an average
sends ``grad_output / size`` back along each axis to the few windows' members (``axis_maps.py``); for a maximum each
cell compares the recorded indices of the few windows over it with its own number.

Fractional windows lie at random places, so there the recorded indices feed a segment sum, as they do where the sizes
are unknown at compile time.

On a CPU ATen's kernels are deterministic and as fast, and are left alone.

Neighbours: ``pooling.py`` and ``max_pooling.py`` (windows of one size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from detpass.constant_tables import constant, real_tensors
from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.axis_maps import Members, Taps, apply_dense, apply_members, transpose
from detpass.rules.max_pooling import MOST_COMPARISONS, scatter_by_indices
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten

ON_A_CPU = Safe("ATen's CPU kernel walks each plane on one thread, in order")


def window_bounds(cells: Any, outputs: Any, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``int64[outputs]`` twice: the first cell of each window of an adaptive axis and one past its last."""
    position = torch.arange(outputs, device=device)
    return position * cells // outputs, ((position + 1) * cells + outputs - 1) // outputs


def _static_members(cells: Sequence[int], outputs: Sequence[int]) -> tuple[Members, ...]:
    """For each axis which windows cover each cell, with weight 1."""
    found = []
    with real_tensors():
        for size, count in zip(cells, outputs, strict=True):
            start, end = window_bounds(size, count)
            longest = int((end - start).max()) if count else 0
            index = start + torch.arange(longest).unsqueeze(1)
            taps = Taps(torch.clamp(index, max=size - 1), (index < end).to(torch.float32))
            found.append(transpose(taps, size))
    return tuple(found)


def _are_numbers(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


class AdaptiveAvgPoolBackward(Rule):
    """``_adaptive_avg_pool2d/3d_backward`` as separable sums over the windows of each cell."""

    name = "adaptive_avg_pool_backward"
    targets = (aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_A_CPU
        given = arguments(node)
        grad, source = tensor_of(given["grad_output"]), tensor_of(given["self"])
        if grad is None or source is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        axes = 2 if node.target is self.targets[0] else 3
        cells, outputs = list(source.shape[-axes:]), list(grad.shape[-axes:])
        if not _are_numbers((*cells, *outputs)):
            reason = "the windows over a cell are a small matrix that the sizes determine"
            return Match((given["grad_output"], given["self"]), reason, {"axes": axes}, Treatment.CLOSED_FORM)
        parameters = {"axes": axes, "members": _static_members(cells, outputs)}
        reason = "the windows over a cell are known from the sizes"
        return Match((given["grad_output"], given["self"]), reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self, grad: torch.Tensor, source: torch.Tensor, *, axes: int, members: tuple[Members, ...] | None = None
    ) -> torch.Tensor:
        cells = source.shape[-axes:]
        share = grad.to(accumulation_dtype(grad.dtype))
        count = torch.ones((), dtype=torch.int64, device=grad.device)
        for axis, size in enumerate(cells):
            start, end = window_bounds(size, grad.shape[axis - axes], grad.device)
            count = count * (end - start).reshape(-1, *[1] * (axes - 1 - axis))
        share = share / count
        for axis, size in enumerate(cells):
            if members is not None:
                share = apply_members(share, axis - axes, members[axis])
            else:
                share = _sum_covering(share, axis - axes, size)
        return share.to(grad.dtype)


def _sum_covering(values: torch.Tensor, dim: int, cells: Any) -> torch.Tensor:
    """Product with the 0/1 matrix of an adaptive axis, whose sizes may be symbolic."""
    start, end = window_bounds(cells, values.shape[dim], values.device)
    cell = torch.arange(cells, device=values.device).unsqueeze(1)
    covers = ((cell >= start) & (cell < end)).unsqueeze(0)
    return apply_dense(values, dim, Taps(cell.expand(covers.shape), covers.to(values.dtype)), cells)


class AdaptiveMaxPoolBackward(Rule):
    """``adaptive_max_pool2d/3d_backward`` as a gather over the windows of each cell, or a segment sum."""

    name = "adaptive_max_pool_backward"
    targets = (aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_A_CPU
        given = arguments(node)
        grad, source = tensor_of(given["grad_output"]), tensor_of(given["self"])
        if grad is None or source is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        axes = 2 if node.target is self.targets[0] else 3
        cells, outputs = list(source.shape[-axes:]), list(grad.shape[-axes:])
        operands = (given["grad_output"], given["indices"], given["self"])
        if _are_numbers((*cells, *outputs)):
            members = _static_members(cells, outputs)
            comparisons = 1
            for of_axis in members:
                comparisons *= of_axis.count
            if comparisons <= MOST_COMPARISONS:
                reason = "a cell meets few windows, known from the sizes"
                return Match(operands, reason, {"axes": axes, "members": members}, Treatment.CLOSED_FORM)
        return Match(operands, "windows overlap; the recorded indices are data", {"axes": axes}, Treatment.SEGMENT)

    def replacement(
        self,
        grad: torch.Tensor,
        indices: torch.Tensor,
        source: torch.Tensor,
        *,
        axes: int,
        members: tuple[Members, ...] | None = None,
    ) -> torch.Tensor:
        cells = source.shape[-axes:]
        if members is None:
            return scatter_by_indices(grad, indices, cells, "adaptive_max_pool_backward")
        wide = grad.to(accumulation_dtype(grad.dtype))
        return _gather_adaptive(wide, indices, cells, members).to(grad.dtype)


def _gather_adaptive(
    grad: torch.Tensor, indices: torch.Tensor, cells: Sequence[Any], members: tuple[Members, ...]
) -> torch.Tensor:
    axes = len(members)
    device = grad.device
    positions = [constant(of_axis.position, device) for of_axis in members]
    used = [constant(of_axis.weight, device) != 0 for of_axis in members]
    number = torch.zeros((), dtype=torch.int64, device=device)
    for size in cells:
        number = number.unsqueeze(-1) * size + torch.arange(size, device=device)
    lead: list[torch.Tensor | None] = [None] * (grad.dim() - axes)

    def add(total: torch.Tensor | None, slots: tuple[int, ...]) -> torch.Tensor:
        axis = len(slots)
        if axis < axes:
            for slot in range(members[axis].count):
                total = add(total, (*slots, slot))
            assert total is not None
            return total
        shapes = [(-1, *[1] * (axes - 1 - d)) for d in range(axes)]
        where = [*lead, *(positions[d][slot].reshape(shapes[d]) for d, slot in enumerate(slots))]
        hit = aten._unsafe_index.Tensor(indices, where) == number
        for d, slot in enumerate(slots):
            hit = hit & used[d][slot].reshape(shapes[d])
        value = torch.where(hit, aten._unsafe_index.Tensor(grad, where), 0)
        return value if total is None else total + value

    return add(None, ())


class FractionalMaxPoolBackward(Rule):
    """``fractional_max_pool2d/3d_backward`` as a segment sum over the recorded indices."""

    name = "fractional_max_pool_backward"
    targets = (aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_A_CPU
        given = arguments(node)
        axes = 2 if node.target is self.targets[0] else 3
        operands = (given["grad_output"], given["indices"], given["self"])
        return Match(operands, "windows lie at random places and may share cells", {"axes": axes}, Treatment.SEGMENT)

    def replacement(
        self, grad: torch.Tensor, indices: torch.Tensor, source: torch.Tensor, *, axes: int
    ) -> torch.Tensor:
        return scatter_by_indices(grad, indices, source.shape[-axes:], "fractional_max_pool_backward")
