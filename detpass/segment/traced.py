"""Forms for CUDA made of torch operations that a compiler can see: no data is read back, every shape is static.

The sums themselves are Triton kernels (``triton_kernels.py`` over the plan of ``triton_plan.py``); here is what stands
around them: which of them accumulate into a destination, counts, last positions and linear indices. An index out of
bounds fails a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from detpass.segment import strategy, triton_plan
from detpass.segment.constants import SKIPPED, skipped_value

sorted_plan = triton_plan.sorted_plan
segment_count = triton_plan.sorted_count
last_positions = triton_plan.sorted_last_positions


def planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str) -> Tensor:
    """Return the totals ``[B, S, D]``; a segment without members gets the identity."""
    from detpass.segment import triton_kernels  # here, since a CPU need not import it

    return triton_kernels.segment_sum_sorted(source, perm, offsets, reduce)


def planned_accumulate(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> Tensor:
    """Return ``dest`` combined with the totals in the accumulation dtype, rounded once; untouched rows as they are."""
    from detpass.segment import triton_kernels  # here, since a CPU need not import it

    return triton_kernels.segment_sum_sorted(source, perm, offsets, reduce, dest.dtype, dest)


def accumulate(dest: Tensor, index: Tensor, source: Tensor, reduce: str, wrap: bool, op: str) -> Tensor:
    """Return ``dest`` combined with the totals by ``index``, by a pass over ``dest`` or over the rows it touches."""
    segments, rows = dest.shape[1], index.shape[0]
    if source.dtype == torch.bool or not strategy.far_exceeds(segments, rows):
        return planned_accumulate(dest, *sorted_plan(index, segments, wrap, op), source, reduce)
    from detpass.segment import triton_update  # here, since a CPU need not import it

    perm, offsets, touched = triton_plan.sorted_groups(index, segments, wrap, op)
    return triton_update.accumulate_rows(dest, touched, source, perm, offsets, reduce)


def linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool, op: str) -> Tensor:
    """Return ``int64[n]``: the broadcast ``indices`` combined row-major over ``sizes``; skipped where any is."""
    linear = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    live = torch.ones((), dtype=torch.bool, device=indices[0].device)
    for axis, (component, size) in enumerate(zip(indices, sizes, strict=True)):
        settled, kept = settle(component, size, wrap, f"{op} (index {axis})" if op else f"index {axis}")
        linear = linear * size + torch.where(kept, settled, 0)
        live = live & kept
    return torch.where(live, linear, SKIPPED).reshape(-1)


def settle(index: Tensor, size: int, wrap: bool, op: str) -> tuple[Tensor, Tensor]:
    """Return ``index`` wrapped, as int64, and which rows are kept; assert on the device that all are in bounds."""
    kept = index != skipped_value(index.dtype)
    wide = index.to(torch.int64)
    settled = torch.where(wide < 0, wide + size, wide) if wrap else wide
    inside = (settled >= 0) & (settled < size)
    torch.ops.aten._assert_async.msg((inside | ~kept).all(), triton_plan.out_of_bounds_message(op or "index", size))
    return settled, kept
