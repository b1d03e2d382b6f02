"""A smaller share of the same samples through the whole backend: Inductor's lowering, its code and the audit after it.

The calls of several operators make one graph, so that one compile serves them all. Dynamo is left out: its part is
tested with the backend, and it does not trace OpInfo's own wrappers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from detpass.backend import detpass, last_report
from tests.conformance.capture import values_and_gradients
from tests.conformance.comparison import difference_of_bits, difference_of_values
from tests.conformance.samples import Sample, samples_of
from tests.conformance.test_opinfo import operators

pytestmark = pytest.mark.conformance

GROUPS = {
    "indexing": ("gather", "index_add", "index_select", "take", "take_along_dim", "scatter_add"),
    "writes": ("index_copy", "index_reduce.amax", "scatter_reduce.mean", "scatter_reduce.prod", "scatter"),
    "tables": ("nn.functional.embedding", "nn.functional.embedding_bag", "cummax", "quantile"),
    "images": ("nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.interpolate.bilinear",
               "nn.functional.pad.replicate", "nn.functional.unfold", "nn.functional.max_unpool2d"),
}  # fmt: skip
"""Operators that share a graph."""

SAMPLES = 2
"""Samples of each operator: the last ones, which have the most arguments."""


def one_graph(samples: list[Sample]) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph that calls every sample's function and returns all results, as Dynamo would hand it to a backend."""
    graph, inputs, results = fx.Graph(), [], []
    for sample in samples:
        places = []
        for tensor in sample.tensors:
            inputs.append(tensor)
            places.append(graph.placeholder(f"input{len(inputs)}"))
        outputs = graph.call_function(sample.function, tuple(places))
        count = len(sample.function(*sample.tensors))
        results += [graph.call_function(_item, (outputs, number)) for number in range(count)]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph), inputs


def _item(outputs: list[Any], number: int) -> Any:
    return outputs[number]


@pytest.mark.parametrize("group", GROUPS)
def test_compiled_samples(group: str) -> None:
    samples = []
    for name in GROUPS[group]:
        found = list(samples_of(operators()[name], torch.float32))
        samples += found[-SAMPLES:]
    graph_module, inputs = one_graph(samples)
    eager = values_and_gradients(graph_module.forward, inputs)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = detpass(graph_module, inputs)
        results = [values_and_gradients(compiled, inputs) for _ in range(3)]
    report = last_report()
    assert report is not None
    assert any(str(record.treatment) in ("segment", "closed_form") for record in report)
    for again in results[1:]:
        assert difference_of_bits(results[0], again) is None
    assert difference_of_values(results[0], eager, torch.float32) is None
