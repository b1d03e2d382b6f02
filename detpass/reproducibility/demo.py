"""The demonstration: one training under three compilers, several times each, every bit compared.

Neighbours: ``demo_training.py`` (model, data, the training), ``cli/demo.py`` (the terminal).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from detpass.reproducibility.demo_training import TrainingRun, standard_library_text, train
from detpass.reproducibility.processes import run_in_process

BASELINES = ("eager", "inductor")
"""What detpass is compared with."""


@dataclass(frozen=True)
class Entry:
    """One run of the demonstration."""

    label: str
    """How it was run."""
    losses_digest: str
    """The digest of the losses of all steps."""
    parameters_digest: str
    """The digest of all parameters after the last step."""
    training: TrainingRun | None
    """The run itself; None when it was made in another process."""

    @property
    def bits(self) -> tuple[str, str]:
        """Both digests."""
        return self.losses_digest, self.parameters_digest


@dataclass(frozen=True)
class DemoReport:
    """All runs of the demonstration."""

    entries: tuple[Entry, ...]
    """In the order run."""
    backend: str
    """The backend that is to repeat."""
    steps: int
    """Training steps of each run."""

    def of(self, label: str) -> tuple[Entry, ...]:
        """The runs with this label."""
        return tuple(entry for entry in self.entries if entry.label == label)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order run."""
        return tuple(dict.fromkeys(entry.label for entry in self.entries))

    @property
    def own(self) -> tuple[Entry, ...]:
        """The runs of the backend that is to repeat: in this process, in a fresh one, with one thread."""
        return tuple(entry for entry in self.entries if entry.label.startswith(self.backend))

    @property
    def repeats(self) -> bool:
        """Whether all runs of the backend that is to repeat have the same bits."""
        return len({entry.bits for entry in self.own}) == 1

    def distinct(self, label: str) -> int:
        """How many different results the runs with this label gave."""
        return len({entry.bits for entry in self.of(label)})

    def step_ms(self, label: str) -> float | None:
        """The median step time over the runs with this label; None when they ran in another process."""
        times = [entry.training.step_ms for entry in self.of(label) if entry.training is not None]
        return statistics.median(times) if times else None


def plan(backend: str, runs: int) -> tuple[tuple[str, str, int, bool], ...]:
    """The runs in order: label, backend, threads, whether in a fresh process.

    Baselines and backend alternate, so that a machine that slows down slows all of them.
    """
    rounds = [(name, name, 2, False) for _ in range(runs) for name in (*BASELINES, backend)]
    return (*rounds, (f"{backend}, fresh process", backend, 2, True), (f"{backend}, 1 thread", backend, 1, False))


def run_demo(
    backend: str = "detpass",
    steps: int = 40,
    runs: int = 3,
    on_step: Callable[[str, int, float | None], None] | None = None,
) -> DemoReport:
    """Run the demonstration.

    ``on_step(label, step, loss)`` is called after each step, with ``loss`` None for those of a run in a fresh process
    (all at once, when it ends). Thread count and Dynamo's state are reset at the end.
    """
    text = standard_library_text()
    former = torch.get_num_threads()
    entries = []
    try:
        for label, name, threads, fresh in plan(backend, runs):
            if fresh:
                arguments = {"backend": name, "steps": steps, "threads": threads}
                target = "detpass.reproducibility.demo_training:train_values"
                run = run_in_process(target, arguments, threads=threads)
                entries.append(Entry(label, str(run.values["losses"]), str(run.values["parameters"]), None))
                for step in range(steps):
                    if on_step is not None:
                        on_step(label, step, None)
                continue
            torch._dynamo.reset()
            training = train(name, steps, threads, text=text, on_step=_labelled(on_step, label))
            entries.append(Entry(label, training.losses_digest, training.parameters_digest, training))
    finally:
        torch.set_num_threads(former)
        torch._dynamo.reset()
    return DemoReport(tuple(entries), backend, steps)


def _labelled(
    on_step: Callable[[str, int, float | None], None] | None, label: str
) -> Callable[[int, float], None] | None:
    return None if on_step is None else lambda step, loss: on_step(label, step, loss)
