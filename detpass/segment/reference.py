"""The canonical order of an accumulation, written as plainly as possible. Every kernel is tested against this file.

For each segment: its members in increasing position; runs of ``CHUNK_ROWS`` members accumulated left to right from the
identity; runs of ``FAN_IN`` such partials accumulated left to right from the identity; again until one is left; then
``dest`` combined with it, in the accumulation dtype, and one rounding to the output dtype. A segment without members
keeps ``dest`` bit for bit. A result that is NaN has the bits of the type's default quiet NaN with a clear sign, since
processors disagree about which payload survives an addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from detpass.segment.constants import CHUNK_ROWS, FAN_IN, skipped_value

Reduction = Literal["sum", "prod", "amax", "amin"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "prod", "amax", "amin")

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def check_supported(dtype: torch.dtype, reduce: str) -> None:
    """Raise TypeError or ValueError where ``reduce`` has no meaning, or none here, for ``dtype``."""
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r} is not one of {', '.join(REDUCTIONS)}")
    if dtype in _COMPLEX and reduce in ("amax", "amin"):
        raise TypeError(f"{reduce} of {dtype}: complex numbers have no order; take it of .real, .imag or .abs()")
    if dtype not in _INTEGERS + _REALS + _COMPLEX:
        known = ", ".join(str(d).removeprefix("torch.") for d in _INTEGERS + _REALS + _COMPLEX)
        raise TypeError(f"{reduce} of {dtype} is not supported; convert to one of {known}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and products of ``dtype`` are computed in (float32 for the 16-bit floats)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def identity(dtype: torch.dtype, reduce: str) -> float | int | bool:
    """Return the value of a segment that has no members."""
    if reduce == "sum":
        return 0
    if reduce == "prod":
        return 1
    if dtype == torch.bool:
        return reduce == "amin"
    if dtype.is_floating_point:
        return float("-inf") if reduce == "amax" else float("inf")
    info = torch.iinfo(dtype)
    return int(info.min if reduce == "amax" else info.max)


def canonical_nan(values: Tensor) -> Tensor:
    """Return ``values`` with each NaN replaced by the type's default quiet NaN, sign clear (complex: per component)."""
    if values.dtype.is_complex:
        return torch.view_as_complex(canonical_nan(torch.view_as_real(values)))
    if not values.dtype.is_floating_point:
        return values
    return torch.where(values.isnan(), torch.full((), float("nan"), dtype=values.dtype, device=values.device), values)


def _complex_product(left: Tensor, right: Tensor) -> Tensor:
    a, b = left.real, left.imag
    c, d = right.real, right.imag
    return torch.complex(a * c - b * d, a * d + b * c)


def _extreme(left: Tensor, right: Tensor, largest: bool) -> Tensor:
    """NaN wins; of the two zeros, ``+0.0`` is the larger."""
    picked = torch.maximum(left, right) if largest else torch.minimum(left, right)
    if left.dtype not in _BITS:
        return picked
    bits = _BITS[left.dtype]
    tied = (left.view(bits) & right.view(bits)) if largest else (left.view(bits) | right.view(bits))
    return torch.where(left == right, tied.view(left.dtype), picked)


def combiner(dtype: torch.dtype, reduce: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the binary operation that accumulates two tensors of the accumulation dtype, element by element."""
    if reduce in ("amax", "amin"):
        return lambda left, right: _extreme(left, right, reduce == "amax")
    if dtype == torch.bool:
        return torch.logical_or if reduce == "sum" else torch.logical_and
    if reduce == "sum":
        return torch.add
    return _complex_product if dtype.is_complex else torch.mul


def _fold(parts: Sequence[Tensor], start: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = start
    for part in parts:
        total = combine(total, part)
    return total


def _total(parts: Sequence[Tensor], start: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Accumulate the members ``parts`` of one segment in the canonical order."""
    size = CHUNK_ROWS
    while True:
        parts = [_fold(parts[i : i + size], start, combine) for i in range(0, len(parts), size)]
        if len(parts) == 1:
            return parts[0]
        size = FAN_IN


def positions(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> list[list[int]]:
    """Return for each segment the positions of its members in increasing order; raise IndexError on a bad index."""
    members: list[list[int]] = [[] for _ in range(num_segments)]
    for position, value in enumerate(index.tolist()):
        if value == skipped_value(index.dtype):
            continue
        low = -num_segments if wrap else 0
        if not low <= value < num_segments:
            raise IndexError(f"{op}: index {value} at position {position}")
        members[value % num_segments if wrap else value].append(position)
    return members


def segment_accumulate(
    dest: Tensor | None,
    index: Tensor,
    source: Tensor,
    num_segments: int,
    reduce: Reduction = "sum",
    wrap: bool = False,
) -> Tensor:
    """Return ``[B, S, D]``: ``dest [B, S, D]`` (None: no dest) accumulated with ``source [B, N, D]``, as above."""
    check_supported(source.dtype, reduce)
    compute = accumulation_dtype(source.dtype)
    combine = combiner(source.dtype, reduce)
    shape = (source.shape[0], num_segments, source.shape[2])
    result = torch.full(shape, identity(source.dtype, reduce), dtype=source.dtype) if dest is None else dest.clone()
    start = torch.full((shape[0], shape[2]), identity(compute, reduce), dtype=compute)
    for segment, members in enumerate(positions(index, num_segments, wrap)):
        if members:
            total = _total([source[:, i].to(compute) for i in members], start, combine)
            if dest is not None:
                total = combine(dest[:, segment].to(compute), total)
            result[:, segment] = canonical_nan(total.to(source.dtype))
    return result


def last_positions(index: Tensor, num_segments: int, wrap: bool = False) -> Tensor:
    """Return ``int64[N]``: for each row the last position with the same index; a skipped row gives its own."""
    result = torch.arange(index.numel())
    for members in positions(index, num_segments, wrap):
        result[members] = max(members, default=0)
    return result


def plan(index: Tensor, num_segments: int, wrap: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``(perm, offsets)``: members segment by segment, then the skipped rows; ``offsets [S + 1]``."""
    members = positions(index, num_segments, wrap)
    kept = list(itertools.chain.from_iterable(members))
    rest = sorted(set(range(index.numel())) - set(kept))
    offsets = list(itertools.accumulate((len(m) for m in members), initial=0))
    return torch.tensor(kept + rest, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)
