"""Sums into planes: each row of values adds to cells of its own plane, at places that data names.

The segment form shared by rules whose index is per plane (pooling with recorded indices, grid sampling): planes and
cells become one linear segment number, so one segment sum serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from detpass import segment


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` are formed: float32 for half precision, otherwise ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def add_into_planes(values: torch.Tensor, cells: torch.Tensor, shape: Sequence[Any], op: str) -> torch.Tensor:
    """Sum ``values: [*planes, n]`` into zeros ``[*planes, *shape]`` at flat cell numbers ``cells: int64[*planes, n]``.

    Additions to one cell follow the canonical order over the positions ``n``. Raises IndexError for a cell outside
    ``shape``.
    """
    planes = values.shape[:-1]
    size, rows, count = _product(shape), _product(planes), values.shape[-1]
    plane = torch.arange(rows, device=cells.device).unsqueeze(1) * size
    flat = cells.reshape(rows, count)
    # An illegal cell must stay illegal: added to a plane's start it would name a neighbour's cell.
    legal = (flat >= 0) & (flat < size)
    linear = torch.where(legal, flat + plane, rows * size).reshape(-1)
    total = segment.segment_reduce(values.reshape(1, -1, 1), linear, rows * size, "sum", False, op)
    return total.reshape(*planes, *shape)


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result
