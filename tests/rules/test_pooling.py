"""Average pooling backward: values against eager (and against the forward, where eager's backward could be wrong)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from detpass.rule import Treatment
from detpass.rules.pooling import AvgPoolBackward
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
RULE = AvgPoolBackward()

GEOMETRIES = [
    # kernel, stride, padding
    (3, 2, 0),
    (3, 2, 1),
    (2, 2, 0),
    (3, 1, 1),
    (2, 3, 0),
    (5, 4, 2),
    (7, 7, 3),
    (6, 17, 2),
    (4, 1, 2),
]
TARGETS = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}
POOLS = {2: F.avg_pool2d, 3: F.avg_pool3d}


def call(x, geometry, ceil, include, divisor, axes=2):
    """The backward operator's arguments for one pooling of ``x`` and the gradient that autograd gives."""
    kernel, stride, padding = ([value] * axes for value in geometry)
    x = x.detach().requires_grad_()
    out = POOLS[axes](x, kernel, stride, padding, ceil, include, divisor)
    grad = torch.randn_like(out)
    out.backward(grad)
    return (grad, x.detach(), kernel, stride, padding, ceil, include, divisor), x.grad


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_in_two_dimensions(geometry, include, ceil):
    torch.manual_seed(0)
    args, expected = call(torch.randn(2, 3, 18, 23, dtype=torch.float64), geometry, ceil, include, None)
    # The sums run over the same terms in another grouping (rows, then columns): a few units in the last place.
    torch.testing.assert_close(replaced(RULE, TARGETS[2], *args), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("ceil", "include"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("geometry", GEOMETRIES[:6], ids=str)
def test_values_in_three_dimensions(geometry, include, ceil):
    torch.manual_seed(0)
    args, expected = call(torch.randn(2, 2, 7, 9, 8, dtype=torch.float64), geometry, ceil, include, None, axes=3)
    torch.testing.assert_close(replaced(RULE, TARGETS[3], *args), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("axes", [2, 3])
def test_divisor_override(axes):
    torch.manual_seed(0)
    x = torch.randn(2, 2, *[8] * axes, dtype=torch.float64)
    args, expected = call(x, (3, 2, 1), True, True, 5, axes)
    torch.testing.assert_close(replaced(RULE, TARGETS[axes], *args), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_the_form_is_the_adjoint_of_the_forward(geometry, include):
    """<pool(x), g> == <x, backward(g)> for all x: eager's backward plays no part."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 13, 18, dtype=torch.float64)
    args, _ = call(x, geometry, True, include, None)
    forward = POOLS[2](x, *args[2:7])
    left, right = (forward * args[0]).sum(), (x * replaced(RULE, TARGETS[2], *args)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_a_window_that_hangs_over_the_end_divides_by_what_it_covers():
    # 5 cells, kernel 3, stride 2, ceil_mode: the windows are 0-2, 2-4; with 6 cells the last is 4-5 and averages two.
    grad = torch.tensor([[[[1.0, 1.0, 1.0]]]])
    x = torch.zeros(1, 1, 1, 6)
    result = replaced(RULE, TARGETS[2], grad, x, [1, 3], [1, 2], [0, 0], True, True, None)
    third = 1 / torch.tensor(3.0)
    expected = torch.stack([third, third, third + third, third, third + 0.5, torch.tensor(0.5)])
    assert torch.equal(result.flatten(), expected)


@pytest.mark.parametrize("shape", [(3, 8, 8), (0, 3, 8, 8)])
def test_without_batch_and_empty(shape):
    args, expected = call(torch.randn(shape), (3, 2, 1), False, True, None)
    torch.testing.assert_close(replaced(RULE, TARGETS[2], *args), expected)


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    args, _ = call(torch.randn(2, 2, 9, 9).bfloat16(), (3, 1, 1), False, True, None)
    wide = (args[0].float(), args[1].float(), *args[2:])
    assert torch.equal(bits(replaced(RULE, TARGETS[2], *args)), bits(replaced(RULE, TARGETS[2], *wide).bfloat16()))


def test_infinity_stays_under_its_window():
    args, _ = call(torch.randn(1, 1, 8, 8), (2, 2, 0), False, True, None)
    args[0][0, 0, 1, 1] = float("inf")
    assert torch.equal(replaced(RULE, TARGETS[2], *args).isinf().nonzero()[:, 2:].unique(), torch.tensor([2, 3]))


def test_the_treatment_is_a_closed_form():
    args, _ = call(torch.randn(1, 1, 8, 8), (3, 2, 1), False, True, None)
    assert verdict_of(RULE, TARGETS[2], *args).treatment is Treatment.CLOSED_FORM
