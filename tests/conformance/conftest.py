"""The terminal summary: how many samples of each operator ran, were equal, refused, excluded or left out for time."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.outcome import (
    EQUAL,
    EQUAL_IN_FLOAT64,
    EQUAL_TO_STABLE,
    EXCLUDED,
    NO_GRAPH,
    NO_TIME,
    REFUSED,
)

PROPERTY = "conformance"
RUN = (EQUAL, EQUAL_IN_FLOAT64, EQUAL_TO_STABLE, "failed")
COLUMNS = (*RUN, REFUSED, NO_GRAPH, EXCLUDED, NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one row an operator; the tallies travel as user properties, from pytest-xdist's workers too."""
    tallies = []
    for status in ("passed", "failed"):
        for report in terminalreporter.stats.get(status, ()):
            tallies.extend(json.loads(value) for name, value in report.user_properties if name == PROPERTY)
    if not tallies:
        return
    terminalreporter.section("samples under detpass against eager")
    width = max(len(t["operator"]) for t in tallies)
    total: Counter[str] = Counter()
    for tally in sorted(tallies, key=lambda t: str(t["operator"])):
        total.update(tally["counts"])
        terminalreporter.write_line(f"{tally['operator']:<{width}}  {_counts(tally['counts'])}")
        for reason, count in tally["reasons"].items():
            terminalreporter.write_line(f"{'':<{width}}    {count} {reason}")
    terminalreporter.write_line(f"{'all':<{width}}  {_counts(total)}")


def _counts(counts: Any) -> str:
    run = sum(counts.get(name, 0) for name in RUN)
    return ", ".join([f"{run} run", *(f"{counts[name]} {name}" for name in COLUMNS if counts.get(name))])


@pytest.fixture
def keep_tally(record_property: Any) -> Any:
    """A function that hands a tally to the terminal summary."""

    def keep(tally: Any) -> None:
        counts = {**tally.counts, "failed": len(tally.failures)}
        record_property(
            PROPERTY, json.dumps({"operator": tally.operator, "counts": counts, "reasons": dict(tally.reasons)})
        )

    return keep


@pytest.fixture(autouse=True)
def without_compiler_trace() -> Iterator[None]:
    """pytest records every logger; torch's structured trace of thousands of small compiles costs more than they do."""
    trace = logging.getLogger("torch.__trace")
    before, trace.disabled = trace.disabled, True
    yield
    trace.disabled = before
