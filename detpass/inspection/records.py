"""What an inspection finds, as plain data: one record a nondeterministic node, and what stands beside the graphs.

Neighbours: ``report.py`` (the whole), ``analysis.py`` (who makes records), ``pictures.py`` (neighbourhoods).
"""

from __future__ import annotations

from dataclasses import dataclass

from detpass.inspection.pictures import Picture
from detpass.rewriting.report import UnknownOp
from detpass.rule import Treatment


@dataclass(frozen=True)
class InspectionRecord:
    """One node that is nondeterministic on the target, or looks so and was proved safe."""

    op: str
    """The operator overload, such as ``aten.index_put.default``."""
    node: str
    """The node's name in its graph, before the rewrite."""
    graph: int
    """The number of the graph that holds it, counted from 0 in the order of capture."""
    device: str
    """The device type that the code is generated for."""
    treatment: Treatment
    """What detpass makes of it."""
    rule: str | None
    """The rule that decided, or None when no rule covers it."""
    reason: str
    """Why it is nondeterministic and what is done, or the proof that it is deterministic."""
    phase: str
    """``"forward"``, ``"backward"`` or ``"inference"``."""
    inputs: tuple[str, ...]
    """Dtype and shape of the tensor arguments, such as ``f32[128, 64]``; symbolic sizes by name."""
    result: str
    """Dtype and shape of the result."""
    dtype: str | None
    """The dtype of the result, or None when it is no single tensor."""
    location: str | None
    """``file:line`` of the model: the innermost frame outside of torch; None when no trace was kept."""
    source: str | None
    """The text of that line, where the file can be read."""
    module: str | None
    """The path of the module, such as ``encoder.embedding``."""
    bytes: int
    """Bytes that the node reads and writes, estimated from its arguments and result (not fused with neighbours)."""
    time_share: float
    """The node's share of the estimated time of all graphs before the rewrite, 0 to 1 (see ``cost.py``)."""
    repeats: bool = False
    """Whether the node repeats as it stands: proved, or rewritten for another reason."""
    before: Picture | None = None
    """The graph around the node before the rewrite."""
    after: Picture | None = None
    """The graph around what replaced it, or None when it was left in place."""

    @property
    def nondeterministic(self) -> bool:
        """Whether the node may give different bits from run to run when nothing is done about it."""
        return not self.repeats

    @property
    def remains(self) -> bool:
        """Whether it still may after detpass."""
        return self.treatment is Treatment.UNCOVERED

    def __str__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        by = f" by {self.rule}" if self.rule else ""
        return f"{self.op} ({self.phase}, {self.device}){place}: {self.treatment}{by}: {self.reason}"


@dataclass(frozen=True)
class GraphSummary:
    """One captured graph."""

    index: int
    """Its number, in the order of capture."""
    kind: str
    """``"joint"`` (forward and backward), ``"forward"``, ``"backward"`` or ``"inference"``."""
    nodes: int
    """Operator nodes before the rewrite."""
    nodes_after: int
    """Operator nodes after it."""
    bytes: int
    """Estimated bytes moved before the rewrite."""


@dataclass(frozen=True)
class GraphBreak:
    """A place where part of the model runs outside of the captured graphs, where detpass does not rewrite it."""

    reason: str
    """What Dynamo says."""
    location: str | None
    """``file:line`` of the model."""
    source: str | None
    """The text of that line."""

    def __str__(self) -> str:
        return f"graph break{f' at {self.location}' if self.location else ''}: {self.reason}"


@dataclass(frozen=True)
class TritonKernel:
    """A user's own Triton kernel and what in it lets the order of programs decide the result."""

    name: str
    """The kernel function's name."""
    atomics: tuple[str, ...]
    """The atomic operations whose order decides, such as ``fadd on f32: ...``; empty when there is none."""
    location: str | None
    """``file:line`` of the launch."""
    unread: str | None = None
    """Why the TTIR could not be made, or None when it was read."""
    measured: str | None = None
    """Why the choice among its autotuner's configurations may decide bits, or None where it does not."""

    def __str__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        choice = (f"a configuration chosen by measurement: {self.measured}",) if self.measured else ()
        found = self.unread or "; ".join((*self.atomics, *choice)) or "no atomic whose order decides"
        return f"Triton kernel {self.name}{place}: {found}"


@dataclass(frozen=True)
class LoweredFinding:
    """Something nondeterministic that is left in the code that Inductor lowers for the target after the rewrite."""

    what: str
    """Such as ``float atomic_add into buf1``."""
    ops: tuple[str, ...]
    """The operators that it stems from, where known."""
    location: str | None
    """``file:line`` of the model, where known."""

    def __str__(self) -> str:
        names = f", from {', '.join(self.ops)}" if self.ops else ""
        return f"{self.what}{names}{f' at {self.location}' if self.location else ''}"


__all__ = [
    "GraphBreak",
    "GraphSummary",
    "InspectionRecord",
    "LoweredFinding",
    "TritonKernel",
    "UnknownOp",
]
