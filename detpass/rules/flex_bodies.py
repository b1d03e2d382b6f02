"""The graphs of one position that flex_attention has (score function, mask function, joint graph), applied to all.

Their values are scalars of one position. Here each is a tensor that broadcasts over batch, head, query and key: the
number of the head is ``[1, H, 1, 1]``, a score is ``[B, H, M, N]``. Pointwise operations need no change, a read of a
captured tensor at a place takes tensors as indices. What a value does not depend on keeps the size 1, which
``flex_totals.py`` makes use of.

Kernels compute in float32 what a graph has in half precision, and drop the roundings in between; so does this.

Neighbours: ``flex_gradients.py`` and ``flex_scores.py``, which ask for values; ``associative_scan.py``, whose graphs
speak of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
prims = torch.ops.prims

READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
CONVERSIONS = (prims.convert_element_type.default, aten._to_copy.default)
LIKE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
JOINT, KERNEL_OPTIONS = 8, 11
"""Where ``flex_attention_backward`` has the joint graph of its score function and the options of its kernels."""


def body_of(node: fx.Node, operand: Any) -> fx.GraphModule:
    """The graph that an operand of ``node``, a higher-order operator's, names."""
    owner: Any = node.graph.owning_module
    body: fx.GraphModule = getattr(owner, str(operand.target)) if isinstance(operand, fx.Node) else operand
    return body


def kernel_options(node: fx.Node) -> Mapping[str, Any]:
    """The kernel options of a ``flex_attention_backward``."""
    options: Any = node.args[KERNEL_OPTIONS]
    return dict(options)


def inputs_of(body: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def results_of(body: fx.GraphModule) -> tuple[Any, ...]:
    """What a graph returns: nodes and None."""
    (returned,) = next(node for node in reversed(body.graph.nodes) if node.op == "output").args
    results: Any = returned
    return tuple(results) if isinstance(results, (list, tuple)) else (results,)


def varying_in(body: fx.GraphModule, positional: int) -> set[fx.Node]:
    """The nodes whose values differ by position: those downstream of the first ``positional`` inputs."""
    return downstream(body, set(inputs_of(body)[:positional]).__contains__)


def downstream(body: fx.GraphModule, starts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes for which ``starts`` is true and all that depends on them."""
    found: set[fx.Node] = set()
    for node in body.graph.nodes:
        if starts(node) or any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def not_of_one_position(body: fx.GraphModule, wanted: Sequence[Any], positional: int) -> fx.Node | None:
    """A node behind ``wanted`` that is not a pointwise operation or a read at a place; None where all are."""
    varying = varying_in(body, positional)
    for node in _needed(body, wanted, ()):
        if node.op == "get_attr" and getattr(body, str(node.target)).numel() != 1:
            return node
        if node in varying and node.op == "call_function" and not _is_of_one_position(node, varying):
            return node
    return None


def _is_of_one_position(node: fx.Node, varying: set[fx.Node]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim():
        return False
    if node.target in READS:
        table: Any = node.args[0]
        indices: Any = node.args[1]
        whole = len(indices) == table.meta["val"].dim() and None not in indices
        return whole and table not in varying
    return node.target in LIKE or is_pointwise(node.target)


def is_pointwise(target: Any) -> bool:
    """Whether an operator computes each element from those at the same place, or copies or converts it."""
    if target in (*COPIES, *CONVERSIONS):
        return True
    if getattr(target, "namespace", None) == "prims":
        return of_aten(target) is not target
    return torch.Tag.pointwise in getattr(target, "tags", ())


def of_aten(target: Any) -> Any:
    """ATen's operator for one of prims, which neither broadcast nor have a meaning under vmap; others as they are."""
    if getattr(target, "namespace", None) == "prims":
        return getattr(aten, target._opname, target)
    return target


def evaluate(body: fx.GraphModule, wanted: Sequence[Any], known: Mapping[fx.Node, Any], positional: int) -> list[Any]:
    """The values of ``wanted`` (nodes and constants) given those of some nodes; nothing else is computed.

    Values of the first ``positional`` inputs are tensors of four dimensions, and so is all that depends on them. Reads
    of captured tensors at places that they do not have read the first place instead: only positions that the mask
    leaves out can ask for one, and what is computed there is dropped.
    """
    env = dict(known)
    varying = varying_in(body, positional)
    for node in _needed(body, wanted, env):
        if node.op == "get_attr":
            env[node] = _constant(getattr(body, str(node.target)))
            continue
        args: Any = fx.node.map_arg(node.args, lambda n: env[n])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n])
        function: Any = node.target
        if node in varying and positional:
            function = _for_all(function)
            if node.target not in READS:
                args = tuple(_spread(arg) for arg in args)
        env[node] = function(*args, **kwargs)
    return [env[item] if isinstance(item, fx.Node) else item for item in wanted]


def spread(value: Tensor) -> Tensor:
    """A value as a tensor of four dimensions: one that is the same at every position has none yet."""
    return value.reshape(1, 1, 1, 1) if value.dim() == 0 else value


def _spread(value: Any) -> Any:
    return spread(value) if isinstance(value, Tensor) else value


def _for_all(target: Any) -> Any:
    if target in READS:
        return _read
    if target in COPIES:
        return lambda value, **_: value
    if target in CONVERSIONS:
        return _converted
    return of_aten(target)


def _read(table: Tensor, indices: Sequence[Tensor]) -> Tensor:
    settled = []
    for index, size in zip(indices, table.shape, strict=True):
        settled.append(torch.where((index >= -size) & (index < size), spread(index), 0))
    return aten.index.Tensor(table, settled)  # type: ignore[no-any-return]


def _converted(value: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    if not dtype.is_floating_point:
        return value.to(dtype)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    return value.to(torch.promote_types(value.dtype, wide) if value.is_floating_point() else wide)


def _constant(tensor: Tensor) -> Tensor:
    """A number that a graph holds, as a tensor of the graph that is being traced."""
    return torch.full((), tensor.item(), dtype=tensor.dtype, device=tensor.device)


def _needed(body: fx.GraphModule, wanted: Sequence[Any], known: Any) -> list[fx.Node]:
    """The nodes behind ``wanted`` that are not ``known``, in order."""
    found: set[fx.Node] = set()
    todo = [item for item in wanted if isinstance(item, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in found and node not in known:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return [node for node in body.graph.nodes if node in found]
