"""Builds an FX graph of ATen operators statement by statement, with a fake tensor for each value.

The names of operators come from files, so they are looked up and never evaluated: an operator is an overload that is
registered with torch, or one of a few functions on sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from detpass import _torch_private_capture
from detpass.errors import InspectionError

SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow",
       "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "getitem")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_sum",
       "sym_ite") if hasattr(torch, name)},
    "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc,
}  # fmt: skip
"""Functions on sizes and tuples that appear in graphs beside operators, by their bare name."""


class GraphBuilder:
    """An FX graph under construction."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.mode = _torch_private_capture.plain_fake_mode()
        _torch_private_capture.register_inductor_operators()

    def input(self, name: str, value: Any) -> fx.Node:
        """A placeholder with its fake tensor or size."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def constant(self, name: str, value: torch.Tensor) -> fx.Node:
        """A fake tensor that the graph holds itself."""
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node

    def tensor(self, dtype: torch.dtype, size: list[int], stride: list[int] | None = None) -> torch.Tensor:
        """A fake tensor on the CPU, contiguous unless ``stride`` says otherwise."""
        with self.mode:
            if stride is None:
                return torch.empty(size, dtype=dtype)
            return torch.empty_strided(size, stride, dtype=dtype)

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trace: str | None,
        where: str,
    ) -> fx.Node:
        """A call and its value on fake tensors. Raises InspectionError, naming ``where``, when the call is refused."""
        node = self.graph.call_function(target, args, kwargs)
        if trace:
            node.meta["stack_trace"] = trace
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            with self.mode:
                node.meta["val"] = target(*values, **named)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise InspectionError(
                f"{self._origin}, {where}: {target} refuses its arguments ({type(error).__name__}: {error})"
            ) from error
        return node

    def finish(self, results: Any) -> fx.GraphModule:
        """The graph module that returns ``results``."""
        self.graph.output(results)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)


def operator_named(parts: list[str], origin: str) -> Callable[..., Any]:
    """The function that a dotted name stands for: ``torch.ops.aten.mm.default``, ``operator.mul``, ``torch.sym_max``.

    Raises InspectionError for a name that is not registered and for anything that is no operator.
    """
    name = ".".join(parts)
    if parts[:2] != ["torch", "ops"]:
        if parts[-1] in SIZE_FUNCTIONS and parts[:-1] in (["torch"], ["operator"], ["_operator"], ["math"], []):
            return SIZE_FUNCTIONS[parts[-1]]
        raise InspectionError(
            f"{origin} calls {name}, which is no ATen operator: only graphs after AOTAutograd and exported programs "
            "can be read. Give the function itself, or the fx_graph_readable.py that Inductor wrote"
        )
    if parts[2:3] == ["higher_order"]:
        raise InspectionError(
            f"{origin} holds the higher-order operator {name}, and bodies of such operators are not read from text; "
            "inspect the function itself"
        )
    found: Any = torch.ops
    for part in parts[2:]:
        found = getattr(found, part, None)
        if found is None:
            raise InspectionError(
                f"{origin} calls {name}, which is not registered with this torch ({torch.__version__}); import the "
                "library that registers it, then inspect again"
            )
    if not _torch_private_capture.is_operator_overload(found):
        raise InspectionError(f"{origin} calls {name}, which names no overload of an operator")
    overload: Callable[..., Any] = found
    return overload
