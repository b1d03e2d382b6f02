"""``detpass repeat``: call a function several times, in one process or in fresh ones, and compare every bit."""

from __future__ import annotations

from typing import Annotated

import typer

from detpass.cli.terminal import console


def command(
    target: Annotated[str, typer.Argument(help="package.module:function or path/to/file.py:function, no arguments.")],
    runs: Annotated[int, typer.Option(min=1, help="Runs for each thread count.")] = 20,
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "1,2",
    processes: Annotated[int, typer.Option(min=0, help="Also this many fresh processes for each thread count.")] = 0,
    seed: Annotated[int, typer.Option(help="Given to torch.manual_seed before each run.")] = 0,
) -> None:
    """Call a function several times from the same seed and compare every bit of what it returns.

    Exit status 1 when the bits differ.
    """
    from detpass.errors import ConfigurationError
    from detpass.reproducibility import compare_runs, run_in_process
    from detpass.reproducibility.targets import load_target

    try:
        counts = [int(part) for part in threads.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--threads {threads!r}: expected numbers separated by commas, such as 1,2") from error
    report = compare_runs(load_target(target), runs, counts, seed)
    out = console()
    out.print(str(report), markup=False, highlight=False)
    same = bool(report)
    for count in counts:
        for number in range(processes):
            run = run_in_process(target, threads=count, seed=seed)
            equal = run.digest == report.runs[0].digest
            same = same and equal
            word = "the same bits" if equal else "other bits"
            out.print(f"process {number} ({count} threads): {word} ({run.digest})", highlight=False)
    raise typer.Exit(0 if same else 1)
