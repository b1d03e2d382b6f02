"""The result of an inspection: iterate over it, print it, write it as JSON or HTML, or raise on what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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

    def problems(self, fail_on: str = "nondeterministic") -> list[str]:
        """What was found, in words; empty when clean.

        ``"nondeterministic"``: everything that may cost repeatability in the model as it stands. ``"remaining"``: what
        is left when the model is compiled with detpass: uncovered nodes, findings in the lowered code, atomics in
        Triton kernels, graph breaks and parts that were not seen. ``"never"``: nothing.
        Raises InspectionError for another word.
        """
        if fail_on not in FAIL_ON:
            raise InspectionError(f"fail_on={fail_on!r}: expected one of {', '.join(map(repr, FAIL_ON))}")
        if fail_on == "never":
            return []
        records = self.nondeterministic if fail_on == "nondeterministic" else self.remaining
        found = [str(record) for record in records]
        found += [str(kernel) for kernel in self.triton_kernels if kernel.atomics]
        found += [f"left in the lowered code: {finding}" for finding in self.lowered]
        if fail_on == "remaining":
            found += [str(item) for item in self.breaks]
        if self.incomplete is not None:
            found.append(f"not all of the model was seen: {self.incomplete}")
        return found

    def raise_if_nondeterministic(self, after_rewrite: bool = False) -> None:
        """Raise NondeterminismError that lists what :meth:`problems` finds.

        With ``after_rewrite``, only what is left when the model is compiled with detpass counts.
        """
        found = self.problems("remaining" if after_rewrite else "nondeterministic")
        if not found:
            return
        shown = "\n  ".join(found[:20])
        more = f"\n  and {len(found) - 20} more" if len(found) > 20 else ""
        remedy = '\nRemedy: torch.compile(model, backend="detpass") makes the covered ones repeat.'
        raise NondeterminismError(
            f"{self.subject} on {self.target}: {len(found)} found\n  {shown}{more}{'' if after_rewrite else remedy}"
        )

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
