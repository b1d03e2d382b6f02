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

FORMAT = 1


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

    def __str__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        by = f" by {self.rule}" if self.rule else ""
        return f"{self.op} ({self.phase}, {self.device}){place}: {self.treatment}{by}: {self.reason}"


@dataclass
class Report:
    """The records of one compiled graph, in graph order, and whether they came from a cache."""

    records: list[Record] = field(default_factory=list)
    """One a nondeterministic node; empty when the graph holds none."""
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

    def __str__(self) -> str:
        if not self.records:
            return "no nondeterministic operation"
        return "\n".join(map(str, self.records))


def encode(report: Report) -> str:
    """The report as JSON text."""
    return json.dumps({"format": FORMAT, "records": [dataclasses.asdict(r) for r in report.records]})


def decode(text: str) -> list[Record]:
    """The records of a text by :func:`encode`. Raises ValueError for another format."""
    data: dict[str, Any] = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"report format {data.get('format')!r}, expected {FORMAT}")
    return [
        Record(
            **{
                **r,
                "treatment": Treatment(r["treatment"]),
                "shape": None if r["shape"] is None else tuple(r["shape"]),
            }
        )
        for r in data["records"]
    ]


def save(report: Report, directory: Path, key: str) -> None:
    """Write the report under ``key``; readers see the old file or the whole new one."""
    directory.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(encode(report))
    os.replace(temporary, directory / f"{key}.json")


def load(directory: Path, key: str) -> list[Record] | None:
    """The records saved under ``key``, or None when there are none that can be read."""
    try:
        return decode((directory / f"{key}.json").read_text())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
