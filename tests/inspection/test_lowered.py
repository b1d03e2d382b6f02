"""Integer scans are exact in any order, whatever floats a fused kernel holds beside them."""

from __future__ import annotations

import pytest
import torch

import detpass

pytest.importorskip("triton")

LONG = 5_000_000
"""Inductor splits the scan of a row this long between thread blocks."""


def test_a_long_integer_scan_beside_floats_is_clean_on_cuda() -> None:
    def scale(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return x * steps.cumsum(0)

    x, steps = torch.empty(LONG), torch.ones(LONG, dtype=torch.int64)
    report = detpass.inspect(scale, x, steps, target="cuda")
    assert report.lowered_note is None
    assert report.problems() == []


def test_the_scans_of_a_product_and_its_gradient_are_clean_under_detpass() -> None:
    """The gradient of ``cumprod`` counts zeros with an integer scan and sums floats with another one."""
    x = torch.ones(LONG, requires_grad=True)
    report = detpass.inspect(lambda x: x.cumprod(0), x, target="cuda")
    assert {record.dtype: record.nondeterministic for record in report} == {"float32": True, "int64": False}
    assert report.lowered_note is None
    assert report.problems("remaining") == []
