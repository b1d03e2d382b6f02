"""Triton kernels of a user's own, with and without atomics whose order decides the result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def histogram(x, index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + at, mask=at < n), tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def locked(x, out, lock, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(out, tl.load(out) + tl.sum(tl.load(x + at, mask=at < n)))
    tl.atomic_xchg(lock, 0)


@triton.jit
def largest(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_max(out, tl.max(tl.load(x + at, mask=at < n, other=0.0)))


@triton.jit
def counted(index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + at, mask=at < n), 1, mask=at < n)


@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
