"""The functions that rules call: indices, plans, tracing, and the choice of the form by device."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from detpass import segment
from detpass.segment import SKIPPED, Form, reference
from tests.segment.forms import assert_same_bits, index, values

SIZES = [(0, 0), (0, 3), (1, 1), (5, 100_000), (3000, 7), (20_000, 1), (20_000, 64), (9000, 200_000), (70_000, 1 << 40)]


@pytest.mark.parametrize(("rows", "segments"), SIZES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_last_positions_and_counts(rows, segments, dtype, threads):
    if segments > torch.iinfo(dtype).max:
        pytest.skip("more segments than the index can name")
    torch.set_num_threads(threads)
    where = index(rows, segments, dtype, skip=True, wrap=True)
    last: dict[int, int] = {}
    settled = [None if v == segment.skipped_value(dtype) else v % segments for v in where.tolist()]
    for position, value in enumerate(settled):
        last[value] = position
    expected = torch.tensor([i if v is None else last[v] for i, v in enumerate(settled)], dtype=torch.int64)
    assert_same_bits(segment.last_positions(where, segments, wrap=True), expected)
    if segments <= 200_000:
        counts = torch.zeros(segments, dtype=torch.int64)
        for value in settled:
            if value is not None:
                counts[value] += 1
        assert_same_bits(segment.segment_count(where, segments, wrap=True), counts)


@pytest.mark.parametrize(("rows", "segments"), [s for s in SIZES if s[1] <= 200_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_plan(rows, segments, dtype, threads):
    torch.set_num_threads(threads)
    where = index(2 * rows, segments, dtype, skip=True, wrap=True)[::2]
    perm, offsets = segment.plan(where, segments, wrap=True)
    expected = reference.plan(where, segments, wrap=True)
    assert_same_bits(perm, expected[0])
    assert_same_bits(offsets, expected[1])


@pytest.mark.parametrize("call", [segment.plan, segment.segment_count, segment.last_positions])
@pytest.mark.parametrize("rows", [4, 20_000])
@pytest.mark.parametrize("segments", [3, 1_000_000])
def test_index_errors(call, rows, segments):
    for wrap, value in ((False, -1), (False, segments), (True, -segments - 1), (True, segments)):
        where = torch.zeros(rows, dtype=torch.int64)
        where[rows - 2] = value
        text = f"put: index {value} at position {rows - 2} is out of bounds for size {segments}"
        with pytest.raises(IndexError, match=text):
            call(where, segments, wrap, "put")
    assert call(torch.tensor([SKIPPED]), segments) is not None


def test_linear_index():
    first, second = torch.tensor([[0], [-1]]), torch.tensor([1, SKIPPED, -2], dtype=torch.int64)
    got = segment.linear_index([first, second], [3, 4], wrap=True)
    assert_same_bits(got, torch.tensor([1, SKIPPED, 2, 9, SKIPPED, 10]))
    narrow = segment.linear_index([first.int(), torch.tensor(2)], [3, 4], wrap=True)
    assert_same_bits(narrow, torch.tensor([2, 10]))
    assert_same_bits(segment.linear_index([torch.tensor(2)], [5]), torch.tensor([2]))
    assert segment.linear_index([torch.zeros(0, 3, dtype=torch.int64), torch.tensor([0])], [0, 1]).shape == (0,)


def test_linear_index_of_random_broadcasts():
    sizes = (5, 7, 11)
    a = torch.randint(-5, 5, (40, 1, 1))
    b = torch.randint(-7, 7, (30, 1)).expand(30, 50)
    c = torch.randint(-11, 11, (50, 30, 40)).permute(2, 1, 0)
    got = segment.linear_index([a, b, c], sizes, wrap=True)
    table = torch.arange(5 * 7 * 11).view(sizes)
    assert_same_bits(got, table[a, b, c].flatten())


def test_linear_index_errors():
    with pytest.raises(IndexError, match=r"gather \(index 1\): index 4 at position 2 is out of bounds for size 4"):
        segment.linear_index([torch.tensor([0, 0, 0]), torch.tensor([1, 2, 4])], [3, 4], op="gather")
    with pytest.raises(IndexError, match="index 0: index -1 at position 0"):
        segment.linear_index([torch.tensor([-1])], [3])
    with pytest.raises(ValueError, match="1 indices for 2 sizes"):
        segment.linear_index([torch.tensor([1])], [3, 4])
    with pytest.raises(TypeError, match="a mask: take its nonzero"):
        segment.linear_index([torch.tensor([True])], [3])


def test_last_write_wins():
    """Every writer of one place writes the value of the last one, so their order no longer matters."""
    where, source = torch.randint(0, 50, (3000,)), torch.randn(3000)
    last = segment.last_positions(where, 50)
    expected = torch.zeros(50)
    for position, value in zip(where.tolist(), source, strict=True):
        expected[position] = value
    assert_same_bits(torch.zeros(50).index_put((where,), source[last]), expected)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_tracing_gives_one_operator_a_call(mode):
    def function(dest, where, source):
        perm, offsets = segment.plan(where, dest.shape[1], True)
        return (
            segment.segment_accumulate(dest, where, source, wrap=True),
            segment.segment_reduce(source, where, dest.shape[1], wrap=True),
            segment.planned_accumulate(dest, perm, offsets, source),
            segment.last_positions(where, dest.shape[1], True),
            segment.linear_index([where, where], [dest.shape[1]] * 2, True),
        )

    operands = values((2, 5, 3), torch.float32), index(40, 5, wrap=True), values((2, 40, 3), torch.float32)
    graph = make_fx(function, tracing_mode=mode)(*operands)
    called = [str(node.target) for node in graph.graph.nodes if "detpass" in str(node.target)]
    names = ("plan", "segment_accumulate", "segment_reduce", "planned_accumulate", "last_positions", "linear_index")
    assert called == [f"detpass.{name}.default" for name in names]
    for got, expected in zip(graph(*operands), function(*operands), strict=True):
        assert_same_bits(got, expected)


def test_the_target_chooses_the_form():
    cpu = torch.device("cpu")
    assert segment.form_for(cpu, torch.float32) is Form.OPERATOR
    with segment.assume_device("cuda"):
        assert segment.form_for(cpu, torch.float32, "amax") is Form.TRITON
        assert segment.form_for(cpu, torch.complex64, "prod") is Form.OPERATOR
        with segment.assume_device("cpu"):
            assert segment.form_for(torch.device("cuda")) is Form.OPERATOR
        with segment.assume_device(None):
            assert segment.form_for(cpu) is Form.OPERATOR
    assert segment.form_for(cpu) is Form.OPERATOR
