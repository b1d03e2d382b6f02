"""grid_sample backward: both gradients, every mode, padding and alignment, against eager."""

from __future__ import annotations

import itertools

import pytest
import torch

from detpass import _torch_private
from detpass.rule import Safe, Treatment
from detpass.rules.grid_sample import GridSampleBackward
from tests.rules.direct import bits, replaced, verdict_of
from tests.rules.reciprocal import by_reciprocals

aten = torch.ops.aten
RULE = GridSampleBackward()
FLAT, VOLUME = aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default
MODES = list(itertools.product((0, 1, 2), (0, 1, 2), (False, True)))


def call(cells, points, mode, padding, aligned, dtype=torch.float64, spread=3.0):
    torch.manual_seed(0)
    source = torch.randn(2, 3, *cells, dtype=dtype)
    # A third of the points lie outside, so that paddings matter.
    grid = (torch.rand(2, *points, len(cells), dtype=dtype) - 0.5) * spread
    return torch.randn(2, 3, *points, dtype=dtype), source, grid, mode, padding, aligned, [True, True]


def check(target, args):
    got, want = replaced(RULE, target, *args, device="cuda"), target(*args)
    for mine, theirs in zip(got, want, strict=True):
        # A cell adds some tens of products; slopes multiply by half the size.
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("mode", "padding", "aligned"), MODES)
@pytest.mark.parametrize("cells", [(5, 7), (1, 4)], ids=str)
def test_two_dimensions(cells, mode, padding, aligned):
    check(FLAT, call(cells, (6, 5), mode, padding, aligned))


@pytest.mark.parametrize(("mode", "padding", "aligned"), [case for case in MODES if case[0] < 2])
def test_three_dimensions(mode, padding, aligned):
    check(VOLUME, call((4, 5, 6), (3, 4, 5), mode, padding, aligned))


def test_only_one_gradient_wanted():
    args = call((5, 7), (6, 5), 0, 0, False)
    grad_input, nothing = replaced(RULE, FLAT, *args[:-1], [True, False], device="cuda")
    assert nothing is None
    torch.testing.assert_close(grad_input, FLAT(*args)[0])
    nothing, grad_grid = replaced(RULE, FLAT, *args[:-1], [False, True], device="cuda")
    assert nothing is None
    torch.testing.assert_close(grad_grid, FLAT(*args)[1])


def test_points_that_are_not_finite_add_nothing_with_zeros_padding():
    args = list(call((5, 7), (6, 5), 0, 0, False))
    args[2] = args[2].clone()
    args[2][0, 0, 0, 0], args[2][0, 1, 0, 1], args[2][1, 0, 0, 0] = float("nan"), float("inf"), -1e30
    kept = torch.ones(2, 1, 6, 5, dtype=torch.bool)
    kept[0, 0, 0, 0] = kept[0, 0, 1, 0] = kept[1, 0, 0, 0] = False
    got = replaced(RULE, FLAT, *args, device="cuda")[0]
    args[2] = torch.where(kept.movedim(1, -1), args[2], 5.0)
    assert torch.equal(got, replaced(RULE, FLAT, *args, device="cuda")[0])


def test_the_order_of_additions_is_that_of_the_points():
    """One cell, many points: the sum is a loop's over the points, row-major."""
    grad, source, grid, *rest = call((1, 1), (9, 9), 1, 1, False, torch.float32)
    total = torch.zeros(2, 3)
    for y, x in itertools.product(range(9), range(9)):
        total = total + grad[:, :, y, x]
    got = replaced(RULE, FLAT, grad, source, grid, *rest, device="cuda")[0]
    assert torch.equal(bits(got[:, :, 0, 0]), bits(total))


def test_half_precision_sums_in_float32():
    args = call((5, 7), (6, 5), 0, 1, False, torch.float32)
    half = [value.bfloat16() for value in args[:3]]
    wide = [value.float() for value in half]
    for mine, theirs in zip(
        replaced(RULE, FLAT, *half, *args[3:], device="cuda"),
        replaced(RULE, FLAT, *wide, *args[3:], device="cuda"),
        strict=True,
    ):
        assert torch.equal(bits(mine), bits(theirs.bfloat16()))


def test_treatment_depends_on_the_device():
    args = call((5, 7), (6, 5), 0, 0, False)
    assert verdict_of(RULE, FLAT, *args, device="cuda").treatment is Treatment.SEGMENT
    assert isinstance(verdict_of(RULE, FLAT, *args, device="cpu"), Safe)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("cells", [41, 42, 48, 56, 61, 84, 85])
def test_points_on_the_border_are_reflected_onto_it_whatever_division_rounds_to(cells, mode, aligned):
    """41 * (1 / 41) is less than 1 in float32: a turn less would name the cell at the other end."""
    grid = torch.tensor([-1.0, 0.25, 1.0, 3.0, -3.0, 5.0]).reshape(1, 1, -1, 1).repeat(1, 1, 1, 2)
    source, grad = torch.zeros(1, 1, cells, cells), torch.ones(1, 1, 1, 6)

    def backward(grad, source, grid):
        parameters = {"mode": mode, "padding": 2, "aligned": aligned, "wanted": (True, False)}
        return RULE.replacement(grad, source, grid, **parameters)[0]

    want, _ = FLAT(grad, source, grid, mode, 2, aligned, [True, False])
    # Weights of points between cells.
    torch.testing.assert_close(by_reciprocals(backward, grad, source, grid), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_nearest_cell_of_a_point_midway_is_the_one_that_the_compiled_forward_reads(aligned):
    for size in range(2, 70):
        midway = (
            torch.arange(1, 2 * size - 1, 2) / (size - 1) - 1 if aligned else torch.arange(2, 2 * size, 2) / size - 1
        )
        grid = torch.stack([midway, torch.zeros_like(midway)], -1)[None, None]
        numbers = torch.arange(size, dtype=torch.float32).reshape(1, 1, 1, size)
        read = _torch_private.decomposition_table()[aten.grid_sampler_2d.default](numbers, grid, 1, 1, aligned)
        args = (torch.ones_like(read), numbers, grid, 1, 1, aligned, [True, False])
        grad, _ = replaced(RULE, FLAT, *args, device="cuda")
        assert torch.equal(grad.flatten().long(), read.flatten().long().bincount(minlength=size)), size
