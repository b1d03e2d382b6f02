"""Backward of torchvision's pooling over regions: the rewritten forms against torchvision's kernels."""

from __future__ import annotations

import pytest
import torch

from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Safe, Treatment
from detpass.rules.regions import PsRoiPoolBackward, RoiAlignBackward, RoiPoolBackward
from tests.rules.compiled import OnCuda, compile_and_compare
from tests.rules.direct import replaced, verdict_of
from tests.rules.vision import torchvision_ops

ops = torchvision_ops()
library = torch.ops.torchvision
ALIGN, SENSITIVE = library._roi_align_backward.default, library._ps_roi_align_backward.default
POOL, SENSITIVE_POOL = library._roi_pool_backward.default, library._ps_roi_pool_backward.default
ALIGN_RULE, POOL_RULE, SENSITIVE_POOL_RULE = RoiAlignBackward(), RoiPoolBackward(), PsRoiPoolBackward()
SIZE, BINS, SCALE = (3, 12, 9, 11), (3, 2), 0.5


def regions(count=40, dtype=torch.float64, low=-6.0):
    """``[count, 5]``: samples and corners of regions, some of them across the borders, one turned inside out."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(count, 2, 2, generator=generator, dtype=torch.float64) * 32 + low
    corners = corners.sort(1).values.flatten(1)
    if count:
        corners[0] = corners[0].flip(0)
    sample = torch.randint(0, SIZE[0], (count, 1), generator=generator).double()
    return torch.cat((sample, corners), 1).to(dtype)


def gradient(count=40, channels=SIZE[1], dtype=torch.float64):
    return torch.randn(count, channels, *BINS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


def align(ratio, aligned, count=40, dtype=torch.float64):
    return gradient(count, dtype=dtype), regions(count, dtype), SCALE, *BINS, *SIZE, ratio, aligned


def sensitive(ratio, count=40, dtype=torch.float64):
    channels = SIZE[1] // (BINS[0] * BINS[1])
    mapping = torch.arange(SIZE[1], dtype=torch.int32).reshape(1, channels, *BINS).repeat(count, 1, 1, 1)
    return gradient(count, channels, dtype), regions(count, dtype), mapping, SCALE, *BINS, ratio, *SIZE


def pool(count=40, dtype=torch.float64):
    source = torch.randn(SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    _, argmax = library.roi_pool(source, regions(count, dtype, low=0.0), SCALE, *BINS)
    return gradient(count, dtype=dtype), regions(count, dtype, low=0.0), argmax, SCALE, *BINS, *SIZE


def sensitive_pool(count=40, dtype=torch.float64):
    grad, rois, mapping, *_ = sensitive(1, count, dtype)
    return grad, rois, mapping, SCALE, *BINS, *SIZE


RATIOS = (-1, 0, 1, 2, 3)
MAKERS = {
    **{f"roi_align, {ratio} points": (ALIGN_RULE, ALIGN, lambda *a, r=ratio: align(r, False, *a)) for ratio in RATIOS},
    **{f"aligned, {ratio} points": (ALIGN_RULE, ALIGN, lambda *a, r=ratio: align(r, True, *a)) for ratio in RATIOS},
    **{f"ps_roi_align, {ratio} points": (ALIGN_RULE, SENSITIVE, lambda *a, r=ratio: sensitive(r, *a))
       for ratio in RATIOS},
    "roi_pool": (POOL_RULE, POOL, pool),
    "ps_roi_pool": (SENSITIVE_POOL_RULE, SENSITIVE_POOL, sensitive_pool),
}  # fmt: skip


def check(rule, target, args, rtol, atol):
    got, want = replaced(rule, target, *args, device="cuda"), target(*args)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("count", [40, 0])
def test_the_gradient_is_torchvisions(name, count):
    rule, target, make = MAKERS[name]
    # A cell adds some tens of products; places up to 16 are rounded to 2 ** -20 in float32.
    check(rule, target, make(count), rtol=1e-11, atol=1e-12)
    check(rule, target, make(count, torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_half_precision(name):
    """The same places, rounded as torchvision rounds them; its sums are rounded too, ours once at the end."""
    rule, target, make = MAKERS[name]
    # Some tens of additions of numbers up to three, each rounded to 2 ** -10.
    check(rule, target, make(40, torch.float16), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("cells", [(1, 1), (1, 7), (37, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_regions_of_every_kind(scale, cells, dtype):
    """Corners on cells and halfway, far outside, of no extent, much smaller than a cell and much larger than all."""
    generator = torch.Generator().manual_seed(3)
    corners = (torch.rand(60, 2, 2, generator=generator, dtype=torch.float64) * 1.5 - 0.25) * max(cells) / scale
    corners = corners.sort(1).values.flatten(1)
    corners[10:20] = corners[10:20].round()
    corners[20:30] = (corners[20:30] * 2).round() / 2
    corners[30:40, 2:] = corners[30:40, :2] + 10.0 ** -torch.arange(10).unsqueeze(1)
    corners[40:45] *= 100
    corners[45:50] = corners[45:50].roll(2, 1)
    corners[50:55, 2:] = corners[50:55, :2]
    sample = torch.randint(0, 2, (60, 1), generator=generator).double()
    rois = torch.cat((sample, corners), 1).to(dtype)
    grad = torch.randn(60, 3, *BINS, generator=generator, dtype=torch.float64).to(dtype)
    mapping = torch.arange(18, dtype=torch.int32).reshape(1, 3, *BINS).repeat(60, 1, 1, 1)
    # Some tens of products again, with places up to a hundred times as large where nothing but the border is met.
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 3e-4}
    for aligned in (False, True):
        check(ALIGN_RULE, ALIGN, (grad, rois, scale, *BINS, 2, 3, *cells, 0, aligned), **tolerance)
    check(ALIGN_RULE, SENSITIVE, (grad, rois, mapping, scale, *BINS, 0, 2, 18, *cells), **tolerance)
    check(SENSITIVE_POOL_RULE, SENSITIVE_POOL, (grad, rois, mapping, scale, *BINS, 2, 18, *cells), **tolerance)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_regions_that_are_not_numbers_add_nothing(ratio, wrong):
    args = list(align(ratio, True))
    args[1] = args[1].clone()
    args[1][3, 2] = wrong
    kept = torch.arange(40) != 3
    got = replaced(ALIGN_RULE, ALIGN, *args, device="cuda")
    less = args[0] * kept.reshape(-1, 1, 1, 1), torch.where(kept.unsqueeze(1), args[1], 0.0), *args[2:]
    assert torch.equal(got, replaced(ALIGN_RULE, ALIGN, *less, device="cuda"))


@pytest.mark.parametrize("sample", [-1, SIZE[0]])
@pytest.mark.parametrize("name", ["aligned, 2 points", "aligned, 0 points", "ps_roi_align, 0 points", "roi_pool",
                                  "ps_roi_pool"])  # fmt: skip
def test_a_sample_that_does_not_exist_is_an_error(name, sample):
    rule, target, make = MAKERS[name]
    args = make()
    wrong = args[1].clone()
    wrong[5, 0] = sample
    with pytest.raises(IndexError):
        rule.replacement(*operands(target, args, wrong), **parameters(rule, target, args))


def parameters(rule, target, args):
    return verdict_of(rule, target, *args, device="cuda").parameters


def operands(target, args, rois):
    """The operands of a rewrite with other regions: torchvision's own kernel would write outside of its result."""
    values = [args[0], rois, args[2]] if target is POOL else [args[0], rois]
    return (*values, *SIZE)


