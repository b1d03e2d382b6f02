"""What became of each nondeterministic node: one record a node, kept beside the compiled artifact.

On a warm AOTAutograd cache the pass does not run, so a report is also written to a file whose name is a hash of what
was compiled (:func:`save`, :func:`load`); ``last_report`` returns the newest one of this process either way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detpass.rule import Treatment

FORMAT = 3


@dataclass(frozen=True)
class Record:
    """One nondeterministic node of a graph and its treatment."""

    op: str
    """The operator, such as ``aten.index_put.default``."""
    node: str
    """The node's name in the graph."""
    treatment: Treatment
    """What became of it."""
    rule: str | None
    """The name of the rule that decided, or None when no rule did."""
    reason: str
    """Why: the proof for ``safe``, the cause for the others."""
    location: str | None
    """``file:line`` of the model, or None when no trace was kept."""
    phase: str
    """``"forward"``, ``"backward"`` or ``"inference"``."""
    device: str
    """The device type that the code was generated for."""
    dtype: str | None
    """The dtype of the node's result, or None when the result is no single tensor."""
    shape: tuple[str, ...] | None
    """The shape of the node's result; symbolic sizes by name."""
    module: str | None = None
    """The path of the module that holds the line, such as ``encoder.embedding``."""
    advice: str = ""
    """What the user may want to decide otherwise, and how; given in a warning too."""

    def __str__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        by = f" by {self.rule}" if self.rule else ""
        return f"{self.op} ({self.phase}, {self.device}){place}: {self.treatment}{by}: {self.reason}"


@dataclass(frozen=True)
class UnknownOp:
    """An operator that is neither torch's nor known to a rule: nobody can say whether it repeats."""

    op: str
    """The operator overload."""
    count: int
    """How many nodes call it."""
    location: str | None
    """``file:line`` of the first of them."""

    def __str__(self) -> str:
        return f"unknown operator {self.op} x{self.count}{f' at {self.location}' if self.location else ''}"


@dataclass
class Report:
    """The records of one compiled graph, in graph order, and whether they came from a cache."""

    records: list[Record] = field(default_factory=list)
    """One a nondeterministic node; empty when the graph holds none."""
    unknown: list[UnknownOp] = field(default_factory=list)
    """Operators of other libraries of which no rule says whether they repeat; they are called as they are."""
    compile_id: str | None = None
    """Dynamo's id of the compile, such as ``0/0``."""
    from_cache: bool = False
    """True when the artifact came from a cache and the report was read back."""
    order: tuple[int, int] | None = None
    """The constants of the canonical order that the sums obey: rows of a chunk, partials of a group."""
    complete: bool = True
    """False when the artifact came from a cache and the saved report was gone: the records are unknown."""
    escapes: list[str] = field(default_factory=list)
    """Parts of the model that run outside this graph, with the place and the remedy."""

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def counts(self) -> dict[str, int]:
        """The number of records of each treatment."""
        return dict(Counter(str(r.treatment) for r in self.records))

    def note_unknown(self, op: str, location: str | None) -> None:
        """Count one more node of an operator of which nothing is known."""
        for place, known in enumerate(self.unknown):
            if known.op == op:
                self.unknown[place] = dataclasses.replace(known, count=known.count + 1)
                return
        self.unknown.append(UnknownOp(op, 1, location))

    def __str__(self) -> str:
        found = [*map(str, self.records), *map(str, self.unknown)]
        return "\n".join(found) if found else "no nondeterministic operation"


def encode(report: Report) -> str:
    """The report as JSON text."""
    records, unknown = ([dataclasses.asdict(r) for r in rows] for rows in (report.records, report.unknown))
    return json.dumps({"format": FORMAT, "records": records, "unknown": unknown})


def decode(text: str) -> tuple[list[Record], list[UnknownOp]]:
    """The records and unknown operators of a text by :func:`encode`. Raises ValueError for another format."""
    data: dict[str, Any] = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"report format {data.get('format')!r}, expected {FORMAT}")
    records = [
        Record(
            **{
                **r,
                "treatment": Treatment(r["treatment"]),
                "shape": None if r["shape"] is None else tuple(r["shape"]),
            }
        )
        for r in data["records"]
    ]
    return records, [UnknownOp(**r) for r in data["unknown"]]


def save(report: Report, directory: Path, key: str) -> None:
    """Write the report under ``key``; readers see the old file or the whole new one."""
    directory.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(encode(report))
    os.replace(temporary, directory / f"{key}.json")


def load(directory: Path, key: str) -> tuple[list[Record], list[UnknownOp]] | None:
    """The records and unknown operators saved under ``key``, or None when there are none that can be read."""
    try:
        return decode((directory / f"{key}.json").read_text())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
