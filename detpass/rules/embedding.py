"""Embedding backward: rows of the gradient added into the table by token id.

``embedding_dense_backward`` is kept whole (its decomposition adds a mask, an index and, for bf16, a float32 copy of
the gradient). Before: ``embedding_dense_backward(grad, ids, num_weights, padding_idx, scale_grad_by_freq)``.
After: ``segment_reduce(grad, where(ids == padding_idx, SKIPPED, ids), num_weights)``.

``_embedding_bag_backward`` and its dense form become the same over the rows ``grad[bag of i]``; for ``max`` the rows
are single elements at the saved ``maximum_indices``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import arguments, label, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Verdict
from detpass.segment import skipped_value

aten = torch.ops.aten

SUM, MEAN, MAX = 0, 1, 2


class EmbeddingDenseBackward(Rule):
    """``embedding_dense_backward``: see the module."""

    name = "embedding_dense_backward"
    targets = (aten.embedding_dense_backward.default,)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        return Match(
            operands=(given["grad_output"], given["indices"], given["num_weights"], given["padding_idx"]),
            parameters={"scale": bool(given["scale_grad_by_freq"]), "op": label(node)},
            reason="token ids repeat and floating-point additions depend on their order",
        )

    def replacement(
        self, grad: Tensor, ids: Tensor, num_weights: Any, padding_idx: Any, scale: bool, op: str
    ) -> Tensor:
        flat = _ids(ids)
        width = grad.shape[-1] if grad.dim() > ids.dim() else 1  # named, for there may be no rows to infer it from
        rows = grad.reshape(flat.shape[0], width)
        if not isinstance(padding_idx, int) or padding_idx >= 0:
            flat = torch.where(flat == padding_idx, skipped_value(flat.dtype), flat)
        if scale:
            rows = rows / _frequency(flat, num_weights, op).unsqueeze(-1)
            rows = rows.to(grad.dtype)
        total = segment.segment_reduce(rows.unsqueeze(0), flat, num_weights, "sum", False, op)
        return total.reshape(num_weights, *grad.shape[ids.dim() :])


class EmbeddingBagBackward(Rule):
    """``_embedding_bag_backward`` and ``_embedding_bag_dense_backward``: see the module."""

    name = "embedding_bag_backward"
    targets = (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        if given.get("sparse"):
            return NoMatch(
                Inapplicable.ARGUMENT, node, "sparse=True gives an uncoalesced gradient: nothing is added here"
            )
        indices = tensor_of(given["indices"])
        assert indices is not None
        if indices.dim() != 1:
            return NoMatch(Inapplicable.SHAPE, node, f"indices of {indices.dim()} dimensions")
        names = ("grad", "indices", "offsets" if "offsets" in given else "offset2bag", "bag_size", "maximum_indices",
                 "num_weights", "per_sample_weights")  # fmt: skip
        return Match(
            operands=tuple(given[name] for name in names),
            parameters={
                "bags_given": "offsets" not in given,
                "mode": given["mode"],
                "scale": bool(given["scale_grad_by_freq"]),
                "padding_idx": given["padding_idx"],
                "op": label(node),
            },
            reason="ids repeat among bags and floating-point additions depend on their order",
        )

    def replacement(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        bag_size: Tensor,
        maximum_indices: Tensor,
        num_weights: Any,
        per_sample_weights: Tensor | None,
        bags_given: bool,
        mode: int,
        scale: bool,
        padding_idx: int,
        op: str,
    ) -> Tensor:
        if mode == MAX:
            return _max_backward(grad, maximum_indices, bag_size, num_weights, padding_idx, op)
        flat = _ids(indices)
        if bags_given:
            bag = offsets
        else:
            positions = torch.arange(flat.shape[0], device=flat.device, dtype=offsets.dtype)
            bag = torch.searchsorted(offsets, positions, right=True) - 1
        rows = grad.index_select(0, bag)
        if mode == MEAN:
            rows = rows / bag_size.index_select(0, bag).to(grad.dtype).unsqueeze(-1)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if padding_idx >= 0:
            flat = torch.where(flat == padding_idx, skipped_value(flat.dtype), flat)
        if scale:
            rows = (rows / _frequency(flat, num_weights, op).unsqueeze(-1)).to(grad.dtype)
        return segment.segment_reduce(rows.unsqueeze(0), flat, num_weights, "sum", False, op).squeeze(0)


def _max_backward(
    grad: Tensor, maximum_indices: Tensor, bag_size: Tensor, num_weights: Any, padding_idx: int, op: str
) -> Tensor:
    """Each element of ``grad [bags, D]`` belongs to one row of its column; empty bags have none."""
    width = grad.shape[1]
    columns = torch.arange(width, device=grad.device)
    place = _ids(maximum_indices).reshape(grad.shape) * width + columns
    absent = (bag_size == 0).unsqueeze(-1) | (maximum_indices < 0)
    if padding_idx >= 0:
        absent = absent | (maximum_indices == padding_idx)
    place = torch.where(absent, skipped_value(place.dtype), place).reshape(-1)
    total = segment.segment_reduce(grad.reshape(1, -1, 1), place, num_weights * width, "sum", False, op)
    return total.reshape(num_weights, width)


def _ids(ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    return flat if flat.dtype in (torch.int32, torch.int64) else flat.to(torch.int64)


def _frequency(flat: Tensor, num_weights: Any, op: str) -> Tensor:
    """How often the id of each row occurs, ``int64[N]``; 1 for a skipped row."""
    counts = segment.segment_count(flat, num_weights, False, op)
    skipped = flat == skipped_value(flat.dtype)
    safe = torch.where(skipped, 0, flat)
    return torch.where(skipped, 1, counts.index_select(0, safe))
