"""Run something several times and compare every bit of what it returns.

Neighbours: ``digests.py`` and ``differences.py`` (how two results are compared), ``processes.py`` (a run in a fresh
process), ``bisect.py`` (which node of the graph is to blame).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from detpass.errors import BitsDifferError, ConfigurationError
from detpass.reproducibility.differences import Difference, all_differences
from detpass.reproducibility.digests import digest


@dataclass(frozen=True)
class Run:
    """One run of :func:`compare_runs`."""

    number: int
    """Position among all runs, from 0."""
    threads: int
    """``torch.get_num_threads()`` during the run."""
    digest: str
    """The digest of all that the run returned."""


@dataclass(frozen=True)
class RunsReport:
    """What :func:`compare_runs` saw. True in a condition when all runs gave the same bits."""

    runs: tuple[Run, ...]
    """Every run in the order made."""
    first_pair: tuple[Run, Run] | None
    """The first run and the first later run with other bits; None when there is none."""
    differences: tuple[Difference, ...]
    """Every tensor that differs between the two of ``first_pair``, in the order of the result."""

    def __bool__(self) -> bool:
        return self.first_pair is None

    @property
    def distinct(self) -> int:
        """How many different results there were; 1 when the function repeats."""
        return len({run.digest for run in self.runs})

    @property
    def distinct_by_threads(self) -> dict[int, int]:
        """For each thread count, how many different results there were among its own runs."""
        counts = dict.fromkeys(run.threads for run in self.runs)
        return {threads: len({run.digest for run in self.runs if run.threads == threads}) for threads in counts}

    def raise_if_different(self) -> None:
        """Raises BitsDifferError that names the pair and the tensors unless all runs gave the same bits."""
        if self.first_pair is not None:
            raise BitsDifferError(str(self))

    def __str__(self) -> str:
        threads = ", ".join(str(count) for count in self.distinct_by_threads)
        if self.first_pair is None:
            return f"{len(self.runs)} runs with {threads} threads: the same bits ({self.runs[0].digest})"
        left, right = self.first_pair
        lines = [
            f"{len(self.runs)} runs with {threads} threads: {self.distinct} different results",
            f"run {left.number} ({left.threads} threads) and run {right.number} ({right.threads} threads) differ in:",
        ]
        return "\n".join(lines + [f"  {difference}" for difference in self.differences])


def compare_runs(
    fn: Callable[[], Any], runs: int = 20, threads: Sequence[int] = (1, 2), seed: int | None = 0
) -> RunsReport:
    """Call ``fn()`` ``runs`` times for each thread count and compare every bit of what it returns.

    ``fn`` starts from the same state each time (same weights, same inputs) and returns what is to be compared: tensors
    (outputs, gradients), modules, optimizers, numbers, or nestings of them. ``seed`` is given to ``torch.manual_seed``
    before each call; None leaves the random number generators alone. Thread count and generator states are restored.
    Memory: two results at a time, not ``runs`` of them.

    Raises ConfigurationError for fewer than two runs in all or a thread count below one.
    """
    if runs < 1 or runs * len(threads) < 2 or any(count < 1 for count in threads):
        raise ConfigurationError(
            f"compare_runs(runs={runs}, threads={tuple(threads)}): expected at least two runs in all and thread counts "
            "of at least 1"
        )
    made: list[Run] = []
    reference: Any = None
    first_pair: tuple[Run, Run] | None = None
    differences: tuple[Difference, ...] = ()
    for count in threads:
        with thread_count(count):
            for _ in range(runs):
                result = _seeded(fn, seed)
                run = Run(len(made), count, digest(result))
                made.append(run)
                if run.number == 0:
                    reference = snapshot(result)
                elif first_pair is None and run.digest != made[0].digest:
                    first_pair = (made[0], run)
                    differences = all_differences(reference, result)
                    reference = None
    return RunsReport(tuple(made), first_pair, differences)


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """``torch.set_num_threads(threads)`` within, the former count afterwards."""
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def snapshot(result: Any) -> Any:
    """A copy of ``result`` that later runs cannot write into; modules and optimizers become their state dicts."""
    if isinstance(result, (torch.nn.Module, torch.optim.Optimizer)):
        return snapshot(result.state_dict())
    if isinstance(result, torch.Tensor):
        return result.detach().clone()
    if isinstance(result, dict):
        return {key: snapshot(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [snapshot(item) for item in result]
    return copy.deepcopy(result)


def _seeded(fn: Callable[[], Any], seed: int | None) -> Any:
    if seed is None:
        return fn()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fn()
