"""roi_align, ps_roi_align and roi_pool backward: the rewritten forms against torchvision's kernels."""

from __future__ import annotations

import pytest
import torch

import detpass
from detpass.errors import UncoveredError
from detpass.rule import Inapplicable, NoMatch, RuleContext, Safe, Treatment
from detpass.rules.regions import RoiAlignBackward, RoiPoolBackward
from tests.rules.direct import bits, replaced, verdict_of

ops = pytest.importorskip("torchvision", reason="torchvision is not installed").ops
library = torch.ops.torchvision
ALIGN, SENSITIVE = library._roi_align_backward.default, library._ps_roi_align_backward.default
POOL = library._roi_pool_backward.default
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


CASES = [
    *((RoiAlignBackward(), ALIGN, align(ratio, aligned)) for ratio in (1, 2, 3) for aligned in (False, True)),
    *((RoiAlignBackward(), SENSITIVE, sensitive(ratio)) for ratio in (1, 2, 3)),
    (RoiPoolBackward(), POOL, pool()),
    (RoiAlignBackward(), ALIGN, align(2, True, count=0)),
    (RoiAlignBackward(), SENSITIVE, sensitive(2, count=0)),
    (RoiPoolBackward(), POOL, pool(count=0)),
]


@pytest.mark.parametrize(("rule", "target", "args"), CASES)
def test_the_gradient_is_torchvisions(rule, target, args):
    got, want = replaced(rule, target, *args, device="cuda"), target(*args)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    # A cell adds some tens of products.
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("rule", "target", "make"), [
    (RoiAlignBackward(), ALIGN, lambda dtype: align(2, True, dtype=dtype)),
    (RoiAlignBackward(), SENSITIVE, lambda dtype: sensitive(2, dtype=dtype)),
    (RoiPoolBackward(), POOL, lambda dtype: pool(dtype=dtype)),
])  # fmt: skip
def test_single_precision(rule, target, make):
    args = make(torch.float32)
    # Places up to 16 are rounded to 2 ** -20; a cell adds some tens of products with them.
    torch.testing.assert_close(replaced(rule, target, *args, device="cuda"), target(*args), rtol=1e-4, atol=1e-4)


def test_regions_that_are_not_numbers_add_nothing():
    args = list(align(2, True))
    args[1] = args[1].clone()
    args[1][3, 2] = float("nan")
    kept = torch.arange(40) != 3
    got = replaced(RoiAlignBackward(), ALIGN, *args, device="cuda")
    want = replaced(RoiAlignBackward(), ALIGN, args[0][kept], args[1][kept], *args[2:], device="cuda")
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("sample", [-1, SIZE[0]])
def test_a_sample_that_does_not_exist_is_an_error(sample):
    for rule, target, args in ((RoiAlignBackward(), ALIGN, align(2, True)), (RoiPoolBackward(), POOL, pool())):
        wrong = args[1].clone()
        wrong[5, 0] = sample
        with pytest.raises(IndexError):
            rule.replacement(*operands(rule, target, args, wrong), **parameters(rule, target, args))


def parameters(rule, target, args):
    return verdict_of(rule, target, *args, device="cuda").parameters


def operands(rule, target, args, rois):
    """The operands of a rewrite with other regions: torchvision's own kernel would write outside of its result."""
    values = [args[0], rois] if target is ALIGN else [args[0], rois, args[2]]
    return (*values, *SIZE)


def test_an_adaptive_number_of_points_and_half_precision_are_left():
    for ratio in (0, -1):
        verdict = verdict_of(RoiAlignBackward(), ALIGN, *align(ratio, True), device="cuda")
        assert isinstance(verdict, NoMatch)
        assert verdict.why is Inapplicable.UNKNOWN_SIZE
    verdict = verdict_of(RoiAlignBackward(), ALIGN, *align(2, True, dtype=torch.float16), device="cuda")
    assert isinstance(verdict, NoMatch)
    assert verdict.why is Inapplicable.DTYPE


def test_the_cpu_kernels_are_left():
    for rule, target, args in CASES:
        assert isinstance(verdict_of(rule, target, *args), Safe)


FUNCTIONS = {
    "roi_align": lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE, 2, True),
    "roi_align, not aligned": lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE, 2),
    "ps_roi_align": lambda x, boxes: ops.ps_roi_align(x, boxes, BINS, SCALE, 2),
    "roi_pool": lambda x, boxes: ops.roi_pool(x, boxes, BINS, SCALE),
}


class Elsewhere(RoiAlignBackward):
    """The rule as on CUDA; the code that runs stays the CPU's."""

    name = "elsewhere"

    def match(self, node, context):
        return super().match(node, RuleContext(torch.device("cuda")))


class PoolElsewhere(RoiPoolBackward):
    """As :class:`Elsewhere`."""

    name = "pool_elsewhere"

    def match(self, node, context):
        return super().match(node, RuleContext(torch.device("cuda")))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name, dynamic):
    """The graph's form for CUDA in code for a CPU: the gradient is eager's and the report names the form."""
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    rules = [Elsewhere(), PoolElsewhere()]
    compiled = torch.compile(function, backend="detpass", dynamic=dynamic, options={"rules": rules})
    for count in (40, 23):
        x = torch.randn(SIZE, dtype=torch.float64, requires_grad=True)
        boxes = regions(count, low=0.0)
        weight = torch.randn_like(function(x, boxes))
        (want,) = torch.autograd.grad(function(x, boxes), x, weight)
        (got,) = torch.autograd.grad(compiled(x, boxes), x, weight)
        # A cell adds some tens of products.
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    treatments = {record.treatment for record in detpass.last_report().records}
    assert Treatment.SEGMENT in treatments


def test_an_adaptive_number_of_points_is_refused_with_the_remedy():
    compiled = torch.compile(
        lambda x, boxes: ops.roi_align(x, boxes, BINS, SCALE), backend="detpass", options={"target": "cuda"}
    )
    with pytest.raises(UncoveredError, match="sampling_ratio > 0"):
        compiled(torch.randn(SIZE, requires_grad=True), regions(dtype=torch.float32)).sum().backward()


@pytest.mark.parametrize("name", [*FUNCTIONS, "ps_roi_pool", "deform_conv2d"])
def test_the_cpu_kernels_repeat(name):
    """Eager, two threads: the reason for which they are left."""
    others = {
        "ps_roi_pool": lambda x, boxes: ops.ps_roi_pool(x, boxes, BINS, SCALE),
        "deform_conv2d": lambda x, boxes: ops.deform_conv2d(x, x.new_full((3, 18, 9, 11), 0.3), x.new_ones(4, 12, 3, 3),
                                                            padding=1),
    }  # fmt: skip
    function = {**FUNCTIONS, **others}[name]
    x, boxes = torch.randn(SIZE, requires_grad=True), regions(200, torch.float32, low=0.0)
    weight = torch.randn_like(function(x, boxes))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = {torch.autograd.grad(function(x, boxes), x, weight)[0].numpy().tobytes() for _ in range(20)}
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
