"""Max pooling backward: values against eager in float64, the bits of a sequential loop, every geometry, each form."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import detpass
from detpass.rule import Inapplicable, NoMatch, RuleContext, Treatment
from detpass.rules.max_pooling import MaxPoolBackward, cell_numbers, pool_windows, scatter_by_indices
from tests.rules.direct import bits, node_of, replaced, verdict_of

aten = torch.ops.aten
RULE = MaxPoolBackward()

GEOMETRIES = [
    # kernel, stride, padding, dilation, ceil_mode
    (3, 2, 0, 1, False),
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (2, 2, 0, 1, False),
    (2, 2, 1, 1, True),
    (3, 1, 1, 1, False),
    (2, 3, 0, 1, False),
    (3, 2, 1, 2, False),
    (3, 3, 1, 2, True),
    (5, 5, 2, 1, False),
    (7, 5, 3, 1, True),
    (9, 1, 4, 1, False),
    ((3, 2), (1, 5), (1, 0), (1, 2), True),
    ((4, 3), (2, 1), (2, 1), (1, 1), False),
]


def call(x, kernel, stride, padding, dilation, ceil, axes=2):
    """The backward operator and its arguments for one pooling of ``x``, with a random gradient."""
    pool = (F.max_pool2d, F.max_pool3d)[axes - 2]
    spread = lambda v: list(v) if isinstance(v, tuple) else [v] * axes  # noqa: E731
    out, indices = pool(x, spread(kernel), spread(stride), spread(padding), spread(dilation), ceil, return_indices=True)
    grad = torch.randn_like(out)
    target = (aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)[axes - 2].default
    return target, (grad, x, spread(kernel), spread(stride), spread(padding), spread(dilation), ceil, indices)


@pytest.mark.parametrize(
    "geometry", [each for each in GEOMETRIES if not isinstance(each[0], int) or each[0] < 9], ids=str
)
def test_cells_of_element_numbers(geometry):
    """The cell that ATen recorded, put as the number of an element of its window, and back."""
    x = torch.randn(2, 3, 17, 23)
    *_, indices = call(x, *geometry)[1]
    windows = pool_windows(2, *geometry[:4])
    down, across = windows
    height, width = (torch.arange(size) for size in indices.shape[-2:])
    row = indices // 23 - (height.unsqueeze(-1) * down.stride - down.padding)
    column = indices % 23 - (width * across.stride - across.padding)
    elements = row // down.dilation * across.kernel + column // across.dilation
    assert torch.equal(cell_numbers(elements.to(torch.int8), windows, 23), indices)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_of_max_pool2d(geometry, dtype):
    torch.manual_seed(0)
    target, args = call(torch.randn(2, 3, 17, 19, dtype=dtype), *geometry)
    # A cell has few windows: both sum them in the same order, so the values are equal, not close.
    torch.testing.assert_close(replaced(RULE, target, *args, device="cuda"), target(*args), rtol=0, atol=0)


@pytest.mark.parametrize("geometry", GEOMETRIES[:9], ids=str)
def test_values_of_max_pool3d(geometry):
    torch.manual_seed(0)
    target, args = call(torch.randn(2, 2, 9, 8, 7, dtype=torch.float64), *geometry, axes=3)
    # Segment sums restart at each chunk of 256 members, which no cell here has: exact equality again.
    torch.testing.assert_close(replaced(RULE, target, *args, device="cuda"), target(*args), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("shape", [(3, 8, 8), (0, 3, 8, 8), (1, 0, 8, 8)])
def test_without_batch_and_empty(shape):
    x = torch.randn(shape)
    if shape == (1, 0, 8, 8):
        with pytest.raises(RuntimeError):
            call(x, 3, 2, 1, 1, False)
        return
    target, args = call(x, 3, 2, 1, 1, False)
    result = replaced(RULE, target, *args, device="cuda")
    assert torch.equal(result, target(*args))
    assert result.shape == x.shape


def test_ties_go_to_the_recorded_index():
    x = torch.zeros(1, 1, 6, 6)
    target, args = call(x, 3, 1, 1, 1, False)
    assert torch.equal(replaced(RULE, target, *args, device="cuda"), target(*args))


def test_nan_stays_in_its_own_cell():
    torch.manual_seed(1)
    target, args = call(torch.randn(1, 1, 8, 8), 3, 2, 1, 1, False)
    grad = args[0].clone()
    grad[0, 0, 1, 1] = float("nan")
    grad[0, 0, 2, 2] = float("inf")
    args = (grad, *args[1:])
    assert torch.equal(bits(replaced(RULE, target, *args, device="cuda")), bits(target(*args)))


def test_the_order_is_that_of_a_loop_over_windows():
    torch.manual_seed(0)
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1.0
    target, args = call(x, 4, 1, 2, 1, False)
    grad = args[0]
    total = torch.zeros(())
    for o in itertools.product(range(grad.shape[2]), range(grad.shape[3])):
        if args[7][0, 0][o] == 12:
            total = total + grad[0, 0][o]
    assert torch.equal(bits(replaced(RULE, target, *args, device="cuda")[0, 0, 2, 2]), bits(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    target, args = call(torch.randn(2, 2, 9, 9).to(dtype), 3, 1, 1, 1, False)
    wide = (args[0].float(), args[1].float(), *args[2:])
    assert torch.equal(bits(replaced(RULE, target, *args, device="cuda")), bits(target(*wide).to(dtype)))


def test_treatments_follow_the_geometry():
    def treatment(*geometry):
        target, args = call(torch.randn(1, 1, 40, 40), *geometry)
        return verdict_of(RULE, target, *args, device="cuda")

    assert treatment(2, 2, 0, 1, False).reason == "windows are disjoint"
    assert treatment(3, 2, 0, 1, False).treatment is Treatment.CLOSED_FORM
    assert treatment(13, 1, 6, 1, False).treatment is Treatment.SEGMENT
    assert treatment(20, 20, 0, 1, False).treatment is Treatment.CLOSED_FORM


def test_a_symbolic_kernel_is_refused():
    target, args = call(torch.randn(1, 1, 8, 8), 3, 2, 1, 1, False)
    node, _ = node_of(target, *args)
    node.args = (*node.args[:2], [node.args[0], node.args[0]], *node.args[3:])
    verdict = RULE.match(node, RuleContext(device=torch.device("cuda")))
    assert isinstance(verdict, NoMatch)
    assert verdict.why is Inapplicable.UNKNOWN_SIZE


def test_the_segment_form_refuses_an_index_outside_its_plane():
    target, args = call(torch.randn(1, 2, 20, 20), 13, 1, 6, 1, False)
    broken = args[7].clone()
    broken[0, 0, 0, 0] = 400
    assert verdict_of(RULE, target, *args, device="cuda").treatment is Treatment.SEGMENT
    with pytest.raises(IndexError, match="max_pool_backward"):
        scatter_by_indices(args[0], broken, [20, 20], "max_pool_backward")


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_on_a_cpu_the_kernel_of_aten_gives_the_bits_of_the_gather(geometry, layout):
    torch.manual_seed(0)
    target, args = call(torch.randn(2, 3, 17, 19).to(memory_format=layout), *geometry)
    assert verdict_of(RULE, target, *args).treatment is Treatment.NATIVE
    got = replaced(RULE, target, *args)
    assert torch.equal(got, target(*args))
    assert got.stride() == target(*args).stride()
    if verdict_of(RULE, target, *args, device="cuda").treatment is Treatment.CLOSED_FORM:
        # Values, not bits: the kernel starts from +0, a lone gradient of -0.0 keeps its sign in the gather.
        assert torch.equal(got, replaced(RULE, target, *args, device="cuda"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_on_a_cpu_the_kernel_of_aten_repeats_and_does_not_read_its_input(layout):
    torch.manual_seed(0)
    x = torch.randn(4, 32, 33, 31).to(memory_format=layout)
    target, args = call(x, 3, 2, 1, 1, False)
    args = (args[0], torch.full_like(x, float("nan")), *args[2:])
    threads = torch.get_num_threads()
    seen = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            seen |= {replaced(RULE, target, *args).numpy().tobytes() for _ in range(10)}
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_cpu_only_single_and_double_precision_in_two_dimensions_are_left_to_aten(axes, dtype):
    target, args = call(torch.randn(1, 1, *[8] * axes).to(dtype), 3, 2, 1, 1, False, axes=axes)
    native = axes == 2 and dtype is torch.float32
    assert (verdict_of(RULE, target, *args).treatment is Treatment.NATIVE) == native


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_on_a_cpu(dynamic):
    """The whole kernel in a compiled step, with a producer and a consumer to fuse with; the second size is another."""
    torch._dynamo.reset()
    function = lambda x: F.max_pool2d(x.relu() * 2, 3, stride=2, padding=1).sin()  # noqa: E731
    compiled = torch.compile(function, backend="detpass", dynamic=dynamic)
    for layout, size in ((torch.contiguous_format, 33), (torch.contiguous_format, 29), (torch.channels_last, 27)):
        x = torch.randn(2, 8, size, size).to(memory_format=layout).requires_grad_()
        weight = torch.randn_like(function(x))
        (want,) = torch.autograd.grad(function(x), x, weight)
        (got,) = torch.autograd.grad(compiled(x), x, weight)
        # The sine's derivative is Inductor's, vectorised.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert got.stride() == want.stride()
    assert Treatment.NATIVE in {record.treatment for record in detpass.last_report().records}
