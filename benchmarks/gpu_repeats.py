"""A case for every row of the catalogue, run 20 times, forward and backward: equal bits in every run.

Compiling takes most of the time, so the cases are shared out among processes (``start``), which work while the main one
compares bits and trains; ``Workers.found`` collects what they wrote. Eager torch runs beside, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a worker runs this file

import torch
from gpu_operators import Case, operator_cases
from gpu_setting import Found, Setting, digest
from measuring import table
from torch import Tensor

import detpass
from detpass.backend import detpass as backend
from detpass.errors import DetpassError
from detpass.rule import Treatment
from detpass.rules import catalogue

RUNS = 20
MOST_WORKERS, CORES_OF_A_WORKER = 4, 3


@dataclass(frozen=True)
class Workers:
    """Processes that each run some of the cases and write one line of JSON a case."""

    folder: tempfile.TemporaryDirectory[str]
    processes: tuple[subprocess.Popen[bytes], ...]
    dry: bool

    def found(self, setting: Setting) -> Found:
        """Wait for the processes until the deadline, end those that are not done, and judge what they wrote."""
        for process in self.processes:
            try:
                process.wait(None if setting.dry else max(0.0, setting.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = [line for number in range(len(self.processes)) for line in self._written(f"{number}.jsonl")]
        failures = [
            f"worker {number} ended with {process.returncode}: {self._written(f'{number}.err')[-1:]}"
            for number, process in enumerate(self.processes)
            if process.returncode not in (0, -9)
        ]
        self.folder.cleanup()
        return judged([json.loads(line) for line in lines], self.dry, failures)

    def _written(self, name: str) -> list[str]:
        path = Path(self.folder.name) / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [line.strip() for line in lines if line.endswith("\n")]


def start(dry: bool) -> Workers:
    """Start the processes."""
    count = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // CORES_OF_A_WORKER))
    folder = tempfile.TemporaryDirectory(prefix="detpass-gpu-")
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(CORES_OF_A_WORKER)}
    processes = []
    for number in range(count):
        command = [sys.executable, __file__, "--worker", str(number), str(count), "--out", folder.name]
        with (Path(folder.name) / f"{number}.err").open("wb") as errors:
            arguments = [*command, *(["--dry-run"] if dry else [])]
            processes.append(subprocess.Popen(arguments, stdout=errors, stderr=errors, env=environment))
    return Workers(folder, tuple(processes), dry)


def judged(results: Sequence[Mapping[str, Any]], dry: bool, failures: Sequence[str] = ()) -> Found:
    """The table of the results, and what failed: other bits in a later run, an error, a case that nobody ran."""
    runs = _runs(dry)
    by_name = {result["case"]: result for result in results}
    rows: list[list[object]] = []
    failures = list(failures)
    reached: set[str] = set()
    missing = []
    for case in operator_cases(dry):
        result = by_name.get(case.name)
        if result is None:
            missing.append(case.name)
        elif "error" in result:
            rows.append([case.name, "failed", "", result["error"]])
            failures.append(f"{case.name}: {result['error']}")
        else:
            treatment = ", ".join(f"{op}: {how}" for op, how, _ in result["records"])
            reached |= {case.row} | rows_shown((op, rule) for op, _, rule in result["records"])
            rows.append([case.name, result["detpass"], result["eager"], treatment])
            if result["detpass"] != 1:
                failures.append(f"{case.name}: {result['detpass']} different results in {runs} runs under detpass")
    unseen = [row for row in promised() if row not in reached]
    notes = [f"rows of the catalogue that no case reached: {'; '.join(unseen) or 'none'}"]
    if missing:
        notes.append(f"not run, for lack of time or since their process ended: {', '.join(missing)}")
        failures.append(notes[-1])
    header = ["case", f"results in {runs} runs, detpass", "eager", "treatment"]
    return Found({"rows": rows, "notes": notes}, "\n\n".join([table(header, rows), *notes]), failures)


def promised() -> list[str]:
    """The rows of the catalogue for CUDA that say that an operator repeats."""
    rows = [entry for entry in catalogue.entries() if "cuda" in entry.devices]
    return [entry.what for entry in rows if entry.treatment is not Treatment.UNCOVERED]


def rows_shown(records: Iterable[tuple[str, str | None]]) -> set[str]:
    """The rows that operators with the rules that took them belong to."""
    taken = set(records)
    return {entry.what for entry in catalogue.entries() if any((op, entry.rule) in taken for op in entry.ops)}


def _runs(dry: bool) -> int:
    return 2 if dry else RUNS


def work(setting: Setting, cases: Sequence[Case], out: Path) -> None:
    """Run ``cases`` and write a line for each as soon as it is done."""
    with out.open("w", encoding="utf-8") as file:
        for case in cases:
            print(json.dumps({"case": case.name, **_result(setting, case)}), file=file, flush=True)


def _result(setting: Setting, case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    before = len(detpass.reports())
    try:
        with case.configured():
            count = _distinct(setting, case, torch.compile(case.function, backend=backend))
    except (DetpassError, RuntimeError, TypeError, ValueError, LookupError) as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    records = [record for report in detpass.reports()[before:] for record in report.records]
    seen = sorted({(record.op, str(record.treatment), record.rule or "") for record in records})
    return {"detpass": count, "eager": _distinct_eager(setting, case), "records": seen}


def _distinct_eager(setting: Setting, case: Case) -> int | str:
    try:
        return _distinct(setting, case, case.function)
    except (RuntimeError, TypeError, ValueError) as error:  # what only a compiler takes
        return type(error).__name__


def _distinct(setting: Setting, case: Case, function: Callable[..., Any]) -> int:
    return len({_step(setting, case, function) for _ in range(_runs(setting.dry))})


def _step(setting: Setting, case: Case, function: Callable[..., Any]) -> str:
    inputs = case.fresh_inputs(setting.device)
    result = function(*inputs)
    values = list(result) if isinstance(result, tuple) else [result]
    gradients: list[Tensor] = []
    if case.backward:
        wanted = [value for value in inputs if value.requires_grad]
        total = sum(
            (value * torch.linspace(-1, 1, value.numel(), device=value.device).view_as(value)).sum()
            for value in values
            if value.requires_grad
        )
        found: tuple[Tensor | None, ...] = torch.autograd.grad(total, wanted, allow_unused=True)
        gradients = [gradient for gradient in found if gradient is not None]
    return digest(*values, *gradients)


def main(arguments: Sequence[str] | None = None) -> None:
    """What a worker does: every ``count``-th case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=int, nargs=2, metavar=("NUMBER", "COUNT"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    number, count = options.worker
    setting = Setting(dry=options.dry_run, deadline=float("inf"))
    work(setting, operator_cases(options.dry_run)[number::count], options.out / f"{number}.jsonl")


if __name__ == "__main__":
    main()
