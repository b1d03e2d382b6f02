"""Index maps that never name one place twice, read off the graph that computes them.

A gather whose index comes from ``arange``, ``randperm``, ``sort`` or ``topk`` has a backward that adds nothing twice:
no sort is needed, a plain store is enough. The proof is structural: :func:`index_map` follows the nodes from an index
back to its source; :func:`distinct` joins the maps of several index tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from detpass.graph_query import argument, list_argument, tensor_of

aten = torch.ops.aten
prims = torch.ops.prims

UNBOUNDED = None


@dataclass(frozen=True)
class IndexMap:
    """What is known of an integer tensor as a function of its coordinates.

    Two elements that agree on the coordinates ``given`` and have equal values agree on the coordinates ``dims``.
    """

    dims: frozenset[int]
    """Coordinates that the value tells apart."""
    given: frozenset[int]
    """Coordinates that must agree beforehand."""
    low: int | None
    """A lower bound of the values, or None."""
    high: int | None
    """An upper bound of the values, or None."""
    step: int
    """Two different values differ by at least this much."""
    source: str
    """Where the values come from, for the report."""


def distinct(indices: Sequence[fx.Node], shape: Sequence[Any]) -> str | None:
    """Why the tuples read from ``indices``, broadcast to ``shape``, are all different places; None when unproved.

    Negative values wrap, so each map that the proof uses must be known to keep one sign.
    """
    maps = [m for node in indices if (m := _broadcast(index_map(node), node, shape)) is not None]
    maps = [m for m in maps if (m.low is not None and m.low >= 0) or (m.high is not None and m.high < 0)]
    needed = {d for d, size in enumerate(shape) if not (isinstance(size, int) and size == 1)}
    covered: set[int] = set(range(len(shape))) - needed
    sources: list[str] = []
    progress = True
    while progress:
        progress = False
        for m in maps:
            if m.given <= covered and not m.dims <= covered:
                covered |= m.dims
                sources.append(m.source)
                progress = True
    if needed <= covered:
        return f"the index is unique ({', '.join(dict.fromkeys(sources))})" if sources else "a single place is written"
    return None


def index_map(node: Any) -> IndexMap | None:
    """What the graph tells about the integer tensor ``node``, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    handler = _HANDLERS.get(node.target)
    if handler is None:
        return None
    return handler(node)


def _broadcast(m: IndexMap | None, node: fx.Node, shape: Sequence[Any]) -> IndexMap | None:
    """The map of ``node`` expanded to ``shape``: along a dimension that is repeated it tells nothing apart."""
    value = tensor_of(node)
    if m is None or value is None:
        return None
    lead = len(shape) - value.dim()
    kept = frozenset(d for d in m.dims if value.dim() and str(value.shape[d]) == str(shape[d + lead]))
    return _shift(replace(m, dims=kept), lead)


def _shift(m: IndexMap, by: int) -> IndexMap:
    return replace(m, dims=frozenset(d + by for d in m.dims), given=frozenset(d + by for d in m.given))


def _iota(node: fx.Node) -> IndexMap | None:
    length, start, step = (argument(node, name) for name in ("length", "start", "step"))
    if not isinstance(start, int) or not isinstance(step, int) or step == 0:
        return None
    low: int | None
    high: int | None
    if isinstance(length, int):
        ends = (start, start + step * max(length - 1, 0))
        low, high = min(ends), max(ends)
    else:
        low, high = (start, UNBOUNDED) if step > 0 else (UNBOUNDED, start)
    return IndexMap(frozenset({0}), frozenset(), low, high, abs(step), "arange")


def _permutation(name: str) -> Callable[[fx.Node], IndexMap | None]:
    def handler(node: fx.Node) -> IndexMap | None:
        length = argument(node, "n")
        high = length - 1 if isinstance(length, int) else UNBOUNDED
        return IndexMap(frozenset({0}), frozenset(), 0, high, 1, name)

    return handler


def _getitem(node: fx.Node) -> IndexMap | None:
    parent, position = node.args
    if not isinstance(parent, fx.Node) or position != 1 or parent.target not in _SELECTIONS:
        return None
    return _along(parent, node, _SELECTIONS[parent.target])


def _argsort(node: fx.Node) -> IndexMap | None:
    return _along(node, node, "argsort")


def _along(call: fx.Node, result: fx.Node, source: str) -> IndexMap | None:
    value = tensor_of(result)
    if value is None:
        return None
    rank = max(value.dim(), 1)
    dim = argument(call, "dim") % rank
    others = frozenset(range(rank)) - {dim}
    return IndexMap(frozenset({dim}), others, 0, UNBOUNDED, 1, source)


