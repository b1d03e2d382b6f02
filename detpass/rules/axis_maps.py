"""Linear maps along one axis, known at compile time, and their adjoints as short sums of gathers.

Resampling and adaptive pooling compute ``out[i] = sum over k of weight[k, i] * in[index[k, i]]`` along each axis, with
``index`` and ``weight`` that the sizes determine. :class:`Taps` holds them; :func:`transpose` turns them around:
which outputs, with what weight, a given input cell takes back. :func:`apply_members` is then a sum over few gathers,
which Inductor fuses into one loop: no atomics, no sort, and a fixed order (increasing output position).

The tables are computed while matching, with real tensors and eager's own arithmetic, and become constants of the
graph. For sizes unknown at compile time :func:`apply_dense` multiplies with the matrix of the map instead.

Neighbours: ``resampling.py``, ``adaptive_pooling.py`` (who use it), ``windows.py`` (sliding windows need no table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from detpass.constant_tables import constant, real_tensors

aten = torch.ops.aten

UNROLLED_MEMBERS = 24
"""Up to this many members are added one by one; above, they become a reduction dimension."""


@dataclass(frozen=True)
class Taps:
    """What each output position of an axis reads. A tap with weight 0 is none."""

    index: torch.Tensor
    """``int64[k, n_out]``: input positions."""
    weight: torch.Tensor
    """``float[k, n_out]``."""


@dataclass(frozen=True)
class Members:
    """What each input cell of an axis takes back: the transposed map, padded to the largest number of members."""

    position: torch.Tensor
    """``int64[m, n_in]``: output positions, increasing along ``m``; unused slots repeat a legal position."""
    weight: torch.Tensor
    """``float[m, n_in]``: 0 in unused slots."""

    @property
    def count(self) -> int:
        """The largest number of members of a cell."""
        return int(self.position.shape[0])

    @property
    def is_selection(self) -> bool:
        """Whether every weight is 0 or 1."""
        return bool(((self.weight == 0) | (self.weight == 1)).all())

    @property
    def is_full(self) -> bool:
        """Whether every slot is used."""
        return bool((self.weight != 0).all())


def transpose(taps: Taps, cells: int) -> Members:
    """Turn a map over ``cells`` input cells around. Several taps of one output on one cell add up to one member."""
    n_out = taps.index.shape[1]
    index, weight = taps.index.reshape(-1), taps.weight.reshape(-1)
    position = torch.arange(n_out).expand(taps.index.shape).reshape(-1)
    used = weight != 0
    index, weight, position = index[used], weight[used], position[used]
    keys, slot = torch.unique(index * n_out + position, return_inverse=True)
    joined = torch.zeros(keys.shape, dtype=torch.float64).index_add_(0, slot, weight.double())
    cell, position = keys // max(n_out, 1), keys % max(n_out, 1)
    counts = torch.bincount(cell, minlength=cells)
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(keys)) - starts[cell]
    depth = max(1, int(counts.max())) if cells else 1
    positions = torch.zeros(depth, cells, dtype=torch.int64)
    weights = torch.zeros(depth, cells, dtype=taps.weight.dtype)
    positions[rank, cell] = position
    weights[rank, cell] = joined.to(weights.dtype)
    return Members(positions, weights)


def apply_members(values: torch.Tensor, dim: int, members: Members) -> torch.Tensor:
    """Replace axis ``dim`` (negative) of ``values`` by cells, each the weighted sum of its members in order.

    An unused slot adds +0.0 whatever value stands at its position, so NaN and infinity reach their own cells only.
    """
    position, weight = constant(members.position, values.device), constant(members.weight, values.device)
    tail = [1] * (-1 - dim)
    with real_tensors():
        plain, full = members.is_selection, members.is_full

    def share(taken: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        scaled = taken if plain else taken * factor
        return scaled if full else torch.where(factor != 0, scaled, 0)

    def take(rows: torch.Tensor) -> torch.Tensor:
        index: list[torch.Tensor | None] = [None] * (values.dim() + dim)
        taken: torch.Tensor = aten._unsafe_index.Tensor(values, [*index, rows])
        return taken

    if members.count > UNROLLED_MEMBERS:
        taken = take(position.reshape(-1)).unflatten(dim, position.shape)
        return share(taken, weight.reshape(*weight.shape, *tail)).sum(dim - 1)
    total = share(take(position[0]), weight[0].reshape(-1, *tail))
    for slot in range(1, members.count):
        total = total + share(take(position[slot]), weight[slot].reshape(-1, *tail))
    return total


def apply_dense(values: torch.Tensor, dim: int, taps: Taps, cells: Any) -> torch.Tensor:
    """``apply_members`` as a product with the matrix of the map: traced, so ``cells`` may be symbolic.

    A NaN or an infinity spreads along its whole axis here, as zero times infinity is NaN.
    """
    cell = torch.arange(cells, device=values.device).unsqueeze(1)
    matrix = torch.where(taps.index[0] == cell, taps.weight[0], 0)
    for index, weight in zip(taps.index[1:], taps.weight[1:], strict=True):
        matrix = matrix + torch.where(index == cell, weight, 0)
    moved = values.transpose(dim, -1) if dim != -1 else values
    result = torch.matmul(moved, matrix.to(values.dtype).t())
    return result.transpose(dim, -1) if dim != -1 else result
