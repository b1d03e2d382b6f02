"""Classifies captured graphs and rewrites them with the compile's own engine, keeping what a person wants to see.

One :class:`Analysis` serves one inspection: :meth:`Analysis.visit` where detpass would rewrite a graph,
:meth:`Analysis.finish` once for each whole graph. Neighbours: ``capture.py`` and ``inputs/`` bring the graphs,
``lowered.py`` reads what Inductor makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from detpass import rules, segment, user_kernels
from detpass.config import Options
from detpass.graph_query import source_location, trace_location
from detpass.inspection.locations import module_path, source_line
from detpass.inspection.pictures import Snapshot, replacements
from detpass.inspection.records import GraphSummary, InspectionRecord, TritonKernel, UnknownOp
from detpass.rewriting.graph_pass import REPLACES, Rewriter
from detpass.rewriting.registry import RuleSet
from detpass.rewriting.report import Record, Report
from detpass.rule import Treatment
from detpass.rules.catalogue import entries

CUDA_COUNTERPARTS: Mapping[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    ),
}
"""Kernels that torch takes on the CPU alone, and what is called in their place on CUDA."""


@dataclass
class Analysis:
    """What is found while graphs are visited."""

    device_type: str
    """``"cpu"`` or ``"cuda"``: the device whose code is inspected."""
    rule_set: RuleSet
    """The rules, in order."""
    capability: int = user_kernels.CAPABILITY
    """The GPU's, for reading Triton kernels where there is none."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Paths of the model's modules by the key that FX uses."""
    progress: Callable[[str], None] = lambda _: None
    """Told in words what happens."""
    records: list[InspectionRecord] = field(default_factory=list)
    graphs: list[GraphSummary] = field(default_factory=list)
    modules: list[fx.GraphModule] = field(default_factory=list)
    """The whole graphs after the rewrite."""
    unknown: dict[str, UnknownOp] = field(default_factory=dict)
    kernels: dict[tuple[str, str | None], TritonKernel] = field(default_factory=dict)
    """Users' Triton kernels by name and place of the launch."""
    _seconds: float = 0.0
    _visited: list[fx.Graph] = field(default_factory=list)
    _sizes: list[tuple[int, int, int]] = field(default_factory=list)

    def visit(self, graph: fx.Graph) -> None:
        """Classify every node of ``graph`` and rewrite it in place."""
        again = any(graph is seen for seen in self._visited)
        self.progress(f"classifying {len(graph.nodes)} nodes")
        before = Snapshot.of(graph, self.device_type)
        self._note_kernels(graph)
        self._note_attention(graph, before)
        hazardous = self._hazardous(graph)
        report = Report()
        self._rewriter().rewrite(graph, report)
        self._note_unknown(report)
        if not report.records and again:
            return
        after = Snapshot.of(graph, self.device_type) if report.records else before
        inserted = replacements(after)
        number = len(self.graphs)
        for record in report.records:
            repeats = record.treatment is Treatment.SAFE or hazardous.get(record.node) is False
            places = inserted.get(record.node, [])
            self.records.append(self._describe(record, before, after, places, number, repeats))
        self._seconds += sum(node.seconds for node in before.nodes.values())
        moved = sum(node.moved for node in before.nodes.values())
        self._visited.append(graph)
        self._sizes.append((before.operators(), after.operators(), moved))

    def finish(self, graph_module: fx.GraphModule, kind: str) -> None:
        """Close a whole graph: visit what its passes did not reach (bodies of nested regions) and sum it up."""
        for module in graph_module.modules():
            if isinstance(module, fx.GraphModule) and not any(module.graph is seen for seen in self._visited):
                self.visit(module.graph)
        operators, operators_after = (sum(row[i] for row in self._sizes) for i in (0, 1))
        self.graphs.append(
            GraphSummary(len(self.graphs), kind, operators, operators_after, sum(r[2] for r in self._sizes))
        )
        self._visited.clear()
        self._sizes.clear()
        graph_module.recompile()
        self.modules.append(graph_module)

    def finished_records(self) -> tuple[InspectionRecord, ...]:
        """All records, with their share of the whole estimated time."""
        total = self._seconds or 1.0
        return tuple(replace(record, time_share=min(1.0, record.time_share / total)) for record in self.records)

    def _rewriter(self) -> Rewriter:
        options = Options(on_uncovered="ignore", target=self.device_type)
        return Rewriter(self.rule_set, rules.hazard, options, segment.assume_device, rules.FINISHERS, rules.unknown)

    def _describe(
        self, record: Record, before: Snapshot, after: Snapshot, inserted: list[str], number: int, repeats: bool
    ) -> InspectionRecord:
        node = before.nodes[record.node]
        location = trace_location(node.meta.get("stack_trace"))
        return InspectionRecord(
            op=record.op,
            node=record.node,
            graph=number,
            device=record.device,
            treatment=record.treatment,
            rule=record.rule,
            reason=record.reason,
            phase=record.phase,
            inputs=tuple(before.nodes[name].detail for name in node.inputs),
            result=node.detail,
            dtype=record.dtype,
            location=location,
            source=source_line(location),
            module=module_path(node.meta, self.module_names),
            bytes=node.moved,
            time_share=node.seconds,
            repeats=repeats,
            before=before.around([record.node], "subject"),
            after=after.around(inserted, "inserted") if inserted else None,
        )

    def _note_attention(self, graph: fx.Graph, before: Snapshot) -> None:
        """Record what was traced as a kernel of the CPU alone and is nondeterministic on CUDA."""
        if self.device_type != "cuda":
            return
        for node in graph.nodes:
            there = CUDA_COUNTERPARTS.get(node.target) if node.op == "call_function" else None
            if there is None:
                continue
            rules_for = self.rule_set.for_target(there)
            record = Record(
                op=str(there),
                node=node.name,
                treatment=Treatment.NATIVE if rules_for else Treatment.UNCOVERED,
                rule=rules_for[0].name if rules_for else None,
                reason="on CUDA the fused attention's backward adds the gradient of the query by atomics; here it was "
                "traced as the CPU's kernel",
                location=None,
                phase="backward",
                device="cuda",
                dtype=None,
                shape=None,
            )
            self.records.append(self._describe(record, before, before, [], len(self.graphs), False))

    def _hazardous(self, graph: fx.Graph) -> dict[str, bool]:
        """Whether the catalogue names a node as nondeterministic on the device, for the operators that it lists.

        A rule may rewrite a node that repeats on this device: for the same bits on another, or for eager's errors.
        """
        device = torch.device(self.device_type)
        return {
            node.name: rules.hazard(node, device) is not None
            for node in graph.nodes
            if node.op == "call_function" and str(node.target) in listed_ops()
        }

    def _note_kernels(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            reading = user_kernels.read(node, self.capability) if node.op == "call_function" else None
            if reading is not None and REPLACES not in node.meta:
                place = source_location(node)
                kernel = TritonKernel(reading.name, reading.ordered, place, reading.unread, reading.unlike)
                self.kernels.setdefault((reading.name, place), kernel)

    def _note_unknown(self, report: Report) -> None:
        for unknown in report.unknown:
            old = self.unknown.get(unknown.op)
            self.unknown[unknown.op] = unknown if old is None else replace(old, count=old.count + unknown.count)


@functools.cache
def listed_ops() -> frozenset[str]:
    """The operators, as graphs name them, of which the catalogue speaks."""
    return frozenset(op for entry in entries() for op in entry.ops)


def names_of(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Paths of submodules by the key that FX keeps for them; the first module's names win."""
    found: dict[str, str] = {}
    for module in modules:
        for name, submodule in module.named_modules():
            found.setdefault(str(id(submodule)), name)
    return found


def whole_graph(analysis: Analysis, graph_module: fx.GraphModule) -> None:
    """Visit and finish a graph that was not captured here but loaded."""
    analysis.visit(graph_module.graph)
    analysis.finish(graph_module, kind_of(graph_module.graph))


def kind_of(graph: fx.Graph) -> str:
    """``"joint"``, ``"backward"`` or ``"inference"``, by the names that AOTAutograd gives to a graph's inputs."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    tangents, primals = any("tangents" in n for n in names), any("primals" in n for n in names)
    if not tangents:
        return "forward" if primals else "inference"
    if not primals:
        return "backward"
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(parent in reached for parent in node.all_input_nodes):
            reached.add(node)
    (results,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    leaves = [r for r in (results if isinstance(results, (list, tuple)) else [results]) if isinstance(r, fx.Node)]
    return "backward" if all(leaf in reached for leaf in leaves) else "joint"
