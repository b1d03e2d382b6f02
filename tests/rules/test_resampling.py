"""Resampling backward: each kind against eager, gathers and matrices, special values, and the compiled whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detpass.backend import detpass, reports
from detpass.rules.axis_maps import UNROLLED_MEMBERS
from detpass.rules.resampling import KINDS, ResamplingBackward
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
RULE = ResamplingBackward()
NAMES = [name for name in KINDS if hasattr(aten, f"{name}_backward")]

SIZES = [
    # input, output (the leading axes are used)
    ((5, 7, 6), (10, 14, 12)),
    ((5, 7, 6), (8, 7, 13)),
    ((9, 10, 8), (4, 3, 8)),
    ((4, 5, 6), (1, 1, 1)),
    ((1, 1, 1), (5, 4, 3)),
    ((3, 4, 3), (90, 100, 64)),
]
CASES = [
    (name, sizes, aligned, scale)
    for name in NAMES
    for sizes in SIZES
    for aligned in (
        (False, True) if "align_corners" in str(getattr(aten, f"{name}_backward").default._schema) else (None,)
    )
    for scale in (None, 1.7)
]


def call(name, sizes, aligned, scale, dtype):
    """The backward operator and its arguments."""
    axes = KINDS[name].axes
    cells = list(sizes[0][:axes])
    outputs = [int(n * scale) for n in cells] if scale else list(sizes[1][:axes])
    grad = torch.randn(2, 3, *outputs, dtype=dtype)
    flags = [] if aligned is None else [aligned]
    return getattr(aten, f"{name}_backward").default, (grad, outputs, [2, 3, *cells], *flags, *[scale] * axes)


@pytest.mark.parametrize(("name", "sizes", "aligned", "scale"), CASES, ids=str)
def test_values(name, sizes, aligned, scale):
    torch.manual_seed(0)
    target, args = call(name, sizes, aligned, scale, torch.float64)
    expected = target(*args)
    # Weights of taps that meet in one border cell are added before, not after, the product with the gradient; a sum of
    # up to 9,000 terms (the last sizes) is grouped by axis.
    torch.testing.assert_close(replaced(RULE, target, *args), expected, rtol=1e-12, atol=1e-12)
    cells, outputs = args[2][2:], args[1]
    dense = RULE.replacement(args[0], cells, outputs, [scale] * len(cells), kind=KINDS[name], aligned=bool(aligned))
    torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float32_follows_the_rounding_of_the_forward(name):
    """Ratios that are no binary fraction: a source position on the border of a cell must choose eager's cell."""
    torch.manual_seed(0)
    for cells, outputs in (((7, 49, 13), (21, 35, 91)), ((300, 11, 5), (100, 33, 7))):
        target, args = call(name, (cells, outputs), None if "nearest" in name else False, None, torch.float32)
        torch.testing.assert_close(replaced(RULE, target, *args), target(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    target, args = call("upsample_bilinear2d", SIZES[0], False, None, torch.float32)
    half = (args[0].to(dtype), *args[1:])
    wide = (half[0].float(), *args[1:])
    assert torch.equal(bits(replaced(RULE, target, *half)), bits(replaced(RULE, target, *wide).to(dtype)))


def test_nan_and_infinity_reach_only_the_cells_that_were_read():
    target, args = call("upsample_bilinear2d", ((6, 6), (12, 12)), False, None, torch.float32)
    grad = torch.ones_like(args[0])
    grad[0, 0, 5, 5], grad[1, 2, 0, 0] = float("nan"), float("inf")
    result = replaced(RULE, target, grad, *args[1:])
    assert result[0, 0].isnan().nonzero().tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]
    assert result[1, 2].isinf().nonzero().tolist() == [[0, 0]]
    assert result[0, 1:].isfinite().all()


def test_long_member_lists_are_a_reduction():
    target, args = call("upsample_nearest2d", ((3, 4), (90, 100)), None, None, torch.float64)
    members = verdict_of(RULE, target, *args).parameters["members"]
    assert members[0].count == 30 > UNROLLED_MEMBERS
    torch.testing.assert_close(replaced(RULE, target, *args), target(*args), rtol=1e-13, atol=0)


def test_an_empty_batch():
    target = aten.upsample_bilinear2d_backward.default
    result = replaced(RULE, target, torch.zeros(0, 3, 8, 8), [8, 8], [0, 3, 4, 4], False, None, None)
    assert result.shape == (0, 3, 4, 4)


@pytest.mark.slow
def test_compiled_interpolate_keeps_every_backward_whole():
    def every_mode(x, line, volume):
        flat = [
            F.interpolate(x, scale_factor=2, mode=mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
        ]
        smooth = [F.interpolate(x, size=(12, 10), mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
        lines = [F.interpolate(line, size=30, mode=mode) for mode in ("nearest", "linear")]
        volumes = [F.interpolate(volume, scale_factor=2, mode=mode) for mode in ("nearest", "trilinear")]
        return torch.cat([t.flatten() for t in (*flat, *smooth, *lines, *volumes)])

    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 6, 5), (2, 3, 9), (1, 2, 4, 5, 3))]
    records = compile_and_compare(every_mode, *inputs, rtol=1e-5, atol=1e-5)
    # One node for each, not 1, 2, 4, 8 or 16 accumulating index_put.
    names = ["upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
             "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_nearest1d", "upsample_linear1d",
             "upsample_nearest3d", "upsample_trilinear3d"]  # fmt: skip
    assert records == {f"aten.{name}_backward.default": ("closed_form", "resampling_backward") for name in names}


@pytest.mark.slow
def test_compiled_with_symbolic_sizes():
    torch.manual_seed(0)
    records = compile_and_compare(
        lambda x: sum(F.interpolate(x, scale_factor=2, mode=mode) for mode in ("nearest", "bilinear", "bicubic")),
        torch.randn(2, 3, 6, 5, requires_grad=True),
        rtol=1e-5,
        atol=1e-5,
        dynamic=True,
    )
    assert set(records.values()) == {("closed_form", "resampling_backward")}
    assert len(records) == 3


@pytest.mark.slow
def test_one_graph_serves_a_stream_of_sizes():
    """Sizes computed from the input's: symbolic in the forward and in the backward."""

    def resized(x):
        size = (2 * x.shape[-2], x.shape[-1] + 3)
        return sum(F.interpolate(x, size=size, mode=mode).square().sum() for mode in ("nearest", "bilinear"))

    compiled = torch.compile(resized, backend=detpass, dynamic=True, fullgraph=True)
    before = len(reports())
    for height, width in ((6, 5), (9, 4), (7, 11)):
        data = torch.randn(2, 3, height, width)
        found, expected = (data.clone().requires_grad_() for _ in range(2))
        value, right = compiled(found), resized(expected)
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
        value.backward()
        right.backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)
    assert len(reports()) == before + 1
    assert {record.rule for record in reports()[-1]} == {"resampling_backward"}


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        ("nearest-exact", (2, 3, 6, 5)),
        pytest.param("bicubic", (2, 3, 6, 5), marks=pytest.mark.slow),
        pytest.param("trilinear", (1, 2, 4, 5, 3), marks=pytest.mark.slow),
    ],
)
def test_a_size_computed_from_symbolic_sizes(mode, shape):
    records = compile_and_compare(
        lambda x: F.interpolate(x, size=tuple(2 * n for n in x.shape[2:]), mode=mode),
        torch.randn(shape, requires_grad=True),
        rtol=1e-5,
        atol=1e-5,
        dynamic=True,
    )
    assert {rule for _, rule in records.values()} == {"resampling_backward"}
