"""Faults of torch that our compiles are led around: the results are eager's, and other backends keep theirs."""

from __future__ import annotations

import pytest
import torch
from torch._decomp.decompositions import _grid_sampler_2d

from detpass import torch_faults
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from tests.rules.direct import bits
from tests.rules.reciprocal import by_reciprocals

DIVISORS = [(16, 1000), (100, 4099), (256, 1000), (256, 70000), (10, 1000)]


def repeated(x, table, d):
    return x + table[torch.arange(x.shape[0]) // d]


def compiled(backend, **options):
    torch._dynamo.reset()
    return torch.compile(repeated, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize(("d", "n"), DIVISORS, ids=str)
def test_the_end_of_a_loop_over_quotients_is_computed(d, n):
    torch.manual_seed(0)
    x, table = torch.randn(n), torch.randn(n // d + 1)
    assert torch.equal(bits(compiled("detpass")(x, table, d)), bits(repeated(x, table, d)))


def test_loops_with_reductions_of_several_sizes_still_compile():
    torch.manual_seed(0)
    q, k, mask = torch.randn(2, 16, 8), torch.randn(2, 16, 8), torch.randn(16, 16)

    def attention(q, k, mask):
        return (q @ k.transpose(1, 2) + mask).softmax(-1) * (torch.arange(16) // 9)

    got = torch.compile(attention, backend="detpass", fullgraph=True)(q, k, mask)
    # A softmax over 16 values.
    torch.testing.assert_close(got, attention(q, k, mask), rtol=1e-5, atol=1e-6)


def test_and_with_symbolic_lengths():
    torch.manual_seed(0)
    run = compiled("detpass", dynamic=True)
    for n in (1000, 1600, 777):
        x, table = torch.randn(n), torch.randn(n // 16 + 1)
        assert torch.equal(bits(run(x, table, 16)), bits(repeated(x, table, 16)))


def test_and_in_the_backward():
    torch.manual_seed(0)
    x, table = torch.randn(1000), torch.randn(63, requires_grad=True)

    def loss(x, table):
        spread = x.sin() * table.repeat_interleave(16)[:1000]
        return spread + (x.cos() * table[torch.arange(1000) // 16]).sin()

    want = torch.autograd.grad(loss(x, table).sum(), table)[0]
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, backend="detpass")(x, table).sum(), table)[0]
    # Sixteen float32 terms of size 1 in another order.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_other_backends_are_left_as_torch_made_them():
    """When this fails, torch mended the fault: name the last release that has it and drop the guard after it."""
    torch.manual_seed(0)
    x, table = torch.randn(1000), torch.randn(63)
    with torch._inductor.config.patch(force_disable_caches=True):
        got = compiled("inductor")(x, table, 16)
    wrong = (got != repeated(x, table, 16)).nonzero().flatten().tolist()
    assert wrong
    assert min(wrong) >= 992, "the loop's end alone"


BORDER = torch.tensor([-1.0, 1.0, 0.25]).reshape(1, 1, -1, 1).repeat(1, 1, 1, 2)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_reflected_points_on_the_border_stay_there(mode):
    x = torch.arange(42.0 * 42).reshape(1, 1, 42, 42)

    def sample(x, grid):
        return _grid_sampler_2d(x, grid, mode, 2, True)

    want = torch.nn.functional.grid_sample(x, BORDER, ("bilinear", "nearest", "bicubic")[mode], "reflection", True)
    got = by_reciprocals(sample, x, BORDER, then=torch_faults.count_reflections_exactly)
    # Weights of points between cells; the values go up to 1764.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)
    plain = by_reciprocals(sample, x, BORDER)
    assert plain.flatten()[1] < want.flatten()[1] / 2, "torch mended the fault: drop the guard after the last release"


EMPTY = {
    "linear": (1, 4, 0),
    "nearest": (1, 4, 0),
    "bilinear": (1, 4, 3, 0),
    "bicubic": (1, 0, 3, 3),
    "trilinear": (1, 4, 3, 0, 3),
}


@pytest.mark.parametrize("mode", EMPTY)
@pytest.mark.parametrize("trains", [True, False])
def test_an_image_without_cells_is_not_resampled(mode, trains):
    """Plain Inductor reads outside of it."""

    def resample(x):
        return torch.nn.functional.interpolate(x, size=[5] * (x.dim() - 2), mode=mode)

    x = torch.ones(EMPTY[mode], requires_grad=trains)
    for function in (resample, torch.compile(resample, backend="detpass")):
        with pytest.raises(RuntimeError, match=r"greater than 0|Non-empty"):
            function(x)


@pytest.mark.parametrize("shape", [(1, 4, 0), (1, 4, 0, 3), (2, 4, 3, 0, 3)])
@pytest.mark.parametrize("trains", [True, False])
def test_an_image_without_cells_is_not_pooled(shape, trains):
    """Plain Inductor's backward ends the process."""
    pool = getattr(torch.nn.functional, f"adaptive_avg_pool{len(shape) - 2}d")

    def pooled(x):
        return pool(x, 2)

    x = torch.ones(shape, requires_grad=trains)
    for function in (pooled, torch.compile(pooled, backend="detpass")):
        with pytest.raises(RuntimeError, match="non-zero size for non-batch dimensions"):
            function(x)


def test_an_empty_batch_is_resampled_and_pooled():
    def both(x):
        pooled = torch.nn.functional.adaptive_avg_pool2d(x, 2)
        return torch.nn.functional.interpolate(pooled, scale_factor=2.0, mode="bilinear")

    x = torch.ones(0, 4, 5, 5, requires_grad=True)
    result = torch.compile(both, backend="detpass")(x)
    result.sum().backward()
    assert result.shape == (0, 4, 4, 4)
    assert x.grad.shape == x.shape


def test_the_code_for_cuda_counts_turns_without_rounding_down():
    def sample(x, grid):
        return torch.nn.functional.grid_sample(x, grid, "nearest", "reflection", True)

    x = torch.zeros(1, 1, 42, 42)
    for backend in ("detpass", "inductor"):
        code = cuda_code_with(CudaSettings(backend, compile_kernels=False), sample, [x, BORDER], {})
        assert ("libdevice.floor" in "".join(code.sources.values())) == (backend == "inductor")
