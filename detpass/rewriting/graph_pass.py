"""The pass over a joint graph: each nondeterministic node gets its deterministic form, is proved safe or refused.

Runs as Inductor's ``joint_custom_post_pass``: after Inductor's own joint patterns, so that attention is fused and an
index from ``randperm`` is known to be unique before anything is rewritten, and before the graph is partitioned.

Assumes a functional ATen graph with fake tensors in ``meta["val"]``. Afterwards every node that a rule or the
catalogue names is deterministic on its device, or has been reported under the policy for uncovered nodes. Running it
again changes nothing: a node that was decided carries ``meta[DECIDED]``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from detpass import _torch_private
from detpass.config import Options, target_device
from detpass.errors import RuleError
from detpass.graph_query import result_key, source_location
from detpass.rewriting.registry import RuleSet
from detpass.rewriting.report import Record, Report
from detpass.rewriting.verification import check_result, handle_uncovered, handle_unfinished
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment

log = logging.getLogger(__name__)

DECIDED = "detpass"
"""Key of ``node.meta`` that holds the reason why a nondeterministic-looking node is left in place."""

REPLACES = "detpass_replaces"
"""Key of ``node.meta`` that holds the name of the node in whose place a node was inserted."""

UNKNOWN = "unknown"
"""The reason under :data:`DECIDED` of an operator of another library of which no rule says whether it repeats."""

UNBACKED = "unbacked_bindings"
"""Key of ``node.meta`` under which torch keeps the sizes that a node computes from data."""

COPIED_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag", "recompute",
               "ac_graph_id", "custom", "autograd_backward")  # fmt: skip
"""Metadata that replacement nodes inherit: the partitioner, checkpointing and error messages read it."""

Hazard = Callable[[fx.Node, torch.device], "str | None"]
"""Says why a node is nondeterministic on a device, or None when the catalogue does not list it."""


def _never(node: fx.Node) -> bool:
    return False


@dataclass(frozen=True)
class Rewriter:
    """The rules, the catalogue and the policies of one compile, applied to any number of graphs."""

    rules: RuleSet
    hazard: Hazard
    options: Options
    scope: Callable[[torch.device], AbstractContextManager[object]] = nullcontext
    """Entered around the tracing of a replacement with the device that code is generated for."""
    finish: tuple[Callable[[fx.Graph], None], ...] = ()
    """Functions over the rewritten graph, run last (sharing of common subexpressions among replacements)."""
    unknown: Callable[[fx.Node], bool] = _never
    """Whether nobody can say of a node, which no rule took and no hazard names, that it repeats."""

    def rewrite(self, graph: fx.Graph, report: Report) -> int:
        """Rewrite ``graph`` in place, append a record a node to ``report`` and return the number of nodes replaced.

        Its nodes are put in order first: the patterns before may have left an argument behind its reader.
        """
        _torch_private.order_nodes(graph)
        backward = _backward_nodes(graph)
        phase_of = _phase_namer(graph, backward)
        replaced = 0
        for node in list(graph.nodes):
            if node.op != "call_function" or DECIDED in node.meta:
                continue
            replaced += self._visit(graph, node, phase_of(node), report)
        if replaced:
            for finish in self.finish:
                finish(graph)
            graph.lint()
        return replaced

    def _visit(self, graph: fx.Graph, node: fx.Node, phase: str, report: Report) -> int:
        device = _device_of(node)
        if device is None:
            return 0
        context = RuleContext(device=target_device(self.options, device))
        refusals: list[NoMatch] = []
        for rule in self.rules.for_node(node):
            verdict = _ask(rule, node, context)
            if isinstance(verdict, NoMatch):
                log.debug("%s does not apply to %s: %s %s", rule.name, node.name, verdict.why.value, verdict.detail)
                refusals.append(verdict)
                continue
            record = _record(node, phase, context.device, rule, verdict)
            report.records.append(record)
            log.info("%s", record)
            if isinstance(verdict, Safe):
                node.meta[DECIDED] = verdict.reason
                return 0
            self._replace(graph, node, rule, verdict, context)
            return 1
        why = self.hazard(node, context.device)
        if why is not None:
            refused = "; ".join(f"{r.why.value}: {r.detail}" for r in refusals)
            record = _record(
                node, phase, context.device, None, None, reason=f"{why}{f' ({refused})' if refused else ''}"
            )
            report.records.append(record)
            handle_uncovered(record, self.options)
            node.meta[DECIDED] = f"uncovered, {self.options.on_uncovered}"
        elif self.unknown(node):
            report.note_unknown(str(node.target), source_location(node))
            node.meta[DECIDED] = UNKNOWN
        return 0

    def _replace(self, graph: fx.Graph, node: fx.Node, rule: Rule, match: Match, context: RuleContext) -> None:
        with self.scope(context.device):
            subgraph, leaves = _trace_replacement(rule, match, node)
        with graph.inserting_before(node):
            result = _inline(graph, node, subgraph, leaves)
        for inserted in result.inserted:
            self._check_inserted(inserted, node, rule, match, context)
        check_result(node, result.output, rule)
        _reconnect(graph, node, result.output)

    def _check_inserted(self, inserted: fx.Node, node: fx.Node, rule: Rule, match: Match, context: RuleContext) -> None:
        if inserted.target in match.leaves:
            inserted.meta[DECIDED] = match.leaves[inserted.target]
            return
        for other in self.rules.for_node(inserted):
            verdict = _ask(other, inserted, context)
            if isinstance(verdict, Safe):
                inserted.meta[DECIDED] = verdict.reason
                return
            if isinstance(verdict, Match):
                handle_unfinished(node, rule, inserted)
        if self.hazard(inserted, context.device) is not None:
            handle_unfinished(node, rule, inserted)


RULE_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a rule that breaks its contract may raise. torch's errors for reading data are among them: passed on, they would
make Dynamo run the model eagerly."""


