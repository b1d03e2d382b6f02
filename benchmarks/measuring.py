"""How the benchmarks measure: interleaved rounds in one process, medians of ratios, and what machine it was."""

from __future__ import annotations

import ctypes
import glob
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
"""Where tables are stored."""


MOST_WAITING = 0.02
"""A round is quiet when in each call this process's threads waited for a core less than this part of the time."""
LEAST_QUIET = 3
"""With fewer quiet rounds, all rounds count and the timing is marked as disturbed."""


@dataclass(frozen=True)
class Timing:
    """Interleaved timings of several functions, one entry a round."""

    seconds: Mapping[str, tuple[float, ...]]
    """Wall-clock seconds of each function in each round that counts."""
    disturbed: bool
    """Whether other work on the machine left too few quiet rounds."""

    def median_ms(self, name: str) -> float:
        """The median over the rounds in milliseconds."""
        return 1000 * statistics.median(self.seconds[name])

    def ratio(self, name: str, rival: str) -> float:
        """The median over the rounds of ``name``'s time by ``rival``'s time of the same round."""
        pairs = zip(self.seconds[name], self.seconds[rival], strict=True)
        return statistics.median(own / other for own, other in pairs)


def interleaved(functions: Mapping[str, Callable[[], Any]], budget_s: float, least: int = 5, most: int = 31) -> Timing:
    """Call the functions in turn, A B C A B C ..., for about ``budget_s`` seconds (``least`` to ``most`` rounds).

    Each is called twice before. Results are dropped at once, so that an output's memory is fresh in each call. Rounds
    in which this process had to wait for a core (Linux tells) do not count, unless nearly all are such.
    """
    for function in functions.values():
        function()
        function()
    rounds: list[tuple[bool, dict[str, float]]] = []
    end = time.perf_counter() + budget_s
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        quiet, seconds = True, {}
        for name, function in functions.items():
            waited, begin = _waited_seconds(), time.perf_counter()
            function()
            seconds[name] = time.perf_counter() - begin
            quiet = quiet and _waited_seconds() - waited <= MOST_WAITING * seconds[name]
        rounds.append((quiet, seconds))
    counted = [seconds for quiet, seconds in rounds if quiet]
    disturbed = len(counted) < LEAST_QUIET
    if disturbed:
        counted = [seconds for _, seconds in rounds]
    return Timing({name: tuple(seconds[name] for seconds in counted) for name in functions}, disturbed)


def under_flag(function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` with torch's own determinism flag on during each call."""

    def flagged() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(False)

    return flagged


def peak_bytes(function: Callable[[], Any]) -> int | None:
    """How far the resident set of this process rises above its level before the call; None where Linux does not tell.

    Memory that the C library keeps is given back first. Scratch memory of native code counts.
    """
    function()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    result = function()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of the logarithms."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def describe(found: Mapping[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['capability']}, torch {found['torch']}, "
        f"OMP_WAIT_POLICY={found['omp_wait_policy']}, load average at the start {found['load_average']}"
    )


def store(name: str, data: Mapping[str, Any], text: str, folder: Path = RESULTS) -> None:
    """Write ``name.json`` and ``name.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; numbers to three significant digits."""
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join('---' for _ in names)}|"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _waited_seconds() -> float:
    """How long the threads of this process have waited for a core so far; 0 where the system does not tell."""
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        try:
            with open(path, encoding="ascii") as file:
                total += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
    return total / 1e9


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
