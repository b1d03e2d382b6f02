"""Scans of any associative function by doubling steps, in blocks of a fixed size.

A step of distance ``d`` combines each place with the one ``d`` before it; after ``d = 1, 2, 4 ... 128`` each place of a
block of 256 holds the combination of all the places up to it. The blocks' totals are scanned in the same way, and each
block is combined with the total before it. Every step is elementwise, so that no thread waits for another, and the
order depends on the length alone. The function needs no identity: places without a predecessor are kept by a mask.

Neighbours: ``scan.py`` and ``associative_scan.py`` (the rules), ``buffers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from detpass.rules.buffers import materialised

BLOCK = 256
"""Elements that are scanned at a time."""
LEVELS_OF_UNKNOWN_LENGTH = 4
"""Enough for 2**32 elements."""

Combine = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""``combine(left, right)``, elementwise over the leading dimensions of tensors of one shape."""


def levels(length: Any) -> int:
    """How many times blocks of blocks are formed over ``length`` elements."""
    if not isinstance(length, int):
        return LEVELS_OF_UNKNOWN_LENGTH
    found = 1
    while length > BLOCK:
        length = (length + BLOCK - 1) // BLOCK
        found += 1
    return found


def scan(parts: Sequence[Tensor], combine: Combine) -> list[Tensor]:
    """Scan tuples of elements: ``parts`` are tensors ``[n, *features]``, scanned together along the first dimension."""
    return _scan(list(parts), combine, levels(parts[0].shape[0]))


def _scan(parts: list[Tensor], combine: Combine, depth: int) -> list[Tensor]:
    length: Any = parts[0].shape[0]
    if depth == 1:
        if isinstance(length, int):
            return _in_blocks(parts, combine, 0, length)
        filled = [shifted(part, 0, 0, BLOCK - length) for part in parts]
        return [part.narrow(0, 0, length) for part in _in_blocks(filled, combine, 0, BLOCK)]
    blocks = (length + BLOCK - 1) // BLOCK
    filled = [shifted(part, 0, 0, blocks * BLOCK - length) for part in parts]
    inner = _in_blocks([part.reshape(blocks, BLOCK, *part.shape[1:]) for part in filled], combine, 1, BLOCK)
    totals = _scan([part[:, -1] for part in inner], combine, depth - 1)
    before = [shifted(total, 0, 1, -1).unsqueeze(1).expand_as(part) for total, part in zip(totals, inner, strict=True)]
    whole = _combined(before, inner, combine, 0, blocks, 1)
    return [materialised(part.flatten(0, 1), length, 0) for part in whole]


def _in_blocks(parts: list[Tensor], combine: Combine, dim: int, size: int) -> list[Tensor]:
    """Scan along ``dim``, of ``size`` elements: a kernel a step, which reads two places for each that it writes."""
    distance = 1
    while distance < size:
        earlier = [shifted(part, dim, distance, -distance) for part in parts]
        parts = [materialised(part) for part in _combined(earlier, parts, combine, dim, size, distance)]
        distance *= 2
    return parts


def _combined(
    left: list[Tensor], right: list[Tensor], combine: Combine, dim: int, size: Any, distance: int
) -> list[Tensor]:
    """``combine(left, right)`` at the places from ``distance`` on along ``dim``, ``right`` before them."""
    place = torch.arange(size, device=right[0].device).reshape(-1, *[1] * (right[0].dim() - dim - 1))
    together = combine(left, right)
    return [torch.where(place >= distance, new, old) for new, old in zip(together, right, strict=True)]


def shifted(part: Tensor, dim: int, before: Any, after: Any, fill: float = 0) -> Tensor:
    """``part`` with ``fill`` before and after it along ``dim``, or without its ends where the numbers are negative."""
    return torch.constant_pad_nd(part, [*[0, 0] * (part.dim() - dim - 1), before, after], fill)
