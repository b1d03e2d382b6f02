"""The sorted plan for CUDA, run on CPU tensors: the same ``perm`` and ``offsets`` as the reference."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from detpass.segment import reference
from detpass.segment.triton_plan import (
    key_dtype,
    sorted_count,
    sorted_groups,
    sorted_last_positions,
    sorted_plan,
)

SIZES = [1, 2, 253, 254, 255, 256, 300, 65533, 65534, 65535, 65536, 70000]


def _index(rows: int, segments: int, wrap: bool, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + segments)
    index = torch.randint(-segments if wrap else 0, segments, (rows,), generator=generator).to(dtype)
    index[:2] = segments - 1
    index[2::5] = torch.iinfo(dtype).min
    return index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("segments", SIZES)
def test_plan_is_the_reference(segments: int, wrap: bool, dtype: torch.dtype) -> None:
    for rows in (0, 1, 400):
        index = _index(rows, segments, wrap, dtype)
        perm, offsets = sorted_plan(index, segments, wrap)
        expected_perm, expected_offsets = reference.plan(index, segments, wrap)
        assert torch.equal(perm, expected_perm.to(perm.dtype))
        assert torch.equal(offsets, expected_offsets.to(offsets.dtype))
        assert (perm.dtype, offsets.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("segments", SIZES)
def test_groups_are_the_segments_with_members(segments: int, wrap: bool, dtype: torch.dtype) -> None:
    for rows in (0, 1, 400):
        index = _index(rows, segments, wrap, dtype)
        perm, offsets, touched = sorted_groups(index, segments, wrap)
        expected_perm, bounds = reference.plan(index, segments, wrap)
        assert torch.equal(perm, expected_perm.to(perm.dtype))
        occupied = (bounds[1:] > bounds[:-1]).nonzero().flatten()
        count = occupied.shape[0]
        assert torch.equal(touched[:count], occupied)
        assert (touched[count:] == -1).all()
        assert torch.equal(offsets[:count], bounds[:-1][occupied].to(offsets.dtype))
        assert offsets.shape == (rows + 1,)
        assert (offsets.diff() >= 0).all()
        if count:
            assert int(offsets[count]) == int(bounds[-1])
        assert int(offsets[-1]) == rows
    with pytest.raises(RuntimeError, match=f"add: an index is out of bounds for size {segments}"):
        sorted_groups(torch.tensor([0, segments], dtype=dtype), segments, wrap, "add")


@pytest.mark.parametrize("wrap", [False, True])
def test_counts_and_last_positions(wrap: bool) -> None:
    index = _index(400, 37, wrap, torch.int64)
    offsets = reference.plan(index, 37, wrap)[1]
    assert torch.equal(sorted_count(index, 37, wrap), (offsets[1:] - offsets[:-1]).long())
    assert torch.equal(sorted_last_positions(index, 37, wrap), reference.last_positions(index, 37, wrap))
    skipped = torch.full((5,), torch.iinfo(torch.int64).min)
    assert torch.equal(sorted_last_positions(skipped, 37, wrap), torch.arange(5))
    assert sorted_last_positions(skipped[:0], 37, wrap).shape == (0,)


def test_narrowest_key() -> None:
    assert [key_dtype(size)[0] for size in (1, 254, 255, 65534, 65535, 2**31 - 2, 2**31 - 1)] == [
        torch.uint8,
        torch.uint8,
        torch.int16,
        torch.int16,
        torch.int32,
        torch.int32,
        torch.int64,
    ]
    for size in (254, 65534):
        dtype, shift = key_dtype(size)
        assert torch.iinfo(dtype).min == shift
        assert size + 1 + shift == torch.iinfo(dtype).max


@pytest.mark.parametrize(("value", "wrap"), [(5, False), (-1, False), (5, True), (-6, True), (2**31, False)])
def test_index_out_of_bounds_is_named(value: int, wrap: bool) -> None:
    index = torch.tensor([0, value, 2])
    with pytest.raises(RuntimeError, match="my_op: an index is out of bounds for size 5"):
        sorted_plan(index, 5, wrap, "my_op")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32])
def test_other_index_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"my_op: the index has dtype .*convert it with \.to\(torch\.int64\)"):
        sorted_plan(torch.zeros(3, dtype=dtype), 5, op="my_op")


def test_symbolic_sizes_make_one_graph() -> None:
    def plan(index: torch.Tensor, dest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sorted_plan(index, dest.shape[0], True, "op")

    graph = make_fx(plan, tracing_mode="symbolic")(_index(400, 300, True, torch.int64), torch.zeros(300))
    sort = [node for node in graph.graph.nodes if "sort" in str(node.target) and "search" not in str(node.target)]
    assert len(sort) == 1
    assert sort[0].kwargs["stable"] is True
    assert sort[0].args[0].meta["val"].dtype == torch.int32
    for rows, segments in ((9, 70000), (500, 3), (1000, 300)):
        index = _index(rows, segments, True, torch.int64)
        perm, offsets = graph(index, torch.zeros(segments))
        expected = reference.plan(index, segments, True)
        assert torch.equal(perm, expected[0].long())
        assert torch.equal(offsets, expected[1])
    with pytest.raises(RuntimeError, match="op: an index is out of bounds for the size of its dimension"):
        graph(torch.tensor([3, 1]), torch.zeros(3))
