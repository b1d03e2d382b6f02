"""Triton's intermediate code (TTIR) as text: what in it lets the order in which programs run decide the result.

A floating-point addition by atomics depends on the order in which programs arrive. So does what an atomic returns, the
value before: a ticket, a place to write to. A compare-and-swap or an exchange is a lock or an atomic made by hand.
Integer additions, bit operations, minima and maxima leave the same value in any order; Triton writes a floating-point
maximum as two of integers, so that NaN and -0.0 have their place in it, too.

Text, because the module's Python interface changes with each Triton; tested on 3.6 to 3.8. Neighbours:
``ttir_configurations.py`` (several configurations of a kernel), ``user_kernels.py`` (where the text of a user's kernel
comes from), ``inspection/cuda_text.py`` (generated modules).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

EXACT = ("add", "and", "or", "xor", "max", "min", "umax", "umin")
"""Operations on integers of which the last value in memory is the same in every order."""
FLOAT_EXTREMES = ({"max", "umin"}, {"min", "umax"})
"""A floating-point maximum or minimum: one operation for each sign."""
ANYWHERE = "?"
NOTES = {
    "fadd": "floating-point addition by atomics",
    "exch": "an atomic exchange: the order of programs decides",
    "cas": "a compare-and-swap: a lock or an atomic made by hand, in unknown order",
}
USED = "its result, the value before, is used: the order of programs decides"


MIXED = "another kind of atomic may act on the same place, and the two do not commute"
UNKNOWN = "nothing says that its result is the same in every order"


@dataclass(frozen=True)
class Atomic:
    """One atomic operation of a kernel."""

    operation: str
    """``fadd``, ``add``, ``max``, ``min``, ``umax``, ``umin``, ``and``, ``or``, ``xor``, ``exch`` or ``cas``."""
    dtype: str
    """``f32``, ``bf16``, ``i64`` and so on; ``?`` where the text does not tell."""
    ordered: str | None
    """Why the order of programs decides the result, or None where it is the same in every order."""
    location: str | None = None
    """``file:line`` of the kernel's source, where the text says so."""

    def __str__(self) -> str:
        why = self.ordered or "exact in any order"
        return f"{self.operation} on {self.dtype}: {why}{f' ({self.location})' if self.location else ''}"


_RMW = re.compile(r"tt\.atomic_rmw\s+(\w+)")
_CAS = re.compile(r"tt\.atomic_cas\b")
_REDUCE = re.compile(r"tt\.descriptor_reduce\s+(\w+)")
_RESULT = re.compile(r"->\s*([^\n]+)")
_DESCRIPTOR = re.compile(r"!tt\.tensordesc<([^\n]+)")
_ELEMENT = re.compile(r"(?:x|^|<|\s)(f\d+|bf16|i\d+)\b")
_ASSEMBLY = re.compile(r'tt\.elementwise_inline_asm\s+"((?:[^"\\]|\\.)*)"')
_PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]+")
_EXTERNAL = re.compile(r"tt\.extern_elementwise\b")
_SYMBOL = re.compile(r'symbol = "([^"]*)"')

_FUNCTION = re.compile(r"^\s*tt\.func\b[^@]*@(?P<name>[^\s(]+|\"[^\"]*\")\(")
_DEFINITION = re.compile(r"^\s*(?P<results>%[\w.$-]+(?::\d+)?(?:\s*,\s*%[\w.$-]+(?::\d+)?)*)\s*=\s*(?P<rest>.*)$")
_VALUE = re.compile(r"%[\w.$-]+")
_CALL = re.compile(r"^tt\.call\s+@(?P<name>[^\s(]+|\"[^\"]*\")\(")
_EFFECT = re.compile(r'^"?(?:tt\.(?:atomic|call|elementwise_inline_asm|extern_elementwise)|scf\.|cf\.)')
"""Operations with results whose operands matter whatever becomes of the results."""
_POINTER_STEP = re.compile(r"^tt\.(?:addptr|splat|bitcast|broadcast|expand_dims|make_tensor_descriptor)\b")
"""Computations that keep a pointer within the tensor that it points into."""
_PLACE = re.compile(r"loc\((?P<place>#\w+)\)\s*$")
_PLACE_TAIL = re.compile(r"\s+loc\(.*\)\s*$")
_PLACE_ROW = re.compile(r"^(?P<name>#\w+) = loc\((?P<text>.*)\)\s*$", re.MULTILINE)
_PLACE_FILE = re.compile(r'"(?P<file>[^"]+)":(?P<line>\d+):\d+')

Value = tuple[str, str]
"""A function's name and a value's; ``""`` for what the function returns."""


def atomics(text: str) -> list[Atomic]:
    """The atomics of a TTIR module, tensor descriptors' included, in the order of the text."""
    lines = list(rows(text))
    live = _live(lines)
    places = {match["name"]: match["text"] for match in _PLACE_ROW.finditer(text)}
    held = [(row, *kind) for row in lines if (kind := _kind(row.body)) is not None]
    mixed = _mixed(held, makers(lines))
    found = []
    for row, operation, dtype in held:
        why = NOTES.get(operation)
        if why is None and (operation not in EXACT or not dtype.startswith("i")):
            why = UNKNOWN
        elif why is None and any((row.function, name) in live for name in row.results):
            why = USED
        elif why is None and row in mixed:
            why = MIXED
        found.append(Atomic(operation, dtype, why, _location(row.place, places)))
    return found


