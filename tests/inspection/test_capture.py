"""Tracing executes nothing, changes nothing, sees the graphs after breaks, and names the model's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import detpass
from detpass.errors import ConfigurationError, InspectionError
from detpass.inspection import Settings, inspect_with
from detpass.rule import Treatment
from tests.inspection import models


def test_training_graph_is_classified_with_lines_and_modules() -> None:
    report = detpass.inspect(models.Tower(depth=2), *models.tower_inputs())
    assert [graph.kind for graph in report.graphs] == ["joint"]
    found = {(record.location, record.phase, record.module) for record in report}
    assert (models.line_of("index_add"), "forward", None) in found
    assert {module for place, phase, module in found if place == models.line_of("gather")} == {"blocks.0", "blocks.1"}
    assert any(record.module == "tokens" and "embedding" in record.op for record in report)
    assert all(record.treatment is Treatment.SEGMENT for record in report)
    assert report.incomplete is None
    assert report.breaks == ()
    assert report.lowered == ()
    assert report.lowered_note is None


def test_records_carry_shapes_bytes_and_shares() -> None:
    report = detpass.inspect(models.Tower(), *models.tower_inputs())
    (record,) = (record for record in report if record.location == models.line_of("index_add"))
    assert record.inputs == ("f32[4, 8]", "i64[16]", "f32[16, 8]")
    assert record.result == "f32[4, 8]"
    assert record.dtype == "float32"
    assert record.bytes == 4 * 8 * 4 + 16 * 8 + 16 * 8 * 4 + 4 * 8 * 4
    assert record.source is not None
    assert "index_add(0, places % 4, hidden)" in record.source
    assert all(0 < item.time_share < 1 for item in report)
    assert record.before is not None
    assert [node.label for node in record.before.nodes if node.kind == "subject"] == ["index_add"]
    assert record.after is not None
    assert any(node.kind == "inserted" and node.label.startswith("detpass.") for node in record.after.nodes)


def test_inference_graph_when_nothing_requires_grad() -> None:
    with torch.no_grad():
        report = detpass.inspect(models.Tower(), *models.tower_inputs())
    assert [graph.kind for graph in report.graphs] == ["inference"]
    assert {record.phase for record in report} == {"inference"}


def test_nothing_is_executed_or_changed() -> None:
    model = models.Tower()
    bits = {name: value.clone() for name, value in model.state_dict().items()}
    held = {name: id(value) for name, value in model.named_parameters()}
    arguments = models.tower_inputs()
    random = torch.get_rng_state()
    touched: list[str] = []

    def step(ids: torch.Tensor, places: torch.Tensor) -> float:
        loss = model(ids, places) + torch.rand(3).sum()
        touched.append(type(loss).__name__)  # after the graph break below, this is a stand-in
        torch._dynamo.graph_break()
        loss.backward()
        return loss.item()

    report = detpass.inspect(step, *arguments)
    assert report.breaks
    assert {name: id(value) for name, value in model.named_parameters()} == held
    assert all(torch.equal(model.state_dict()[name], value) for name, value in bits.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert type(model.tokens.weight) is nn.Parameter
    assert any(record.location == models.line_of("gather") for record in report)


def test_graphs_after_a_break_are_seen_and_the_break_is_named(tmp_path: Path) -> None:
    def broken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        first = x[index]
        if first.sum() > 0:  # depends on data
            first = first * 2
        return torch.zeros(4).index_add(0, index, first)

    report = detpass.inspect(broken, torch.randn(4, requires_grad=True), torch.tensor([0, 0, 1, 2]))
    (found,) = report.breaks
    assert "branch" in found.reason
    assert found.source == "if first.sum() > 0:  # depends on data"
    assert len(report.graphs) == 2
    assert {"aten.index_put.default", "aten.index_add.default"} <= {record.op for record in report}
    assert any("graph break" in problem for problem in report.problems("remaining"))


def test_a_disabled_function_is_reported_not_seen() -> None:
    @torch.compiler.disable
    def hidden(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4).index_add(0, index, x)

    report = detpass.inspect(hidden, torch.randn(4), torch.tensor([0, 0, 1, 2]))
    assert len(report) == 0
    assert report.incomplete is not None or report.breaks
    assert report.problems("remaining")


def test_what_needs_data_between_graphs_ends_the_capture_and_says_where() -> None:
    def counted(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        first = x[index]
        return torch.bincount(index, first.detach()).sum() + first.sum()

    report = detpass.inspect(counted, torch.randn(4, requires_grad=True), torch.tensor([0, 0, 1, 2]))
    assert report.incomplete is not None
    assert "needs data" in report.incomplete
    assert "aten.index_put.default" in {record.op for record in report}
    assert report.problems("remaining")


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50_000_000, 256), nn.Linear(256, 256))
    report = detpass.inspect(model, torch.randint(0, 10, (8,)))
    (record,) = report.nondeterministic
    assert record.result == "f32[50000000, 256]"
    assert record.bytes > 50_000_000 * 256 * 4
    assert model[0].weight.device.type == "meta"


def test_a_compiled_model_and_a_bound_method_are_inspected_like_the_model() -> None:
    model = models.Tower(depth=1)
    expected = [str(record) for record in detpass.inspect(model, *models.tower_inputs())]
    for same in (torch.compile(model, backend="eager"), model.forward):
        assert [str(record) for record in detpass.inspect(same, *models.tower_inputs())] == expected


def test_inspecting_twice_gives_the_same_records() -> None:
    model = models.Tower(depth=1)
    first, second = (detpass.inspect(model, *models.tower_inputs()) for _ in range(2))
    assert first.records == second.records


def test_dynamic_sizes_are_named() -> None:
    def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index].sin()

    report = detpass.inspect(gather, torch.randn(6, requires_grad=True), torch.randint(0, 6, (9,)), dynamic=True)
    (record,) = report
    assert record.result.startswith("f32[s")


def test_unknown_custom_operators_are_listed() -> None:
    @torch.library.custom_op("inspection_test::strange", mutates_args=())
    def strange(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    strange.register_fake(torch.empty_like)
    report = detpass.inspect(lambda x: strange(strange(x)), torch.randn(3))
    (unknown,) = report.unknown_ops
    assert unknown.op == "inspection_test.strange.default"
    assert unknown.count == 2


def test_a_users_rule_is_used() -> None:
    @torch.library.custom_op("inspection_test::ruled", mutates_args=())
    def ruled(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    ruled.register_fake(torch.empty_like)

    class Proved(detpass.Rule):
        name = "inspection_test_proved"
        targets = (torch.ops.inspection_test.ruled.default,)

        def match(self, node: torch.fx.Node, context: detpass.RuleContext) -> detpass.Safe:
            return detpass.Safe("a copy")

        def replacement(self) -> None:
            raise AssertionError("never asked")

    detpass.register_rule(Proved())
    try:
        report = detpass.inspect(ruled, torch.randn(3))
    finally:
        detpass.unregister_rule("inspection_test_proved")
    assert report.unknown_ops == ()
    assert [record.treatment for record in report] == [Treatment.SAFE]
    assert report.nondeterministic == ()


def test_what_the_lowered_code_still_holds_is_found() -> None:
    """With no rule at all, the audit alone has to find the accumulation."""
    from detpass.inspection.analysis import Analysis
    from detpass.inspection.lowered import cpu_findings
    from detpass.rewriting.registry import RuleSet

    def accumulate(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_put([index], x[:3], accumulate=True)

    arguments = torch.randn(5), torch.tensor([0, 0, 1])
    exported = torch.export.export(_Call(accumulate), arguments).run_decompositions({})
    analysis = Analysis("cpu", RuleSet(()))
    analysis.finish(exported.graph_module, "inference")
    analysis.modules[0].graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)[0].meta.pop(
        "detpass", None
    )
    found = cpu_findings(analysis.modules)
    assert any("atomic_add" in finding.what for finding in found), found
    assert any("index_put" in op for finding in found for op in finding.ops)


class _Call(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.function(*arguments)  # type: ignore[operator]


@pytest.mark.parametrize("target", ["tpu", "cuda:x", "cpu:0", ""])
def test_unknown_targets_are_refused(target: str) -> None:
    with pytest.raises(ConfigurationError, match="expected 'cpu'"):
        detpass.inspect(nn.Linear(2, 2), torch.randn(1, 2), target=target)


def test_a_function_that_fails_names_the_error() -> None:
    with pytest.raises(InspectionError, match="could not be traced"):
        detpass.inspect(lambda x: x @ x, torch.randn(2, 3))


def test_something_else_is_refused() -> None:
    with pytest.raises(InspectionError, match="expected a function"):
        inspect_with(Settings(), 3)


def test_nested_regions_are_visited() -> None:
    def branch(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0,
            lambda x, index: torch.zeros(4).index_add(0, index, x),
            lambda x, index: torch.zeros(4),
            (x, index),
        )

    report = detpass.inspect(branch, torch.randn(4), torch.tensor([0, 0, 1, 2]))
    assert "aten.index_add.default" in {record.op for record in report}


def test_ctc_loss_is_one_graph_as_in_a_compile() -> None:
    def loss(scores: torch.Tensor, targets: torch.Tensor, long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
        return nn.functional.ctc_loss(scores.log_softmax(2), targets, long, short)

    scores = torch.randn(20, 3, 8, requires_grad=True)
    report = detpass.inspect(
        loss, scores, torch.randint(1, 8, (3, 5)), torch.tensor([20, 18, 15]), torch.tensor([5, 4, 3])
    )
    assert [graph.kind for graph in report.graphs] == ["joint"]
    assert report.breaks == ()
    assert {record.treatment for record in report} == {Treatment.NATIVE}
