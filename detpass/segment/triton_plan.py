"""``index -> (perm, offsets)`` for CUDA in plain torch operations: what a compiler can fuse, capture and share.

Neighbours: ``plan.py`` (the same on a CPU), ``triton_kernels.py`` (what is done with the result).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from detpass.segment.constants import INDEX_DTYPES, skipped_value

_KEY_RANGES = ((torch.uint8, 2**8), (torch.int16, 2**16))


def key_dtype(num_segments: int | torch.SymInt) -> tuple[torch.dtype, int]:
    """Return the narrowest sort key for ``num_segments`` segments and two more values, and the shift that fits it.

    ``torch.sort`` on CUDA is a radix sort over every bit of the key's type, so the width decides its time: one pass
    over the rows for uint8, two for int16, four for int32, eight for int64. A symbolic size is tested against the
    int32 limit alone (one guard that always holds), never against the narrow ranges.
    """
    if isinstance(num_segments, int):
        for dtype, values in _KEY_RANGES:
            if num_segments + 2 <= values:
                return dtype, int(torch.iinfo(dtype).min)
    return (torch.int32 if _fits(num_segments, 2**31 - 2) else torch.int64), 0


def offsets_dtype(num_rows: int | torch.SymInt) -> torch.dtype:
    """Return the dtype of ``offsets``: int32 unless ``num_rows`` rows need more."""
    return torch.int32 if _fits(num_rows, 2**31 - 1) else torch.int64


def _fits(size: int | torch.SymInt, limit: int) -> bool:
    if isinstance(size, int):
        return size <= limit
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(size <= limit))  # a size that depends on data takes the wide type


def out_of_bounds_message(op: str, num_segments: int | torch.SymInt) -> str:
    # Dynamo shows a symbolic size as an int and would make it a constant where it is formatted.
    known = isinstance(num_segments, int) and not torch.compiler.is_dynamo_compiling()
    return f"{op}: an index is out of bounds for " + (f"size {num_segments}" if known else "the size of its dimension")


def sorted_plan(
    index: Tensor, num_segments: int | torch.SymInt, wrap: bool = False, op: str = "segment sum"
) -> tuple[Tensor, Tensor]:
    """Return ``perm: int64[N]`` and ``offsets: int32[S + 1]`` (int64 from 2**31 rows on) of a stable sort of ``index``.

    ``index: int32[N]`` or ``int64[N]``. Segment ``s`` has the members ``perm[offsets[s]:offsets[s + 1]]``, in
    increasing position. Rows whose index is the smallest value of its dtype are skipped: they stand behind every
    segment in ``perm``. With ``wrap`` an index in ``[-S, 0)`` counts from the end.

    The result depends on the index alone. Nothing is read back to the host, so it can be traced with symbolic sizes and
    captured in a CUDA graph. An index out of range fails a device-side assertion that names ``op`` and the size; its
    row belongs to no segment, so it cannot reach memory outside the result. Raises TypeError for another index dtype.
    """
    keys, shift, ordered, perm = _sorted(index, num_segments, wrap, op)
    size: Any = num_segments  # torch's signatures do not name SymInt
    bounds = (torch.arange(size + 2, device=index.device) + shift).to(keys)
    narrow = offsets_dtype(index.shape[0]) == torch.int32
    bounded = torch.searchsorted(ordered, bounds, out_int32=narrow)
    torch.ops.aten._assert_async.msg(bounded[-1] == index.shape[0], out_of_bounds_message(op, num_segments))
    return perm, bounded[:-1]


def sorted_groups(
    index: Tensor, num_segments: int | torch.SymInt, wrap: bool = False, op: str = "segment sum"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``perm: int64[N]``, ``offsets: int[N + 1]`` and ``rows: int64[N]`` of the segments that have members.

    As :func:`sorted_plan`, but with no tensor as long as there are segments: group ``g`` has the members
    ``perm[offsets[g]:offsets[g + 1]]``, in increasing position, and is segment ``rows[g]``; the groups are in the order
    of their segments. Skipped rows are a group without a segment, ``rows[g] == -1``, and so is a group without members.
    """
    _, shift, ordered, perm = _sorted(index, num_segments, wrap, op)
    count: Any = index.shape[0]
    size: Any = num_segments
    torch.ops.aten._assert_async.msg((ordered <= size + shift).all(), out_of_bounds_message(op, num_segments))
    place = torch.arange(count, device=index.device)
    first = (place == 0) | (ordered != ordered[torch.clamp(place - 1, min=0)])
    narrow = offsets_dtype(count) == torch.int32
    group = torch.cumsum(first, 0) - 1
    offsets = torch.searchsorted(group, torch.arange(count + 1, device=index.device), out_int32=narrow)
    start = offsets[:-1].to(torch.int64)
    row = ordered[torch.clamp(start, max=count - 1)].to(torch.int64) - shift
    return perm, offsets, torch.where((start < count) & (row < size), row, -1)


def _sorted(
    index: Tensor, num_segments: int | torch.SymInt, wrap: bool, op: str
) -> tuple[torch.dtype, int, Tensor, Tensor]:
    """The keys' dtype and shift, the keys in order and the permutation that orders them.

    A skipped row has the key of one segment too many, a row out of bounds that of two.
    """
    if index.dtype not in INDEX_DTYPES:
        known = " or ".join(str(dtype) for dtype in INDEX_DTYPES)
        raise TypeError(f"{op}: the index has dtype {index.dtype}, expected {known}; convert it with .to(torch.int64)")
    keys, shift = key_dtype(num_segments)
    size: Any = num_segments  # torch's signatures do not name SymInt
    skipped = index == skipped_value(index.dtype)
    segment = torch.where(index < 0, index + size, index) if wrap else index
    outside = (segment < 0) | (segment >= size)
    key = torch.where(skipped, size, torch.where(outside, size + 1, segment))
    # In int64 before it is narrowed: the two virtual segments need not fit the index's own dtype.
    ordered, perm = torch.sort((key.to(torch.int64) + shift).to(keys), stable=True)
    return keys, shift, ordered, perm


def sorted_count(
    index: Tensor, num_segments: int | torch.SymInt, wrap: bool = False, op: str = "segment count"
) -> Tensor:
    """Return ``int64[num_segments]``: the number of rows of ``index: int[N]`` in each segment."""
    offsets = sorted_plan(index, num_segments, wrap, op)[1]
    return (offsets[1:] - offsets[:-1]).to(torch.int64)


def sorted_last_positions(
    index: Tensor, num_segments: int | torch.SymInt, wrap: bool = False, op: str = "last position"
) -> Tensor:
    """Return ``int64[N]``: for each row the largest position with the same index; a skipped row gives its own.

    In sorted order that is the last row before the next segment starts; the way back is a write to distinct rows.
    """
    perm, offsets = sorted_plan(index, num_segments, wrap, op)
    rows = torch.arange(index.shape[0], device=index.device)
    end = torch.searchsorted(offsets, rows, right=True)
    kept = rows < offsets[-1]
    last = perm[torch.where(kept, offsets[torch.where(kept, end, 0)] - 1, rows)]
    return torch.empty_like(perm).scatter(0, perm, last)
