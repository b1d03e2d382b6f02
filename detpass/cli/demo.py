"""``detpass demo``: train a small model several times under eager, Inductor and detpass, and compare every bit."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from detpass.cli.terminal import console, environment_variables, error_console

if TYPE_CHECKING:
    from detpass.reproducibility.demo import DemoReport


def command(
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each run.")] = 40,
    runs: Annotated[int, typer.Option(min=2, help="Runs under each compiler.")] = 3,
    backend: Annotated[str, typer.Option(help="The torch.compile backend that is to repeat.")] = "detpass",
) -> None:
    """Train a byte-level language model on Python's own sources several times; compare every bit of every run.

    Exit status 1 when the runs of the backend differ among themselves.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP reads it once, when torch is loaded, which has happened: start again. Without it, threads that spin at
        # barriers slow every compiler down as soon as something else wants a core.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, "-m", "detpass", *sys.argv[1:]])
    from detpass.reproducibility.demo import plan, run_demo
    from detpass.segment.build import cache_directory

    total = len(plan(backend, runs)) * steps
    progress = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=error_console(),
        transient=True,
    )
    # A cache of its own: the first run compiles from nothing, later ones and the fresh process find its artifacts. The
    # CPU kernels, built once on a machine, stay where they are.
    with (
        tempfile.TemporaryDirectory(prefix="detpass_demo_") as cache,
        environment_variables(DETPASS_CACHE_DIR=str(cache_directory()), TORCHINDUCTOR_CACHE_DIR=cache),
        progress,
    ):
        task = progress.add_task("starting", total=total, loss="-")
        report = run_demo(
            backend,
            steps,
            runs,
            lambda label, step, loss: progress.update(
                task, advance=1, description=label, loss="-" if loss is None else f"{loss:.4f}"
            ),
        )
    _print(report)
    raise typer.Exit(0 if report.repeats else 1)


def _print(report: DemoReport) -> None:
    out = console()
    table = Table(title=f"{report.steps} training steps from the same state; digests of all bits")
    for name in ("run", "losses", "parameters", "last loss", "step ms"):
        table.add_column(name, justify="right" if name in ("last loss", "step ms") else "left")
    for label in report.labels:
        for entry in report.of(label):
            training = entry.training
            numbers = (f"{training.last_loss:.6f}", f"{training.step_ms:.1f}") if training else ("-", "-")
            table.add_row(label, entry.losses_digest[:16], entry.parameters_digest[:16], *numbers)
        table.add_section()
    out.print(table)
    for label in report.labels:
        if label.startswith(f"{report.backend},"):
            continue
        distinct, count, time = report.distinct(label), len(report.of(label)), report.step_ms(label)
        same = "the same bits every time" if distinct == 1 else f"{distinct} different results"
        out.print(f"{label}: {count} runs, {same}; median step {time:.1f} ms")
    for label in report.labels:
        if label.startswith(f"{report.backend},"):
            equal = report.of(label)[0].bits == report.of(report.backend)[0].bits
            out.print(f"{label}: {'the same bits' if equal else 'OTHER BITS'}")
    if report.distinct("inductor") == 1:
        out.print("The baseline happened not to differ this time: its additions met in the same order in each run.")
    out.print(f"{report.backend} repeats." if report.repeats else f"{report.backend} DOES NOT REPEAT.")
