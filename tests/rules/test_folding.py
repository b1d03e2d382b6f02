"""fold and the backward of unfold: every geometry against eager, both layouts, the compiled whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detpass.rules.folding import Col2Im, UnfoldBackward
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


# The backward of Tensor.unfold: along one dimension.

UNFOLDS = [
    # size of the tensor, dimension, window, step
    ((3, 20, 4), 1, 5, 2),
    ((3, 20, 4), 1, 5, 5),
    ((3, 20, 4), 1, 3, 7),
    ((20,), 0, 20, 1),
    ((2, 300), 1, 64, 16),
    ((2, 300), -1, 100, 40),
    ((90, 2), 0, 50, 1),
    ((), 0, 1, 1),
]


def unfolded(shape, dim, window, step, dtype=torch.float64):
    grad = torch.randn_like(torch.zeros(shape, dtype=dtype).unfold(dim, window, step))
    return grad, list(shape), dim, window, step


@pytest.mark.parametrize("geometry", UNFOLDS, ids=str)
def test_values_of_unfold_backward(geometry):
    torch.manual_seed(0)
    args = unfolded(*geometry)
    got = replaced(UnfoldBackward(), aten.unfold_backward.default, *args)
    torch.testing.assert_close(got, aten.unfold_backward(*args), rtol=1e-14, atol=1e-13)  # up to 50 terms


def test_windows_that_hardly_overlap_are_slices_and_others_segments():
    for geometry, treatment in ((UNFOLDS[4], "closed_form"), (UNFOLDS[6], "segment")):
        verdict = verdict_of(UnfoldBackward(), aten.unfold_backward.default, *unfolded(*geometry))
        assert verdict.treatment == treatment
    verdict = verdict_of(UnfoldBackward(), aten.unfold_backward.default, *unfolded(*UNFOLDS[1]))
    assert verdict.reason == "windows are disjoint"


def test_a_gradient_of_the_whole_batch_is_repeated():
    """As ``istft`` asks of it for its window."""
    grad = torch.randn(1, 51, 64, dtype=torch.float64)
    got = replaced(UnfoldBackward(), aten.unfold_backward.default, grad, [2, 864], 1, 64, 16)
    want = aten.unfold_backward(grad, [1, 864], 1, 64, 16).expand(2, -1)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_half_precision_of_unfold_backward_is_rounded_once():
    for geometry in (UNFOLDS[0], UNFOLDS[6]):
        args = unfolded(*geometry, torch.float32)
        half = (args[0].bfloat16(), *args[1:])
        wide = (half[0].float(), *args[1:])
        got, exact = (replaced(UnfoldBackward(), aten.unfold_backward.default, *given) for given in (half, wide))
        assert torch.equal(bits(got), bits(exact.bfloat16()))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("window", "step"), [(5, 2), (64, 1), pytest.param(40, 24, marks=pytest.mark.slow)])
def test_compiled_unfold(window, step, dynamic):
    def f(x):
        return x.unfold(1, window, step).sin() * 2

    torch.manual_seed(0)
    records = compile_and_compare(f, torch.randn(3, 200, 4, requires_grad=True), rtol=1e-5, atol=1e-5, dynamic=dynamic)
    assert records == {
        "aten.unfold_backward.default": ("segment" if window == 64 else "closed_form", "unfold_backward")
    }


def test_compiled_istft():
    window = torch.hann_window(64)

    def f(x):
        return torch.istft(torch.stft(x, 64, 16, window=window, return_complex=True) * 0.5, 64, 16, window=window)

    torch.manual_seed(0)
    records = compile_and_compare(f, torch.randn(2, 800, requires_grad=True), rtol=1e-4, atol=1e-5)
    assert records["aten.unfold_backward.default"] == ("closed_form", "unfold_backward")
