"""Training fingerprints: a small append-only file that tells later at which step two trainings parted.

Each line is one step: the digest of every tensor that was recorded (loss, gradients, parameters, optimizer state). Two
ledgers are compared without the trainings that wrote them; a training that repeats or resumes over an existing ledger
is checked against it step by step. Neighbours: ``digests.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detpass.errors import BitsDifferError, ConfigurationError
from detpass.reproducibility.digests import digests

FORMAT = 1
"""Version of the file format, in each ledger's first line."""


@dataclass(frozen=True)
class LedgerDifference:
    """The first step at which two ledgers part."""

    step: int
    """The step's number."""
    names: tuple[str, ...]
    """The entries with other bits at this step, in the order they were recorded: ``loss``, ``grad.layer.weight`` ..."""
    reason: str
    """``"other bits in"``, or what else parts them: an entry or a step that only one of them has."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason} {', '.join(self.names)}".rstrip()


class Ledger:
    """An append-only file of per-step fingerprints::

        ledger = Ledger("run.jsonl")
        for step, batch in enumerate(batches):
            loss = train_step(batch)
            ledger.record(step, loss=loss, model=model)

    Opening an existing file continues it. Recording a step that the file already holds writes nothing and raises
    BitsDifferError unless the bits are the same: running a training again over its own ledger is the check that it
    repeats. An incomplete last line (the process died while writing) is cut off when the file is opened.

    Cost: every recorded tensor is read and hashed, from a GPU after a copy to the host; about a second for each
    gigabyte. Record every hundredth step of a large model.
    """

    def __init__(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self._steps: dict[int, dict[str, str]] = {}
        if self.path.exists() and self.path.stat().st_size > 0:
            _cut_incomplete_line(self.path)
        if self.path.exists() and self.path.stat().st_size > 0:
            self._steps = read(self.path)
        else:
            header = {
                "detpass_ledger": FORMAT,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "notes": dict(notes or {}),
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps recorded so far, in the order recorded."""
        return tuple(self._steps)

    def record(
        self,
        step: int,
        *,
        loss: torch.Tensor | float | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        gradients: bool = True,
        **more: Any,
    ) -> None:
        """Record the bits of ``loss``, of the model's gradients (unless ``gradients=False``), parameters and buffers,
        of the optimizer's state, and of anything in ``more``, under those names.

        Raises BitsDifferError when the step is in the file with other bits, ConfigurationError when nothing is given.
        """
        parts: dict[str, Any] = {}
        if loss is not None:
            parts["loss"] = loss
        if model is not None and gradients:
            parts["grad"] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if model is not None:
            parts["model"] = model
        if optimizer is not None:
            parts["optimizer"] = optimizer
        parts.update(more)
        if not parts:
            raise ConfigurationError(
                f"nothing to record at step {step}: give loss=, model=, optimizer= or tensors by name"
            )
        entries: dict[str, str] = {}
        for name, part in parts.items():
            entries.update({f"{name}.{path}" if path else name: value for path, value in digests(part).items()})
        known = self._steps.get(step)
        if known is None:
            self._append({"step": step, "digests": entries})
            self._steps[step] = entries
            return
        difference = _compare_step(step, known, entries)
        if difference is not None:
            raise BitsDifferError(f"this training parts from the one recorded in {self.path} at {difference}")

    @staticmethod
    def compare(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> LedgerDifference | None:
        """The first step at which two ledger files part, or None when every step of both has the same bits.

        A step that only one file holds is a difference. Raises ConfigurationError for a file that is no ledger.
        """
        left_steps, right_steps = read(left), read(right)
        for step in sorted(left_steps.keys() | right_steps.keys()):
            if step not in left_steps or step not in right_steps:
                return LedgerDifference(step, (), f"recorded only in {left if step in left_steps else right}")
            difference = _compare_step(step, left_steps[step], right_steps[step])
            if difference is not None:
                return difference
        return None

    def _append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> dict[int, dict[str, str]]:
    """The digests of a ledger file by step and name. An incomplete last line does not count.

    Raises ConfigurationError, naming the line, for a file that is no ledger or of another format.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]
    steps: dict[int, dict[str, str]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path}, line {number}: not a ledger's line ({error})") from error
        if number == 1:
            found = record.get("detpass_ledger") if isinstance(record, dict) else None
            if found != FORMAT:
                raise ConfigurationError(f"{path}: ledger format {found!r} found, {FORMAT} expected")
            continue
        if not (isinstance(record, dict) and {"step", "digests"} <= record.keys()):
            raise ConfigurationError(f"{path}, line {number}: expected a step and its digests")
        steps[record["step"]] = record["digests"]
    if not lines:
        raise ConfigurationError(f"{path}: no complete line; expected a ledger written by detpass")
    return steps


def _compare_step(step: int, left: Mapping[str, str], right: Mapping[str, str]) -> LedgerDifference | None:
    lone = tuple(name for name in left if name not in right) + tuple(name for name in right if name not in left)
    if lone:
        return LedgerDifference(step, lone, "recorded on one side only:")
    other = tuple(name for name in left if left[name] != right[name])
    return LedgerDifference(step, other, "other bits in") if other else None


def _cut_incomplete_line(path: Path) -> None:
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
