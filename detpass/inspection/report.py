"""The result of an inspection: iterate over it, print it, write it as JSON or HTML, or raise on what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from detpass.environment import Finding as EnvironmentFinding
from detpass.errors import InspectionError, NondeterminismError
from detpass.inspection.records import (
    GraphBreak,
    GraphSummary,
    InspectionRecord,
    LoweredFinding,
    TritonKernel,
    UnknownOp,
)

FAIL_ON = ("nondeterministic", "remaining", "never")
"""What :meth:`InspectionReport.problems` can be asked for."""
SHOWN = 20
"""How many lines of one kind an exception's message lists."""


class Verdict(str, Enum):
    """What an inspection concludes."""

    CLEAN = "clean"
    """Everything was read and nothing was found."""
    NONDETERMINISTIC = "nondeterministic"
    """Something was found that may differ from run to run."""
    UNKNOWN = "unknown"
    """Nothing was found, but something was not read."""


@dataclass(frozen=True)
class InspectionReport:
    """What in a model is nondeterministic, where, and what becomes of it under detpass."""

    subject: str
    """The name of what was inspected."""
    target: str
    """``"cpu"``, ``"cuda"`` or ``"cuda:sm_90"``."""
    records: tuple[InspectionRecord, ...]
    """One a nondeterministic or proved node, in graph order."""
    graphs: tuple[GraphSummary, ...]
    """The captured graphs."""
    breaks: tuple[GraphBreak, ...]
    """Places where part of the model runs outside the graphs."""
    unknown_ops: tuple[UnknownOp, ...]
    """Operators of which nothing is known."""
    triton_kernels: tuple[TritonKernel, ...]
    """The user's own Triton kernels."""
    lowered: tuple[LoweredFinding, ...]
    """What is nondeterministic in the lowered code after the rewrite."""
    lowered_note: str | None
    """Why the lowered code was not read, or None when it was."""
    notes: tuple[str, ...]
    """What to know about how the report was made."""
    environment: tuple[EnvironmentFinding, ...]
    """Versions and settings that bear on repeatability."""
    incomplete: str | None
    """Why the capture ended before the model did, or None when all of it was seen."""
    torch_version: str
    """The torch that traced the model."""
    seconds: float
    """How long the inspection took."""

    def __iter__(self) -> Iterator[InspectionRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def nondeterministic(self) -> tuple[InspectionRecord, ...]:
        """The records of nodes that may differ from run to run when nothing is done about them."""
        return tuple(record for record in self.records if record.nondeterministic)

    @property
    def remaining(self) -> tuple[InspectionRecord, ...]:
        """The records of nodes that no rule covers."""
        return tuple(record for record in self.records if record.remains)

    def counts(self) -> dict[str, int]:
        """The number of records of each treatment."""
        return dict(Counter(str(record.treatment) for record in self.records))

    def unread(self) -> list[str]:
        """What nobody looked at, in words; where there is something, no finding does not mean clean."""
        found = [f"lowered code {self.lowered_note}"] if self.lowered_note is not None else []
        if self.incomplete is not None:
            found.append(f"not all of the model was seen: {self.incomplete}")
        found += [f"not read, it runs outside the graphs: {item}" for item in self.breaks]
        found += [str(item) for item in self.unknown_ops]
        return found + [str(kernel) for kernel in self.triton_kernels if kernel.unread]

    def found(self, fail_on: str = "nondeterministic") -> list[str]:
        """The nondeterminism that was seen, in words; ``fail_on`` as in :meth:`problems`."""
        _known(fail_on)
        if fail_on == "never":
            return []
        records = self.nondeterministic if fail_on == "nondeterministic" else self.remaining
        found = [str(record) for record in records]
        return found + [f"left in the lowered code: {finding}" for finding in self.lowered]

    def verdict(self, fail_on: str = "nondeterministic") -> Verdict:
        """What :meth:`problems` amounts to: ``NONDETERMINISTIC`` where something was found, else ``UNKNOWN`` where
        something was not read, else ``CLEAN``."""
        if self.found(fail_on):
            return Verdict.NONDETERMINISTIC
        return Verdict.UNKNOWN if self.problems(fail_on) else Verdict.CLEAN

    def problems(self, fail_on: str = "nondeterministic") -> list[str]:
        """What was found and what was not read, in words; empty when clean.

        ``"nondeterministic"``: everything that may cost repeatability in the model as it stands. ``"remaining"``: what
        is left when the model is compiled with detpass: uncovered nodes (Triton kernels of your own among them) and
        findings in the lowered code. In both, whatever was not read (:meth:`unread`) counts: lowered code that was not
        generated, graph breaks, unknown operators. ``"never"``: nothing. Raises InspectionError for another word.
        """
        found = self.found(fail_on)
        return found if fail_on == "never" else found + self.unread()

    def raise_if_nondeterministic(self, after_rewrite: bool = False) -> None:
        """Raise NondeterminismError that lists what :meth:`problems` finds; what was not read raises, too.

        With ``after_rewrite``, only what is left when the model is compiled with detpass counts.
        """
        fail_on = "remaining" if after_rewrite else "nondeterministic"
        found, unread = self.found(fail_on), self.unread()
        if not found and not unread:
            return
        parts = [f"{self.subject} on {self.target}: {len(found) or 'nothing nondeterministic'} found"]
        parts += _some(found)
        if unread:
            parts += [f"{len(unread)} not read, so nothing is known of it:", *_some(unread)]
        if found and not after_rewrite:
            parts.append('Remedy: torch.compile(model, backend="detpass") makes the covered ones repeat.')
        raise NondeterminismError("\n".join(parts))

    def __str__(self) -> str:
        from detpass.inspection.render_text import as_text

        return as_text(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text; the fields are those of this class, with a ``format`` number."""
        from detpass.inspection.render_json import as_json

        return as_json(self, indent)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no network, and return its path."""
        from detpass.inspection.render_html import as_html

        written = Path(path)
        written.write_text(as_html(self), encoding="utf-8")
        return written


def _known(fail_on: str) -> None:
    if fail_on not in FAIL_ON:
        raise InspectionError(f"fail_on={fail_on!r}: expected one of {', '.join(map(repr, FAIL_ON))}")


def _some(lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  {line}" for line in lines[:SHOWN]] + more
