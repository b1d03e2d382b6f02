"""One accumulation for every reduction name, with and without the destination's own value."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from detpass import segment

Combination = segment.Reduction | Literal["mean"]
"""How the rows of one place are combined."""

NAMES: dict[str, Combination] = {
    "sum": "sum",
    "add": "sum",
    "prod": "prod",
    "multiply": "prod",
    "mean": "mean",
    "amax": "amax",
    "amin": "amin",
}
"""Names that torch uses, each with ours."""


def combine(
    dest: Tensor,
    index: Tensor,
    source: Tensor,
    num_segments: Any,
    reduce: Combination,
    include_self: bool,
    zeros: bool,
    wrap: bool,
    op: str,
) -> Tensor:
    """``dest [B, S, D]`` combined with the rows ``source [B, N, D]`` by ``index [N]``.

    With ``include_self=False`` a segment that has members forgets ``dest``; one without keeps it either way. ``mean``
    divides by the number of members, plus one when ``dest`` counts. ``zeros`` says that ``dest`` is all zeros.
    """
    if reduce == "mean":
        return _mean(dest, index, source, num_segments, include_self, zeros, wrap, op)
    if include_self:
        if zeros and reduce == "sum":
            return segment.segment_reduce(source, index, num_segments, "sum", wrap, op)
        return segment.segment_accumulate(dest, index, source, reduce, wrap, op)
    total = segment.segment_reduce(source, index, num_segments, reduce, wrap, op)
    return torch.where(_occupied(index, num_segments, wrap, op), total, dest)


def _mean(
    dest: Tensor,
    index: Tensor,
    source: Tensor,
    num_segments: Any,
    include_self: bool,
    zeros: bool,
    wrap: bool,
    op: str,
) -> Tensor:
    wide = torch.float32 if source.dtype in (torch.bfloat16, torch.float16) else source.dtype
    count = segment.segment_count(index, num_segments, wrap, op).reshape(1, -1, 1)
    total = segment.segment_reduce(source.to(wide), index, num_segments, "sum", wrap, op)
    if include_self:
        if not zeros:
            total = dest.to(wide) + total
        mean = total / (count + 1).to(wide)
    else:
        mean = total / count.clamp(min=1).to(wide)
    return torch.where(count > 0, mean.to(dest.dtype), dest)


def _occupied(index: Tensor, num_segments: Any, wrap: bool, op: str) -> Tensor:
    return (segment.segment_count(index, num_segments, wrap, op) > 0).reshape(1, -1, 1)
