"""flex_attention's backward: gradients of tensors that the score function captures, as segment sums.

Before::

    dq, dk, dv, (d_bias,) = flex_attention_backward(..., joint_graph, ...)     # d_bias by atomics inside the kernel

After::

    dq, dk, dv, _ = flex_attention_backward(..., joint graph without d_bias, ...)
    for each block of query rows:
        scores, grads = what the kernel computes at every position
        d_bias += segment sum of the joint graph's terms by the place each goes to

The kernel without captured gradients adds up ``dq``, ``dk`` and ``dv`` in registers, one program a block, in order: it
keeps its speed. The positions are computed again beside it, in blocks of bounded size, with matrix products.

What torch refuses is covered too: a captured tensor that is read at several places, and (before 2.14) a captured
scalar.

Neighbours: ``flex_bodies.py`` (graphs of one position), ``flex_gradients.py`` (the terms), ``flex_scores.py`` (the
positions), ``flex_totals.py`` (the sums).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from detpass.graph_query import label
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.flex_bodies import (
    body_of,
    evaluate,
    inputs_of,
    kernel_options,
    not_of_one_position,
    results_of,
    spread,
)
from detpass.rules.flex_gradients import (
    POSITIONAL,
    Gradients,
    Unsummable,
    captured_inputs,
    gradients_of,
    wanted_results,
    without_captured_gradients,
)
from detpass.rules.flex_scores import Attention, Mask, block_count, blocks
from detpass.rules.flex_totals import total, total_by_place

BACKWARD = torch.ops.higher_order.flex_attention_backward


class FlexAttentionBackward(Rule):
    """``flex_attention_backward`` with gradients of captured tensors."""

    name = "flex_attention_backward"
    targets = (BACKWARD,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return NoMatch(Inapplicable.DEVICE, node, "torch has no such kernel here")
        given: Any = node.args
        tensors, (fw, joint, mask, scale), (captured, mask_captured) = given[:7], given[7:11], given[12:]
        options = kernel_options(node)
        joint_graph = body_of(node, joint)
        if options.get("BACKEND") == "FLASH":
            return NoMatch(Inapplicable.ARGUMENT, node, "BACKEND='FLASH' adds up the gradient of query atomically")
        if not wanted_results(joint_graph):
            return Safe("each program adds up its own block of the gradients in order")
        gradients = gradients_of(joint_graph)
        if isinstance(gradients, Unsummable):
            return NoMatch(Inapplicable.ARGUMENT, node, f"{gradients.why} ({gradients.node.target})")
        for body, positional in ((body_of(node, fw), 5), (body_of(node, mask[-1]), 4)):
            strange = not_of_one_position(body, results_of(body), positional)
            if strange is not None:
                return NoMatch(Inapplicable.ARGUMENT, node, f"{strange.target} is no pointwise operation")
        operands = (*map(tuple, (tensors, mask[:-1], options.values(), captured, mask_captured)), scale)
        parameters = {
            "function": body_of(node, fw),
            "gradients": gradients,
            "mask_function": body_of(node, mask[-1]),
            "options": tuple(options),
            "op": label(node),
        }
        return Match(operands, "positions share places of captured tensors", parameters, Treatment.SEGMENT)

    def replacement(
        self,
        tensors: tuple[Any, ...],
        lists: tuple[Any, ...],
        option_values: tuple[Any, ...],
        captured: tuple[Any, ...],
        mask_captured: tuple[Any, ...],
        scale: Any,
        *,
        function: fx.GraphModule,
        gradients: Gradients,
        mask_function: fx.GraphModule,
        options: tuple[str, ...],
        op: str,
    ) -> Any:
        plain = without_captured_gradients(gradients.joint)
        kernel = dict(zip(options, option_values, strict=True))
        block_mask = (*lists, mask_function)
        dq, dk, dv, _ = BACKWARD(*tensors, function, plain, block_mask, scale, kernel, captured, mask_captured)
        mask = Mask(mask_function, mask_captured, *lists[2:6], *lists[-2:])
        query, key, value, out, lse, grad_out, grad_lse = tensors
        attention = Attention(query, key, value, out, lse, grad_out, grad_lse, scale, function, captured, mask)
        return dq, dk, dv, tuple(_captured_gradients(attention, gradients, op))


def _captured_gradients(attention: Attention, gradients: Gradients, op: str) -> list[Tensor | None]:
    query, key = attention.query, attention.key
    joint, terms = gradients.joint, gradients.terms
    env = captured_inputs(joint, attention.captured)
    shapes = {node: evaluate(joint, term.shape, env, 0) for node, term in terms.items()}
    wanted = [item for term in terms.values() for item in (term.value, *term.indices)]
    totals: dict[fx.Node, Tensor] = {}
    count = block_count((*query.shape[:3], key.shape[2]))
    for block in blocks(attention, count):
        given = (block.scores, *block.places, block.grads, *attention.captured)
        found = map(spread, evaluate(joint, wanted, dict(zip(inputs_of(joint), given, strict=True)), POSITIONAL))
        for node, term in terms.items():
            value = torch.where(block.alive, next(found), 0).to(block.scores.dtype)
            indices = [next(found) for _ in term.indices]
            if indices:
                partial = total_by_place(value, indices, shapes[node], op)
            else:
                partial = total(value)
            totals[node] = totals[node] + partial if node in totals else partial
    return gradients.of_totals(totals, attention.captured)
