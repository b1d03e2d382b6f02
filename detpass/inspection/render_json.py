"""An inspection's report as JSON: its fields by name, pictures left out."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from detpass.inspection.report import InspectionReport, Verdict

FORMAT = 1
"""Changes when a field is renamed or removed."""
LEFT_OUT = frozenset({"before", "after"})
"""Fields that only pictures need."""


def as_json(report: InspectionReport, indent: int | None = 2) -> str:
    """JSON text of the report, its counts, its verdicts and what was not read."""
    body = {
        "format": FORMAT,
        "counts": report.counts(),
        "verdict": report.verdict("nondeterministic").value,
        "verdict_after_rewrite": report.verdict("remaining").value,
        "clean": report.verdict("nondeterministic") is Verdict.CLEAN,
        "clean_after_rewrite": report.verdict("remaining") is Verdict.CLEAN,
        "unread": report.unread(),
        **_plain(report),
    }
    return json.dumps(body, indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value