def opaque(text: str) -> list[str]:
    """Parts of a TTIR module that this module does not understand and that may act on memory, in words."""
    found = []
    for row in rows(text):
        assembly = _ASSEMBLY.search(row.body)
        if assembly and (atomic := _PTX_ATOMIC.search(assembly[1])):
            found.append(f"inline assembly with {atomic[0]}: nothing says that its result is the same in every order")
        if _EXTERNAL.search(row.body) and "pure = false" in row.body:
            symbol = _SYMBOL.search(row.body)
            found.append(f"a call of the external function {symbol[1] if symbol else '?'}, which may act on memory")
    return list(dict.fromkeys(found))


def _kind(body: str) -> tuple[str, str] | None:
    """Operation and dtype of the atomic that a line holds, or None."""
    if match := _RMW.search(body):
        return match[1], _element(_RESULT.search(body))
    if _CAS.search(body):
        return "cas", _element(_RESULT.search(body))
    if match := _REDUCE.search(body):
        dtype = _element(_DESCRIPTOR.search(body))
        return ("fadd" if match[1] == "add" and not dtype.startswith("i") else match[1]), dtype
    return None


def _mixed(held: list[tuple[Row, str, str]], made: Mapping[Value, Row]) -> set[Row]:
    """The atomics that may share a place with one of another kind.

    Places are told apart by the kernel's argument that the pointer is computed from. A floating-point maximum is a
    signed and an unsigned operation on one line, whose masks keep them apart.
    """
    lines: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for row, operation, _ in held:
        lines[row.function, row.place].add(operation)
    kinds: dict[str, set[frozenset[str]]] = defaultdict(set)
    targets = {}
    for row, operation, _ in held:
        line = lines[row.function, row.place]
        targets[row] = _base(row, made)
        kinds[targets[row]].add(frozenset(line if line in FLOAT_EXTREMES else {operation}))
    everywhere = kinds.pop(ANYWHERE, set())
    crowded = {base for base, found in kinds.items() if len(found | everywhere) > 1}
    if len(everywhere.union(*kinds.values())) > 1 and everywhere:
        crowded.add(ANYWHERE)
    return {row for row, base in targets.items() if base in crowded}


def _base(row: Row, made: Mapping[Value, Row]) -> str:
    """The argument of the kernel that an atomic's pointer is computed from, or ``ANYWHERE``."""
    name, function = row.operands[0], row.function
    while (maker := made.get((function, name))) is not None:
        if not _POINTER_STEP.match(maker.body):
            return ANYWHERE
        name = maker.operands[0]
    return name if row.public and name in row.arguments else ANYWHERE


def _element(types: re.Match[str] | None) -> str:
    element = _ELEMENT.search(types[1]) if types else None
    return element[1] if element else "?"


@dataclass(frozen=True)
class Row:
    """One line of a function's body."""

    number: int
    function: str
    public: bool
    """Whether the function is the kernel, not a helper."""
    arguments: frozenset[str]
    """Names of the function's arguments."""
    results: tuple[str, ...]
    body: str
    place: str | None

    @property
    def operands(self) -> list[str]:
        return _VALUE.findall(self.body)


def rows(text: str) -> Iterator[Row]:
    """The lines of a TTIR module's functions, without the functions' own headers."""
    function, public, arguments = "", False, frozenset[str]()
    for number, line in enumerate(text.splitlines()):
        header = _FUNCTION.match(line)
        if header:  # its arguments are defined there, not used
            function, public = header["name"], " public " in header[0]
            arguments = frozenset(_VALUE.findall(line))
            continue
        place = _PLACE.search(line)
        plain = _PLACE_TAIL.sub("", line)
        definition = _DEFINITION.match(plain)
        results = tuple(_VALUE.findall(definition["results"])) if definition else ()
        body = definition["rest"] if definition else plain.strip()
        yield Row(number, function, public, arguments, results, body, place["place"] if place else None)


def makers(lines: list[Row]) -> dict[Value, Row]:
    """The line that makes each value."""
    return {(row.function, name): row for row in lines for name in row.results}


def _live(lines: list[Row]) -> set[Value]:
    """The values that reach memory, control flow or another kernel's eyes; what only unused values are made of is dead.

    Triton's builder leaves unused results in the text. Whatever is no plain computation is taken to use its operands.
    """
    feeds: dict[Value, list[Value]] = defaultdict(list)
    roots: list[Value] = []
    for row in lines:
        operands = [(row.function, name) for name in row.operands]
        if row.body.startswith("tt.return"):
            feeds[row.function, ""] += operands
        elif not row.results or _EFFECT.match(row.body):
            roots += operands
        else:
            for name in row.results:
                feeds[row.function, name] += operands
        if call := _CALL.match(row.body):
            for name in row.results:
                feeds[row.function, name].append((call["name"], ""))
    live: set[Value] = set()
    while roots:
        value = roots.pop()
        if value not in live:
            live.add(value)
            roots += feeds[value]
    return live


def _location(place: str | None, places: dict[str, str]) -> str | None:
    """``file:line`` of a location's name: the innermost one, where a name or a call stands around it."""
    seen: set[str] = set()
    while place is not None and place not in seen:
        seen.add(place)
        text = places.get(place, "")
        if match := _PLACE_FILE.search(text):
            return f"{Path(match['file']).name}:{match['line']}"
        inner = re.search(r"#\w+", text)
        place = inner[0] if inner else None
    return None
