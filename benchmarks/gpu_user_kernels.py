"""Triton kernels as a user writes them, for the cases of ``gpu_operators.py``: exact atomics, and autotuners."""

# Triton's decorators are untyped.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
CONFIGURATIONS = [triton.Config({"BLOCK": size}, num_warps=warps) for size, warps in ((256, 4), (1024, 8))]


@triton.jit
def _count(index, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + at, mask=at < n), 1, mask=at < n)


@triton.autotune(configs=CONFIGURATIONS, key=["n"])
@triton.jit
def _sum_rows(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total))


@triton.autotune(configs=CONFIGURATIONS, key=["n"])
@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def counted(index: Tensor, places: int) -> Tensor:
    """How often each place is named, ``int64[places]``."""
    out = torch.zeros(places, dtype=torch.int64, device=index.device)
    _count[(triton.cdiv(index.numel(), BLOCK),)](index, out, index.numel(), BLOCK=BLOCK)
    return out


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row of ``x: [R, N]``, in an order that the chosen configuration decides."""
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _sum_rows[(x.shape[0],)](x, out, x.shape[1])
    return out


def doubled(x: Tensor) -> Tensor:
    """``2 * x``: the same bits under each configuration."""
    out = torch.empty_like(x)
    _double[lambda chosen: (triton.cdiv(x.numel(), chosen["BLOCK"]),)](x, out, x.numel())
    return out
