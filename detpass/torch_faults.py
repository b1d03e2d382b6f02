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


class TorchFaults(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # the base is torch's
    """The functions above as a graph pass."""

    def __call__(self, graph: fx.Graph) -> None:
        lead_around_randperm_pattern(graph)

    def uuid(self) -> Any:
        return ("detpass.torch_faults", 1)
