"""Totals over the positions of an attention matrix, by the place that each position's value goes to.

A place is named by index tensors that rarely depend on everything: in ``bias[h, i - j]`` one depends on the head, the
other on query and key, none on the batch. So dimensions on which no index depends are summed first, as an ordinary
reduction, and indices that share no dimension are taken one group after another: a segment sum over the dimensions of a
group, with all the others as features. A sort of ``B * H * M * N`` keys becomes one of ``M * N``.

An index has the size 1 in each dimension on which it does not depend.

Neighbours: ``flex_scores.py`` (whose values these are), ``flex_attention.py`` (the rule).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detpass import segment
from detpass.graph_query import is_one

DIMS = 4
"""Batch, head, query, key."""


def total(value: Tensor) -> Tensor:
    """The sum of ``value: [B, H, M, N]`` over all positions."""
    return value.sum(dim=tuple(range(DIMS)))


def total_by_place(value: Tensor, indices: Sequence[Tensor], shape: Sequence[Any], op: str) -> Tensor:
    """Return a tensor of ``shape`` with the sum of ``value: [B, H, M, N]`` over the positions that name each place.

    ``indices`` has an integer tensor, which broadcasts to the shape of ``value``, for each dimension of ``shape``; a
    negative one counts from the end, a position with one out of range is left out. The order of the additions depends
    on the sizes alone.
    """
    needed = [_dependence(index) for index in indices]
    kept = set().union(*needed) if needed else set()
    summed = [d for d in range(DIMS) if d not in kept]
    current = value.sum(dim=summed, keepdim=True) if summed else value
    order: list[Any] = list(range(DIMS))  # what each dimension of ``current`` is: a position, or a place's ("place", k)
    for numbers, dims in _groups(needed, value):
        rows = [order.index(d) for d in dims]
        rest = [d for d in range(len(order)) if d not in rows]
        moved = current.permute(*rows, *rest)
        index = _linear(indices, numbers, dims, shape)
        features = [current.shape[d] for d in rest]
        source = moved.reshape(1, index.shape[0], math.prod(features))
        places = math.prod(shape[n] for n in numbers)
        sums = segment.segment_reduce(source, index, places, "sum", False, op)
        current = sums.reshape(*(shape[n] for n in numbers), *features)
        order = [*(("place", n) for n in numbers), *(order[d] for d in rest)]
    positions = [d for d, what in enumerate(order) if isinstance(what, int)]
    current = current.sum(dim=positions, keepdim=True) if positions else current
    places_first = [order.index(("place", n)) for n in range(len(shape))]
    return current.permute(*places_first, *positions).reshape(list(shape))


def _dependence(index: Tensor) -> set[int]:
    """The dimensions along which an index may differ."""
    return {d for d, size in enumerate(index.shape) if not is_one(size)}


def _groups(needed: Sequence[set[int]], value: Tensor) -> list[tuple[list[int], list[int]]]:
    """Indices that share dimensions, with the dimensions they depend on: the groups of most positions first."""
    groups: list[tuple[list[int], set[int]]] = []
    for number, dims in enumerate(needed):
        numbers, merged = [number], set(dims)
        for other in [group for group in groups if group[1] & merged]:
            groups.remove(other)
            numbers, merged = other[0] + numbers, merged | other[1]
        groups.append((sorted(numbers), merged))
    sizes: tuple[Any, ...] = tuple(value.shape)

    def known_rows(group: tuple[list[int], set[int]]) -> tuple[int, int]:
        return len(group[1]), math.prod(size for d, size in enumerate(sizes) if d in group[1] and isinstance(size, int))

    return [(numbers, sorted(dims)) for numbers, dims in sorted(groups, key=known_rows, reverse=True)]


def _linear(indices: Sequence[Tensor], numbers: Sequence[int], dims: Sequence[int], shape: Sequence[Any]) -> Tensor:
    """One row-major index over the sizes of ``numbers``, flattened over ``dims``; skipped where out of range."""
    linear: Any = 0
    inside: Any = True
    for number in numbers:
        index = indices[number]
        for d in reversed(range(DIMS)):
            if d not in dims:
                index = index.select(d, 0)
        size = shape[number]
        index = index.to(torch.int64)
        index = torch.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        linear = linear * size + index
    return torch.where(inside, linear, segment.skipped_value(torch.int64)).reshape(-1)