def _failed(rule: Rule, node: fx.Node, part: str, error: Exception) -> RuleError:
    place = source_location(node)
    first = str(error).partition("\n")[0]
    return RuleError(
        f"the {part} of rule {rule.name!r} for {node.target}{f' at {place}' if place else ''} failed: "
        f"{type(error).__name__}: {first}. A rule decides by the node and its metadata: tensors have no values yet."
    )


def _ask(rule: Rule, node: fx.Node, context: RuleContext) -> Match | Safe | NoMatch:
    try:
        verdict = rule.match(node, context)
    except RULE_FAILURES as error:
        raise _failed(rule, node, "match", error) from error
    if not isinstance(verdict, Match | Safe | NoMatch):
        raise _failed(rule, node, "match", TypeError(f"it returned {verdict!r}, expected Match, Safe or NoMatch"))
    return verdict


@dataclass(frozen=True)
class _Inlined:
    inserted: list[fx.Node]
    output: Any


def _trace_replacement(rule: Rule, match: Match, node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Trace the replacement over the operands' fake values: the graph and the nodes its placeholders stand for."""
    leaves: list[fx.Node] = []

    def collect(operand: Any) -> Any:
        if isinstance(operand, fx.Node):
            if operand not in leaves:
                leaves.append(operand)
            return _Slot(leaves.index(operand))
        if isinstance(operand, (list, tuple)):
            return type(operand)(collect(item) for item in operand)
        return operand

    spec = [collect(operand) for operand in match.operands]

    def function(*values: Any) -> Any:
        def fill(item: Any) -> Any:
            if isinstance(item, _Slot):
                return values[item.position]
            if isinstance(item, (list, tuple)):
                return type(item)(fill(i) for i in item)
            return item

        return rule.replacement(*(fill(item) for item in spec), **match.parameters)

    examples = [leaf.meta["val"] for leaf in leaves]
    fake_mode = _torch_private.fake_mode_of(node.graph)
    try:
        with fake_mode:
            subgraph = _torch_private.trace_subgraph(function, examples)
    except RULE_FAILURES as error:
        raise _failed(rule, node, "replacement", error) from error
    return subgraph, leaves


@dataclass(frozen=True)
class _Slot:
    position: int


def _inline(graph: fx.Graph, node: fx.Node, subgraph: fx.GraphModule, leaves: list[fx.Node]) -> _Inlined:
    env: dict[fx.Node, Any] = {}
    sources = iter(leaves)
    inserted: list[fx.Node] = []
    root = graph.owning_module
    for inner in subgraph.graph.nodes:
        if inner.op == "placeholder":
            env[inner] = next(sources)
        elif inner.op == "output":
            output = fx.node.map_arg(inner.args[0], lambda n: env[n])
            return _Inlined(inserted, output)
        elif inner.op == "get_attr":
            env[inner] = _copy_attribute(graph, root, subgraph, inner)
            _inherit(env[inner], node, inner)
        else:
            new = graph.node_copy(inner, lambda n: env[n])
            _inherit(new, node, inner)
            env[inner] = new
            inserted.append(new)
    raise AssertionError("an FX graph always ends in an output node")


def _copy_attribute(graph: fx.Graph, root: Any, subgraph: fx.GraphModule, inner: fx.Node) -> fx.Node:
    """A constant of the replacement becomes a constant of the graph under a fresh name."""
    value = getattr(subgraph, str(inner.target))
    number = 0
    while hasattr(root, f"_detpass_constant{number}"):
        if getattr(root, f"_detpass_constant{number}") is value:
            break
        number += 1
    name = f"_detpass_constant{number}"
    if isinstance(value, torch.nn.Module):  # the body of a higher-order operator
        root.add_module(name, value)
    else:
        root.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)


