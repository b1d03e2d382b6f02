"""Differences: which entry, how many elements, how far apart."""

from __future__ import annotations

import math

import pytest
import torch

from detpass.reproducibility import all_differences, first_difference, ulp_distance

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_equal_bits_have_no_difference() -> None:
    tensor = torch.tensor([1.0, -0.0, math.nan, math.inf])
    assert first_difference({"a": tensor}, {"a": tensor.clone()}) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 2.0, 1e-3], dtype=dtype)
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    assert ulp_distance(values, above).tolist() == [1] * 5
    assert ulp_distance(above, values).tolist() == [1] * 5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_distance_across_zero_counts_both_sides(dtype: torch.dtype) -> None:
    tiny = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert ulp_distance(tiny, -tiny).item() == 2
    assert ulp_distance(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)).item() == 0


def test_a_distance_that_does_not_fit_saturates() -> None:
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    limit = torch.iinfo(torch.int64).max
    assert ulp_distance(largest, -largest).item() == limit
    assert ulp_distance(-largest, largest).item() == limit
    assert ulp_distance(largest, largest).item() == 0


def test_the_first_element_and_the_count_are_named() -> None:
    left = torch.zeros(3, 4)
    right = left.clone()
    right[1, 2] = 1.0
    right[2, 0] = -0.0
    found = first_difference({"grad": left}, {"grad": right})
    assert found is not None
    assert (found.path, found.differing, found.elements, found.first_index) == ("grad", 2, 12, (1, 2))
    assert (found.left, found.right) == (0.0, 1.0)
    assert found.max_ulp == 0x3F800000
    assert "grad" in str(found)
    assert "2 of 12" in str(found)


def test_the_sign_of_a_zero_is_a_difference_of_no_ulp() -> None:
    found = first_difference(torch.tensor(0.0), torch.tensor(-0.0))
    assert found is not None
    assert (found.max_ulp, found.first_index) == (0, ())


def test_nan_against_a_number_has_no_distance() -> None:
    found = first_difference(torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0]))
    assert found is not None
    assert found.max_ulp is None
    assert math.isnan(found.right)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float8_e5m2], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    found = first_difference(torch.zeros(3).to(dtype), torch.tensor([0.0, 0.0, 1.0]).to(dtype))
    assert found is not None
    assert found.first_index == (2,)
    assert (found.max_ulp is not None) == (dtype in (torch.complex64, torch.float8_e5m2))


def test_dtypes_shapes_values_and_missing_entries() -> None:
    left = {"same": 1, "shape": torch.ones(2), "dtype": torch.ones(2), "value": 1.0, "gone": 0}
    right = {"same": 1, "shape": torch.ones(3), "dtype": torch.ones(2).double(), "value": 2.0, "new": 0}
    details = {found.path: found.detail for found in all_differences(left, right)}
    assert details.keys() == {"shape", "dtype", "value", "gone", "new"}
    assert details["gone"] == "only in the left result"
    assert details["new"] == "only in the right result"
    assert details["value"] == "1.0 against 2.0"
    assert "[2] against" in details["shape"]
