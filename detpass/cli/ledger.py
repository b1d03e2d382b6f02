"""``detpass ledger``: the first step at which two recorded trainings part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from detpass.cli.terminal import console


def command(
    left: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A ledger file.")],
    right: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Another one.")],
) -> None:
    """Compare two training ledgers step by step. Exit status 1 when they part."""
    from detpass.reproducibility import Ledger

    difference = Ledger.compare(left, right)
    console().print("every step has the same bits" if difference is None else str(difference), markup=False)
    raise typer.Exit(0 if difference is None else 1)
