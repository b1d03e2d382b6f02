"""The canonical order in torch operations alone, for any device: slower than the kernels, the same bits.

Used where no compiler is found, for the few dtypes the kernels leave out (complex products), and as the implementation
of the operators on devices without a kernel. Only elementwise operations, gathers and writes to distinct rows are used
on values, so neither the device nor the thread count can change a bit. Sizes depend on the data: on an accelerator
the operators synchronise, and they carry the tag that keeps them out of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from detpass.segment.constants import CHUNK_ROWS, FAN_IN, SKIPPED, skipped_value
from detpass.segment.reference import accumulation_dtype, canonical_nan, check_supported, combiner, identity

Combine = Callable[[Tensor, Tensor], Tensor]


def out_of_bounds(op: str, value: int, position: int, size: int, wrap: bool) -> IndexError:
    """Return the error for the first index outside the legal range, in eager torch's exception type."""
    low = -size if wrap else 0
    where = f"{op}: " if op else ""
    return IndexError(
        f"{where}index {value} at position {position} is out of bounds for size {size}: "
        f"expected {low} <= index < {size}" + ("" if wrap else " (a negative index does not wrap here)")
    )


def settle(index: Tensor, size: int, wrap: bool, op: str) -> tuple[Tensor, Tensor]:
    """Check and wrap ``index``; return it as int64 and a mask of the rows that are not skipped."""
    kept = index != skipped_value(index.dtype)
    wide = index.to(torch.int64)
    bad = kept & ((wide < (-size if wrap else 0)) | (wide >= size))
    if bool(bad.any()):
        position = int(bad.nonzero()[0].item())
        raise out_of_bounds(op, int(wide[position].item()), position, size, wrap)
    return (torch.where(wide < 0, wide + size, wide) if wrap else wide), kept


def plan(index: Tensor, num_segments: int, wrap: bool, op: str) -> tuple[Tensor, Tensor]:
    """Return ``perm [N]`` (members by segment, then the skipped rows) and ``offsets [S + 1]``, both of one dtype."""
    segment, kept = settle(index, num_segments, wrap, op)
    keys, perm = torch.sort(torch.where(kept, segment, num_segments), stable=True)
    bounds = torch.arange(num_segments + 1, device=index.device)
    offsets = torch.searchsorted(keys, bounds)
    dtype = plan_dtype(index.numel())
    return perm.to(dtype), offsets.to(dtype)


def plan_dtype(rows: int | torch.SymInt) -> torch.dtype:
    """Return int32 unless ``rows`` positions need more (on a symbolic size this is a guard)."""
    return torch.int32 if rows < 2**31 else torch.int64


def _one_level(
    gather: Callable[[Tensor], Tensor], counts: Tensor, size: int, start: Tensor, combine: Combine
) -> tuple[Tensor, Tensor]:
    """Accumulate runs of ``size`` of the rows that ``gather`` gives (``counts`` a segment); return partials, counts."""
    runs = (counts + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), runs)
    run = torch.arange(owner.numel(), device=counts.device) - (runs.cumsum(0) - runs)[owner]
    first = (counts.cumsum(0) - counts)[owner] + run * size
    length = torch.minimum(counts[owner] - run * size, torch.full_like(run, size))
    length, order = torch.sort(length, descending=True)
    first = first[order]
    partial = start.expand(start.shape[0], owner.numel(), start.shape[2]).clone()
    longest = int(length[0].item()) if length.numel() else 0
    active = torch.searchsorted(-length, -torch.arange(longest, device=length.device), right=False).tolist()
    for k in range(longest):
        live = int(active[k])
        partial[:, :live] = combine(partial[:, :live], gather(first[:live] + k))
    result = torch.empty_like(partial)
    result[:, order] = partial
    return result, runs


def _one_level_up(totals: Tensor, counts: Tensor, start: Tensor, combine: Combine) -> tuple[Tensor, Tensor]:
    """Accumulate runs of ``FAN_IN`` partials; a segment that has one partial already is left as it is."""
    result, runs = _one_level(lambda i: totals[:, i], counts, FAN_IN, start, combine)
    done = counts == 1
    result[:, (runs.cumsum(0) - runs)[done]] = totals[:, (counts.cumsum(0) - counts)[done]]
    return result, runs