def test_the_cpu_kernels_are_left():
    for rule, target, make in MAKERS.values():
        assert isinstance(verdict_of(rule, target, *make()), Safe)


def test_treatments():
    for name, (rule, target, make) in MAKERS.items():
        closed = name == "ps_roi_pool" or "0 points" in name or "-1 points" in name
        treatment = Treatment.CLOSED_FORM if closed else Treatment.SEGMENT
        assert verdict_of(rule, target, *make(), device="cuda").treatment is treatment


FUNCTIONS = {
    "roi_align": (ALIGN_RULE, lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE)),
    "roi_align, aligned": (ALIGN_RULE, lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE, -1, True)),
    "roi_align, 2 points": (ALIGN_RULE, lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE, 2)),
    "ps_roi_align": (ALIGN_RULE, lambda x, boxes: ops.ps_roi_align(x, boxes, BINS, SCALE)),
    "ps_roi_align, 2 points": (ALIGN_RULE, lambda x, boxes: ops.ps_roi_align(x, boxes, BINS, SCALE, 2)),
    "roi_pool": (POOL_RULE, lambda x, boxes: ops.roi_pool(x, boxes, BINS, SCALE)),
    "ps_roi_pool": (SENSITIVE_POOL_RULE, lambda x, boxes: ops.ps_roi_pool(x, boxes, BINS, SCALE)),
}
# The adaptive forms are the new code of every change here; the others take the same ways through the compiler.
QUICK = ("roi_align", "ps_roi_pool")
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-2}


