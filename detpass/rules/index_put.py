"""``index_put`` with ``accumulate=True``: indexing backward, ``take``, ``put``, ``fold`` and much else.

Before: ``index_put(dest, [i, None, j], values, True)`` with indices that may repeat.
After: ``restore(segment_accumulate(dest3, linear(i, j), values3))``, or ``segment_reduce`` over a ``dest`` of zeros.

The order of the additions is then the canonical one instead of the order in which threads arrive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import argument, is_zeros, label, list_argument, tensor_of
from detpass.proofs.exact import addition_is_exact
from detpass.proofs.injective import distinct
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.canonical import canonical, check_values, expand_masks, index_shape, is_mask, is_single, result_shape

aten = torch.ops.aten

MASKS_ALONE = "masks select each place once"
"""Also several: they are read side by side, and each names its own places in increasing order."""


class IndexPutAccumulate(Rule):
    """Accumulating ``index_put``: see the module."""

    name = "index_put_accumulate"
    targets = (aten.index_put.default, aten._unsafe_index_put.default)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if not argument(node, "accumulate"):
            return NoMatch(Inapplicable.ARGUMENT, node, "accumulate=False")
        dest, values = tensor_of(node.args[0]), tensor_of(node.args[2])
        indices = list_argument(node, "indices")
        assert dest is not None
        assert values is not None
        if addition_is_exact(dest.dtype):
            return Safe(f"{dest.dtype} additions are exact in every order")
        masks = [index for index in indices if is_mask(index)]
        if masks:
            return _match_masks(node, dest, values, indices, masks)
        shape = result_shape(dest, indices)
        if shape is None:
            return NoMatch(Inapplicable.SHAPE, node, "the index tensors do not broadcast")
        check_values(node, values, shape)
        tensors = [index for index in indices if index is not None]
        unique = distinct(tensors, index_shape(tensors))
        parameters = {"zeros": is_zeros(node.args[0]), "op": label(node)}
        if unique is not None:
            return Match(
                operands=(node.args[0], indices, node.args[2]),
                parameters={**parameters, "form": "store"},
                reason=unique,
                treatment=Treatment.CLOSED_FORM,
                leaves={aten.index_put.default: unique},
            )
        return Match(
            operands=(node.args[0], indices, node.args[2]),
            parameters={**parameters, "form": "segment"},
            reason="indices may repeat and floating-point additions depend on their order",
        )

    def replacement(
        self, dest: Tensor, indices: list[Tensor | None], values: Tensor, form: str, zeros: bool, op: str
    ) -> Tensor:
        if form == "store":
            return _store(dest, indices, values, zeros)
        return accumulate(dest, expand_masks(indices), values, zeros, op)


def accumulate(
    dest: Tensor, indices: list[Tensor | None], values: Tensor, zeros: bool, op: str, wrap: bool = True
) -> Tensor:
    """``dest[indices] += values`` in canonical order; ``zeros`` says that ``dest`` is all zeros."""
    form = canonical(dest, indices, values, wrap, op)
    if zeros:
        return form.restore(segment.segment_reduce(form.source, form.index, form.num_segments, "sum", wrap, op))
    return form.restore(segment.segment_accumulate(form.dest, form.index, form.source, "sum", wrap, op))


def _store(dest: Tensor, indices: list[Tensor | None], values: Tensor, zeros: bool) -> Tensor:
    """Each place is written once: no accumulation is needed."""
    old = 0.0 if zeros else aten.index.Tensor(dest, indices)
    written: Tensor = aten.index_put.default(dest, indices, values + old, False)
    return written


def _match_masks(node: fx.Node, dest: Tensor, values: Tensor, indices: list[Any], masks: list[Any]) -> Verdict:
    others = [value for index in indices if not is_mask(index) and (value := tensor_of(index)) is not None]
    if all(is_single(value) for value in others):
        return Safe(MASKS_ALONE)
    return Match(
        operands=(node.args[0], indices, node.args[2]),
        parameters={"zeros": is_zeros(node.args[0]), "op": label(node), "form": "segment"},
        reason="a mask beside index tensors: places may repeat",
    )
