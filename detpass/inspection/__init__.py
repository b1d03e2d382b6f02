"""What in a model is nondeterministic, where, and what becomes of it: read from its graphs, with nothing executed."""

from detpass.inspection.entry import inspect, inspect_with
from detpass.inspection.records import (
    GraphBreak,
    GraphSummary,
    InspectionRecord,
    LoweredFinding,
    TritonKernel,
    UnknownOp,
)
from detpass.inspection.report import InspectionReport, Verdict
from detpass.inspection.settings import Settings

__all__ = [
    "GraphBreak",
    "GraphSummary",
    "InspectionRecord",
    "InspectionReport",
    "LoweredFinding",
    "Settings",
    "TritonKernel",
    "UnknownOp",
    "Verdict",
    "inspect",
    "inspect_with",
]
