"""``_unsafe_masked_index_put_accumulate``: the backward of masked reads and, decomposed, of embedding.

Before: ``_unsafe_masked_index_put_accumulate(dest, mask, indices, values)``: rows whose mask is false add nothing.
After: the index of such a row is ``SKIPPED`` and the row is no member of any segment. A mask that varies along the
features cannot be moved to the index; its values are set to zero instead, as Inductor does.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from detpass.graph_query import is_zeros, label, list_argument, repeats, tensor_of
from detpass.proofs.exact import addition_is_exact
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Verdict
from detpass.rules.canonical import check_values, index_dims, result_shape
from detpass.rules.index_put import accumulate
from detpass.segment import skipped_value

aten = torch.ops.aten


class MaskedIndexPutAccumulate(Rule):
    """Masked accumulation: see the module."""

    name = "masked_index_put_accumulate"
    targets = (aten._unsafe_masked_index_put_accumulate.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest_node, mask_node, _, values_node = node.args
        indices = list_argument(node, "indices")
        dest, mask, values = tensor_of(dest_node), tensor_of(mask_node), tensor_of(values_node)
        assert dest is not None
        assert mask is not None
        assert values is not None
        if addition_is_exact(dest.dtype):
            return Safe(f"{dest.dtype} additions are exact in every order")
        shape = result_shape(dest, indices)
        if shape is None:
            return NoMatch(Inapplicable.SHAPE, node, "the index tensors do not broadcast")
        check_values(node, values, shape)
        first, last = index_dims(dest, indices)
        lead = len(shape) - mask.dim()
        rows_only = all(first <= d < last or d < lead or repeats(mask, d - lead) for d in range(len(shape)))
        return Match(
            operands=(dest_node, mask_node, indices, values_node),
            parameters={
                "zeros": is_zeros(dest_node),
                "op": label(node),
                "index_dims": (first, last) if rows_only else None,
                "rank": len(shape),
            },
            reason="indices may repeat and floating-point additions depend on their order",
        )

    def replacement(
        self,
        dest: Tensor,
        mask: Tensor,
        indices: list[Tensor | None],
        values: Tensor,
        zeros: bool,
        op: str,
        index_dims: tuple[int, int] | None,
        rank: int,
    ) -> Tensor:
        clamped = [
            None if index is None else torch.clamp(index, -dest.shape[d], dest.shape[d] - 1)
            for d, index in enumerate(indices)
        ]
        if index_dims is None:
            return accumulate(dest, clamped, torch.where(mask, values, torch.zeros_like(values)), zeros, op)
        rows = _mask_of_rows(mask, index_dims, rank)
        position = next(d for d, index in enumerate(clamped) if index is not None)
        first = clamped[position]
        assert first is not None
        clamped[position] = torch.where(rows, first, skipped_value(first.dtype))
        return accumulate(dest, clamped, values, zeros, op)


def _mask_of_rows(mask: Tensor, index_dims: tuple[int, int], rank: int) -> Tensor:
    """The mask over the index dimensions alone: it is the same along all others."""
    lead = rank - mask.dim()
    for d in reversed(range(rank)):
        if d >= lead and not index_dims[0] <= d < index_dims[1]:
            mask = mask.select(d - lead, 0)
    return mask
