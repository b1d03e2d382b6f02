"""Runs the CUDA kernels in Triton's interpreter and compares bits with the reference; prints one JSON object.

``TRITON_INTERPRET=1`` has to be set before triton is imported, so ``test_triton_kernels.py`` starts a process for it:
``python triton_worker.py GROUP``. The result counts the comparisons and lists each that differed.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from detpass.segment import reference, triton_kernels
from detpass.segment.functional import assume_device, segment_accumulate
from detpass.segment.triton_kernels import Tile, launches, segment_sum_sorted, sorted_plan

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Comparison = tuple[str, Tensor, Tensor]


def bits(values: Tensor) -> Tensor:
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    return values.contiguous().view(BITS[values.element_size()])


def layouts(generator: torch.Generator) -> Iterator[tuple[str, int, Tensor]]:
    """Name, number of segments and index of each distribution of rows over segments."""

    def random(rows: int, segments: int) -> Tensor:
        return torch.randint(0, segments, (rows,), generator=generator)

    hot = random(400, 30)
    hot[torch.rand(400, generator=generator) < 0.9] = 11
    yield "random", 20, random(100, 20)
    yield "hot", 30, hot
    yield "mostly empty", 200, random(7, 200)
    yield "no rows", 5, random(0, 5)
    yield "one segment, no rows", 1, random(0, 1)
    yield "one row", 3, torch.tensor([2])
    for rows in (255, 256, 257, 512, 513):
        yield f"one segment of {rows}", 1, torch.zeros(rows, dtype=torch.int64)
    yield "two of 257 around an empty one", 3, torch.tensor([0, 2] * 257)


def values(batch: int, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values over many orders of magnitude, so that almost every order of additions rounds differently."""
    if dtype == torch.bool:
        return torch.rand(batch, rows, columns, generator=generator) < 0.3
    if not dtype.is_floating_point and not dtype.is_complex:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (batch, rows, columns), dtype=dtype, generator=generator)
    scale = torch.exp(2 * torch.randn(batch, rows, 1, generator=generator))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(batch, rows, columns, dtype=wide, generator=generator) * scale).to(dtype)


