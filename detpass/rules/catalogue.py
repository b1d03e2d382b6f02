"""Every operator known to be nondeterministic, per device: why, and what becomes of it.

The rows stand in ``catalogue_rows.py`` (graph operators) and ``catalogue_notes.py`` (what torch documents and no graph
shows). The engine asks :func:`hazard` about nodes that no rule took; the documentation's table is :func:`markdown`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from detpass import user_kernels
from detpass.graph_query import argument
from detpass.rule import Treatment
from detpass.rules.flex_bodies import JOINT, body_of, kernel_options
from detpass.rules.flex_gradients import wanted_results

CPU, CUDA = "cpu", "cuda"


def always(node: fx.Node) -> bool:
    """Every node of the operator is meant."""
    return True


def is_inexact(node: fx.Node) -> bool:
    """Whether the operator adds or multiplies floating-point or complex numbers."""
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, torch.Tensor) else [v for v in value or () if isinstance(v, torch.Tensor)]
    return any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)


def has_weights(node: fx.Node) -> bool:
    """Whether a histogram adds weights, not ones."""
    names = {formal.name for formal in node.target._schema.arguments}  # type: ignore[union-attr]
    return argument(node, "weights" if "weights" in names else "weight") is not None


def is_transposed(node: fx.Node) -> bool:
    """Whether a convolution is a transposed one."""
    return bool(argument(node, "transposed"))


def is_unstable(node: fx.Node) -> bool:
    """Whether a sort leaves the order of equal values open."""
    return not argument(node, "stable")


def is_left_to_cudnn(node: fx.Node) -> bool:
    """Whether an operator with a ``deterministic`` argument does not ask for it."""
    return not argument(node, "deterministic")


def captures_gradients(node: fx.Node) -> bool:
    """Whether a flex_attention backward accumulates gradients of tensors captured by its score function."""
    return bool(wanted_results(body_of(node, node.args[JOINT])))


def is_flash(node: fx.Node) -> bool:
    """Whether a flex_attention backward is asked of FlashAttention's kernels."""
    return kernel_options(node).get("BACKEND") == "FLASH"


def has_ordered_atomics(node: fx.Node) -> bool:
    """Whether a user's Triton kernel holds atomics of which nothing proves that they are exact in any order."""
    reading = user_kernels.read(node)
    return reading is not None and bool(reading.ordered)


def is_measured(node: fx.Node) -> bool:
    """Whether a user's Triton kernel has several configurations that need not give the same bits."""
    reading = user_kernels.read(node)
    return reading is not None and reading.unlike is not None


KNOWN_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "higher_order", "detpass", "inductor", "inductor_prims", "rngprims", "quantized",
     "quantized_decomposed", "flex_lib", "c10d_functional", "_c10d_functional", "fsdp", "streams", "mkldnn", "mkl"}
)  # fmt: skip
"""Namespaces of operators that come with torch or detpass."""


def unknown(node: fx.Node) -> bool:
    """Whether ``node`` calls an operator of another library that no row names."""
    namespace = getattr(node.target, "namespace", None)
    if namespace is None or namespace in KNOWN_NAMESPACES or not hasattr(node.target, "_schema"):
        return False
    return str(node.target) not in _by_op()


@dataclass(frozen=True)
class Entry:
    """One row: operators that are nondeterministic for one reason and have one treatment."""

    what: str
    """A name for people: ``index_put, accumulating``."""
    ops: tuple[str, ...]
    """Operators as graphs show them, ``str(node.target)``; empty when no graph shows any."""
    devices: tuple[str, ...]
    """Device types on which it is nondeterministic."""
    why: str
    """The cause, one clause."""
    treatment: Treatment
    """What becomes of it."""
    rule: str | None = None
    """The name of the built-in rule, or None for ``safe`` and ``uncovered`` rows."""
    test: str | None = None
    """The test file that shows it, from the root of the repository."""
    documented: tuple[str, ...] = ()
    """The names under which ``torch.use_deterministic_algorithms`` documents it."""
    applies: Callable[[fx.Node], bool] = always
    """Which nodes of the operators are meant."""
    note: str = ""
    """For safe and uncovered rows: the proof, or what to do instead."""


@functools.lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """Every row, graph operators first."""
    from detpass.rules.catalogue_notes import NOTES
    from detpass.rules.catalogue_rows import ROWS

    return (*ROWS, *NOTES)


@functools.lru_cache(maxsize=1)
def _by_op() -> Mapping[str, tuple[Entry, ...]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries():
        for op in entry.ops:
            found.setdefault(op, []).append(entry)
    return {op: tuple(rows) for op, rows in found.items()}


def rows_of(node: fx.Node, device: torch.device) -> Iterable[Entry]:
    """The rows that name ``node`` as nondeterministic on ``device``."""
    for entry in _by_op().get(str(node.target), ()):
        if device.type in entry.devices and entry.treatment is not Treatment.SAFE and entry.applies(node):
            yield entry


def hazard(node: fx.Node, device: torch.device) -> str | None:
    """Why ``node`` is nondeterministic on ``device``, with what to do instead; None when no row names it."""
    for entry in rows_of(node, device):
        return f"{entry.why}; {entry.note}" if entry.note else entry.why
    return None


def markdown() -> str:
    """The table of the documentation."""
    lines = ["| operation | device | why | treatment | rule | test |", "|---|---|---|---|---|---|"]
    for entry in entries():
        rule = f"`{entry.rule}`" if entry.rule else entry.note
        test = f"`{entry.test}`" if entry.test else ""
        devices = ", ".join(entry.devices)
        lines.append(f"| {entry.what} | {devices} | {entry.why} | {entry.treatment} | {rule} | {test} |")
    return "\n".join(lines) + "\n"


__all__ = ["CPU", "CUDA", "Entry", "entries", "hazard", "markdown", "rows_of", "unknown"]
