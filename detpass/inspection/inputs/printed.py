"""Printed graphs: ``fx_graph_readable.py``, ``fx_graph_transformed.py`` and ``fx_graph_runnable.py``.

The text is parsed, never run. Sizes and dtypes of the inputs come from the annotations of a readable graph, or from
``load_args`` of a runnable one; the model's lines from the comments. Symbolic sizes take the value that a runnable file
gives, or one of ``SIZES`` each.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import fx

from detpass.errors import InspectionError
from detpass.inspection.inputs.statements import GraphBuilder, operator_named
from detpass.inspection.locations import SHORT_DTYPES

SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
"""Values given to symbolic sizes of which none is known: distinct, so that unequal sizes stay unequal."""

_ANNOTATION = re.compile(r"^(?P<dtype>[a-z]+\d*\w*)\[(?P<size>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>\S*)$")
_CLASS = re.compile(r"^class <\w+>\(", re.MULTILINE)
_COMMENT = re.compile(r"#.*?\bFile: (?P<file>.+?):(?P<line>\d+) in (?P<name>\S+?),? code: (?P<code>.*)$")
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_DTYPES = {short: dtype for dtype, short in SHORT_DTYPES.items()}


def read(path: Path) -> fx.GraphModule:
    """The graph printed in the file ``path``, with fake values. Raises InspectionError where it cannot be read."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(_CLASS.sub("class GraphModule(", text))
    except SyntaxError as error:
        raise InspectionError(f"{path}, line {error.lineno}: not Python text ({error.msg})") from error
    forwards = [
        (outer, inner)
        for outer in tree.body
        if isinstance(outer, ast.ClassDef)
        for inner in outer.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "forward"
    ]
    if len(forwards) != 1:
        raise InspectionError(
            f"{path} holds {len(forwards)} classes with a forward method; a printed graph has one. Expected an "
            "fx_graph_readable.py or fx_graph_runnable.py; to inspect a function of a file, name it: file.py:factory"
        )
    return _Reader(path, text, tree, *forwards[0]).read()


class _Reader:
    def __init__(self, path: Path, text: str, tree: ast.Module, cls: ast.ClassDef, forward: ast.FunctionDef) -> None:
        self._origin = str(path)
        self._lines = text.splitlines()
        self._tree = tree
        self._cls = cls
        self._forward = forward
        self._build = GraphBuilder(self._origin)
        self._symbols: dict[str, int] = {}
        self._values: dict[str, Any] = {}

    def read(self) -> fx.GraphModule:
        self._read_symbols()
        described = self._arguments()
        traces = self._traces()
        for argument in self._forward.args.args[1:]:
            if argument.arg not in described:
                raise self._error(argument, f"nothing says what the input {argument.arg} is")
            self._values[argument.arg] = self._build.input(argument.arg, described[argument.arg])
        for statement in self._forward.body:
            if isinstance(statement, ast.Return):
                return self._build.finish(self._value(statement.value) if statement.value is not None else ())
            self._statement(statement, traces)
        raise self._error(self._forward, "the forward method returns nothing")

    def _statement(self, statement: ast.stmt, traces: dict[int, str]) -> None:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, value, note = statement.target.id, statement.value, statement.annotation
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value, note = statement.targets[0].id, statement.value, None
            if isinstance(value, ast.Constant) and value.value is None:
                return  # "x = None" frees a value
        elif isinstance(statement, (ast.Expr, ast.Assert)):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._call(statement.value, traces.get(statement.lineno))
            return
        else:
            raise self._error(statement, f"unexpected statement {type(statement).__name__}")
        if value is None:
            raise self._error(statement, f"{name} has no value")
        trace = traces.get(statement.lineno)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
            self._values[name] = self._held(statement, value.attr, note)
        elif isinstance(value, ast.Call) and not self._is_constant_call(value):
            self._values[name] = self._call(value, trace)
        else:
            self._values[name] = self._value(value, trace)

    def _call(self, call: ast.Call, trace: str | None) -> fx.Node:
        parts = _dotted(call.func)
        if parts is None:
            raise self._error(call, f"cannot read {ast.unparse(call.func)}")
        target = operator_named(parts, self._where(call))
        args = tuple(self._value(argument) for argument in call.args)
        kwargs = {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        return self._build.call(target, args, kwargs, trace, f"line {call.lineno}")

    def _value(self, node: ast.expr, trace: str | None = None) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self._value(item) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Name):
            if node.id in self._values:
                return self._values[node.id]
            if node.id in ("inf", "nan"):
                return float(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._value(node.operand)
            return self._size_call(operator.neg, operand) if isinstance(operand, fx.Node) else -operand
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._size_call(_ARITHMETIC[type(node.op)], self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
            sides = self._value(node.left), self._value(node.comparators[0])
            return self._size_call(_ARITHMETIC[type(node.ops[0])], *sides)
        if isinstance(node, ast.Subscript):
            item = self._value(node.slice)
            return self._build.call(operator.getitem, (self._value(node.value), item), {}, trace, f"line {node.lineno}")
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return slice(*(None if part is None else self._value(part) for part in parts))
        if isinstance(node, ast.Attribute):
            return self._torch_constant(node)
        if isinstance(node, ast.Call):
            return torch.device("cpu") if self._is_constant_call(node) else self._call(node, trace)
        raise self._error(node, f"cannot read {ast.unparse(node)}")

    def _size_call(self, function: Callable[..., Any], *operands: Any) -> Any:
        if any(isinstance(operand, fx.Node) for operand in operands):
            return self._build.call(function, operands, {}, None, "arithmetic on sizes")
        return function(*operands)

    def _torch_constant(self, node: ast.Attribute) -> Any:
        parts = _dotted(node)
        if parts is not None and parts[:1] == ["torch"] and len(parts) == 2:
            value = getattr(torch, parts[1], None)
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
        if parts in (["math", "inf"], ["math", "nan"]):
            return getattr(math, parts[1])
        raise self._error(node, f"cannot read {ast.unparse(node)}")

    def _is_constant_call(self, call: ast.Call) -> bool:
        return _dotted(call.func) in (["device"], ["torch", "device"])

    def _held(self, statement: ast.stmt, name: str, note: ast.expr | None) -> fx.Node:
        """A tensor that the module holds: described by its annotation, or by ``register_buffer`` in ``__init__``."""
        if note is not None:
            value = self._described(note, name)
            if isinstance(value, torch.Tensor):
                return self._build.constant(name, value)
        for call in (n for n in ast.walk(self._cls) if isinstance(n, ast.Call)):
            if (_dotted(call.func) or [""])[-1] == "register_buffer" and _literal(call.args[0]) == name:
                made = call.args[1]
                sizes = [_literal(a) for a in ast.walk(made) if isinstance(a, (ast.List, ast.Tuple))]
                dtypes = [self._torch_constant(a) for a in ast.walk(made) if _is_dtype(a)]
                value = self._build.tensor((dtypes or [torch.float32])[0], list((sizes or [()])[0] or ()))
                return self._build.constant(name, value)
        raise self._error(statement, f"nothing says what the held tensor {name} is")

    def _arguments(self) -> dict[str, Any]:
        """Fake values of the inputs by name, from ``load_args`` or from the annotations."""
        names = [argument.arg for argument in self._forward.args.args[1:]]
        loaders = [n for n in self._tree.body if isinstance(n, ast.FunctionDef) and n.name == "load_args"]
        if loaders:
            calls = [s.value for s in loaders[0].body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
            return dict(zip(names, [self._loaded(call) for call in calls], strict=False))
        notes = {a.arg: a.annotation for a in self._forward.args.args[1:] if a.annotation is not None}
        return {name: self._described(note, name) for name, note in notes.items()}

    def _loaded(self, call: ast.Call) -> Any:
        """The value of one ``reader.tensor(...)`` or ``reader.symint(...)``."""
        kind = (_dotted(call.func) or [""])[-1]
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if kind in ("symint", "const"):
            return _literal(call.args[0])
        if kind != "tensor":
            raise self._error(call, f"cannot read {ast.unparse(call)}")
        named_dtype = named.get("dtype")
        dtype = self._torch_constant(named_dtype) if isinstance(named_dtype, ast.Attribute) else torch.float32
        shape, strides = call.args[1], call.args[2] if len(call.args) > 2 else named.get("stride")
        stride = self._sizes(strides) if isinstance(strides, ast.Tuple) else None
        return self._build.tensor(dtype, self._sizes(shape), stride)

    def _described(self, note: ast.expr, name: str) -> Any:
        """The fake value that an annotation such as ``"f32[4, s0]"`` or ``"Sym(s0)"`` describes."""
        text = _literal(note)
        if isinstance(text, str) and text.startswith("Sym("):
            return self._size(ast.parse(text[4:-1], mode="eval").body)
        match = _ANNOTATION.match(text) if isinstance(text, str) else None
        dtype = _DTYPES.get(match["dtype"]) if match else None
        if match is None or dtype is None:
            raise self._error(note, f"the annotation {text!r} of {name} describes no tensor")
        stride = match["stride"]
        return self._build.tensor(
            dtype, self._sizes_of(match["size"]), None if stride is None else self._sizes_of(stride)
        )

    def _sizes_of(self, text: str) -> list[int]:
        return self._sizes(ast.parse(f"({text},)" if text.strip() else "()", mode="eval").body)

    def _sizes(self, node: ast.expr) -> list[int]:
        if not isinstance(node, (ast.Tuple, ast.List)):
            raise self._error(node, f"expected sizes, found {ast.unparse(node)}")
        return [self._size(item) for item in node.elts]

    def _size(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return self._symbols.setdefault(node.id, SIZES[len(self._symbols) % len(SIZES)])
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(node.op)](self._size(node.left), self._size(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._size(node.operand)
        raise self._error(node, f"cannot read the size {ast.unparse(node)}")

    def _read_symbols(self) -> None:
        """Values of symbolic sizes from the head of a runnable file: ``s77 = 5``."""
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                value = _literal(statement.value)
                if isinstance(value, int) and re.fullmatch(r"[su]\d+", statement.targets[0].id):
                    self._symbols[statement.targets[0].id] = value

    def _traces(self) -> dict[int, str]:
        """The stack trace of each line of the forward method, from the comments above it."""
        found: dict[int, str] = {}
        current = ""
        for number in range(self._forward.lineno, (self._forward.end_lineno or 0) + 1):
            line = self._lines[number - 1].strip()
            if line.startswith("#"):
                match = _COMMENT.search(line)
                current = f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}' if match else ""
            elif current:
                found[number] = current
        return found

    def _where(self, node: ast.AST) -> str:
        return f"{self._origin}, line {getattr(node, 'lineno', '?')}"

    def _error(self, node: ast.AST, what: str) -> InspectionError:
        return InspectionError(f"{self._where(node)}: {what}; expected a graph printed by torch")


def _dotted(node: ast.expr) -> list[str] | None:
    """``a.b.c`` as its parts, or None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _is_dtype(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(getattr(torch, node.attr, None), torch.dtype)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or None for anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
