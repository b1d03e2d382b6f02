"""Accumulations over one index share its sort.

Runs over the rewritten graph. Before: several ``detpass.segment_reduce`` / ``segment_accumulate`` nodes with the same
``index`` node, size and wrapping. After: one ``detpass.plan`` and a ``planned_*`` node each, where the rows are wide
enough for a sorted sum to beat the scan. The bits are the same either way.

Neighbours: ``segment/ops.py`` (the operators), ``segment/strategy.py`` (the choice inside one operator).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from detpass.graph_query import tensor_of

aten = torch.ops.aten
ops = torch.ops.detpass

MIN_ROW_BYTES = 32
"""Below this width a scan without any sort is faster than a sum over rows that are sorted already (measured)."""


def share_plans(graph: fx.Graph) -> None:
    """Give accumulations of ``graph`` that share an index one plan. Changes the graph in place; no bit of a result."""
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ARGUMENTS:
            index, segments, wrap = _ARGUMENTS[node.target](node)
            groups[_identity(index), _key(segments), wrap].append(node)
    for nodes in groups.values():
        wide = [node for node in nodes if _row_bytes(node) >= MIN_ROW_BYTES]
        if len(wide) > 1:
            _share(graph, wide)


def _share(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    first = nodes[0]
    index, segments, wrap = _ARGUMENTS[first.target](first)
    with graph.inserting_before(first):
        if first.target is not ops.segment_reduce.default:
            segments = _segments_node(graph, first)
        plan = graph.call_function(ops.plan.default, (index, segments, wrap, _label(first)))
        index_value: Any = tensor_of(index)  # a FakeTensor: only that has ``fake_mode``
        assert index_value is not None
        count = segments.meta["val"] if isinstance(segments, fx.Node) else segments
        with index_value.fake_mode:
            plan.meta = {**_kept_meta(first), "val": ops.plan.default(index_value, count, wrap, "")}
        parts = [graph.call_function(operator.getitem, (plan, k)) for k in (0, 1)]
        for k, part in enumerate(parts):
            part.meta = {**_kept_meta(first), "val": plan.meta["val"][k]}
    for node in nodes:
        with graph.inserting_before(node):
            if node.target is ops.segment_reduce.default:
                new = graph.call_function(ops.planned_reduce.default, (node.args[0], *parts, _reduce(node, 3)))
            else:
                dest, _, source = node.args[:3]
                new = graph.call_function(ops.planned_accumulate.default, (dest, *parts, source, _reduce(node, 3)))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _segments_node(graph: fx.Graph, node: fx.Node) -> Any:
    dest = node.args[0]
    value = tensor_of(dest)
    assert value is not None
    size = value.shape[1]
    if isinstance(size, int):
        return size
    segments = graph.call_function(torch.ops.aten.sym_size.int, (dest, 1))
    segments.meta = {**_kept_meta(node), "val": size}
    return segments


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}


def _argument(node: fx.Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _reduce(node: fx.Node, position: int) -> Any:
    return _argument(node, position, "sum")


def _label(node: fx.Node) -> Any:
    return _argument(node, 5, "")


def _of_reduce(node: fx.Node) -> tuple[Any, Any, Any]:
    return node.args[1], node.args[2], _argument(node, 4, False)


def _of_accumulate(node: fx.Node) -> tuple[Any, Any, Any]:
    dest = tensor_of(node.args[0])
    return node.args[1], None if dest is None else dest.shape[1], _argument(node, 4, False)


def _identity(value: Any, depth: int = 6) -> Any:
    """Equal for nodes that compute the same index by the same cheap operations from the same node."""
    if isinstance(value, fx.Node):
        if depth == 0 or value.target not in _CHEAP:
            return value
        return (value.target, _identity(value.args, depth - 1), _identity(tuple(value.kwargs.items()), depth - 1))
    if isinstance(value, (list, tuple)):
        return tuple(_identity(item, depth) for item in value)
    return value


_CHEAP = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.select.int,
        aten.where.self,
        aten.eq.Scalar,
        aten.full.default,
        aten.clone.default,
        aten.sym_size.int,
        torch.ops.prims.convert_element_type.default,
        ops.linear_index.default,
    }
)
"""Pure operations that lead from an index argument to the index of an accumulation."""


def _key(segments: Any) -> str:
    return str(segments.meta["val"]) if isinstance(segments, fx.Node) else str(segments)


def _row_bytes(node: fx.Node) -> int:
    source = tensor_of(node.args[0] if node.target is ops.segment_reduce.default else node.args[2])
    if source is None or not isinstance(source.shape[2], int):
        return 0
    return source.shape[2] * source.element_size()


_ARGUMENTS: dict[Any, Callable[[fx.Node], tuple[Any, Any, Any]]] = {
    ops.segment_reduce.default: _of_reduce,
    ops.segment_accumulate.default: _of_accumulate,
}
