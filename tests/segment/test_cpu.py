"""Every form of the CPU kernels against the reference, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch

from detpass.segment import build, cpu, ops, reference
from detpass.segment.strategy import Strategy
from tests.segment.forms import COMPLEX, FLOATS, FORMS, INTEGERS, assert_same_bits, forced, index, values

pytestmark = pytest.mark.skipif(build.load("sums") is None, reason="no C++ compiler here: test_fallback.py covers this")

SPECIALS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40)


def operands(rows, segments, columns, dtype, batch=1, index_dtype=torch.int64, **kind):
    dest, source = values((batch, segments, columns), dtype), values((batch, rows, columns), dtype)
    if dtype.is_floating_point and rows > 100 and columns:
        source[0, : 5 * len(SPECIALS) : 5, 0] = torch.tensor(SPECIALS).to(dtype)
        source[-1, 60:80] = -0.0
        dest[0, 0, 0], dest[-1, -1, -1] = -0.0, float("nan")
    return dest, index(rows, segments, index_dtype, **kind), source


def check_all_forms(dest, where, source, reduce, wrap=False, threads=(1, 2, 3, 7), forms=FORMS):
    segments = dest.shape[1]
    total = reference.segment_accumulate(None, where, source, segments, reduce, wrap)
    onto = reference.segment_accumulate(dest, where, source, segments, reduce, wrap)
    plan = reference.plan(where, segments, wrap)
    for name in forms:
        for count in threads:
            what = (name, count, reduce, source.dtype, tuple(source.shape), segments)
            with forced(FORMS[name], count):
                if name != "sparse":
                    assert_same_bits(ops._segment_reduce(source, where, segments, reduce, wrap), total, what)
                    assert_same_bits(ops._segment_accumulate(dest, where, source, reduce, wrap), onto, what)
                    assert_same_bits(ops._planned_reduce(source, *plan, reduce), total, what)
                    assert_same_bits(ops._planned_accumulate(dest, *plan, source, reduce), onto, what)
                mutated = dest.clone()
                assert ops._segment_accumulate_(mutated, where, source, reduce, wrap) is mutated
                assert_same_bits(mutated, onto, what)
                mutated = dest.clone()
                ops._planned_accumulate_(mutated, *plan, source, reduce)
                assert_same_bits(mutated, onto, what)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX, ids=str)
@pytest.mark.parametrize("reduce", reference.REDUCTIONS)
def test_dtypes_and_reductions(dtype, reduce):
    if dtype.is_complex and reduce in ("amax", "amin"):
        pytest.skip("complex numbers have no order")
    dest, where, source = operands(1200, 7, 5, dtype, skip=True, wrap=True)
    check_all_forms(dest, where, source, reduce, wrap=True, threads=(1, 3))


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 33, 64, 100, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_widths(columns, dtype):
    check_all_forms(*operands(900, 11, columns, dtype), "sum", threads=(1, 2))


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("where", [torch.int32, torch.int64], ids=str)
def test_batches_and_index_dtypes(batch, where):
    check_all_forms(*operands(700, 9, 3, torch.float32, batch=batch, index_dtype=where), "sum")


@pytest.mark.parametrize(
    ("members", "dtype"),
    [(n, torch.float32) for n in (0, 1, 255, 256, 257, 512, 65536, 65537)]
    + [(n, torch.bfloat16) for n in (256, 257, 65536 + 300)],
)
@pytest.mark.parametrize("columns", [1, 2])
def test_odometer(members, dtype, columns):
    """One segment of exactly so many members between two short ones: every carry of the odometer."""
    where = torch.cat([torch.full((members,), 1), torch.tensor([0, 2, 2])])
    where = where[torch.randperm(len(where))]
    dest, source = values((1, 3, columns), dtype), values((1, len(where), columns), dtype)
    check_all_forms(dest, where, source, "sum", threads=(1, 3))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.complex64], ids=str)
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_single_columns(dtype, stride):
    """One segment with most of the rows, long runs of it and short ones, in every layout of a single column."""
    rows, segments = 9000, 50
    where = index(rows, segments, skip=True, wrap=True)
    where[100:5000] = 7
    where[5000:8000:2] = 7
    dest = values((1, segments, 1), dtype)
    source = values((1, 3 * rows, 1), dtype).as_strided((1, rows, 1), (3 * rows, stride, 1))
    check_all_forms(dest, where, source, "sum", wrap=True, threads=(1, 3))


@pytest.mark.parametrize(("reduce", "members"), [("prod", 20_000), ("amax", 6000), ("amin", 6000)])
def test_long_segments_of_other_reductions_are_split(reduce, members):
    source = 1 + values((1, members, 1), torch.float64) * 1e-9
    where = torch.zeros(members, dtype=torch.int64)
    check_all_forms(torch.ones(1, 2, 1, dtype=torch.float64), where, source, reduce, threads=(1, 3), forms=["sorted"])


@pytest.mark.parametrize("layout", ["rows apart", "expanded", "transposed", "columns apart", "batch inside"])
def test_strides(layout):
    rows, segments, columns = 600, 5, 6
    where = index(2 * rows, segments)[::2]
    source = {
        "rows apart": lambda: values((2, rows, 2 * columns), torch.float32)[:, :, :columns],
        "expanded": lambda: values((2, 1, columns), torch.float32).expand(2, rows, columns),
        "transposed": lambda: values((2, columns, rows), torch.float32).transpose(1, 2),
        "columns apart": lambda: values((2, rows, 3 * columns), torch.float32)[:, :, ::3],
        "batch inside": lambda: values((rows, columns, 2), torch.float32).permute(2, 0, 1),
    }[layout]()
    dest = values((2, columns, segments), torch.float32).transpose(1, 2)
    check_all_forms(dest, where, source, "sum", threads=(1, 3))
    mutated = values((2, columns, segments), torch.float32).transpose(1, 2)
    expected = reference.segment_accumulate(mutated, where, source, segments)
    ops._segment_accumulate_(mutated, where, source)
    assert mutated.stride(2) == segments, "the strides of dest are its own"
    assert_same_bits(mutated, expected)


@pytest.mark.parametrize("shape", [(1, 0, 0, 3), (1, 0, 4, 3), (0, 5, 4, 3), (1, 5, 4, 0), (2, 1, 1, 1)])
def test_empty_and_tiny(shape):
    batch, rows, segments, columns = shape
    dest, where, source = operands(rows, segments, columns, torch.float32, batch=batch)
    for reduce in reference.REDUCTIONS:
        check_all_forms(dest, where, source, reduce, threads=(1, 2))


def test_an_update_in_place_leaves_other_rows_alone():
    """A row that nobody names is not even written: it may be NaN with a payload, and a page never touched."""
    dest = torch.full((1, 100_000, 4), -1, dtype=torch.int32).view(torch.float32)
    where = torch.tensor([5, 99_999, 5])
    before = dest.clone()
    dest[0, 5], dest[0, 99_999] = 1.0, 2.0
    ops._segment_accumulate_(dest, where, torch.ones(1, 3, 4))
    assert dest[0, where].tolist() == [[3.0] * 4] * 3
    untouched = torch.ones(100_000, dtype=torch.bool)
    untouched[where] = False
    assert_same_bits(dest[:, untouched], before[:, untouched])


def test_denormals_survive_the_flush_flag():
    """``torch.set_flush_denormal`` reaches the calling thread alone; the bits must not depend on it."""
    source, where = torch.full((1, 64, 40), 1e-41), torch.arange(64) % 4
    expected = reference.segment_accumulate(None, where, source, 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for name in ("scan", "sorted"):
            for threads in (1, 2):
                with forced(FORMS[name], threads):
                    assert_same_bits(ops._segment_reduce(source, where, 4), expected, (name, threads))
    finally:
        torch.set_flush_denormal(False)


def check_capability(capability, reduce, dtypes, monkeypatch):
    order = ("default", "avx2", "avx512")
    if order.index(capability) > order.index(build.cpu_capability()):
        pytest.skip(f"this processor has no {capability}")
    monkeypatch.setenv("DETPASS_CPU_CAPABILITY", capability)
    for cached in (build.load, cpu._function, cpu._kernel):
        cached.cache_clear()
    try:
        for dtype in dtypes:
            for columns in (1, 21):
                dest, where, source = operands(800, 6, columns, dtype, skip=True)
                check_all_forms(dest, where, source, reduce, threads=(2,), forms=["scan", "sorted"])
    finally:
        for cached in (build.load, cpu._function, cpu._kernel):
            cached.cache_clear()


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_instruction_sets_give_the_same_bits(capability, monkeypatch):
    check_capability(capability, "sum", (torch.float32, torch.bfloat16), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
@pytest.mark.parametrize("reduce", reference.REDUCTIONS)
def test_instruction_sets_give_the_same_bits_everywhere(capability, reduce, monkeypatch):
    check_capability(capability, reduce, FLOATS + INTEGERS, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("value", [5, -6, 2**40, -(2**40)])
def test_bad_indices_are_named(form, wrap, value):
    source, dest = torch.ones(1, 9000, 2), torch.zeros(1, 5, 2)
    where = torch.zeros(9000, dtype=torch.int64)
    where[8123:] = value
    name, low = "aten.index_add (model.py:12)", -5 if wrap else 0
    text = re.escape(f"{name}: index {value} at position 8123 is out of bounds for size 5: expected {low} <=")
    with forced(FORMS[form], 2):
        with pytest.raises(IndexError, match=text):
            ops._segment_accumulate_(dest, where, source, "sum", wrap, name)
        with pytest.raises(IndexError, match=text):
            ops._segment_accumulate(dest, where, source, "amax", wrap, name)
        with pytest.raises(IndexError, match=text):
            ops._segment_reduce(source, where, 5, "sum", wrap, name)


def test_minus_one_does_not_wrap_by_itself():
    with pytest.raises(IndexError, match="a negative index does not wrap here"):
        ops._segment_reduce(torch.ones(1, 2, 1), torch.tensor([0, -1]), 5)


def test_float16_conversions_are_complete():
    """All 65536 half floats in, and all roundings out near each of them, against torch."""
    every = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16)
    where = torch.arange(65536)
    got = ops._segment_reduce(every.view(1, -1, 1), where, 65536).flatten()
    expected = reference.canonical_nan((every.float() + 0.0).to(torch.float16))
    assert_same_bits(got, expected)
    finite = every[every.isfinite()]
    for other in (2.0**-25, 1.5 * 2.0**-25, 1e-3, 7.77, 31.0):
        pairs = torch.stack([finite, torch.full_like(finite, other)]).flatten()
        where = torch.arange(len(finite)).repeat(2)
        got = ops._segment_reduce(pairs.view(1, -1, 1), where, len(finite)).flatten()
        exact = finite.float() + torch.full_like(finite, other).float()
        assert_same_bits(got, exact.to(torch.float16), other)


def test_forms_table_is_complete():
    assert {choice.form for choice in FORMS.values()} | {Strategy.PLANNED} == set(Strategy)
