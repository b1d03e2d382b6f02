"""A run in a fresh Python process, so that nothing of this one (caches, allocator, threads) can carry bits over.

Only digests come back. Neighbours: ``runs.py`` (runs within one process), ``targets.py`` (how the function is named).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detpass.errors import BitsDifferError
from detpass.reproducibility.digests import digest, digests
from detpass.reproducibility.flattening import walk
from detpass.reproducibility.targets import load_target

_CHILD = "import sys; from detpass.reproducibility.processes import _child; _child(*sys.argv[1:])"


@dataclass(frozen=True)
class ProcessRun:
    """What a fresh process saw."""

    threads: int
    """Its thread count."""
    digest: str
    """The digest of all that the function returned."""
    entries: Mapping[str, str]
    """The digest of each tensor and value of it by path."""
    values: Mapping[str, str | int | float | bool]
    """The plain values of it by path, as they are."""


def run_in_process(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    threads: int = 2,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> ProcessRun:
    """Call the function that ``target`` names, with keyword ``arguments`` (JSON values), in a fresh Python process.

    ``threads`` and ``seed`` are set before the call; ``environment`` adds to this process's. Raises
    ``subprocess.CalledProcessError`` (the child's output goes to ours) or ``TimeoutExpired``.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        request = {"target": target, "arguments": dict(arguments or {}), "threads": threads, "seed": seed}
        command = [sys.executable, "-c", _CHILD, json.dumps(request), str(answer)]
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        child_environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
        subprocess.run(command, check=True, env=child_environment, timeout=timeout)
        read = json.loads(answer.read_text(encoding="utf-8"))
    return ProcessRun(threads, read["digest"], read["entries"], read["values"])


def compare_processes(
    target: str, processes: int = 2, *, threads: int = 2, environment: Mapping[str, str] | None = None
) -> tuple[ProcessRun, ...]:
    """The runs of ``target`` in several fresh processes, one after another.

    Raises BitsDifferError that names the first pair and its entries when their bits differ.
    """
    runs = tuple(run_in_process(target, threads=threads, environment=environment) for _ in range(processes))
    for number, run in enumerate(runs[1:], start=1):
        if run.digest != runs[0].digest:
            names = [name for name, value in runs[0].entries.items() if run.entries.get(name) != value]
            what = ", ".join(names) or "structure"
            raise BitsDifferError(f"processes 0 and {number} running {target} differ in {what}")
    return runs


def _child(request_text: str, answer: str) -> None:
    request = json.loads(request_text)
    torch.set_num_threads(request["threads"])
    function = load_target(request["target"])
    torch.manual_seed(request["seed"])
    result = function(**request["arguments"])
    plain = {path: value for path, value in walk(result) if isinstance(value, (str, int, float, bool))}
    values = {path: value for path, value in plain.items() if not path.endswith("#")}
    message = {"digest": digest(result), "entries": digests(result), "values": values}
    Path(answer).write_text(json.dumps(message), encoding="utf-8")
