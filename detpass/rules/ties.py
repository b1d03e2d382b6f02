"""Order statistics with a rule for ties: of equal values the smallest index.

``median``, ``kthvalue``, ``mode``, ``topk`` and an unstable ``sort`` leave open which of several equal values an index
names, and CUDA kernels choose as their threads happen to run. Before: ``aten.topk(x, k, dim, largest, sorted)``.
After: ``aten.sort(x, stable=True)`` and a slice of it; the others pick their value from the sorted row and the first
place in ``x`` where it stands.

On a CPU one thread handles a row, the same way each time, and the ops are left alone. ``max``, ``min`` and ``argmax``
need no rule: Inductor's reductions prefer the smaller index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict

aten = torch.ops.aten

Pair = tuple[torch.Tensor, torch.Tensor]


class SmallestIndexAmongEquals(Rule):
    """``median``, ``nanmedian``, ``kthvalue``, ``mode``, ``topk`` and ``sort`` through a stable sort."""

    name = "smallest_index_among_equals"
    targets = (
        aten.median.dim,
        aten.nanmedian.dim,
        aten.kthvalue.default,
        aten.mode.default,
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
    )

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return Safe("one thread handles a row, the same way each time")
        given = arguments(node)
        if node.target is aten.sort.stable and given["stable"]:
            return Safe("a stable sort has one result")
        source = tensor_of(given["self"])
        if source is None or source.dtype.is_complex:
            return NoMatch(Inapplicable.DTYPE, node, "no order among complex numbers")
        if source.dim() == 0:
            return Safe("one element")
        operands = [given["self"]]
        parameters: dict[str, Any] = {"form": node.target, "dim": given["dim"]}
        if "k" in given:
            operands.append(given["k"])
        if "keepdim" in given:
            parameters["keepdim"] = bool(given["keepdim"])
        descending = given.get("largest", given.get("descending"))
        if descending is not None:
            parameters["descending"] = bool(descending)
        reason = "equal values are told apart by their index"
        return Match(tuple(operands), reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self,
        source: torch.Tensor,
        k: Any = None,
        *,
        form: Any,
        dim: int,
        keepdim: bool = True,
        descending: bool = False,
    ) -> Pair:
        values, order = aten.sort.stable(source, stable=True, dim=dim, descending=descending)
        if form in (aten.sort.default, aten.sort.stable):
            return values, order
        if form is aten.topk.default:
            return values.narrow(dim, 0, k), order.narrow(dim, 0, k)
        chosen = PICKS[form](source, values, dim, k)
        index = _first_place(source, chosen, dim)
        return (chosen, index) if keepdim else (chosen.squeeze(dim), index.squeeze(dim))


def _first_place(source: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    """The smallest index along ``dim`` at which ``value`` (kept dimension) stands; NaN equals NaN."""
    place = torch.arange(source.shape[dim], device=source.device)
    place = place.reshape(-1, *[1] * (source.dim() - 1 - dim % source.dim()))
    same = source == value
    if source.dtype.is_floating_point:
        same = same | (source.isnan() & value.isnan())
    return torch.where(same, place, source.shape[dim]).amin(dim, keepdim=True)


def _kth(source: torch.Tensor, ordered: torch.Tensor, dim: int, k: Any) -> torch.Tensor:
    return ordered.narrow(dim, k - 1, 1)


def _median(source: torch.Tensor, ordered: torch.Tensor, dim: int, k: Any) -> torch.Tensor:
    length = source.shape[dim]
    middle = ordered.narrow(dim, (length - 1) // 2, 1)
    if not source.dtype.is_floating_point:
        return middle
    last = ordered.narrow(dim, length - 1, 1)  # NaN sorts last
    return torch.where(last.isnan(), last, middle)


def _nanmedian(source: torch.Tensor, ordered: torch.Tensor, dim: int, k: Any) -> torch.Tensor:
    if not source.dtype.is_floating_point:
        return _median(source, ordered, dim, k)
    numbers = (~source.isnan()).sum(dim, keepdim=True)
    return ordered.gather(dim, torch.clamp((numbers - 1) // 2, min=0))


def _mode(source: torch.Tensor, ordered: torch.Tensor, dim: int, k: Any) -> torch.Tensor:
    rows = ordered.movedim(dim, -1).contiguous()
    # The length of each value's run, read at every member; the first of the longest runs is the smallest such value.
    run = torch.searchsorted(rows, rows, right=True) - torch.searchsorted(rows, rows)
    longest = run.argmax(-1, keepdim=True)
    return rows.gather(-1, longest).movedim(-1, dim)


PICKS: dict[Any, Callable[[torch.Tensor, torch.Tensor, int, Any], torch.Tensor]] = {
    aten.kthvalue.default: _kth,
    aten.median.dim: _median,
    aten.nanmedian.dim: _nanmedian,
    aten.mode.default: _mode,
}
