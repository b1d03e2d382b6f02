"""What the engine's marks on the nodes of a rewritten graph say: what is settled, and what is unknown.

Generated code names an operator, not the node; what is said here of a name holds for each of its nodes in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from detpass import rules, user_kernels
from detpass.inspection.extern_hazards import operator_name
from detpass.rewriting.graph_pass import DECIDED, UNKNOWN

UNDECIDED = "uncovered"
"""How the engine's mark on a node starts that no rule took; also our word for a node without a mark."""


def operators(graph_module: fx.GraphModule) -> frozenset[str]:
    """The names of operators of which the engine settled every call in a graph, and left none as uncovered."""
    return _all_settled((operator_name(str(node.target)), node) for node in _calls(graph_module))


def kernels(graph_module: fx.GraphModule) -> frozenset[str]:
    """The names of users' Triton kernels of which a rule settled every launch in a graph."""
    launches = ((user_kernels.function_of(node), node) for node in _calls(graph_module))
    return _all_settled((kernel.__name__, node) for kernel, node in launches if kernel is not None)


def measured(graph_module: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Users' Triton kernels whose choice of a configuration may decide bits, settled by no rule: the name, and why."""
    for node in _calls(graph_module):
        reading = user_kernels.read(node)
        if reading is not None and reading.unlike is not None and not _is_settled(node):
            yield reading.name, reading.unlike


def _all_settled(named: Iterable[tuple[str, fx.Node]]) -> frozenset[str]:
    settled: dict[str, bool] = {}
    for name, node in named:
        settled[name] = settled.get(name, True) and _is_settled(node)
    return frozenset(name for name, all_settled in settled.items() if all_settled)


def _is_settled(node: fx.Node) -> bool:
    decided = str(node.meta.get(DECIDED, UNDECIDED))
    return decided != UNKNOWN and not decided.startswith(UNDECIDED)


def _calls(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def unknown(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of operators of other libraries of which no rule says whether they repeat."""
    for node in _calls(graph_module):
        if rules.unknown(node) and str(node.meta.get(DECIDED, UNKNOWN)) == UNKNOWN:
            yield node
