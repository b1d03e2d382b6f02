"""Tables that a kernel updates in part are handed to it in their own shape.

Runs over the rewritten graph. Before: ``out = update_rows(view(table))``, ``view(out)``. After: ``update_rows(table)``.
The kernel reads memory, not shapes; and Inductor updates a graph's input in place only where the input itself, not a
view of it, is what the kernel writes and what is copied back. No bit of a result changes.

Neighbour: ``segment/triton_update.py`` (the kernel).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from detpass.graph_query import tensor_of

aten = torch.ops.aten

LAUNCH = "triton_kernel_wrapper_functional"
OPERANDS = {"table", "rows", "totals"}
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default)


def update_whole_tables(graph: fx.Graph) -> None:
    """Lead updates of a few rows around views of their table. Changes the graph in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") == LAUNCH:
            operands: Any = node.kwargs["kwargs"]
            if operands.keys() >= OPERANDS and operands["table"].target in VIEWS:
                _without_view(graph, node, operands["table"])


def _without_view(graph: fx.Graph, launch: fx.Node, view: fx.Node) -> None:
    whole = view.args[0]
    value: Any = tensor_of(whole)  # a FakeTensor: only that has ``fake_mode``
    if value is None or not isinstance(whole, fx.Node) or not value.is_contiguous():
        return
    launch.kwargs = {**launch.kwargs, "kwargs": {**dict(launch.kwargs["kwargs"]), "table": whole}}  # type: ignore[arg-type]
    with value.fake_mode:
        updated = torch.empty_like(value)
    launch.meta["val"] = {**launch.meta["val"], "table": updated}
    for result in [user for user in launch.users if user.target is operator.getitem and user.args[1] == "table"]:
        old = result.meta["val"]
        result.meta["val"] = updated
        readers = list(result.users)
        with graph.inserting_after(result):
            again: Any = view.target
            shaped = graph.call_function(again, (result, *view.args[1:]))
        shaped.meta = {**result.meta, "val": old}
        for reader in readers:
            if reader.target in VIEWS and str(reader.meta["val"].shape) == str(updated.shape):
                reader.replace_all_uses_with(result)
                graph.erase_node(reader)
            else:
                reader.replace_input_with(result, shaped)
        if not shaped.users:
            graph.erase_node(shaped)
