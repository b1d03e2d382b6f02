"""Questions about nodes of an FX graph that rules ask; nothing here knows a particular rule.

Neighbours: ``rule.py`` (what a rule is), ``rewriting/graph_pass.py`` (who offers nodes to rules).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of ``node``, or None when the argument is no node or the node's value is no tensor."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, name: str) -> Any:
    """The argument ``name`` of an operator node, whether given by position, by keyword or left at its default.

    Raises KeyError when the operator's schema has no such argument.
    """
    schema = _schema(node)
    for position, formal in enumerate(schema.arguments):
        if formal.name != name:
            continue
        if name in node.kwargs:
            return node.kwargs[name]
        if not formal.kwarg_only and position < len(node.args):
            return node.args[position]
        return formal.default_value
    raise KeyError(f"{node.target} has no argument {name!r}; it has {[a.name for a in schema.arguments]}")


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operator node by name, defaults filled in."""
    return {formal.name: argument(node, formal.name) for formal in _schema(node).arguments}


def int_argument(node: fx.Node, name: str) -> int:
    """The argument ``name`` of an operator node, a constant integer. Raises TypeError for what is no number."""
    return int(argument(node, name))


def list_argument(node: fx.Node, name: str) -> list[Any]:
    """The argument ``name`` of an operator node, a list (of nodes, None or constants)."""
    return list(argument(node, name))


def result_number(getitem: fx.Node) -> int:
    """Which of its parent's results an ``operator.getitem`` node takes."""
    position: Any = getitem.args[1]
    return int(position)


def result_key(getitem: fx.Node) -> Any:
    """Which of its parent's results an ``operator.getitem`` node takes: a number, or a kernel's name for it."""
    return getitem.args[1]


def _schema(node: fx.Node) -> Any:
    target: Any = node.target
    return target._schema


def source_location(node: fx.Node) -> str | None:
    """``file:line`` of the model that ``node`` stems from (:func:`trace_location`), or None without a trace."""
    return trace_location(node.meta.get("stack_trace") or getattr(node, "stack_trace", None))


def trace_location(trace: str | None) -> str | None:
    """``file:line`` of a stack trace's innermost frame in the user's code; of any frame, where all are torch's.

    Code of torch (``torch.nn.functional``, ``nn.Embedding``), of detpass's own operators and generated code are passed
    over: the line is the one that calls them.
    """
    found = frames(trace or "")
    own = [frame for frame in found if not _FOREIGN.match(frame[0])]
    if not found:
        return None
    file, line = (own or found)[-1]
    return f"{file}:{line}"


def frames(trace: str) -> list[tuple[str, int]]:
    """File and line of each frame of a stack trace's text, outermost first."""
    return [(m["file"], int(m["line"])) for line in trace.splitlines() if (m := _FRAME.match(line))]


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_FOREIGN = re.compile(
    "|".join(
        [
            *(
                re.escape(str(folder) + os.sep)
                for folder in (
                    Path(torch.__file__).parent,
                    Path(__file__).parent / "inspection",
                    Path(__file__).parent / "segment",
                )
            ),
            r".*[/\\](?:site|dist)-packages[/\\]torch[/\\]",  # of the machine that printed a graph
            r"<",
        ]
    )
)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1; a symbolic size is not."""
    return isinstance(size, int) and size == 1


def is_zero(size: Any) -> bool:
    """Whether a size or a stride is known to be 0; a symbolic one is not."""
    return isinstance(size, int) and size == 0


def repeats(tensor: torch.Tensor, dim: int) -> bool:
    """Whether all elements along ``dim`` are known to be the same one (not so for a symbolic stride)."""
    return is_one(tensor.shape[dim]) or is_zero(tensor.stride(dim))


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements, whatever its symbolic sizes are."""
    return any(is_zero(size) for size in tensor.shape)


def known_to_differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known and unequal; a symbolic size may be equal to any other."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def is_zeros(node: Any) -> bool:
    """Whether ``node`` is a fresh tensor of zeros (``full``, ``zeros``, ``new_zeros``, ``zeros_like`` ...)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return bool(_constant_fill(node) == 0)


def _constant_fill(node: fx.Node) -> Any:
    aten = torch.ops.aten
    if node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return 0
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = argument(node, "fill_value")
        return fill if isinstance(fill, (int, float, bool, complex)) else None
    if node.target in (
        aten.expand.default,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.clone.default,
        aten.alias.default,
        torch.ops.prims.convert_element_type.default,
    ):
        source = node.args[0]
        return _constant_fill(source) if isinstance(source, fx.Node) and source.op == "call_function" else None
    return None


def label(node: fx.Node) -> str:
    """What error messages call a node: its operator and, where known, the model's line."""
    place = source_location(node)
    name = str(node.target).removesuffix(".default")
    return f"{name} at {place}" if place else name
