"""Histograms: eager's counts, and weights summed in the order of the values."""

from __future__ import annotations

import pytest
import torch

from detpass.errors import EscapeWarning, UncoveredError
from detpass.rule import Safe, Treatment
from detpass.rules.histogram import Histc, WeightedHistogram
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
HISTC, WEIGHTED = Histc(), WeightedHistogram()


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


def weighted_count(x, weight):
    return torch.bincount(x, weight.sin(), minlength=4) * 2


def test_weighted_bincount_for_cuda_is_refused_with_the_way_around():
    x, weight = torch.tensor([0, 3, 3, 1]), torch.rand(4)
    torch._dynamo.reset()
    compiled = torch.compile(weighted_count, backend="detpass", options={"target": "cuda"}, fullgraph=True)
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with captured, pytest.raises(UncoveredError, match="index_add"):
        compiled(x, weight)


def test_the_way_around_weighted_bincount_gives_its_result():
    torch.manual_seed(0)
    x, weight = torch.randint(0, 9, (500,)), torch.rand(500, requires_grad=True)
    records = compile_and_compare(
        lambda x, weight: torch.zeros(9, dtype=weight.dtype).index_add(0, x, weight),
        x, weight, rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    want = torch.bincount(x, weight.detach(), minlength=9)
    torch.testing.assert_close(torch.zeros(9).index_add(0, x, weight.detach()), want, rtol=1e-6, atol=1e-6)
    assert records["aten.index_add.default"] == ("segment", "index_add")


def test_weighted_bincount_on_a_cpu_is_left_alone_and_ends_a_graph_otherwise():
    x, weight = torch.tensor([0, 3, 3, 1]), torch.rand(4)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(weighted_count, backend="detpass", fullgraph=True)
        assert torch.equal(compiled(x, weight), weighted_count(x, weight))
    torch._dynamo.reset()
    with pytest.warns(EscapeWarning, match="graph break"):
        assert torch.equal(torch.compile(weighted_count, backend="detpass")(x, weight), weighted_count(x, weight))
