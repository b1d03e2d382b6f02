"""A user's rule: it is applied, scoped, ordered before the built-in ones, and refused when it breaks its contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import detpass
from detpass import Match, NoMatch, Rule, RuleContext, RuleError, Safe, segment
from detpass.backend import detpass as backend
from detpass.backend import last_report
from detpass.rule import Inapplicable, Verdict

aten = torch.ops.aten


def w() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


INDEX = torch.tensor([1, 1, 3, 1, 7])


class Doubling(Rule):
    """Replaces sin by a visible other value."""

    name = "doubling"
    targets = (aten.sin.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Match(operands=(node.args[0],), reason="for the test")

    def replacement(self, x: Tensor) -> Tensor:
        return x * 2


class WrongShape(Doubling):
    name = "wrong_shape"

    def replacement(self, x: Tensor) -> Tensor:
        return x[:1]


class WrongDtype(Doubling):
    name = "wrong_dtype"

    def replacement(self, x: Tensor) -> Tensor:
        return x.double()


class TwoResults(Doubling):
    name = "two_results"

    def replacement(self, x: Tensor) -> Any:
        return x, x


class Unfinished(Doubling):
    name = "unfinished"

    def replacement(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[0]) // 2
        return x.index_put((index,), x, accumulate=True)


class Failing(Doubling):
    name = "failing"

    def replacement(self, x: Tensor) -> Tensor:
        return x @ x


class ReadsData(Doubling):
    name = "reads_data"

    def replacement(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Declining(Doubling):
    name = "declining"

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return NoMatch(Inapplicable.DTYPE, node, "not today")


class Trusting(Rule):
    """Declares index_put safe: comes before the built-in rule."""

    name = "trusting"
    targets = (aten.index_put.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Safe("the caller promises unique indices")

    def replacement(self, *operands: Any) -> Any:
        raise AssertionError("a safe node has no replacement")


class MatchReadsData(Doubling):
    name = "match_reads_data"

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Safe("positive") if node.meta["val"].sum().item() > 0 else super().match(node, context)


class MatchFails(Doubling):
    name = "match_fails"

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Safe(node.meta["no such key"])


class NoVerdict(Doubling):
    name = "no_verdict"

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return None  # type: ignore[return-value]  # what a forgotten return gives


def compiled(*rules: Rule, function: Callable[[Tensor], Tensor] = torch.sin) -> Callable[[Tensor], Tensor]:
    result: Callable[[Tensor], Tensor] = torch.compile(
        lambda x: function(x), backend=backend, fullgraph=True, options={"rules": rules}
    )
    return result


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = detpass.registered_rules()
    yield
    for rule in detpass.registered_rules():
        if rule not in before:
            detpass.unregister_rule(rule.name)


def test_a_rule_of_one_compile() -> None:
    x = w().detach()
    assert torch.equal(compiled(Doubling())(x), x * 2)
    assert torch.equal(compiled()(x), torch.compile(torch.sin)(x)), "the next compile does not have it"


def test_a_registered_rule(clean_registry: None) -> None:
    x = w().detach()
    detpass.register_rule(Doubling())
    assert torch.equal(compiled()(x), x * 2)
    report = last_report()
    assert report is not None
    assert [r.rule for r in report] == ["doubling"]
    detpass.unregister_rule("doubling")
    torch._dynamo.reset()
    assert torch.equal(compiled()(x), torch.compile(torch.sin)(x))


def test_a_users_rule_comes_before_the_built_in_ones() -> None:
    compiled(Trusting(), function=lambda x: x[INDEX])(w()).sum().backward()
    report = last_report()
    assert report is not None
    assert [(r.rule, r.reason) for r in report] == [("trusting", "the caller promises unique indices")]


def test_advice_is_given_once_a_line_from_a_cache_too(tmp_path: Path) -> None:
    """A warm start does not run the rule: the advice is read back with the report."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, Path(__file__).with_name("advice_worker.py")],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]
    for found, cached in zip(runs, ("False", "True"), strict=True):
        place = r"at .*advice_worker.py:\d+: twice. Remedy: divide by two."
        assert found[0] == cached
        assert len(found) == 2, "the second graph with the line does not say it again"
        assert re.fullmatch(f"ReplacementWarning {place}", found[1])


