"""``index_add`` and ``index_reduce``: whole slices along one dimension, combined by index.

Both are kept whole: their decomposition into ``index_put`` would let a negative index wrap and a mis-shaped source
broadcast, which eager refuses. Before: ``index_add(dest, dim, index, source, alpha=a)``.
After: ``segment_accumulate(dest3, index, a * source3)``; the product is rounded on its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass.errors import Refusal
from detpass.graph_query import argument, int_argument, is_zeros, known_to_differ, label, tensor_of
from detpass.proofs.exact import addition_is_exact
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Verdict
from detpass.rules.canonical import product
from detpass.rules.reductions import NAMES, Combination, combine

aten = torch.ops.aten


class IndexAdd(Rule):
    """``index_add`` and ``index_reduce``: see the module."""

    name = "index_add"
    targets = (aten.index_add.default, aten.index_reduce.default)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest, index, source = (tensor_of(node.args[i]) for i in (0, 2, 3))
        assert dest is not None
        assert index is not None
        assert source is not None
        adds = node.target is aten.index_add.default
        reduce = "sum" if adds else str(argument(node, "reduce"))
        if reduce not in NAMES:
            return NoMatch(Inapplicable.ARGUMENT, node, f"reduce={reduce!r}; known: {', '.join(NAMES)}")
        dim = int_argument(node, "dim") % max(dest.dim(), 1)
        check_slices(node, dest, index, source, dim)
        exact = addition_is_exact(dest.dtype)
        return Match(
            operands=(node.args[0], node.args[2], node.args[3]),
            parameters={
                "dim": dim,
                "reduce": NAMES[reduce],
                "include_self": True if adds else bool(argument(node, "include_self")),
                "alpha": argument(node, "alpha") if adds else 1,
                "zeros": is_zeros(node.args[0]),
                "op": label(node),
            },
            reason="integer additions are exact; kept whole so that an illegal index is refused as in eager"
            if exact
            else "the index may repeat and floating-point results depend on the order",
        )

    def replacement(
        self,
        dest: Tensor,
        index: Tensor,
        source: Tensor,
        dim: int,
        reduce: Combination,
        include_self: bool,
        alpha: Any,
        zeros: bool,
        op: str,
    ) -> Tensor:
        if alpha != 1:
            source = source * alpha
        dest3, index1, source3 = slices(dest, index, source, dim)
        result = combine(dest3, index1, source3, dest3.shape[1], reduce, include_self, zeros, False, op)
        return result.reshape(dest.shape)


def slices(dest: Tensor, index: Tensor, source: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """``dest [B, S, D]``, ``index [N]`` and ``source [B, N, D]`` of an operation on slices along ``dim``."""
    shape = dest.shape if dest.dim() else torch.Size([1])
    before, after = product(shape[:dim]), product(shape[dim + 1 :])
    flat = index.reshape(-1)
    return (
        dest.reshape(before, shape[dim], after),
        flat if flat.dtype in (torch.int32, torch.int64) else flat.to(torch.int64),
        source.reshape(before, flat.shape[0], after),
    )


def check_slices(node: fx.Node, dest: Tensor, index: Tensor, source: Tensor, dim: int) -> None:
    """Raise eager's error (as a Refusal) for an index or a source that eager refuses."""
    if index.dim() > 1:
        raise Refusal(IndexError(f"{label(node)}: Index is supposed to be a vector, found shape {list(index.shape)}"))
    if index.dtype not in (torch.int32, torch.int64):
        raise Refusal(RuntimeError(f"{label(node)}: Expected dtype int32/int64 for index, found {index.dtype}"))
    if dest.dtype != source.dtype:
        raise Refusal(
            RuntimeError(
                f"{label(node)}: self ({dest.dtype}) and source ({source.dtype}) must have the same scalar type"
            )
        )
    count = index.shape[0] if index.dim() else 1
    expected = [count if d == dim else size for d, size in enumerate(dest.shape)]
    found = list(source.shape)
    if dest.dim() == 0 and source.dim() <= 1:
        return
    if len(found) != len(expected) or any(known_to_differ(a, b) for a, b in zip(found, expected, strict=True)):
        raise Refusal(
            RuntimeError(
                f"{label(node)}: source tensor shape must match self tensor shape, excluding the specified dimension. "
                f"Got self.shape = {list(dest.shape)}, dim = {dim}, an index of {count} and "
                f"source.shape = {found}; expected {expected}"
            )
        )