def special(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Signed zeros, infinities, NaN with a payload and a sign, the smallest denormal, the largest number."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    nan = torch.tensor([float("nan")], dtype=dtype)
    negative_nan = (bits(nan) | (-1 << (8 * nan.element_size() - 4)) | 5).view(dtype)
    pool = torch.tensor([0.0, -0.0, -0.0, float("inf"), float("-inf"), tiny, -tiny, info.max, 1.0], dtype=dtype)
    pool = torch.cat([pool, nan, negative_nan])
    picks = torch.randint(0, pool.numel(), (1, rows, columns), generator=torch.Generator().manual_seed(3))
    return pool[picks]


def sums(dtype: torch.dtype) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(1)
    for name, segments, index in layouts(generator):
        perm, offsets = sorted_plan(index, segments)
        for columns, batch in ((1, 1), (5, 2), (16, 1), (33, 1)) if name in ("random", "hot") else ((3, 1),):
            source = values(batch, index.numel(), columns, dtype, generator)
            expected = reference.segment_accumulate(None, index, source, segments)
            yield f"{name}, D={columns}", segment_sum_sorted(source, perm, offsets), expected
            tiled = launches(source, perm, offsets, "sum", dtype, tile=Tile(2, 8, unroll=3))
            yield f"{name}, D={columns}, other tile", tiled, expected


def long_segments(dtype: torch.dtype) -> Iterator[Comparison]:
    """The borders between two and three levels."""
    generator = torch.Generator().manual_seed(2)
    for rows in (65535, 65536, 65537):
        index = torch.zeros(rows, dtype=torch.int64)
        index[:300] = 2
        perm, offsets = sorted_plan(index.flip(0), 3)
        source = values(1, rows, 1, dtype, generator)
        expected = reference.segment_accumulate(None, index.flip(0), source, 3)
        yield f"{rows} rows", segment_sum_sorted(source, perm, offsets), expected
    index = torch.zeros(65537, dtype=torch.int64)
    perm, offsets = sorted_plan(index, 1)
    source = values(1, 65537, 2, dtype, generator)
    expected = reference.segment_accumulate(None, index, source, 1)
    yield "65537 in one", segment_sum_sorted(source, perm, offsets), expected


def deep() -> Iterator[Comparison]:
    """Small constants, so that a few hundred rows need up to seven levels; every segment length at many offsets."""
    generator = torch.Generator().manual_seed(4)
    for chunk, fan in ((2, 2), (3, 4), (4, 3)):
        reference.CHUNK_ROWS, reference.FAN_IN = chunk, fan
        for trial in range(8):
            lengths = torch.randint(0, (4, 30, 200)[trial % 3], (12,), generator=generator)
            index = torch.repeat_interleave(torch.arange(12), lengths)
            index = index[torch.randperm(index.numel(), generator=generator)]
            perm, offsets = sorted_plan(index, 12)
            source = values(1, index.numel(), 3, torch.float32, generator)
            expected = reference.segment_accumulate(None, index, source, 12)
            got = launches(source, perm, offsets, "sum", torch.float32, chunk_rows=chunk, fan_in=fan, tile=Tile(16, 4))
            yield f"chunks of {chunk}, fan-in {fan}, lengths {lengths.tolist()}", got, expected


def reductions() -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(5)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool)
    rows = 330
    index = (torch.rand(rows, generator=generator) < 0.1).long() * 2  # the first of four has more than one chunk
    perm, offsets = sorted_plan(index, 4)
    for dtype, reduce in itertools.product(dtypes, reference.REDUCTIONS):
        source = values(1, rows, 3, dtype, generator)
        expected = reference.segment_accumulate(None, index, source, 4, reduce)
        yield f"{reduce} of {dtype}", segment_sum_sorted(source, perm, offsets, reduce), expected
        dest = values(1, 4, 3, dtype, generator)
        expected = reference.segment_accumulate(dest, index, source, 4, reduce)
        got = segment_sum_sorted(source, perm, offsets, reduce, dest=dest)
        yield f"{reduce} of {dtype} into dest", got, expected
    for dtype, reduce in itertools.product(dtypes[:4], reference.REDUCTIONS):
        source = special(30, 6, dtype)
        short = torch.arange(30) % 5
        perm, offsets = sorted_plan(short, 6)
        expected = reference.segment_accumulate(None, short, source, 6, reduce)
        yield f"{reduce} of special {dtype}", segment_sum_sorted(source, perm, offsets, reduce), expected
        dest = special(6, 6, dtype)
        expected = reference.segment_accumulate(dest, short, source, 6, reduce)
        got = segment_sum_sorted(source, perm, offsets, reduce, dest=dest)
        yield f"{reduce} of special {dtype} into special", got, expected
    perm, offsets = sorted_plan(index, 4)
    for dtype in (torch.complex64, torch.complex128):
        source = values(1, rows, 3, dtype, generator)
        expected = reference.segment_accumulate(None, index, source, 4)
        yield f"sum of {dtype}", segment_sum_sorted(source, perm, offsets), expected
        conjugate = source.conj()
        expected = reference.segment_accumulate(None, index, conjugate.resolve_conj(), 4)
        yield f"sum of conjugated {dtype}", segment_sum_sorted(conjugate, perm, offsets), expected
        dest = values(1, 4, 3, dtype, generator)
        expected = reference.segment_accumulate(dest, index, source, 4)
        yield f"sum of {dtype} into dest", segment_sum_sorted(source, perm, offsets, dest=dest), expected


