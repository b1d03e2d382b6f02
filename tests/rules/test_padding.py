"""Replication padding backward: all signs of padding in 1, 2 and 3 dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detpass.rules.padding import ReplicationPadBackward
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced

aten = torch.ops.aten
RULE = ReplicationPadBackward()
BACKWARDS = {axes: getattr(aten, f"replication_pad{axes}d_backward").default for axes in (1, 2, 3)}
FORWARDS = {axes: getattr(aten, f"replication_pad{axes}d").default for axes in (1, 2, 3)}
PAIRS = [(0, 0), (2, 3), (0, 4), (-1, 2), (3, -2), (1, 1), (3, -4), (-1, -1)]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    # eager refuses an empty result
    ("pair", "cells"),
    [(pair, cells) for pair in PAIRS for cells in (1, 2, 5) if cells + sum(pair) >= 1],
    ids=str,
)
def test_values(axes, pair, cells):
    torch.manual_seed(0)
    padding = [*pair, *[1, 2] * (axes - 1)]
    x = torch.randn(2, 3, *[4] * (axes - 1), cells, dtype=torch.float64)
    grad = torch.randn_like(FORWARDS[axes](x, padding))
    expected = BACKWARDS[axes](grad, x, padding)
    # Corner copies are grouped by axis: a few units in the last place.
    torch.testing.assert_close(replaced(RULE, BACKWARDS[axes], grad, x, padding), expected, rtol=1e-14, atol=1e-14)


def test_without_batch_and_empty():
    for shape in ((3, 5), (0, 3, 5)):
        x = torch.randn(shape)
        grad = torch.randn(*shape[:-1], 10)
        torch.testing.assert_close(replaced(RULE, BACKWARDS[1], grad, x, [2, 3]), BACKWARDS[1](grad, x, [2, 3]))


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 3, 25).bfloat16()
    wide = replaced(RULE, BACKWARDS[1], grad.float(), x.float(), [9, 11])
    assert torch.equal(bits(replaced(RULE, BACKWARDS[1], grad, x, [9, 11])), bits(wide.bfloat16()))


def test_nan_in_a_copy_reaches_its_cell_alone():
    x, grad = torch.zeros(1, 1, 4), torch.ones(1, 1, 8)
    grad[0, 0, 0] = float("nan")
    result = replaced(RULE, BACKWARDS[1], grad, x, [2, 2])
    assert result[0, 0].isnan().tolist() == [True, False, False, False]


@pytest.mark.slow
def test_compiled_with_static_and_symbolic_sizes():
    def pads(x, line):
        flat = [F.pad(x, (3, 3, 2, 1), mode=mode) for mode in ("replicate", "reflect", "circular")]
        return torch.cat([t.flatten() for t in (*flat, F.pad(line, (2, 3), mode="replicate"))])

    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 6, 5), (2, 3, 9))]
    for dynamic in (False, True):
        records = compile_and_compare(pads, *inputs, rtol=1e-5, atol=1e-5, dynamic=dynamic)
        assert records == {
            "aten.replication_pad2d_backward.default": ("closed_form", "replication_pad_backward"),
            "aten.replication_pad1d_backward.default": ("closed_form", "replication_pad_backward"),
        }
