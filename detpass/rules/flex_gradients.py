"""What a score function's joint graph adds up for the tensors that it captures: the terms, and their totals.

flex_attention differentiates the score function at one position. The joint graph's results for captured tensors are
meant to be summed over all positions, which a kernel does with atomics. Here each result is taken apart into *terms*,
values of one position that go to a place (``zeros_and_scatter``) or to one sum, and the operations that lead from the
terms to the result. Those must be linear, so that they may be applied to the totals::

    zeros_and_scatter(shape, [h, i - j], grad) * 2      term: grad at (h, i - j);   result: total * 2
    grad * score                                        term: grad * score;         result: total

Neighbours: ``flex_attention.py`` (the rule), ``flex_scores.py`` (positions), ``flex_totals.py`` (the sums).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass.graph_query import is_zeros
from detpass.rules.flex_bodies import downstream, evaluate, inputs_of, not_of_one_position, results_of, varying_in

aten = torch.ops.aten
prims = torch.ops.prims

SCATTER = "flex_lib.zeros_and_scatter.default"
POSITIONAL = 6
"""The joint graph's first inputs, which differ by position: score, batch, head, query, key and the gradient."""
OF_POSITION = 5
"""The joint graph's first results: gradients of score, batch, head, query and key; then those of captured tensors."""

LINEAR = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default,
    aten.clone.default, aten.alias.default, aten.detach.default, aten.neg.default, aten._to_copy.default,
    aten.sum.dim_IntList, aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.slice.Tensor, aten.select.int,
    aten.flip.default, prims.convert_element_type.default, aten.select_backward.default, aten.slice_backward.default,
    aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.elu_backward.default, aten.softplus_backward.default,
    aten.leaky_relu_backward.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
}  # fmt: skip
"""Linear in their first argument, where the others are the same at every position."""
BILINEAR = {aten.mul.Tensor, prims.mul.default, aten.mm.default, aten.bmm.default}
"""Linear in either of their first two arguments, where the other is the same at every position."""
SUMS = {aten.add.Tensor, aten.sub.Tensor}
"""Linear in their first two arguments together."""
PLACED = {aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default}
"""Linear in their second argument, where the first is zeros."""


@dataclass(frozen=True)
class Term:
    """A value of every position, and where it goes."""

    value: fx.Node
    """The value, a scalar of one position."""
    indices: tuple[Any, ...]
    """The place it is added to, one number (a node, or a constant) for each dimension; empty for one sum of all."""
    shape: tuple[Any, ...]
    """The sizes of what it is added to: numbers, or nodes that are the same at every position."""


@dataclass(frozen=True)
class Gradients:
    """The terms behind the wanted results of a joint graph, and how the results follow from their totals."""

    joint: fx.GraphModule
    terms: Mapping[fx.Node, Term]
    """The terms by the node of the joint graph whose total each gives."""

    def of_totals(self, totals: Mapping[fx.Node, Tensor], captured: Sequence[Any]) -> list[Tensor | None]:
        """The gradient of each captured tensor, in its dtype; None for numbers.

        Zeros where the joint graph has no result: torch before 2.14 adds up what it takes for a gradient there.
        """
        env = captured_inputs(self.joint, captured)
        env.update(totals)
        outputs = results_of(self.joint)[OF_POSITION:]
        found: list[Tensor | None] = []
        for tensor, output in zip(captured, outputs, strict=True):
            if not isinstance(tensor, Tensor):
                found.append(None)
            elif output is None:
                found.append(torch.zeros_like(tensor, memory_format=torch.contiguous_format))
            else:
                found.append(evaluate(self.joint, [output], env, 0)[0].to(tensor.dtype).contiguous())
        return found


@dataclass(frozen=True)
class Unsummable:
    """A result that is no linear function of sums over positions, and the node at which that shows."""

    node: fx.Node
    why: str


def wanted_results(joint: fx.GraphModule) -> tuple[int, ...]:
    """The numbers of the captured tensors of which a joint graph computes a gradient."""
    captured = results_of(joint)[OF_POSITION:]
    return tuple(number for number, result in enumerate(captured) if result is not None)


def gradients_of(joint: fx.GraphModule) -> Gradients | Unsummable:
    """Take the results for captured tensors apart."""
    varying = varying_in(joint, POSITIONAL)
    scattered = downstream(joint, lambda node: str(node.target) == SCATTER)
    wanted = wanted_results(joint)
    terms: dict[fx.Node, Term] = {}
    todo = [results_of(joint)[OF_POSITION + number] for number in wanted]
    while todo:
        node = todo.pop()
        if node in terms:
            continue
        if str(node.target) == SCATTER:
            shape, indices, value = node.args
            if any(used in scattered for used in (value, *indices)):
                return Unsummable(node, "a captured tensor is indexed in two steps, x[a][b] instead of x[a, b]")
            if len(indices) != len(shape):
                return Unsummable(node, "a captured tensor is indexed in some of its dimensions only")
            terms[node] = Term(value, tuple(indices), tuple(shape))
        elif (through := _linear_operands(node, varying)) is not None:
            todo.extend(through)
        elif node in scattered:
            return Unsummable(node, "what depends on the position is applied to a captured tensor before it is indexed")
        else:
            terms[node] = Term(node, (), ())
    values = [item for term in terms.values() for item in (term.value, *term.indices)]
    node = not_of_one_position(joint, values, POSITIONAL)
    if node is not None:
        return Unsummable(node, "the score function is no pointwise function of one position")
    return Gradients(joint, terms)


def without_captured_gradients(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph that computes the gradient of the score alone."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = results_of(joint)
    for node in joint.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    kept = [copies[result] if isinstance(result, fx.Node) else None for result in returned[:OF_POSITION]]
    graph.output([*kept, *([None] * (len(returned) - OF_POSITION))])
    graph.eliminate_dead_code()
    return fx.GraphModule(joint, graph)


def captured_inputs(joint: fx.GraphModule, captured: Sequence[Any]) -> dict[fx.Node, Any]:
    """What the joint graph's inputs for captured tensors stand for."""
    return dict(zip(inputs_of(joint)[POSITIONAL:], captured, strict=True))


def _linear_operands(node: fx.Node, varying: set[fx.Node]) -> list[fx.Node] | None:
    """The operands whose totals give the node's total by the node's own operation; None where there are none such."""
    moving = [parent for parent in node.all_input_nodes if parent in varying]

    def summed(operand: Any) -> bool:
        return operand in moving or is_zeros(operand)

    if not moving:
        return None
    if node.target in LINEAR:
        return moving if moving == [node.args[0]] else None
    if node.target in BILINEAR:
        return moving if len(moving) == 1 and node.args[0] is not node.args[1] else None
    if node.target in SUMS:
        return moving if summed(node.args[0]) and summed(node.args[1]) else None
    if node.target is aten.where.self:
        return moving if node.args[0] not in moving and all(map(summed, node.args[1:])) else None
    if node.target in PLACED:
        return moving if moving == [node.args[1]] and is_zeros(node.args[0]) else None
    return None
