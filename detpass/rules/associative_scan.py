"""``associative_scan`` of one tensor by doubling steps, with the function that combines applied to whole tensors.

Before::

    (y,) = associative_scan(combine_graph, [x], ())     # on CUDA: Inductor's split scan, by decoupled look-back

After: ``doubling.scan([x], combine)``, where ``combine`` is the graph mapped over the scanned dimension.

The graph speaks of slices ``[*features]``, of which the scan has ``n``; ``torch.vmap`` gives each operation its meaning
for all of them at once, whatever their shapes, constants and views are. Halves are combined in float32, as Inductor's
kernel does. Captured tensors, which Inductor refuses, are the same for every slice.

Tuples of tensors are never split: Inductor's loop over blocks carries one tuple from each to the next.

Neighbours: ``doubling.py`` (the steps), ``flex_bodies.py`` (graphs of higher-order operators).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from detpass.graph_query import tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules import doubling
from detpass.rules.flex_bodies import (
    CONVERSIONS,
    body_of,
    inputs_of,
    is_pointwise,
    of_aten,
    results_of,
    varying_in,
)
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten

SCAN = torch.ops.higher_order.associative_scan

EXACT = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_xor.default,
    }
)
"""Operators that are associative on integers to the bit; sums and products wrap around."""


class AssociativeScan(Rule):
    """``associative_scan`` with ``combine_mode="pointwise"``, the mode that has an operator of its own in graphs."""

    name = "associative_scan"
    targets = (SCAN,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return NoMatch(Inapplicable.DEVICE, node, "Inductor generates no code for it here")
        combine, sources, captured = node.args
        parts = [tensor_of(source) for source in sources]  # type: ignore[union-attr]
        body = body_of(node, combine)
        shape = parts[0].shape  # type: ignore[union-attr]
        if isinstance(shape[0], int) and shape[0] <= 1:
            return Safe("one element")
        if not _takes_captured(captured, body, 2 * len(parts)):  # type: ignore[arg-type]
            if len(parts) > 1:
                return Safe("tuples are scanned block by block, in order, by one thread block")
            if _is_exact(body):
                return Safe("scans of integers with this function are exact in any order")
        if any(part.shape != shape for part in parts):  # type: ignore[union-attr]
            return NoMatch(Inapplicable.SHAPE, node, "the tensors of the tuple differ in shape")
        strange = _not_elementwise(body, 2 * len(parts))
        if strange is not None:
            return NoMatch(Inapplicable.ARGUMENT, node, f"{strange.target} is no pointwise operation")
        operands = (tuple(sources), tuple(captured))  # type: ignore[arg-type]
        reason = f"scanned by doubling steps in blocks of {doubling.BLOCK}, whose totals are scanned in turn"
        return Match(operands, reason, {"body": body}, Treatment.CLOSED_FORM)

    def replacement(
        self, sources: tuple[Tensor, ...], captured: tuple[Any, ...], *, body: fx.GraphModule
    ) -> tuple[Tensor, ...]:
        features = sources[0].dim() - 1
        wide = [source.to(accumulation_dtype(source.dtype)) for source in sources]

        def combine(left: Sequence[Tensor], right: Sequence[Tensor]) -> Sequence[Tensor]:
            def of_one_slice(*slices: Tensor) -> tuple[Tensor, ...]:
                return tuple(_Wide(body).run(*slices, *captured))

            function = of_one_slice
            for _ in range(right[0].dim() - features):
                function = torch.vmap(function)
            together = function(*left, *right)
            return [new.to(old.dtype) for new, old in zip(together, right, strict=True)]

        results = doubling.scan(wide, combine)
        return tuple(result.to(source.dtype) for result, source in zip(results, sources, strict=True))


class _Wide(fx.Interpreter):
    """Evaluates a graph whose values of half precision are given, and stay, in float32."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in CONVERSIONS:
            dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            return args[0] if dtype is None else args[0].to(accumulation_dtype(dtype))
        return super().call_function(of_aten(target), args, kwargs)


def _takes_captured(captured: Sequence[Any], body: fx.GraphModule, own: int) -> bool:
    """Whether Inductor refuses what the graph is given besides its slices: tensors, and sizes that it reads."""
    tensors = any(tensor_of(value) is not None for value in captured)
    return tensors or any(node.users for node in inputs_of(body)[own:])


def _is_exact(body: fx.GraphModule) -> bool:
    """Whether the graph is one operator of :data:`EXACT` on integers."""
    (result,) = results_of(body)
    first, second, *_ = inputs_of(body)
    values = [node.meta["val"].dtype for node in (first, second, result)]
    whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in values)
    return whole and result.target in EXACT and set(result.args) == {first, second} and not result.kwargs


def _not_elementwise(body: fx.GraphModule, own: int) -> fx.Node | None:
    """A node that depends on slices and is neither pointwise nor a view of features; None where there is none."""
    varying = varying_in(body, own)
    nodes: list[fx.Node] = list(body.graph.nodes)
    calls = (n for n in nodes if n.op == "call_function" and n in varying)
    return next((n for n in calls if not is_pointwise(n.target) and not _is_view(n.target)), None)


def _is_view(target: Any) -> bool:
    """Whether an operator's result shares memory with an argument, element by element and of its dtype."""
    schema = getattr(target, "_schema", None)
    aliases = [] if schema is None else [a.alias_info for a in schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases) and target is not aten.view.dtype
