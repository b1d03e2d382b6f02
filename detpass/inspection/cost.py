"""Bytes and seconds of a node, estimated from its fake tensors: enough to rank nodes, not to predict a run.

A node takes the longer of moving its bytes and doing its floating-point operations. Views move nothing. Nodes are
taken one by one, so what Inductor fuses is counted at every node that it fuses. Shares of time compare nodes of one
report; the machine's numbers below only weigh bytes against operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from detpass import _torch_private_capture


@dataclass(frozen=True)
class Machine:
    """How fast a machine of a kind moves and computes."""

    bytes_per_second: float
    """Memory bandwidth."""
    flops_per_second: float
    """Multiplications and additions of matrix products."""


MACHINES = {"cpu": Machine(20e9, 200e9), "cuda": Machine(3e12, 300e12)}
"""Round numbers of a two-core server slice and of a data-centre GPU."""


def node_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that an operator node reads and writes; 0 for views and for anything but operators."""
    if node.op != "call_function" or _is_view(node.target):
        return 0
    seen: set[fx.Node] = set(node.all_input_nodes)
    return sum(_value_bytes(n.meta.get("val")) for n in seen) + _value_bytes(node.meta.get("val"))


def node_seconds(node: fx.Node, moved: int, device_type: str) -> float:
    """Estimated seconds of an operator node that moves ``moved`` bytes on a machine of ``device_type``."""
    machine = MACHINES.get(device_type, MACHINES["cpu"])
    return max(moved / machine.bytes_per_second, _flops(node) / machine.flops_per_second)


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return True  # getitem and arithmetic on sizes
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _value_bytes(value: Any) -> int:
    total = 0
    for tensor in _tensors(value):
        count = 1
        for size in tensor.shape:
            count *= _torch_private_capture.hint(size)
        total += count * tensor.dtype.itemsize
    return total


def _flops(node: fx.Node) -> float:
    formula: Callable[..., Any] | None = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        return float(_torch_private_capture.hint(formula(*args, **kwargs, out_val=node.meta.get("val"))))
    except (AssertionError, TypeError, ValueError, AttributeError, IndexError):
        return 0.0  # torch's formulas cover the common forms of an operator's arguments only
