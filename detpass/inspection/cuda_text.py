"""Reads the text that Inductor generates for CUDA: its kernels, the atomics in them, and the operators it calls.

A kernel is read three times where it can be: its Triton source, Triton's intermediate code and PTX. Neighbours:
``cuda_code.py`` (where the text comes from), ``extern_hazards.py`` (which operators are nondeterministic).
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from detpass.inspection.extern_hazards import hazard_of, operator_name
from detpass.ttir import atomics


@dataclass(frozen=True)
class KernelText:
    """One Triton kernel of a generated module."""

    name: str
    """The name by which the module calls it."""
    function: str
    """The name of the Python function."""
    source: str
    """The text of the kernel's own module."""

    @property
    def is_users(self) -> bool:
        """Whether the model launches it: Inductor did not write it."""
        return "triton_heuristics.user_autotune" in self.source


@dataclass(frozen=True)
class Atomic:
    """One kind of atomic in one kernel."""

    graph: str
    """The name of the graph in :attr:`CudaCode.sources`."""
    kernel: str
    operation: str
    """``fadd``, ``add``, ``max``, ``min``, ``umax``, ``umin``, ``and``, ``or``, ``xor``, ``exch`` or ``cas``."""
    dtype: str
    """``f32``, ``i64`` and so on; ``?`` where the source alone was read and does not tell."""
    count: int
    """How often it stands in the text where it was found first."""
    found_in: tuple[str, ...]
    """Of ``source``, ``ttir`` and ``ptx``."""


@dataclass(frozen=True)
class Scan:
    """A scan by decoupled look-back: blocks are combined as they arrive."""

    graph: str
    kernel: str
    floating: bool
    """Whether floating-point values are in it; then the bits depend on the order, else the scan is exact."""


@dataclass(frozen=True)
class ExternCall:
    """A call of an operator that Inductor does not generate itself."""

    graph: str
    operator: str
    """As it is called: ``extern_kernels.mm``, ``aten.index_put_``, ``torch.ops.aten.sort.stable``."""
    line: int
    """In the graph's source."""
    hazard: str | None
    """Why it is nondeterministic on CUDA, or None."""


@dataclass(frozen=True)
class Reading:
    """What one kernel holds."""

    atomics: tuple[Atomic, ...]
    scans: tuple[Scan, ...]
    ordered: frozenset[Atomic] = frozenset()
    """Integer atomics of a user's kernel whose order decides: their results are used, or several kinds are mixed."""


_PTX_ATOMIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)((?:\.\w+)+)", re.MULTILINE)
_PTX_FLOAT = re.compile(r"^(?:f16|f16x2|bf16|bf16x2|f32|f64)$")
_PTX_OPERATIONS = ("add", "max", "min", "and", "or", "xor", "exch", "cas", "inc", "dec")
_SOURCE_ATOMIC = re.compile(r"\btl\.atomic_(\w+)\(\s*([A-Za-z_]\w*)?")
_POINTER = re.compile(r"'(\w+)':\s*'\*(\w+)'")
_TRITON_NAMES = {"fp16": "f16", "fp32": "f32", "fp64": "f64", "bf16": "bf16"}
_BUFFER = re.compile(r"^\s*(\w+) = empty_strided_cuda\(.*torch\.(\w+)\)$", re.MULTILINE)
_LOOK_BACK = "decoupled_lookback"
_EXACT_DTYPES = ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
"""Sums and products of these wrap around: they are the same in every order."""


