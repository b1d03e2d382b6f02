"""The definition itself, against numpy's sequential additions, exact sums and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from detpass.segment import SKIPPED, reference
from tests.segment.forms import assert_same_bits, values


def test_up_to_one_chunk_is_a_sequential_loop():
    source, index = values((1, 700, 3), torch.float32), torch.randint(0, 5, (700,))
    expected = np.zeros((5, 3), np.float32)
    np.add.at(expected, index.numpy(), source[0].numpy())
    assert int(index.bincount().max()) <= reference.CHUNK_ROWS
    assert_same_bits(reference.segment_accumulate(None, index, source, 5)[0], torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [256, 257, 600])
def test_chunks_start_from_zero_and_are_added_in_order(rows):
    source = values((1, rows, 1), torch.float32)
    chunks = [np.float32(0)] * -(-rows // 256)
    for i, value in enumerate(source.flatten().numpy()):
        chunks[i // 256] = np.float32(chunks[i // 256] + value)
    total = chunks[0]
    for chunk in chunks[1:]:
        total = np.float32(total + chunk)
    got = reference.segment_accumulate(None, torch.zeros(rows, dtype=torch.int64), source, 1)
    assert_same_bits(got.flatten(), torch.tensor([total]))
    if rows == 600:
        assert got.item() != torch.from_numpy(np.cumsum(source.flatten().numpy()))[-1].item(), (
            "chunking shows in the bits"
        )


def test_a_third_level_exists():
    rows = 65536 + 256
    source = torch.ones(1, rows, 1, dtype=torch.float64)
    got = reference.segment_accumulate(None, torch.zeros(rows, dtype=torch.int64), source, 1)
    assert got.item() == rows


def test_an_empty_segment_keeps_dest_bit_for_bit():
    payload = torch.tensor([0x7FC12345, -0x80000000], dtype=torch.int32).view(torch.float32).reshape(1, 1, 2)
    none = torch.tensor([SKIPPED])
    got = reference.segment_accumulate(payload, none, torch.ones(1, 1, 2), 1)
    assert_same_bits(got, payload)


def test_dest_is_added_before_the_one_rounding():
    dest = torch.tensor([[[256.0]]], dtype=torch.bfloat16)
    source = torch.full((1, 3, 1), 0.5, dtype=torch.bfloat16)
    got = reference.segment_accumulate(dest, torch.zeros(3, dtype=torch.int64), source, 1)
    assert got.item() == 258.0  # 257.5 rounds to 258; adding one by one would stay at 256


def test_minus_zero_and_nan():
    minus_zero = torch.full((1, 4, 1), -0.0)
    at_zero = torch.zeros(4, dtype=torch.int64)
    assert_same_bits(reference.segment_accumulate(None, at_zero, minus_zero, 1), torch.zeros(1, 1, 1))
    strange = torch.tensor([-1], dtype=torch.int32).view(torch.float32).reshape(1, 1, 1)
    got = reference.segment_accumulate(None, at_zero[:1], strange, 1)
    assert_same_bits(got, torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32).reshape(1, 1, 1))


@pytest.mark.parametrize(("reduce", "expected"), [("amax", 0.0), ("amin", -0.0)])
@pytest.mark.parametrize("order", [(0.0, -0.0), (-0.0, 0.0)])
def test_extremes_order_the_zeros(reduce, expected, order):
    source = torch.tensor(order).reshape(1, 2, 1)
    got = reference.segment_accumulate(None, torch.zeros(2, dtype=torch.int64), source, 1, reduce)
    assert_same_bits(got.flatten(), torch.tensor([expected]))


@pytest.mark.parametrize("reduce", reference.REDUCTIONS)
def test_close_to_exact(reduce):
    source, index = torch.rand(2, 3000, 2, dtype=torch.float64) + 0.5, torch.randint(0, 4, (3000,))
    got = reference.segment_accumulate(None, index, source, 4, reduce)
    start = torch.zeros(2, 4, 2, dtype=torch.float64)
    wide = index.view(1, -1, 1).expand_as(source)
    expected = start.scatter_reduce(1, wide, source, reduce, include_self=False)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)  # both are float64: other orders, same numbers


def test_refusals():
    with pytest.raises(TypeError, match="complex numbers have no order"):
        reference.check_supported(torch.complex64, "amax")
    with pytest.raises(ValueError, match="reduce='mean' is not one of sum, prod, amax, amin"):
        reference.check_supported(torch.float32, "mean")
    with pytest.raises(TypeError, match="uint16 is not supported"):
        reference.check_supported(torch.uint16, "sum")
