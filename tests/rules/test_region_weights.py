"""The weights of bins along one axis against loops over the sampling points and over the cells."""

from __future__ import annotations

import math

import pytest
import torch

from detpass.rules import region_weights
from detpass.rules.region_weights import bin_starts, covering, extents, places, point_counts, sampled
from tests.rules.reciprocal import by_reciprocals

CORNERS = [
    *((-3.0, 2.5), (0.0, 0.3), (1.25, 8.75), (-20.0, 40.0), (4.0, 4.0), (6.0, 5.0), (7.9, 12.0), (30.0, 50.0)),
    *((-1.0, 3.0), (-2.0, -1.0), (8.0, 11.0), (0.5, 2.0 + 1e-7), (-400.0, 700.0)),
]


def looped(start, end, bins, cells, dtype):
    """``[bins, cells]`` by the formulas of the operator, point by point, in ``dtype``."""

    def number(x):
        return torch.tensor(x, dtype=dtype)

    start, end = number(start), number(end)
    step = (end - start) / bins
    count = max(0, math.ceil(step))
    total = torch.zeros(bins, cells, dtype=torch.float64)
    for i in range(bins):
        for k in range(count):
            place = float(start + i * step + number(k + 0.5) * step / number(count))
            if not -1 <= place <= cells:
                continue
            place = max(place, 0.0)
            low = min(int(place), cells - 1)
            after = place - low if low < cells - 1 else 0.0
            total[i, low] += 1 - after
            total[i, min(low + 1, cells - 1)] += after
    return total


# Sums of up to some tens of weights; in half precision only the places are rounded, and those the loop rounds as well.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("bins", "cells"), [(1, 9), (3, 9), (7, 10), (2, 1), (14, 31)])
def test_adaptive_sampling(dtype, bins, cells):
    low, high = torch.tensor(CORNERS, dtype=torch.float64).to(dtype).unbind(1)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    axis = extents(low.to(work), high.to(work), bins, 1.0, 0.0, None, dtype)
    got = sampled(axis, bins, cells)
    for region, (start, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        want = looped(start, end, bins, cells, dtype)
        torch.testing.assert_close(got[region].double(), want, rtol=1e-6, atol=TOLERANCES[dtype])


def test_fewer_candidates_would_miss_points(monkeypatch):
    """Two points a little more than half a cell apart: four of them are in reach of a cell."""
    axis = extents(torch.tensor([0.3]).double(), torch.tensor([3.4]).double(), 3, 1.0, 0.0, None, torch.float64)
    want = looped(0.3, 3.4, 3, 6, torch.float64)
    torch.testing.assert_close(sampled(axis, 3, 6)[0], want)
    monkeypatch.setattr(region_weights, "CANDIDATES", 1)
    assert not torch.allclose(sampled(axis, 3, 6)[0], want)


def test_places_of_half_precision_on_a_long_axis():
    """2000 cells, where neighbouring values of half precision are one cell apart."""
    generator = torch.Generator().manual_seed(0)
    corners = (torch.rand(30, 2, generator=generator) * 2400 - 200).sort(1).values.half()
    for bins in (1, 5, 14):
        low, high = corners.float().unbind(1)
        got = sampled(extents(low, high, bins, 1.0, 0.0, None, torch.float16), bins, 2000)
        for region, (start, end) in enumerate(corners.tolist()):
            want = looped(start, end, bins, 2000, torch.float16)
            torch.testing.assert_close(got[region].double(), want, rtol=1e-6, atol=1e-3)


def test_regions_without_points_or_that_are_not_numbers_weigh_nothing():
    inf, nan = torch.inf, torch.nan
    corners = torch.tensor([[5.0, 2.0], [3.0, 3.0], [nan, 4.0], [1.0, nan], [-inf, inf], [0.0, inf], [inf, inf]])
    axis = extents(*corners.unbind(1), 2, 1.0, 0.0, None, torch.float32)
    got = sampled(axis, 2, 8)
    assert torch.equal(got, torch.zeros(7, 2, 8))
    assert point_counts(axis)[:2].tolist() == [0.0, 0.0]


def test_a_least_extent_and_the_scale_of_the_operands_dtype():
    axis = extents(torch.tensor([4.0]), torch.tensor([3.0]), 2, 0.1, 0.0, 1.0, torch.float32)
    assert axis.step.tolist() == [0.5]
    assert bin_starts(axis, 2).tolist() == [pytest.approx([0.4, 0.9])]
    half = extents(torch.tensor([1024.0]), torch.tensor([2048.0]), 1, 0.1, 0.0, None, torch.float16)
    assert half.start.item() == (torch.tensor(1024.0).half() * torch.tensor(0.1).half()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_covered_cells(dtype):
    bins, cells, scale = 3, 9, 0.5
    low, high = torch.tensor([*CORNERS, (1.0, 5.0), (-1.0, -5.0), (3.0, 3.0)], dtype=torch.float64).to(dtype).unbind(1)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    got = covering(low.to(work), high.to(work), bins, scale, cells, dtype)
    for region, corners in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        # Halves go away from zero.
        start, end = (math.copysign(math.floor(abs(corner * scale) + 0.5), corner) for corner in corners)
        step = torch.tensor(max(end - start, 1), dtype=dtype) / bins
        for i in range(bins):
            first = math.floor(i * step) + start
            last = math.ceil((i + 1) * step) + start
            covered = [first <= cell < last for cell in range(cells)]
            assert got.mask[region, i].tolist() == covered
            assert got.count[region, i] == sum(covered)


def test_corners_that_are_not_numbers_are_zero_and_huge_ones_stay_in_range():
    corners = torch.tensor([[torch.nan, torch.nan], [-1e30, 1e30], [-torch.inf, torch.inf]])
    got = covering(*corners.unbind(1), 1, 1.0, 4, torch.float32)
    assert got.count.tolist() == [[1], [4], [4]]


def test_places_are_those_of_true_division():
    """A point at exactly -1 or at the number of cells counts, one a last bit beyond it does not."""
    count, step = torch.arange(1.0, 60.0).reshape(-1, 1), torch.arange(1.0, 80.0)
    start, point = torch.full((), -1.5), torch.full((), 2.0)

    def along(start, step, point, count):
        return places(start, step, point, count, torch.float32)

    want = start + (point + 0.5) * step / count
    assert torch.equal(by_reciprocals(along, start, step, point, count), want)
