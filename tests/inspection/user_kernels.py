"""Triton kernels of a user's own, with and without atomics whose order decides the result."""

from __future__ import annotations

from typing import Any

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


@triton.jit
def totals(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(out, total)


def _tuned(function: Any, *configurations: dict[str, int], **options: int) -> Any:
    return triton.autotune([triton.Config(each, **options) for each in configurations], key=[])(function)


tuned_totals = _tuned(totals, {"BLOCK": 64}, {"BLOCK": 128})
"""A kernel of which the configuration sets the order of a sum."""
tuned_doubled = _tuned(doubled, {"BLOCK": 64}, {"BLOCK": 128})
"""A kernel that does the same to each element in every configuration."""
tuned_totals_once = _tuned(totals, {"BLOCK": 64})
tuned_histogram = _tuned(histogram, {"BLOCK": 64}, {"BLOCK": 128})
tuned_totals_twice = _tuned(totals, {"BLOCK": 64}, {"BLOCK": 64})
tuned_totals_reversed = _tuned(totals, {"BLOCK": 128}, {"BLOCK": 64})
tuned_adding_first = _tuned(guarded, {"ADD": True, "BLOCK": 128}, {"ADD": False, "BLOCK": 64})


@triton.jit
def row_total(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < n, other=0.0)))


tuned_warps = triton.autotune(
    [triton.Config({"BLOCK": 128}, num_warps=4), triton.Config({"BLOCK": 128}, num_warps=8)], key=[]
)(row_total)


@triton.jit
def scaled(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * FACTOR, mask=at < n)


tuned_by_rule = _tuned(
    triton.heuristics({"FACTOR": lambda given: float(given["BLOCK"])})(scaled), {"BLOCK": 64}, {"BLOCK": 128}
)
"""A kernel with a factor that a heuristic computes from the configuration."""
by_rule = _tuned(triton.heuristics({"FACTOR": lambda given: 2.0})(scaled), {"BLOCK": 64})