def source(dtype=torch.float32):
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def slow_unless(quick, value):
    return value if quick else pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in FUNCTIONS])
@pytest.mark.parametrize(("dtype", "threads"), [
    (torch.float32, 2),
    pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    pytest.param(torch.float64, 2, marks=pytest.mark.slow),
    pytest.param(torch.float16, 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_compiled(name, dtype, threads):
    """The graph's form for CUDA in code for a CPU: eager's gradient, twenty times the same bits."""
    rule, function = FUNCTIONS[name]
    torch.set_num_threads(threads)
    boxes = regions(dtype=dtype, low=0.0)
    tolerance = TOLERANCES[dtype]  # as above: a cell adds some tens of products
    records = compile_and_compare(
        function, source(dtype), boxes, rtol=tolerance, atol=tolerance, runs=20, rules=[OnCuda(rule)]
    )
    assert [rule for _, rule in records.values() if rule.endswith("_on_cuda")] == [f"{rule.name}_on_cuda"]


@pytest.mark.parametrize("name", [slow_unless(name == "roi_align", name) for name in FUNCTIONS])
def test_compiled_once_for_every_number_of_regions(name):
    rule, function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="detpass", dynamic=True, options={"rules": [OnCuda(rule)]})
    for count in (40, 23, 60):
        x, boxes = source(torch.float64), regions(count, low=0.0)
        weight = torch.randn_like(function(x, boxes))
        (want,) = torch.autograd.grad(function(x, boxes), x, weight)
        with torch._dynamo.config.patch(error_on_recompile=count != 40):
            (got,) = torch.autograd.grad(compiled(x, boxes), x, weight)
        # A cell adds some tens of products.
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in FUNCTIONS])
def test_cuda_code_is_deterministic(name):
    _, function = FUNCTIONS[name]
    inputs = [source(), regions(dtype=torch.float32, low=0.0)]
    code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), function, inputs)
    # No quotient is a product with a reciprocal of the number of bins, which would round it otherwise than the kernels.
    assert "0.333333" not in "".join(code.sources.values())
    assert not any((code.float_atomics, code.float_scans, code.nondeterministic_externs))
    assert not any(call.operator.endswith("_backward.default") for call in code.extern_calls)
    plain = cuda_code_with(CudaSettings("inductor", compile_kernels=False), function, inputs)
    assert plain.nondeterministic_externs


def test_operands_that_eager_refuses_are_refused():
    wrong = {
        "roi_align": (source(), regions(dtype=torch.float32)[:, :4]),
        "ps_roi_pool": (source()[:, :-1].detach().requires_grad_(), regions(dtype=torch.float32)),
        "ps_roi_align": (source(), regions(dtype=torch.float64)),
    }
    for name, inputs in wrong.items():
        _, function = FUNCTIONS[name]
        compiled = torch.compile(function, backend="detpass", options={"target": "cuda"})
        for call in (function, compiled):
            with pytest.raises((RuntimeError, AssertionError)):
                call(*inputs).sum().backward()


@pytest.mark.parametrize("name", [*FUNCTIONS, "deform_conv2d"])
def test_the_cpu_kernels_repeat(name):
    """Eager, two threads: the reason for which they are left."""

    def convolution(x, boxes):
        return ops.deform_conv2d(x, x.new_full((3, 18, 9, 11), 0.3), x.new_ones(4, 12, 3, 3), padding=1)

    function = convolution if name == "deform_conv2d" else FUNCTIONS[name][1]
    x, boxes = source(), regions(200, torch.float32, low=0.0)
    weight = torch.randn_like(function(x, boxes))
    seen = {torch.autograd.grad(function(x, boxes), x, weight)[0].numpy().tobytes() for _ in range(20)}
    assert len(seen) == 1
