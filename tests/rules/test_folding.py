"""fold and the backward of unfold: every geometry against eager, both layouts, the compiled whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detpass.rules.folding import Col2Im
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
RULE = Col2Im()

GEOMETRIES = [
    # kernel, dilation, padding, stride
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 2), (1, 1), (0, 0), (2, 2)),
    ((3, 2), (2, 1), (1, 0), (2, 3)),
    ((3, 3), (2, 1), (1, 0), (3, 2)),
    ((4, 4), (1, 1), (0, 0), (4, 4)),
    ((5, 5), (1, 1), (0, 0), (5, 5)),
    ((7, 5), (1, 2), (2, 1), (5, 4)),
    ((1, 1), (1, 1), (1, 1), (1, 1)),
    ((2, 2), (1, 1), (0, 0), (5, 5)),
    ((2, 3), (7, 2), (1, 2), (1, 2)),
]


def call(kernel, dilation, padding, stride, dtype=torch.float64):
    columns = torch.randn_like(F.unfold(torch.zeros(2, 3, 21, 20, dtype=dtype), kernel, dilation, padding, stride))
    return columns, [21, 20], list(kernel), list(dilation), list(padding), list(stride)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values(geometry):
    torch.manual_seed(0)
    args = call(*geometry)
    # A cell adds at most 35 entries, block by block here and element by element in eager.
    torch.testing.assert_close(replaced(RULE, aten.col2im.default, *args), aten.col2im(*args), rtol=1e-14, atol=1e-14)


def test_disjoint_blocks_are_a_permutation():
    args = call((4, 4), (1, 1), (0, 0), (4, 4), torch.float32)
    assert verdict_of(RULE, aten.col2im.default, *args).reason == "blocks are disjoint"
    assert torch.equal(replaced(RULE, aten.col2im.default, *args), aten.col2im(*args))


def test_half_precision_is_rounded_once():
    args = call(*GEOMETRIES[0], dtype=torch.float32)
    half = (args[0].bfloat16(), *args[1:])
    wide = (half[0].float(), *args[1:])
    got = replaced(RULE, aten.col2im.default, *half)
    assert torch.equal(bits(got), bits(replaced(RULE, aten.col2im.default, *wide).bfloat16()))


def test_without_batch():
    args = call(*GEOMETRIES[0])
    single = (args[0][0], *args[1:])
    got = replaced(RULE, aten.col2im.default, *single)
    torch.testing.assert_close(got, aten.col2im(*single), rtol=1e-14, atol=1e-14)


@pytest.mark.slow
def test_compiled_fold_and_unfold():
    def both(x, columns):
        return torch.cat([F.unfold(x, 3, padding=1).flatten(), F.fold(columns, (8, 9), 3, padding=1).flatten()])

    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 8, 9, requires_grad=True), torch.randn(2, 27, 72, requires_grad=True)]
    for dynamic in (False, True):
        records = compile_and_compare(both, *inputs, rtol=1e-5, atol=1e-5, dynamic=dynamic)
        # Two nodes: fold's forward and unfold's backward.
        assert records == {"aten.col2im.default": ("closed_form", "col2im")}
