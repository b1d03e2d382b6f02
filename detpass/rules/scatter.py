"""Accumulating scatters: ``scatter_add``, ``scatter(reduce=)`` and ``scatter_reduce``.

Before: ``scatter_add(dest, dim, index, src)``.
After: ``segment_accumulate(dest3, index, src3)`` in the form of ``scatter_form``.

``mean`` is the total divided by the exact count; with ``include_self=False`` a place that is written forgets the old
value. The index is not wrapped: scatter refuses a negative one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass.graph_query import argument, is_empty, is_zeros, label, tensor_of
from detpass.proofs.exact import addition_is_exact
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.reductions import NAMES, Combination, combine
from detpass.rules.scatter_form import canonical_scatter, check_shapes, row_index, scatter_dim

aten = torch.ops.aten


class ScatterReduce(Rule):
    """Every accumulating scatter: see the module."""

    name = "scatter_reduce"
    targets = (
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
    )

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest, index = tensor_of(node.args[0]), tensor_of(node.args[2])
        assert dest is not None
        assert index is not None
        reduce = _reduction(node)
        if reduce not in NAMES:
            return NoMatch(Inapplicable.ARGUMENT, node, f"reduce={reduce!r}; known: {', '.join(NAMES)}")
        if addition_is_exact(dest.dtype):
            return Safe(f"{dest.dtype} arithmetic is exact in every order")
        if is_empty(index):
            return Match((node.args[0],), "nothing is written", treatment=Treatment.CLOSED_FORM)
        dim = scatter_dim(node)
        src = tensor_of(node.args[3])
        check_shapes(node, dest, index, src, dim)
        value = None if src is not None else node.args[3]
        return Match(
            operands=(node.args[0], node.args[2], node.args[3] if src is not None else None),
            parameters={
                "dim": dim,
                "reduce": NAMES[reduce],
                "include_self": _include_self(node),
                "zeros": is_zeros(node.args[0]),
                "rows": dest.dim() > 0 and index.dim() > 0 and row_index(index, dest, dim),
                "value": value,
                "op": label(node),
            },
            reason="places may repeat and floating-point results depend on the order",
        )

    def replacement(
        self,
        dest: Tensor,
        index: Tensor | None = None,
        src: Tensor | None = None,
        dim: int = 0,
        reduce: Combination = "sum",
        include_self: bool = True,
        zeros: bool = False,
        rows: bool = False,
        value: Any = None,
        op: str = "",
    ) -> Tensor:
        if index is None:
            return dest.clone()
        if src is None:
            src = torch.full_like(index, value, dtype=dest.dtype)
        form = canonical_scatter(dest, dim, index, src, rows, op)
        result = combine(form.dest, form.index, form.source, form.num_segments, reduce, include_self, zeros, False, op)
        return form.restore(result)


def _reduction(node: fx.Node) -> str:
    return "sum" if node.target is aten.scatter_add.default else str(argument(node, "reduce"))


def _include_self(node: fx.Node) -> bool:
    return bool(argument(node, "include_self")) if node.target is aten.scatter_reduce.two else True
