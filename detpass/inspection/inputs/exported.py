"""``torch.export`` programs: as objects, and as ``.pt2`` archives whose graph is read from its JSON text.

``torch.export.load`` evaluates size expressions and may unpickle; here only the JSON is read: weights, sample inputs
and pickled objects in the archive are left alone. Symbolic sizes take the value of the example that was exported.
"""

from __future__ import annotations

import json
import operator
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detpass import _torch_private_capture
from detpass.errors import InspectionError
from detpass.inspection.inputs.statements import GraphBuilder, operator_named

_PLAIN = ("as_int", "as_float", "as_bool", "as_string", "as_ints", "as_floats", "as_bools", "as_strings")
_ENUMS = {"as_scalar_type": "dtype", "as_layout": "layout", "as_memory_format": "memory_format"}


def model_entry(archive: zipfile.ZipFile) -> str | None:
    """The name of the archive's entry that holds the graph, or None when it is no exported program."""
    found = [name for name in archive.namelist() if "/models/" in name and name.endswith(".json")]
    return found[0] if found else None


def from_program(program: torch.export.ExportedProgram) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The graph of an exported program and a fake tensor for each of its inputs, parameters first."""
    graph_module = program.graph_module
    parameters = set(program.graph_signature.inputs_to_parameters)
    mode = _torch_private_capture.plain_fake_mode()
    inputs: list[Any] = []
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            learned = node.name in parameters and _learned(program, node.name)
            inputs.append(_fake(mode, value, learned or value.requires_grad))
        else:
            inputs.append(_torch_private_capture.hint(value) if isinstance(value, torch.SymInt) else value)
    return graph_module, tuple(inputs)


def from_archive(archive: zipfile.ZipFile, path: Path) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The same for an opened ``.pt2`` archive. Raises InspectionError for a graph that cannot be read."""
    entry = model_entry(archive)
    if entry is None:
        raise InspectionError(f"{path} holds no exported graph (no models/*.json)")
    try:
        model = json.loads(archive.read(entry))
        return _Reader(str(path), model["graph_module"]).read()
    except (KeyError, TypeError, ValueError) as error:
        raise InspectionError(
            f"{path}: the graph in {entry} has a form that is not known ({type(error).__name__}: {error}); it may come "
            "from another version of torch. Load it with torch.export.load and give the program itself"
        ) from error


def _learned(program: torch.export.ExportedProgram, name: str) -> bool:
    held = program.state_dict.get(program.graph_signature.inputs_to_parameters[name])
    return isinstance(held, torch.Tensor) and held.requires_grad


def _fake(mode: Any, like: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    size = [_torch_private_capture.hint(s) for s in like.size()]
    stride = [_torch_private_capture.hint(s) for s in like.stride()]
    with mode:
        made = torch.empty_strided(size, stride, dtype=like.dtype)
    return made.requires_grad_(requires_grad)


class _Reader:
    def __init__(self, origin: str, module: dict[str, Any]) -> None:
        self._origin = origin
        self._graph = module["graph"]
        self._build = GraphBuilder(origin)
        self._enums = _torch_private_capture.export_enums()
        self._values: dict[str, Any] = {}

    def read(self) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        inputs: list[Any] = []
        for argument in self._graph["inputs"]:
            ((kind, value),) = argument.items()
            if kind != "as_tensor":
                inputs.append(value if kind in _PLAIN else None)
                self._build.input(f"constant_{len(inputs)}", inputs[-1])
                continue
            fake = self._tensor(value["name"])
            self._values[value["name"]] = self._build.input(value["name"], fake)
            wanted = self._graph["tensor_values"][value["name"]]["requires_grad"]
            inputs.append(_fake(self._build.mode, fake, wanted))
        for number, node in enumerate(self._graph["nodes"]):
            self._node(node, number)
        results = tuple(self._value(output) for output in self._graph["outputs"])
        return self._build.finish(results), tuple(inputs)

    def _node(self, node: dict[str, Any], number: int) -> None:
        target = operator_named(node["target"].split("."), self._origin)
        formals = getattr(getattr(target, "_schema", None), "arguments", ())
        keyword_only = {formal.name for formal in formals if formal.kwarg_only}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for item in node["inputs"]:
            value = self._value(item["arg"])
            if item.get("kind") == 2 or item["name"] in keyword_only or (args and kwargs):
                kwargs[item["name"]] = value
            else:
                args.append(value)
        trace = (node.get("metadata") or {}).get("stack_trace")
        made = self._build.call(target, tuple(args), kwargs, trace, f"node {number}")
        outputs = node["outputs"]
        if len(outputs) == 1 and "as_tensors" not in outputs[0]:
            self._name(outputs[0], made)
            return
        flat = [
            {"as_tensor": o} if kind == "as_tensors" else {kind: value}
            for output in outputs
            for kind, value in output.items()
            for o in (value if kind == "as_tensors" else [value])
        ]
        for position, output in enumerate(flat):
            if "as_none" not in output:
                item = self._build.call(operator.getitem, (made, position), {}, trace, f"node {number}")
                self._name(output, item)

    def _name(self, output: dict[str, Any], made: fx.Node) -> None:
        ((kind, value),) = output.items()
        name = value.get("name") or value.get("as_name")
        if name is None:
            raise ValueError(f"an output of kind {kind} without a name")
        self._values[name] = made

    def _value(self, argument: dict[str, Any]) -> Any:
        ((kind, value),) = argument.items()
        if kind in _PLAIN:
            return value
        if kind in _ENUMS:
            return self._enums[_ENUMS[kind]][value]
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self._values[value["name"]]
        if kind == "as_tensors":
            return [self._values[item["name"]] for item in value]
        if kind in ("as_optional_tensors", "as_optional_tensor"):
            items = [self._value(item) for item in (value if isinstance(value, list) else [value])]
            return items if isinstance(value, list) else items[0]
        if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            return self._size(value)
        if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
            return [self._size(item) for item in value]
        if kind == "as_device":
            return torch.device("cpu")
        raise ValueError(f"an argument of kind {kind}")

    def _size(self, value: dict[str, Any]) -> Any:
        ((kind, content),) = value.items()
        return self._values[content] if kind == "as_name" else content

    def _tensor(self, name: str) -> torch.Tensor:
        meta = self._graph["tensor_values"][name]
        size, stride = ([self._number(item) for item in meta[key]] for key in ("sizes", "strides"))
        return self._build.tensor(self._enums["dtype"][meta["dtype"]], size, stride)

    def _number(self, item: dict[str, Any]) -> int:
        if "as_int" in item:
            return int(item["as_int"])
        hint = item["as_expr"].get("hint")
        if hint is None:
            raise ValueError(f"the size {item['as_expr'].get('expr_str')} without an example's value")
        return int(hint["as_int"] if isinstance(hint, dict) else hint)
