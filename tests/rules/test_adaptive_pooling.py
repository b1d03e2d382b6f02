"""Adaptive and fractional pooling backward: values against eager, gathers, matrices and segment sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detpass.rule import Treatment
from detpass.rules.adaptive_pooling import (
    AdaptiveAvgPoolBackward,
    AdaptiveMaxPoolBackward,
    FractionalMaxPoolBackward,
)
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
AVG, MAX, FRACTIONAL = AdaptiveAvgPoolBackward(), AdaptiveMaxPoolBackward(), FractionalMaxPoolBackward()
AVG_OPS = {2: aten._adaptive_avg_pool2d_backward.default, 3: aten._adaptive_avg_pool3d_backward.default}
MAX_OPS = {2: aten.adaptive_max_pool2d_backward.default, 3: aten.adaptive_max_pool3d_backward.default}
MAX_POOLS = {2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}

SIZES = [
    ((8, 9), (7, 7)),
    ((8, 9), (4, 3)),
    ((5, 6), (7, 11)),
    ((64, 60), (7, 7)),
    ((9, 9), (1, 1)),
    ((3, 50), (3, 3)),
    ((2, 2), (60, 3)),
    ((8, 9, 4), (7, 7, 3)),
    ((4, 5, 6), (2, 8, 3)),
]


@pytest.mark.parametrize(("cells", "outputs"), SIZES, ids=str)
def test_average(cells, outputs):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, *cells, dtype=torch.float64), torch.randn(2, 3, *outputs, dtype=torch.float64)
    target = AVG_OPS[len(cells)]
    # The same terms grouped by axis: some units in the last place.
    torch.testing.assert_close(replaced(AVG, target, grad, x, device="cuda"), target(grad, x), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(AVG.replacement(grad, x, axes=len(cells)), target(grad, x), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("cells", "outputs"), SIZES, ids=str)
def test_maximum(cells, outputs):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *cells, dtype=torch.float64)
    out, indices = MAX_POOLS[len(cells)](x, outputs, return_indices=True)
    grad, target = torch.randn_like(out), MAX_OPS[len(cells)]
    # Both forms add a cell's windows in their own order, as eager does: equal, not close.
    assert torch.equal(replaced(MAX, target, grad, x, indices, device="cuda"), target(grad, x, indices))
    assert torch.equal(MAX.replacement(grad, indices, x, axes=len(cells)), target(grad, x, indices))


def test_many_windows_over_a_cell_are_a_segment_sum():
    x = torch.randn(1, 1, 2, 2)
    out, indices = F.adaptive_max_pool2d(x, (40, 40), return_indices=True)
    assert verdict_of(MAX, MAX_OPS[2], torch.ones_like(out), x, indices, device="cuda").treatment is Treatment.SEGMENT
    out, indices = F.adaptive_max_pool2d(x, (3, 3), return_indices=True)
    assert (
        verdict_of(MAX, MAX_OPS[2], torch.ones_like(out), x, indices, device="cuda").treatment is Treatment.CLOSED_FORM
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 8, 9).to(dtype), torch.randn(2, 3, 7, 7).to(dtype)
    wide = replaced(AVG, AVG_OPS[2], grad.float(), x.float(), device="cuda")
    assert torch.equal(bits(replaced(AVG, AVG_OPS[2], grad, x, device="cuda")), bits(wide.to(dtype)))


@pytest.mark.parametrize("shape", [(3, 8, 9), (0, 3, 8, 9)])
def test_without_batch_and_empty(shape):
    x = torch.randn(shape)
    grad = torch.randn(*shape[:-2], 4, 4)
    torch.testing.assert_close(replaced(AVG, AVG_OPS[2], grad, x, device="cuda"), AVG_OPS[2](grad, x))
    _, indices = F.adaptive_max_pool2d(x, (4, 4), return_indices=True)
    assert torch.equal(replaced(MAX, MAX_OPS[2], grad, x, indices, device="cuda"), MAX_OPS[2](grad, x, indices))


@pytest.mark.parametrize("axes", [2, 3])
def test_fractional(axes):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *[9] * axes, dtype=torch.float64)
    pool = (F.fractional_max_pool2d, F.fractional_max_pool3d)[axes - 2]
    out, indices = pool(x, 3, output_size=[5] * axes, return_indices=True)
    target = (aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward)[axes - 2].default
    args = (torch.randn_like(out), x, [3] * axes, [5] * axes, indices)
    assert verdict_of(FRACTIONAL, target, *args, device="cuda").treatment is Treatment.SEGMENT
    assert torch.equal(replaced(FRACTIONAL, target, *args, device="cuda"), target(*args))


@pytest.mark.slow
def test_compiled():
    torch.manual_seed(0)
    records = compile_and_compare(
        lambda x: F.adaptive_avg_pool2d(x, 7) * F.adaptive_max_pool2d(x, 7),
        torch.randn(2, 3, 16, 18, requires_grad=True),
        rtol=1e-5,
        atol=1e-5,
        target="cuda",
    )
    assert records == {
        "aten._adaptive_avg_pool2d_backward.default": ("closed_form", "adaptive_avg_pool_backward"),
        "aten.adaptive_max_pool2d_backward.default": ("closed_form", "adaptive_max_pool_backward"),
    }


def test_compiled_with_symbolic_sizes():
    torch.manual_seed(0)
    records = compile_and_compare(
        lambda x: F.adaptive_avg_pool2d(x, 7),
        torch.randn(2, 3, 16, 18, requires_grad=True),
        rtol=1e-5,
        atol=1e-5,
        dynamic=True,
        target="cuda",
    )
    assert records == {"aten._adaptive_avg_pool2d_backward.default": ("closed_form", "adaptive_avg_pool_backward")}


def test_compiled_on_a_cpu_keeps_atens_kernels_with_symbolic_sizes_too():
    torch.manual_seed(0)
    records = compile_and_compare(
        lambda x: F.adaptive_avg_pool2d(x, 7) * F.adaptive_max_pool2d(x, 7),
        torch.randn(2, 3, 16, 18, requires_grad=True),
        rtol=1e-5,  # Inductor's forward divides and multiplies in another order than ATen's
        atol=1e-6,
        dynamic=True,
    )
    assert {treatment for treatment, _ in records.values()} == {"safe"}
