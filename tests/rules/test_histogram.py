"""Histograms: eager's counts, and weights summed in the order of the values."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from detpass import segment
from detpass.backend import reports
from detpass.errors import EscapeWarning
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Safe, Treatment
from detpass.rules.histogram import Histc, WeightedBincount, WeightedHistogram
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of
from tests.rules.reciprocal import by_reciprocals

aten = torch.ops.aten
HISTC, WEIGHTED, BINCOUNT = Histc(), WeightedHistogram(), WeightedBincount()


@pytest.mark.parametrize("args", [(10,), (10, -1, 1), (7, 0.0, 3.0), (3, 2.0, 2.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histc(args, dtype):
    torch.manual_seed(0)
    x = torch.randn(5000, dtype=dtype)
    x[:3] = torch.tensor([float("nan"), 1.0, -1.0]) if len(args) > 1 and args[1] != args[2] else 0.5
    assert torch.equal(replaced(HISTC, aten.histc.default, x, *args, device="cuda"), torch.histc(x, *args))


def test_histc_of_nothing_and_of_one_value():
    for x in (torch.zeros(0), torch.full((4,), 2.0)):
        assert torch.equal(replaced(HISTC, aten.histc.default, x, 5, device="cuda"), torch.histc(x, 5))


@pytest.mark.parametrize("low", [0.0, -3.0])
def test_values_on_the_edge_of_a_bin_are_in_it_whatever_division_rounds_to(low):
    for bins in (41, 47, 55, 100):
        x, high = torch.arange(bins) + low, low + bins
        count = partial(HISTC.replacement, bins=bins, low=low, high=high)
        got = by_reciprocals(count, x)
        assert torch.equal(got, torch.histc(x, bins, low, high))


def test_the_code_for_cuda_divides_in_double_precision():
    for x in (torch.randn(100), torch.randn(100, dtype=torch.float64)):
        code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), lambda x: x.histc(41, 0.0, 41.0), [x], {})
        (quotient,) = re.findall(r"\((tmp\d+) / tmp\d+\)", "".join(code.sources.values()))
        (made,) = re.findall(rf"{quotient} = (.*)", "".join(code.sources.values()))
        assert "float64" in made or x.dtype == torch.float64


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1 << 40), (-5, 1 << 39)])
def test_histc_of_integers_divides_integers(low, high):
    """Eager has it on CUDA alone."""
    x = torch.tensor([0, 5, (1 << 40) - 1, 1 << 40, (1 << 39) - 1, (1 << 39), (3 << 37) - 1])
    start, end = (low, high) if low != high else (int(x.min()), int(x.max()))
    want = [0] * 8
    for value in x.tolist():
        if start <= value <= end:
            want[min((value - start) * 8 // (end - start), 7)] += 1
    assert HISTC.replacement(x, bins=8, low=low, high=high).tolist() == want
    small = torch.tensor([-128, -1, 0, 127], dtype=torch.int8)
    assert HISTC.replacement(small, bins=2, low=0, high=0).tolist() == [2, 2]


def test_histc_is_left_alone_on_a_cpu():
    assert isinstance(verdict_of(HISTC, aten.histc.default, torch.randn(5), 5), Safe)


@pytest.mark.parametrize("options", [{}, {"range": [-1.0, 1.0]}, {"density": True}], ids=str)
def test_weights(options):
    torch.manual_seed(0)
    x, weight = torch.randn(5000, dtype=torch.float64), torch.rand(5000, dtype=torch.float64)
    got = replaced(WEIGHTED, aten.histogram.bin_ct, x, 10, weight=weight, **options)
    want = torch.histogram(x, 10, weight=weight, **options)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(got[1], want[1])


def test_weights_with_given_edges():
    torch.manual_seed(0)
    x, weight, edges = torch.randn(5000), torch.rand(5000), torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0])
    x[:5] = edges
    got = replaced(WEIGHTED, aten.histogram.bins_tensor, x, edges, weight=weight)
    want = torch.histogram(x.double(), edges.double(), weight=weight.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-6, atol=1e-6)


def test_the_order_of_additions_is_that_of_the_values():
    torch.manual_seed(0)
    weight = torch.rand(200)
    got = replaced(WEIGHTED, aten.histogram.bin_ct, torch.zeros(200), 1, range=[-1.0, 1.0], weight=weight)
    total = torch.zeros(())
    for value in weight:
        total = total + value
    assert torch.equal(bits(got[0][0]), bits(total))


def test_unweighted_counts_are_exact():
    assert isinstance(verdict_of(WEIGHTED, aten.histogram.bin_ct, torch.randn(5), 5), Safe)
    verdict = verdict_of(WEIGHTED, aten.histogram.bin_ct, torch.randn(5), 5, weight=torch.rand(5))
    assert verdict.treatment is Treatment.SEGMENT


def test_compiled():
    torch.manual_seed(0)
    x, scale = torch.randn(500), torch.ones(10, requires_grad=True)
    weight = torch.rand(500)
    records = compile_and_compare(
        lambda x, weight, scale: torch.histogram(x, 10, range=(-1.0, 1.0), weight=weight)[0] * scale,
        x,
        weight,
        scale,
        rtol=1e-5,
        atol=1e-5,
    )
    assert records["aten.histogram.bin_ct"] == ("segment", "weighted_histogram")


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_weighted_bincount(dtype, weight_dtype):
    torch.manual_seed(0)
    x, weight = torch.randint(0, 9, (5000,), dtype=dtype), (8 * torch.randn(5000)).to(weight_dtype)
    for minlength in (0, 4, 50):
        got = replaced(BINCOUNT, aten.bincount.default, x, weight, minlength, device="cuda")
        want = torch.bincount(x, weight.double(), minlength)
        assert got.dtype is torch.bincount(x, weight).dtype
        assert got.shape == want.shape
        rtol = 1e-6 if weight_dtype is torch.float32 else 1e-13
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=200 * rtol)


def test_the_order_of_a_bincount_is_that_of_the_values():
    torch.manual_seed(0)
    x, weight = torch.randint(0, 5, (600,)), torch.rand(600)
    want = torch.bincount(x, weight)  # on a CPU: one loop from the first value to the last
    assert torch.equal(bits(replaced(BINCOUNT, aten.bincount.default, x, weight, device="cuda")), bits(want))


def test_which_bincounts_are_left_alone():
    x, weight = torch.tensor([0, 3, 3, 1]), torch.rand(4)
    assert isinstance(verdict_of(BINCOUNT, aten.bincount.default, x, device="cuda"), Safe)
    assert isinstance(verdict_of(BINCOUNT, aten.bincount.default, x, weight, device="cpu"), Safe)
    assert isinstance(verdict_of(BINCOUNT, aten.bincount.default, x[:0], weight[:0], 4, device="cuda"), Safe)


def weighted_count(x, weight):
    return torch.bincount(x, weight.sin(), minlength=4) * 2


def uses_of_a_count(x, weight, scale):
    total = torch.bincount(x, weight, minlength=4)
    tail = torch.arange(total.shape[0], device=x.device) * total
    return (total * scale).sin(), total[x] * scale, tail.cumsum(0)


@pytest.fixture
def one_operator(monkeypatch):
    """The rules as for a GPU, each segment sum one operator: a CPU can run the result."""
    monkeypatch.setattr(segment, "assume_device", lambda device: nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_weighted_bincount_compiled(one_operator, dynamic):
    torch._dynamo.reset()
    before = len(reports())
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    compiled = torch.compile(
        uses_of_a_count, backend="detpass", options={"target": "cuda"}, fullgraph=True, dynamic=dynamic
    )
    torch.manual_seed(0)
    with captured, torch._inductor.config.patch(force_disable_caches=True):
        for length, high in ((40, 3), (40, 9), (700, 30)):
            x, weight = torch.randint(0, high, (length,)), torch.rand(length, dtype=torch.float64)
            scales = [torch.tensor(0.3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
            got, want = (f(x, weight, scale) for f, scale in zip((compiled, uses_of_a_count), scales, strict=True))
            for part, expected in zip(got, want, strict=True):
                torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)
            for outputs in (got, want):
                (outputs[0].sum() + outputs[1].sum()).backward()
            torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-12, atol=1e-12)
    records = {record.op: record.rule for report in reports()[before:] for record in report.records}
    assert records["aten.bincount.default"] == "weighted_bincount"


def test_compiled_bincounts_refuse_what_eager_refuses(one_operator):
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with captured:
        for x, weight in (
            (torch.tensor([0, -3, 3, 1]), torch.rand(4)),
            (torch.tensor([0, 3, 3, 1]), torch.rand(5)),
            (torch.tensor([[0, 3], [3, 1]]), torch.rand(2, 2)),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(weighted_count, backend="detpass", options={"target": "cuda"}, fullgraph=True)
            for function in (weighted_count, compiled):
                with pytest.raises(RuntimeError, match=r"bincount|weights should be 1-d"):
                    function(x, weight)


@pytest.mark.parametrize("target", [None, "cuda"])
def test_a_bincount_of_nothing_counts_in_integers(target):
    torch._dynamo.reset()
    options = {} if target is None else {"target": target}
    x, weight = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(weighted_count, backend="detpass", options=options, fullgraph=True)(x, weight)
    want = weighted_count(x, weight)
    assert got.dtype is want.dtype is torch.int64
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_code_for_cuda_adds_no_weights_atomically(dynamic):
    pytest.importorskip("triton", reason="triton is not installed")
    inputs = [torch.randint(0, 9, (700,)), torch.rand(700), torch.rand(1, requires_grad=True)]

    def loss(x, weight, scale):
        first, second, third = uses_of_a_count(x, weight, scale)
        return first.sum() + second.sum() + third.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        code, plain = (
            cuda_code_with(CudaSettings(backend, dynamic=dynamic, compile_kernels=False), loss, inputs)
            for backend in ("detpass", "inductor")
        )
    assert code.deterministic
    assert {call.operator for call in plain.nondeterministic_externs} == {"torch.ops.aten.bincount.default"}


def test_weighted_bincount_on_a_cpu_is_left_alone_and_ends_a_graph_otherwise():
    x, weight = torch.tensor([0, 3, 3, 1]), torch.rand(4)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(weighted_count, backend="detpass", fullgraph=True)
        assert torch.equal(compiled(x, weight), weighted_count(x, weight))
    torch._dynamo.reset()
    with pytest.warns(EscapeWarning, match="graph break"):
        assert torch.equal(torch.compile(weighted_count, backend="detpass")(x, weight), weighted_count(x, weight))