def test_a_declining_rule_leaves_the_node() -> None:
    x = w().detach()
    assert torch.equal(compiled(Declining())(x), torch.compile(torch.sin)(x))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (WrongShape(), r"'wrong_shape'.*shape \(1, 4\), the node has \(8, 4\)"),
        (WrongDtype(), r"'wrong_dtype'.*dtype torch.float64, the node has torch.float32"),
        (TwoResults(), r"'two_results'.*expected a tensor"),
        (Unfinished(), r"'unfinished'.*leaves a nondeterministic aten.index_put.default.*Match.leaves"),
        (Failing(), r"(?s)'failing'.*failed: RuntimeError"),
        (ReadsData(), r"(?s)'reads_data'.*failed"),
        (MatchReadsData(), r"(?s)the match of rule 'match_reads_data'.*failed: (DataDependent|GuardOnDataDependent)"),
        (MatchFails(), r"the match of rule 'match_fails'.*failed: KeyError: 'no such key'"),
        (NoVerdict(), r"the match of rule 'no_verdict'.*it returned None, expected Match, Safe or NoMatch"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_broken_rule_is_refused_with_its_name_and_the_line(rule: Rule, message: str) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        compiled(rule)(w().detach())
    assert "test_rules_of_users.py:" in str(caught.value), "the model's line is named"


def test_a_duplicate_name_is_refused(clean_registry: None) -> None:
    detpass.register_rule(Doubling())
    with pytest.raises(RuleError, match="'doubling' is registered already; unregister_rule"):
        detpass.register_rule(Doubling())
    with pytest.raises(RuleError, match="two rules are named 'doubling'"):
        compiled(Doubling())(w().detach())


def test_the_name_of_a_built_in_rule_is_taken() -> None:
    class Taken(Doubling):
        name = "index_add"

    with pytest.raises(RuleError, match="two rules are named 'index_add'"):
        compiled(Taken())(w().detach())


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Doubling, "pass an instance, not the class"),
        (3, "expected an instance of detpass.Rule, found 3"),
    ],
)
def test_what_is_no_rule_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        detpass.register_rule(thing)


def test_an_unknown_name_cannot_be_unregistered() -> None:
    with pytest.raises(RuleError, match="no rule named 'nobody' is registered"):
        detpass.unregister_rule("nobody")


def test_twice_is_once() -> None:
    """The pass meets some graphs again; a second run changes nothing."""
    from detpass import rules
    from detpass.config import Options
    from detpass.rewriting.graph_pass import Rewriter
    from detpass.rewriting.registry import RuleSet
    from detpass.rewriting.report import Report

    counts = []

    def twice(graph: fx.Graph) -> None:
        rewriter = Rewriter(
            RuleSet(rules.BUILTIN_RULES), rules.hazard, Options(), segment.assume_device, rules.FINISHERS
        )
        for _ in range(2):
            report = Report()
            counts.append((rewriter.rewrite(graph, report), len(report)))

    function = lambda x: x[INDEX].sin()  # noqa: E731
    torch.compile(function, backend="inductor", options={"joint_custom_post_pass": twice})(w()).sum().backward()
    assert counts == [(1, 1), (0, 0)]


class PlacesFromOne(Rule):
    """A replacement that finds its size from data again."""

    name = "places_from_one"
    targets = (aten.nonzero.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Match(operands=(node.args[0],), reason="for the test")

    def replacement(self, x: Tensor) -> Tensor:
        return torch.masked_select(torch.arange(x.shape[0]), x != 0).unsqueeze(1) + 1


class PlacesOfAll(PlacesFromOne):
    name = "places_of_all"

    def replacement(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], 1, dtype=torch.int64)


def places(x: Tensor) -> Tensor:
    found = x.nonzero()
    return torch.cat([found, x.new_full((found.shape[0], 1), 5, dtype=torch.int64)], 1)


def test_a_size_found_from_data_keeps_the_name_that_its_users_know() -> None:
    x = torch.tensor([0.0, 3.0, 4.0, 0.0, 5.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = compiled(PlacesFromOne(), function=places)(x)
        assert torch.equal(got, places(x) + torch.tensor([1, 0]))
        torch._dynamo.reset()
        with pytest.raises(RuleError, match=r"has the size 5, the node finds that size from data"):
            compiled(PlacesOfAll(), function=places)(x)
