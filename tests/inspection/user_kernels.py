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


@triton.jit
def add_to(place, value):  # type: ignore[no-untyped-def]
    return tl.atomic_add(place, value)


@triton.jit
def counted_by_helper(index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    add_to(out + tl.program_id(0) % 8, 1)


@triton.jit
def compacted(x, out, count, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    place = add_to(count, tl.sum((value > 0).to(tl.int32)))
    tl.store(out + place + tl.cumsum((value > 0).to(tl.int32)) - 1, value, mask=value > 0)


@triton.jit
def counted_and_largest(index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.atomic_add(out, 1)
    tl.atomic_max(out + 1, tl.load(index))


@triton.jit
def guarded(x, out, n, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ADD:
        tl.atomic_add(out + at, tl.load(x + at, mask=at < n), mask=at < n)
    else:
        tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def assembled(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.inline_asm_elementwise(
        "{ .reg .f32 old; atom.global.add.f32 old, [$1], 0f3F800000; mov.u32 $0, 0; }",
        "=r,l",
        [tl.load(x + at, mask=at < n).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


tuned = triton.autotune(
    configs=[triton.Config({"ADD": False, "BLOCK": 64}), triton.Config({"ADD": True, "BLOCK": 128})], key=[]
)(guarded)
"""A kernel of which the second configuration alone adds by atomics."""