def _same(node: fx.Node) -> IndexMap | None:
    return index_map(node.args[0])


def _convert(node: fx.Node) -> IndexMap | None:
    value = tensor_of(node)
    if value is None or value.dtype not in (torch.int64, torch.int32):
        return None
    return index_map(node.args[0])


def _view(node: fx.Node) -> IndexMap | None:
    m = index_map(node.args[0])
    old, new = tensor_of(node.args[0]), tensor_of(node)
    if m is None or old is None or new is None:
        return None
    if m.given or not _covers(m.dims, old.shape):
        return None
    return replace(m, dims=frozenset(range(new.dim())))


def _covers(dims: frozenset[int], shape: Sequence[Any]) -> bool:
    return all(d in dims or (isinstance(size, int) and size == 1) for d, size in enumerate(shape))


def _unsqueeze(node: fx.Node) -> IndexMap | None:
    m = index_map(node.args[0])
    new = tensor_of(node)
    if m is None or new is None:
        return None
    at = argument(node, "dim") % new.dim()
    return _renumber(m, lambda d: d + (d >= at))


def _permute(node: fx.Node) -> IndexMap | None:
    m = index_map(node.args[0])
    if m is None:
        return None
    dims = list_argument(node, "dims")
    order = [d % len(dims) for d in dims]
    return _renumber(m, order.index)


def _expand(node: fx.Node) -> IndexMap | None:
    new = tensor_of(node)
    if new is None or not isinstance(node.args[0], fx.Node):
        return None
    return _broadcast(index_map(node.args[0]), node.args[0], new.shape)


def _renumber(m: IndexMap, number: Callable[[int], int]) -> IndexMap:
    return replace(m, dims=frozenset(map(number, m.dims)), given=frozenset(map(number, m.given)))


def _scaled(node: fx.Node) -> IndexMap | None:
    m, factor = index_map(node.args[0]), node.args[1]
    if m is None or not isinstance(factor, int) or isinstance(factor, bool) or factor == 0:
        return None
    ends = [None if bound is None else bound * factor for bound in (m.low, m.high)]
    low, high = ends if factor > 0 else ends[::-1]
    return replace(m, low=low, high=high, step=m.step * abs(factor))


def _shifted(sign: int) -> Callable[[fx.Node], IndexMap | None]:
    def handler(node: fx.Node) -> IndexMap | None:
        if argument(node, "alpha") != 1:
            return None
        left, right = node.args[0], node.args[1]
        if isinstance(right, int) and not isinstance(right, bool):
            return _offset(index_map(left), sign * right)
        if sign != 1:
            return None
        return _sum(node, left, right)

    return handler


def _offset(m: IndexMap | None, by: int) -> IndexMap | None:
    if m is None:
        return None
    low, high = (None if bound is None else bound + by for bound in (m.low, m.high))
    return replace(m, low=low, high=high)


def _sum(node: fx.Node, left: Any, right: Any) -> IndexMap | None:
    """``a + b`` tells apart what both tell apart when ``a`` moves in steps wider than the range of ``b``."""
    total = tensor_of(node)
    if total is None or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    pair = [_broadcast(index_map(n), n, total.shape) for n in (left, right)]
    for coarse, fine in (pair, pair[::-1]):
        if coarse is None or fine is None or fine.low is None or fine.high is None or coarse.given or fine.given:
            continue
        if coarse.step > fine.high - fine.low:
            high = None if coarse.high is None else coarse.high + fine.high
            low = None if coarse.low is None else coarse.low + fine.low
            step = min(fine.step, coarse.step - (fine.high - fine.low))
            return IndexMap(coarse.dims | fine.dims, frozenset(), low, high, step, f"{coarse.source} + {fine.source}")
    return None


_SELECTIONS: dict[Any, str] = {
    aten.sort.default: "sort",
    aten.sort.stable: "sort",
    aten.topk.default: "topk",
}

_HANDLERS: dict[Any, Callable[[fx.Node], IndexMap | None]] = {
    prims.iota.default: _iota,
    aten.randperm.default: _permutation("randperm"),
    aten.argsort.default: _argsort,
    aten.argsort.stable: _argsort,
    prims.convert_element_type.default: _convert,
    aten._to_copy.default: _convert,
    operator.getitem: _getitem,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _same,
    aten.mul.Tensor: _scaled,
    aten.add.Tensor: _shifted(1),
    aten.sub.Tensor: _shifted(-1),
}