def planned_totals(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Return ``(rows, totals)``: the segments that have members, and their totals ``[B, rows, D]`` unrounded."""
    combine = combiner(source.dtype, reduce)
    compute = accumulation_dtype(source.dtype)
    counts = (offsets[1:] - offsets[:-1]).to(torch.int64)
    rows = counts.nonzero().flatten()
    counts = counts[rows]
    start = source.new_full((source.shape[0], 1, source.shape[2]), identity(compute, reduce), dtype=compute)
    order = perm.to(torch.int64)
    totals, counts = _one_level(lambda i: source[:, order[i]].to(compute), counts, CHUNK_ROWS, start, combine)
    while counts.numel() and int(counts.max().item()) > 1:
        totals, counts = _one_level_up(totals, counts, start, combine)
    return rows, totals


def planned_accumulate_(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> Tensor:
    """Step 4 of the canonical order, in place: only the rows of segments with members are written."""
    check_supported(source.dtype, reduce)
    rows, totals = planned_totals(source, perm, offsets, reduce)
    combined = combiner(source.dtype, reduce)(dest[:, rows].to(totals.dtype), totals)
    dest[:, rows] = canonical_nan(combined.to(dest.dtype))
    return dest


def planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str) -> Tensor:
    """Return the totals ``[B, S, D]``; a segment without members gets the identity of ``reduce``."""
    check_supported(source.dtype, reduce)
    shape = (source.shape[0], offsets.numel() - 1, source.shape[2])
    result = torch.full(shape, identity(source.dtype, reduce), dtype=source.dtype, device=source.device)
    rows, totals = planned_totals(source, perm, offsets, reduce)
    result[:, rows] = canonical_nan(totals.to(source.dtype))
    return result


def planned_accumulate(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> Tensor:
    """Step 4 of the canonical order into a fresh, contiguous tensor."""
    return planned_accumulate_(dest.clone(memory_format=torch.contiguous_format), perm, offsets, source, reduce)


def segment_reduce(source: Tensor, index: Tensor, num_segments: int, reduce: str, wrap: bool, op: str) -> Tensor:
    """Return the totals ``[B, S, D]`` of the rows of ``source [B, N, D]`` by ``index [N]``."""
    return planned_reduce(source, *plan(index, num_segments, wrap, op), reduce)


def segment_accumulate(dest: Tensor, index: Tensor, source: Tensor, reduce: str, wrap: bool, op: str) -> Tensor:
    """Return ``dest [B, S, D]`` accumulated with ``source [B, N, D]`` by ``index [N]``, in a fresh tensor."""
    return planned_accumulate(dest, *plan(index, dest.shape[1], wrap, op), source, reduce)


def segment_accumulate_(dest: Tensor, index: Tensor, source: Tensor, reduce: str, wrap: bool, op: str) -> Tensor:
    """Accumulate ``source [B, N, D]`` by ``index [N]`` into ``dest [B, S, D]`` itself."""
    return planned_accumulate_(dest, *plan(index, dest.shape[1], wrap, op), source, reduce)


def segment_count(index: Tensor, num_segments: int, wrap: bool, op: str) -> Tensor:
    """Return ``int64[S]``: the number of members of each segment."""
    segment, kept = settle(index, num_segments, wrap, op)
    counted = torch.sort(segment[kept]).values
    bounds = torch.searchsorted(counted, torch.arange(num_segments + 1, device=index.device))
    return bounds[1:] - bounds[:-1]


def last_positions(index: Tensor, num_segments: int, wrap: bool, op: str) -> Tensor:
    """Return ``int64[N]``: for each row the last position with the same index; a skipped row gives its own."""
    segment, kept = settle(index, num_segments, wrap, op)
    keys, perm = torch.sort(torch.where(kept, segment, -1), stable=True)
    end = torch.searchsorted(keys, keys, right=True) - 1
    last = torch.empty_like(perm)
    last[perm] = perm[end]
    return torch.where(kept, last, torch.arange(index.numel(), device=index.device))


def linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool, op: str) -> Tensor:
    """Return ``int64[n]``: the broadcast ``indices`` combined row-major over ``sizes``; skipped where any is."""
    flat = [component.reshape(-1) for component in torch.broadcast_tensors(*indices)]
    linear = torch.zeros_like(flat[0], dtype=torch.int64)
    kept_everywhere = torch.ones_like(flat[0], dtype=torch.bool)
    for axis, (component, size) in enumerate(zip(flat, sizes, strict=True)):
        settled, kept = settle(component, size, wrap, f"{op} (index {axis})" if op else f"index {axis}")
        linear = linear * size + settled.where(kept, 0)
        kept_everywhere &= kept
    return linear.where(kept_everywhere, SKIPPED)