def forms() -> Iterator[Comparison]:
    """Other operands: two dimensions, strides, int32, an output dtype, mean, last, skipped rows."""
    generator = torch.Generator().manual_seed(6)
    index = torch.randint(-9, 9, (120,), generator=generator)
    index[index == 5] = -9
    index[::7] = torch.iinfo(torch.int64).min
    perm, offsets = sorted_plan(index, 9, wrap=True)
    source = values(1, 120, 4, torch.bfloat16, generator)
    expected = reference.segment_accumulate(None, index, source, 9, wrap=True)
    yield "skipped and wrapped", segment_sum_sorted(source, perm, offsets), expected
    yield "[N, D]", segment_sum_sorted(source[0], perm, offsets), expected[0]
    yield "int32 plan", segment_sum_sorted(source, perm.int(), offsets.int()), expected
    yield "int64 offsets", segment_sum_sorted(source, perm, offsets.long()), expected
    strided = source.transpose(1, 2).contiguous().transpose(1, 2)
    yield "strides", segment_sum_sorted(strided, perm, offsets), expected
    wide = segment_sum_sorted(source, perm, offsets, "sum", torch.float32)
    yield "float32 result", wide, reference.segment_accumulate(None, index, source.float(), 9, wrap=True)
    count = (offsets[1:] - offsets[:-1])[:, None]
    mean = torch.where(count > 0, wide / count.clamp(min=1), 0).to(torch.bfloat16)
    yield "mean", segment_sum_sorted(source, perm, offsets, "mean"), mean
    last = torch.zeros(1, 9, 4, dtype=torch.bfloat16)
    for position, segment in enumerate(index.tolist()):
        if segment != torch.iinfo(torch.int64).min:
            last[:, segment] = source[:, position]
    yield "last", segment_sum_sorted(source, perm, offsets, "last"), last
    dest = values(1, 9, 4, torch.bfloat16, generator)
    written = torch.where(count > 0, last, dest)
    yield "last into dest", segment_sum_sorted(source, perm, offsets, "last", dest=dest), written
    expected_dest = reference.segment_accumulate(dest, index, source, 9, wrap=True)
    yield "[N, D] into [S, D]", segment_sum_sorted(source[0], perm, offsets, dest=dest[0]), expected_dest[0]
    nothing = sorted_plan(index[:0], 9)
    yield "last of no rows", segment_sum_sorted(source[:, :0], *nothing, "last"), torch.zeros_like(last)
    yield "no columns", segment_sum_sorted(source[..., :0], perm, offsets), expected[..., :0]
    yield "no batch", segment_sum_sorted(source[:0], perm, offsets), expected[:0]


def updates() -> Iterator[Comparison]:
    """Few rows into a large table, by the function that rules call."""
    generator = torch.Generator().manual_seed(7)
    kinds = ((torch.float32, "sum", 9), (torch.bfloat16, "sum", 9), (torch.complex64, "sum", 9),
             (torch.int32, "prod", 9), (torch.float32, "amax", 9), (torch.float64, "sum", 300))  # fmt: skip
    for dtype, reduce, rows in kinds:
        index = torch.randint(-4200, 4200, (rows,), generator=generator)
        index[1::2] = 17
        index[2] = torch.iinfo(torch.int64).min
        source, dest = (values(2, n, 3, dtype, generator) for n in (rows, 4200))
        if dtype.is_floating_point:
            dest[:, :20] = special(20, 3, dtype)
        with assume_device("cuda"):
            got = segment_accumulate(dest, index, source, reduce, True, "add")
        yield f"{reduce} of {rows} {dtype}", got, reference.segment_accumulate(dest, index, source, 4200, reduce, True)
        nothing = torch.full((5,), torch.iinfo(torch.int64).min)
        with assume_device("cuda"):
            kept = segment_accumulate(dest, nothing, source[:, :5], reduce, True, "add")
        yield f"{reduce} of no {dtype}", kept, dest


GROUPS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "sums-float32": lambda: sums(torch.float32),
    "sums-float64": lambda: sums(torch.float64),
    "sums-float16": lambda: sums(torch.float16),
    "sums-bfloat16": lambda: sums(torch.bfloat16),
    "long-float32": lambda: long_segments(torch.float32),
    "long-bfloat16": lambda: long_segments(torch.bfloat16),
    "deep": deep,
    "reductions": reductions,
    "forms": forms,
    "updates": updates,
}


def main(group: str) -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, for overflow in the interpreter
    count, different = 0, []
    for name, got, expected in GROUPS[group]():
        count += 1
        if got.shape != expected.shape or got.dtype != expected.dtype:
            different.append(f"{name}: {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}")
        elif not torch.equal(bits(got), bits(expected)):
            different.append(f"{name}: {int((bits(got) != bits(expected)).sum())} values differ")
    print(json.dumps({"interpreted": triton_kernels.interpreted(), "count": count, "different": different}))


if __name__ == "__main__":
    main(sys.argv[1])
