"""Faults of torch itself that a graph can be led around before Inductor's own passes meet it.

Each function names the fault and the releases that have it. They run as Inductor's ``joint_custom_pre_pass``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass import _torch_private
from detpass.graph_query import tensor_of

aten = torch.ops.aten

INDEXING = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
)


def lead_around_randperm_pattern(graph: fx.Graph) -> None:
    """``x[torch.randperm(len(x))]`` crashes Inductor's randperm pattern in torch 2.13.

    The pattern expects a slice of the permutation and fails where there is none. What it would have done is done
    here: such an index is within bounds, so the read needs no check.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not aten.index.Tensor:
            continue
        table, indices = node.args[0], node.args[1]
        value = tensor_of(table)
        index = indices[0] if len(indices) == 1 else None
        if value is None or not isinstance(index, fx.Node) or index.target is not aten.randperm.default:
            continue
        if str(index.args[0]) == str(value.shape[0]):
            node.target = aten._unsafe_index.Tensor


def read_byte_masks_as_bool(graph: fx.Graph) -> None:
    """A ``uint8`` tensor as an index is a mask; Inductor generates code for it that fails (2.11 to 2.14)."""
    bools: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in INDEXING:
            continue
        indices = list(node.args[1])
        for position, index in enumerate(indices):
            value = tensor_of(index)
            if value is None or value.dtype is not torch.uint8:
                continue
            if index not in bools:
                with graph.inserting_before(node):
                    bools[index] = graph.call_function(aten.ne.Scalar, (index, 0))
                    bools[index].meta = {**index.meta, "val": value.to(torch.bool)}
            indices[position] = bools[index]
        node.args = (node.args[0], indices, *node.args[2:])


class TorchFaults(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # the base is torch's
    """The functions above as a graph pass."""

    def __call__(self, graph: fx.Graph) -> None:
        lead_around_randperm_pattern(graph)
        read_byte_masks_as_bool(graph)

    def uuid(self) -> Any:
        return ("detpass.torch_faults", 2)
