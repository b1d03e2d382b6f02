"""``detpass inspect``: what in a model is nondeterministic, where, and what becomes of it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from detpass.cli.terminal import console, error_console

if TYPE_CHECKING:
    from detpass.inspection import InspectionReport, Settings

FILE_SUFFIXES = (".pt2", ".pt", ".pth", ".py")
"""Files that are inspected as they stand, when no ``:factory`` follows."""


def command(
    subject: Annotated[
        str,
        typer.Argument(
            help="path/to/file.py:factory or package.module:factory, where factory() returns a model and its example "
            "inputs: (model, (x, y)) or (model, (x,), {'mask': m}). Or a file: .pt2, fx_graph_readable.py, "
            "fx_graph_runnable.py.",
            show_default=False,
        ),
    ],
    target: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:sm_90; by default the model's device.")] = None,
    dynamic: Annotated[bool | None, typer.Option(help="torch.compile's argument of that name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report as one HTML file.")] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            help="nondeterministic: status 1 for anything that may differ as the model stands; remaining: only for "
            "what is left under detpass; never: always 0. What could not be read counts in both."
        ),
    ] = "nondeterministic",
    lowered: Annotated[
        bool | None, typer.Option(help="Read the lowered code too; by default for models of up to 8000 operators.")
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load files that run code of their own when loaded. Trusted files only."),
    ] = False,
) -> None:
    """Inspect a model: nothing is trained or run, and no GPU is needed, not even for CUDA.

    Exit status 0 clean, 1 nondeterminism found or not everything could be read, 2 misuse.
    """
    from detpass.errors import InspectionError
    from detpass.inspection import Settings
    from detpass.inspection.report import FAIL_ON

    if fail_on not in FAIL_ON:
        raise InspectionError(f"--fail-on {fail_on}: expected one of {', '.join(FAIL_ON)}")
    terminal = error_console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("loading", total=None)
        settings = Settings(
            target=target,
            dynamic=dynamic,
            read_lowered=lowered,
            allow_pickle=allow_pickle,
            progress=lambda text: progress.update(task, description=text),
        )
        report = _inspect(subject, settings)
    if html is not None:
        report.to_html(html)
    if as_json:
        typer.echo(report.to_json())
    else:
        _print(report, html)
    raise typer.Exit(1 if report.problems(fail_on) else 0)


def _inspect(subject: str, settings: Settings) -> InspectionReport:
    from detpass.errors import InspectionError
    from detpass.inspection import inspect_with

    if Path(subject).suffix in FILE_SUFFIXES and ":" not in Path(subject).name:
        try:
            return inspect_with(settings, Path(subject))
        except InspectionError as error:
            if not subject.endswith(".py"):
                raise
            raise InspectionError(
                f"{error}. For a model that the file makes, name its factory: {subject}:NAME"
            ) from error
    model, args, kwargs = _made(subject)
    return inspect_with(settings, model, args, kwargs)


def _made(subject: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the factory. Raises InspectionError when it fails or returns no model with example inputs."""
    from detpass.errors import DetpassError, InspectionError
    from detpass.reproducibility.targets import load_target

    factory = load_target(subject)
    try:
        made = factory()
    except DetpassError:
        raise
    except Exception as error:  # the border to the user's code, which may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InspectionError(
            f"{subject} failed at {last.filename}:{last.lineno} ({type(error).__name__}: {error}); expected a factory "
            "that takes no arguments and returns (model, (inputs...))"
        ) from error
    expected = "expected (model, (inputs...)) or (model, (inputs...), {keyword inputs})"
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise InspectionError(f"{subject} returned {_named(made)}; {expected}")
    model, args, kwargs = made if len(made) == 3 else (*made, {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise InspectionError(f"{subject} returned the inputs as {_named(args)} and {_named(kwargs)}; {expected}")
    return model, tuple(args), kwargs


def _named(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _print(report: InspectionReport, html: Path | None) -> None:
    from detpass.inspection.render_text import renderables

    out = console()
    for part in renderables(report, out.width):
        out.print(part)
    if html is not None:
        out.print(f"written: {html}", highlight=False, markup=False)
