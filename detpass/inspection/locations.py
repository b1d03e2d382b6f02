"""What a person wants to see of a node's place in the model: the line's text, the module's path, dtypes and shapes.

The place itself, ``file:line``, is ``graph_query.source_location``'s.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from typing import Any

import torch

_STEP = re.compile(r"\._modules\['([^']+)'\]|\.([A-Za-z_]\w*)|\[(\d+)\]|\['([^']+)'\]")


def source_line(location: str | None) -> str | None:
    """The text of the line at ``file:line``, or None when the file cannot be read."""
    if location is None:
        return None
    file, _, line = location.rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return text or None


def module_path(meta: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
    """The path of the module that holds a node, such as ``encoder.layers.0``.

    ``names`` gives the paths of the inspected model's modules by the key that FX uses (``str(id(module))``); where a
    module is not listed, the path is read from Dynamo's own expression for it.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, (expression, _) = list(stack.items())[-1]
    known = names.get(str(key).partition("@")[0])
    if known is not None:
        return known or None
    head, _, rest = str(expression).partition("]") if str(expression).startswith("L[") else ("", "", str(expression))
    steps = [next(filter(None, m.groups())) for m in _STEP.finditer(rest)] if head else rest.split(".")
    return ".".join(step for step in steps if step not in ("_modules", "self")) or None


def describe(value: Any) -> str:
    """Dtype and shape of a node's value, such as ``f32[128, s0]``; several values in brackets."""
    if isinstance(value, torch.Tensor):
        dtype = SHORT_DTYPES.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {describe(item)}" for name, item in value.items())
    return str(value)


SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
"""The names that FX's own printouts use."""