def kernels(source: str) -> list[KernelText]:
    """The Triton kernels that a generated module defines, Inductor's and the user's, in order."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call, name = node.value, node.targets[0]
        if ast.unparse(call.func) != "async_compile.triton" or not isinstance(name, ast.Name):
            continue
        function, text = (ast.literal_eval(argument) for argument in call.args[:2])
        found.append(KernelText(name.id, function, text))
    return found


def read_kernel(graph: str, kernel: KernelText, ttir: str = "", ptx: str = "", error: str = "") -> Reading:
    """The atomics and floating-point scans of one kernel; ``ttir`` and ``ptx`` are empty where it was not compiled."""
    in_ttir = atomics(ttir)
    counts: dict[str, Counter[tuple[str, str]]] = {
        "ttir": Counter((atomic.operation, atomic.dtype) for atomic in in_ttir),
        "ptx": Counter(_in_ptx(ptx)),
        "source": Counter(_in_source(kernel.source)),
    }
    if ttir:  # it has the types, and the helper functions that the source only names
        del counts["source"]
    kinds = dict.fromkeys(kind for counter in counts.values() for kind in counter)
    found = []
    for operation, dtype in kinds:
        where = tuple(place for place, counter in counts.items() if (operation, dtype) in counter)
        first = counts[where[0]][operation, dtype]
        found.append(Atomic(graph, kernel.name, operation, dtype, first, where))
    floats = _look_back_of_floats(kernel.source)
    scans = () if floats is None else (Scan(graph, kernel.name, floats),)
    # Inductor's own kernels count and wait by integer atomics where only the moment of a step depends on the order.
    decided = {(atomic.operation, atomic.dtype) for atomic in in_ttir if atomic.ordered} if kernel.is_users else set()
    ordered = frozenset(atomic for atomic in found if (atomic.operation, atomic.dtype) in decided)
    return Reading(tuple(found), scans, ordered)


def _look_back_of_floats(source: str) -> bool | None:
    """Whether a look-back scan combines floating-point values; None where the kernel has none.

    Inductor converts what it scans with ``.to(tl.int64)`` or ``.to(tl.float32)`` first; other values of the kernel say
    nothing. What cannot be followed back to such a conversion counts as floating point.
    """
    if _LOOK_BACK not in source:
        return None
    tree = ast.parse(source)
    values = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    scanned = [call.args[1] for call in calls if _LOOK_BACK in (_dotted(call.func) or "")]
    return not scanned or any(_triton_dtype(value, values) not in _EXACT_DTYPES for value in scanned)


def _triton_dtype(value: ast.expr, values: Mapping[str, ast.expr]) -> str | None:
    """The dtype, such as ``int64``, that an expression of a kernel was converted to last; None where none is found."""
    seen: set[str] = set()
    while True:
        if isinstance(value, ast.Name) and value.id in values and value.id not in seen:
            seen.add(value.id)
            value = values[value.id]
        elif not isinstance(value, ast.Call):
            return None
        elif isinstance(value.func, ast.Attribute) and value.func.attr == "to" and value.args:
            dtype = _dotted(value.args[0])
            return dtype.removeprefix("tl.") if dtype else None
        elif _dotted(value.func) in ("tl.broadcast_to", "tl.reduce") and value.args:
            value = value.args[0]
        else:
            return None


def _in_ptx(text: str) -> Iterator[tuple[str, str]]:
    for match in _PTX_ATOMIC.finditer(text):
        parts = match[1].strip(".").split(".")
        operation = next((part for part in parts if part in _PTX_OPERATIONS), "?")
        dtype = parts[-1]
        if _PTX_FLOAT.match(dtype):
            yield ("fadd" if operation == "add" else operation), dtype.removesuffix("x2")
        elif operation in ("max", "min") and dtype.startswith("u"):
            yield "u" + operation, "i" + dtype[1:]
        else:
            yield operation, "i" + dtype[1:]


def _in_source(text: str) -> Iterator[tuple[str, str]]:
    types = {name: _TRITON_NAMES.get(kind, kind) for name, kind in _POINTER.findall(text)}
    for operation, pointer in _SOURCE_ATOMIC.findall(text):
        dtype = types.get(pointer, "?")
        floating = dtype in _TRITON_NAMES.values() or dtype == "?"  # unknown counts as the worse one
        yield ("fadd" if operation == "add" and floating else operation), dtype


def extern_calls(graph: str, source: str, proved: Collection[str] = ()) -> list[ExternCall]:
    """The operators that the generated module calls, without allocation and device bookkeeping.

    ``proved`` names operators (:func:`operator_name`) of which every call in the graph was proved to repeat.
    """
    found = []
    exact = {name for name, dtype in _BUFFER.findall(source) if dtype.startswith(("int", "uint", "bool"))}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name is None or not name.startswith(_PREFIXES):
            continue
        arguments = [ast.unparse(argument) for argument in node.args]
        keywords = {keyword.arg or "": ast.unparse(keyword.value) for keyword in node.keywords}
        integers = bool(arguments) and arguments[0] in exact
        hazard = None if operator_name(name) in proved else hazard_of(name, arguments, keywords, integers)
        found.append(ExternCall(graph, name, node.lineno, hazard))
    return sorted(found, key=lambda call: call.line)


_PREFIXES = ("extern_kernels.", "torch.ops.", "aten.", "prims.", "inductor_ops.", "fallback_op.")


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