def _inherit(new: fx.Node, node: fx.Node, inner: fx.Node) -> None:
    kept: dict[str, Any] = {key: inner.meta[key] for key in ("val", "tensor_meta", UNBACKED) if key in inner.meta}
    new.meta = {**{key: node.meta[key] for key in COPIED_META if key in node.meta}, **kept, REPLACES: node.name}


def _reconnect(graph: fx.Graph, node: fx.Node, output: Any) -> None:
    if isinstance(output, (list, tuple, Mapping)):
        for user in list(node.users):
            _reconnect(graph, user, output[result_key(user)])
    else:
        node.replace_all_uses_with(output)
    graph.erase_node(node)


def _device_of(node: fx.Node) -> torch.device | None:
    for candidate in (node, *node.all_input_nodes):
        value = candidate.meta.get("val")
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, torch.Tensor):
                return leaf.device
    return None


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                found.add(node)
        elif any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def _phase_namer(graph: fx.Graph, backward: set[fx.Node]) -> Callable[[fx.Node], str]:
    joint = any(node.op == "placeholder" for node in backward)
    return lambda node: ("backward" if node in backward else "forward") if joint else "inference"


def _record(
    node: fx.Node, phase: str, device: torch.device, rule: Rule | None, verdict: Match | Safe | None, reason: str = ""
) -> Record:
    value = node.meta.get("val")
    tensor = value if isinstance(value, torch.Tensor) else None
    if isinstance(verdict, Match):
        treatment, reason = verdict.treatment, verdict.reason
    elif isinstance(verdict, Safe):
        treatment, reason = Treatment.SAFE, verdict.reason
    else:
        treatment = Treatment.UNCOVERED
    return Record(
        op=str(node.target),
        node=node.name,
        treatment=treatment,
        rule=None if rule is None else rule.name,
        reason=reason,
        location=source_location(node),
        phase=phase,
        device=device.type,
        dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        shape=None if tensor is None else tuple(map(str, tensor.shape)),
        module=_module_path(node.meta),
        advice=verdict.advice if isinstance(verdict, Match) else "",
    )


def _module_path(meta: Mapping[str, Any]) -> str | None:
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path = list(stack.values())[-1][0]
    for prefix in ("L['self'].", "L['self']", "self."):
        path = path.removeprefix(prefix)
    return path or None


__all__ = ["DECIDED", "REPLACES", "Hazard", "Inapplicable", "Rewriter"]
