"""Schemas, fake kernels, functionalization, and what Inductor makes of the operators."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from detpass import _torch_private
from detpass.segment import fallback, ops
from tests.segment.forms import assert_same_bits, index, values

DETPASS = torch.ops.detpass


def samples():
    dest, source = values((2, 5, 3), torch.float32), values((2, 40, 3), torch.float32)
    where = index(40, 5)
    perm, offsets = DETPASS.plan(where, 5)
    return {
        "segment_reduce": (source, where, 5, "amax", True, "op"),
        "segment_accumulate": (dest, where, source, "sum"),
        "segment_accumulate_": (dest.clone(), where, source, "prod"),
        "segment_count": (where, 5),
        "last_positions": (where, 5),
        "linear_index": ([where, where], [5, 5]),
        "plan": (where, 5),
        "planned_reduce": (source, perm, offsets),
        "planned_accumulate": (dest, perm, offsets, source, "amin"),
        "planned_accumulate_": (dest.clone(), perm, offsets, source),
    }


def test_the_samples_cover_every_operator():
    assert set(samples()) == set(ops._KERNELS)


@pytest.mark.parametrize("name", samples())
def test_opcheck(name):
    arguments = samples()[name]
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    if not name.endswith("_"):  # opcheck refuses operators that return their argument there
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(DETPASS, name).default, arguments, test_utils=tests)


@pytest.mark.parametrize("name", samples())
def test_layouts_are_left_alone(name):
    if hasattr(torch.Tag, "flexible_layout"):
        assert torch.Tag.flexible_layout in getattr(DETPASS, name).default.tags


def test_refusals():
    source, where = torch.ones(1, 3, 2), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match=r"source has 3 rows .* the index has 2"):
        DETPASS.segment_reduce(source, where[:2], 2)
    with pytest.raises(ValueError, match=r"expected \[batch, rows, features\]"):
        DETPASS.segment_reduce(source[0], where, 2)
    with pytest.raises(TypeError, match=r"index has dtype torch\.int16; expected int32 or int64"):
        DETPASS.segment_reduce(source, where.short(), 2)
    with pytest.raises(ValueError, match="expected one dimension"):
        DETPASS.segment_count(where.view(1, 3), 2)
    with pytest.raises(TypeError, match=r"dest is torch\.float64 and source is torch\.float32"):
        DETPASS.segment_accumulate(torch.ones(1, 2, 2, dtype=torch.float64), where, source)
    with pytest.raises(ValueError, match="expected equal batch and feature sizes"):
        DETPASS.segment_accumulate(torch.ones(2, 2, 2), where, source)
    with pytest.raises(ValueError, match="as plan\\(\\) gives them"):
        DETPASS.planned_reduce(source, where.float(), where)
    with pytest.raises(ValueError, match="num_segments is -1"):
        DETPASS.plan(where, -1)


@pytest.fixture
def inplace_variants():
    for functional, inplace in ops.INPLACE_VARIANTS:
        _torch_private.register_inplace_variant(functional, inplace, 0)


def kernel_calls(function, *arguments):
    with torch.no_grad():
        result, (code, *_) = run_and_get_code(torch.compile(function), *arguments)
    return result, [line.strip() for line in code.splitlines() if "torch.ops.detpass." in line and "=" in line], code


def updated(table, where, source, planned):
    if planned:
        return DETPASS.planned_accumulate(table, *DETPASS.plan(where, table.shape[1]), source)
    return DETPASS.segment_accumulate(table, where, source)


@pytest.mark.parametrize("planned", [False, True])
def test_inductor_updates_a_table_in_place(inplace_variants, planned):
    def train(table, where, source):
        table.copy_(updated(table, where, source, planned))
        return source + 1

    table, where, source = values((1, 3000, 8), torch.float32), index(50, 3000), values((1, 50, 8), torch.float32)
    perm, offsets = fallback.plan(where, 3000, False, "")
    expected = fallback.planned_accumulate(table, perm, offsets, source, "sum")
    _, calls, code = kernel_calls(train, table, where, source)
    assert_same_bits(table, expected)
    assert any("accumulate_.default(arg" in call for call in calls), calls
    fused = [line for line in code.splitlines() if "cpp_fused" in line and "arg0_1" in line]
    assert not fused, ("no kernel but the operator touches the table", fused)


@pytest.mark.parametrize("planned", [False, True])
def test_inductor_keeps_a_table_that_is_read_later(inplace_variants, planned):
    def read_later(table, where, source):
        result = updated(table, where, source, planned)
        return result, table * 2

    table, where, source = values((1, 300, 8), torch.float32), index(50, 300), values((1, 50, 8), torch.float32)
    before = table.clone()
    (result, doubled), calls, _ = kernel_calls(read_later, table, where, source)
    assert not any("accumulate_.default" in call for call in calls), calls
    assert_same_bits(table, before)
    assert_same_bits(doubled, before * 2)
    assert_same_bits(result, updated(before, where, source, planned))


def test_inductor_reuses_a_temporary(inplace_variants):
    def fresh(table, where, source):
        return updated(table * 0.5, where, source, False)

    table, where, source = values((1, 300, 8), torch.float32), index(50, 300), values((1, 50, 8), torch.float32)
    result, calls, _ = kernel_calls(fresh, table, where, source)
    assert any("accumulate_.default" in call for call in calls), calls
    assert_same_bits(result, updated(table * 0.5, where, source, False))


def test_a_mutating_call_is_functionalized():
    def mutate(table, where, source):
        DETPASS.segment_accumulate_(table, where, source)
        return table.sum()

    table, where, source = values((1, 30, 8), torch.float32), index(50, 30), values((1, 50, 8), torch.float32)
    expected = updated(table, where, source, False)
    torch.compile(mutate, backend="aot_eager")(table, where, source)
    assert_same_bits(table, expected)


def test_a_transposed_operand_is_not_copied():
    """Inductor hands the operator the strides it has: no kernel of its own stands before the call."""

    def function(where, source):
        return DETPASS.segment_reduce(source.transpose(1, 2), where, 7)

    where, source = index(50, 7), values((1, 8, 50), torch.float32)
    result, calls, code = kernel_calls(function, where, source)
    assert len(calls) == 1, calls
    assert "cpp_fused" not in code, code
    assert_same_bits(result, DETPASS.segment_reduce(source.transpose(1, 2), where, 7))
