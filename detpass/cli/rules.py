"""``detpass rules``: the catalogue of nondeterministic operators and what becomes of each."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from detpass.cli.terminal import console


def command(
    op: Annotated[str | None, typer.Option(help="Explain one operator: any part of its name.")] = None,
    device: Annotated[str | None, typer.Option(help="Only what is nondeterministic on cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List the operators that are known to be nondeterministic, why, and the rule that treats each.

    Exit status 2 for an operator of which the catalogue knows nothing.
    """
    from detpass.inspection.catalogue import as_data, explained, find

    found = find(op, device)
    if as_json:
        typer.echo(json.dumps([as_data(entry) for entry in found], indent=2))
    elif op is None:
        table = Table("operator", "on", "why", "treatment", "rule")
        for entry in found:
            cells = (entry.what, ", ".join(entry.devices), entry.why, str(entry.treatment), entry.rule or entry.note)
            table.add_row(*map(Text, cells))
        console().print(table)
    else:
        for entry in found:
            text = Text(f"{entry.what}\n", style="bold")
            for heading, line in explained(entry).items():
                text.append(f"  {heading:<11}", style="dim").append(f"{line}\n", style="not bold")
            console().print(text)
