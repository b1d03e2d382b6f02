"""detpass: training that gives the same bits every time.

``torch.compile(model, backend="detpass")`` rewrites nondeterministic accumulations in the joint forward and backward
graph into deterministic forms before Inductor lowers it. This module is the public surface.
"""

from typing import TYPE_CHECKING, Any

from detpass import segment
from detpass.backend import last_report, reports
from detpass.errors import (
    ConfigurationError,
    DetpassError,
    DetpassWarning,
    EnvironmentWarning,
    EscapeError,
    EscapeWarning,
    InspectionError,
    KernelBuildWarning,
    NondeterminismError,
    NondeterministicArtifactError,
    ReplacementWarning,
    RuleError,
    UncoveredError,
    UncoveredWarning,
)
from detpass.packaging import aoti_compile_and_package
from detpass.rewriting.registry import register_rule, registered_rules, unregister_rule
from detpass.rewriting.report import Record, Report, UnknownOp
from detpass.rule import Declared, Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment

if TYPE_CHECKING:
    from detpass.inspection import InspectionReport, inspect
    from detpass.inspection.cuda_code import CudaCode, cuda_code

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "CudaCode",
    "Declared",
    "DetpassError",
    "DetpassWarning",
    "EnvironmentWarning",
    "EscapeError",
    "EscapeWarning",
    "Inapplicable",
    "InspectionError",
    "InspectionReport",
    "KernelBuildWarning",
    "Match",
    "NoMatch",
    "NondeterminismError",
    "NondeterministicArtifactError",
    "Record",
    "ReplacementWarning",
    "Report",
    "Rule",
    "RuleContext",
    "RuleError",
    "Safe",
    "Treatment",
    "UncoveredError",
    "UncoveredWarning",
    "UnknownOp",
    "aoti_compile_and_package",
    "cuda_code",
    "inspect",
    "last_report",
    "register_rule",
    "registered_rules",
    "reports",
    "segment",
    "unregister_rule",
]


def __getattr__(name: str) -> Any:
    """Inspection is imported when it is first asked for: a compile does not need it."""
    if name in ("InspectionReport", "inspect"):
        from detpass import inspection

        return getattr(inspection, name)
    if name in ("CudaCode", "cuda_code"):
        from detpass.inspection import cuda_code as module

        return getattr(module, name)
    raise AttributeError(f"module 'detpass' has no attribute {name!r}")
