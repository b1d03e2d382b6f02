"""The two products against one sum over everything, in one block of channels and in several."""

from __future__ import annotations

import pytest
import torch

from detpass.rules.region_products import _blocks, spread

BATCH, CHANNELS, HEIGHT, WIDTH, BINS = 3, 5, 6, 7, (2, 4)


def operands(regions=11):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, columns = normal(regions, BINS[0], HEIGHT), normal(regions, BINS[1], WIDTH)
    sample = torch.randint(0, BATCH, (regions,), generator=generator)
    return normal(regions, CHANNELS, *BINS), rows, columns, sample


def expected(grad, rows, columns, sample, sensitive):
    of = "rcij,rih,rjw->rcijhw" if sensitive else "rcij,rih,rjw->rchw"
    each = torch.einsum(of, grad, rows, columns).reshape(len(sample), -1, HEIGHT, WIDTH)
    channels = CHANNELS * BINS[0] * BINS[1] if sensitive else CHANNELS
    return torch.zeros(BATCH, channels, HEIGHT, WIDTH, dtype=torch.float64).index_add(0, sample, each)


@pytest.mark.parametrize("sensitive", [False, True])
@pytest.mark.parametrize("most", [1, 200, 1 << 27])
@pytest.mark.parametrize("regions", [0, 1, 11])
def test_the_products_are_the_sum(sensitive, most, regions):
    grad, rows, columns, sample = operands(regions)
    got = spread(grad, rows, columns, sample, BATCH, sensitive, most)
    want = expected(grad, rows, columns, sample, sensitive) if regions else torch.zeros_like(got)
    assert got.shape[1] == (CHANNELS * BINS[0] * BINS[1] if sensitive else CHANNELS)
    # Some tens of products of normal numbers.
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_blocks_hold_no_more_than_they_should():
    shape = (100, 64, 7, 7)
    assert _blocks(shape, 50, False, 100 * 64 * 7 * 50) == 1
    assert _blocks(shape, 50, False, 100 * 64 * 7 * 50 - 1) == 2
    assert _blocks(shape, 50, True, 100 * 64 * 7 * 7 * 50 // 4) == 4
    assert _blocks(shape, 50, False, 1) == 64
