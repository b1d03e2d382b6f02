"""``detpass doctor``: what around the model decides whether its bits repeat."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from detpass.cli.terminal import console


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit status 1 when there is a warning.")] = False,
) -> None:
    """Look at versions, compiler, caches and the settings of torch that bear on repeatability."""
    from detpass.environment import Level, findings

    found = findings()
    out = console()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        style = {Level.OK: "green", Level.NOTE: "yellow", Level.WARNING: "bold red"}
        table = Table("", "what", "found", "advice")
        for finding in found:
            table.add_row(f"[{style[finding.level]}]{finding.level}[/]", finding.name, finding.value, finding.advice)
        out.print(table)
    if strict and any(finding.level is Level.WARNING for finding in found):
        raise typer.Exit(1)
