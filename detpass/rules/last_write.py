"""Plain writes whose index may repeat: the last write in index order wins.

Before: ``index_put(dest, [i], values, False)``, ``scatter(dest, dim, i, src)``, ``index_copy(dest, dim, i, source)``:
of several writers of one place an arbitrary one is last.
After: the same write of ``values[last_positions(i)]``: each writer carries the value of the last one, so that it does
not matter who is last, and Inductor's in-place store and fusion are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import argument, int_argument, is_empty, label, list_argument, repeats, tensor_of
from detpass.proofs.injective import distinct, index_map
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.canonical import (
    canonical,
    check_values,
    constant_along_index,
    expand_masks,
    index_dims,
    index_shape,
    is_mask,
    is_single,
    result_shape,
)
from detpass.rules.index_add import check_slices, slices
from detpass.rules.index_put import MASKS_ALONE
from detpass.rules.scatter_form import canonical_scatter, check_shapes, row_index, scatter_dim

aten = torch.ops.aten

EQUAL_WRITERS = "all writers of one place carry the value of the last one"
REASON = "places may repeat and the last writer is arbitrary"


class IndexPutLastWrite(Rule):
    """``index_put`` with ``accumulate=False``: see the module."""

    name = "index_put_last_write"
    targets = (aten.index_put.default, aten._unsafe_index_put.default)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if argument(node, "accumulate"):
            return NoMatch(Inapplicable.ARGUMENT, node, "accumulate=True")
        dest, values = tensor_of(node.args[0]), tensor_of(node.args[2])
        indices = list_argument(node, "indices")
        assert dest is not None
        assert values is not None
        masks = [index for index in indices if is_mask(index)]
        others = [v for index in indices if not is_mask(index) and (v := tensor_of(index)) is not None]
        if masks and all(is_single(v) for v in others):
            return Safe(MASKS_ALONE)
        if not masks:
            shape = result_shape(dest, indices)
            if shape is None:
                return NoMatch(Inapplicable.SHAPE, node, "the index tensors do not broadcast")
            check_values(node, values, shape)
            tensors = [index for index in indices if index is not None]
            unique = distinct(tensors, index_shape(tensors))
            if unique is not None:
                return Safe(unique)
            if constant_along_index(values, shape, *index_dims(dest, indices)):
                return Safe("all writers of one place carry equal values")
        return Match(
            operands=(node.args[0], indices, node.args[2]),
            parameters={"op": label(node)},
            reason=REASON,
            leaves={aten.index_put.default: EQUAL_WRITERS},
        )

    def replacement(self, dest: Tensor, indices: list[Tensor | None], values: Tensor, op: str) -> Tensor:
        indices = expand_masks(indices)
        form = canonical(dest, indices, values, True, op)
        last = segment.last_positions(form.index, form.num_segments, True, op)
        rows = form.spread(form.source.index_select(1, last))
        written: Tensor = aten.index_put.default(dest, indices, rows, False)
        return written


class ScatterLastWrite(Rule):
    """``scatter`` of a tensor or a value: see the module."""

    name = "scatter_last_write"
    targets = (aten.scatter.src, aten.scatter.value)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest, index, src = (tensor_of(node.args[i]) for i in (0, 2, 3))
        assert dest is not None
        assert index is not None
        dim = scatter_dim(node)
        check_shapes(node, dest, index, src, dim)
        if is_empty(index):
            return Match((node.args[0], None, None), "nothing is written", {"dim": dim}, Treatment.CLOSED_FORM)
        if src is None:
            return Safe("all writers of one place carry equal values")
        if isinstance(index.numel(), int) and index.numel() == 1:
            return Safe("one element is written")
        if isinstance(index.shape[dim], int) and index.shape[dim] == 1:
            return Safe("one element is written along the dimension")
        unique = _unique_along(node.args[2], index, dim)
        if unique is not None:
            return Safe(unique)
        if src.dim() == 0 or repeats(src, dim):
            return Safe("all writers of one place carry equal values")
        return Match(
            operands=(node.args[0], node.args[2], node.args[3]),
            parameters={"dim": dim, "rows": dest.dim() > 0 and row_index(index, dest, dim), "op": label(node)},
            reason=REASON,
            leaves={aten.scatter.src: EQUAL_WRITERS},
        )

    def replacement(
        self, dest: Tensor, index: Tensor | None, src: Tensor | None, dim: int, rows: bool = False, op: str = ""
    ) -> Tensor:
        if index is None or src is None:
            return dest.clone()
        form = canonical_scatter(dest, dim, index, src, rows, op)
        last = segment.last_positions(form.index, form.num_segments, False, op)
        written: Tensor = aten.scatter.src(dest, dim, index, form.spread(form.source.index_select(1, last)))
        return written


class IndexCopy(Rule):
    """``index_copy``, kept whole so that a negative index is refused as in eager: see the module."""

    name = "index_copy"
    targets = (aten.index_copy.default,)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest, index, source = (tensor_of(node.args[i]) for i in (0, 2, 3))
        assert dest is not None
        assert index is not None
        assert source is not None
        dim = int_argument(node, "dim") % max(dest.dim(), 1)
        check_slices(node, dest, index, source, dim)
        return Match(
            operands=(node.args[0], node.args[2], node.args[3]),
            parameters={"dim": dim, "op": label(node)},
            reason=REASON,
            leaves={aten.index_put.default: EQUAL_WRITERS},
        )

    def replacement(self, dest: Tensor, index: Tensor, source: Tensor, dim: int, op: str) -> Tensor:
        dest3, flat, source3 = slices(dest, index, source, dim)
        last = segment.last_positions(flat, dest3.shape[1], False, op)
        rows = source3.index_select(1, last)
        written: Tensor = aten.index_put.default(dest3, [None, flat], rows, False)
        return written.reshape(dest.shape)


class IndexFill(Rule):
    """``index_fill``: every writer carries one value. Kept whole, since it takes a negative index and ``index_copy``,
    into which torch decomposes it, does not.
    """

    name = "index_fill"
    targets = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        dest, index = tensor_of(node.args[0]), tensor_of(node.args[2])
        assert dest is not None
        assert index is not None
        return Match(
            operands=(node.args[0], node.args[2], node.args[3]),
            parameters={"dim": int_argument(node, "dim") % max(dest.dim(), 1)},
            reason="all writers of one place carry equal values",
            treatment=Treatment.CLOSED_FORM,
            leaves={aten.index_put.default: "all writers of one place carry equal values"},
        )

    def replacement(self, dest: Tensor, index: Tensor, value: Any, dim: int) -> Tensor:
        shaped = dest if dest.dim() else dest.reshape(1)
        fill = value if isinstance(value, Tensor) else torch.full((), value, dtype=dest.dtype, device=dest.device)
        indices = [None] * dim + [index.reshape(-1).to(torch.int64)]
        written: Tensor = aten.index_put.default(shaped, indices, fill.to(dest.dtype), False)
        return written.reshape(dest.shape)


def _unique_along(node: Any, index: Tensor, dim: int) -> str | None:
    """Whether the elements of ``index`` along ``dim`` are all different, the other coordinates being equal."""
    found = index_map(node)
    if found is None or dim not in found.dims or not found.given <= set(range(index.dim())) - {dim}:
        return None
    return f"the index is unique along the dimension ({found.source})"
