"""Whether a kernel gives the same bits in each of its autotuner's configurations, from its intermediate code (TTIR).

A tile's size and a number of warps set the order of a sum, of a scan and of a matrix product's terms, and how often a
loop runs. A kernel that has none of these computes each element by the same operations in every configuration, if the
code is the same apart from sizes. Taken for granted is what the author says by tuning: that in every configuration
each element is computed, from the same operands.

Neighbours: ``ttir.py`` (atomics), ``user_kernels.py`` (where the texts come from).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from detpass.ttir import Row, Value, makers, rows

ELEMENTWISE = re.compile(
    r"(?:arith|math)\.\w+$|ub\.poison$|scf\.(?:if|yield)$|tt\.(?:load|store|splat|unsplat|addptr|broadcast|expand_dims"
    r"|make_range|get_program_id|get_num_programs|return|call|bitcast|int_to_ptr|ptr_to_int|fp_to_fp|clampf"
    r"|precise_sqrt|precise_divf|mulhiui|trans|join|split|reshape|extern_elementwise|elementwise_inline_asm|assert"
    r"|print|atomic_rmw|make_tensor_descriptor|descriptor_load|descriptor_store|descriptor_reduce)$"
)
"""Operations that compute each element from its own operands, or move it. Atomics are judged in ``ttir.py``."""
_OPERATION = re.compile(r'^"?(?P<name>[a-z_]\w*\.[\w.]*\w)')
COMBINING = {
    "tt.reduce": "a reduction", "tt.scan": "a scan", "tt.dot": "a matrix product", "tt.dot_scaled": "a matrix product",
    "scf.for": "a loop", "scf.while": "a loop", "cf.br": "a loop", "cf.cond_br": "a loop",
}  # fmt: skip
"""Words for what combines elements, or does so again."""
_TO_FLOAT = ("arith.sitofp", "arith.uitofp")
_WIDENING = re.compile(r"^(?:arith\.(?:extsi|extui|trunci)|tt\.(?:splat|broadcast|expand_dims))\b")
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?|@\"[^\"]*\"|@[\w.$-]+")
_SHAPE = re.compile(r"\b(?:\d+x)+")
_INTEGER = re.compile(r"-?\b\d+( : i(?:8|16|32|64)\b)")
_DENSE = re.compile(r"dense<-?\d+>( : tensor<(?:_x)+i(?:8|16|32|64)>)")
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\([^()]*\))*\)")


def difference(texts: Sequence[str]) -> str | None:
    """Why the configuration may change bits, in words, or None where it does not.

    ``texts`` are the TTIR of one kernel, one for each configuration; the first stands for all where they are alike.
    """
    first = texts[0]
    kernel = list(rows(first))
    made = makers(kernel)
    found = []
    for row in kernel:
        operation = _OPERATION.match(row.body)
        if operation is None:
            continue
        name = operation["name"]
        if name in COMBINING:
            return f"a configuration can set the order in {COMBINING[name]}"
        if not ELEMENTWISE.match(name) or "allow_reorder" in row.body:
            found.append(f"nothing says that {name} does the same in every configuration")
        elif name in _TO_FLOAT and not _read_from_memory(row, made):
            found.append("a number computed from positions becomes floating-point")
    if found:
        return found[0]
    shape = _without_sizes(first)
    if any(_without_sizes(text) != shape for text in texts[1:]):
        return "its operations differ from one configuration to another"
    return None


def _read_from_memory(row: Row, made: dict[Value, Row]) -> bool:
    """Whether the operand of a conversion is a value from memory, or an argument of the kernel."""
    name = row.operands[0]
    while (maker := made.get((row.function, name))) is not None:
        if maker.body.startswith("tt.load"):
            return True
        if not _WIDENING.match(maker.body):
            return False
        name = maker.operands[0]
    return row.public and name in row.arguments


def _without_sizes(text: str) -> list[str]:
    """The lines of a text with its values and functions renamed in order, and without places, sizes and integers."""
    names: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        plain = _LOCATION.sub("", line)
        plain = _NAME.sub(lambda match: names.setdefault(match[0], f"{match[0][0]}{len(names)}"), plain)
        plain = _SHAPE.sub(lambda match: "_x" * match[0].count("x"), plain)
        plain = _INTEGER.sub(r"#\1", plain)
        found.append(_DENSE.sub(r"dense<#>\1", plain))
    return found
