"""The command line: ``detpass demo | doctor | inspect | rules | repeat | ledger``, one module for each command.

A command is a function with typer annotations in its own module; adding one is a line in ``COMMANDS``. Modules import
torch inside the command, so that ``--help`` is quick. Exit status: 0 clean, 1 the bits differ or nondeterminism was
found, 2 misuse.
"""

from __future__ import annotations

import importlib
import sys

import typer

from detpass.cli.terminal import error_console

COMMANDS = ("demo", "doctor", "inspect", "rules", "repeat", "ledger")
"""Modules of this package, each with a function ``command`` that becomes the command of the module's name."""


def application() -> typer.Typer:
    """The typer application with every command of ``COMMANDS``."""
    app = typer.Typer(
        name="detpass",
        help="Bit-repeatable training with torch.compile.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"detpass.cli.{name}").command)
    return app


def main() -> None:
    """The console script. Errors of detpass are printed as one message: status 1 when bits differ, 2 otherwise."""
    from detpass.errors import BitsDifferError, DetpassError

    try:
        application()()
    except DetpassError as error:
        error_console().print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False)
        sys.exit(1 if isinstance(error, BitsDifferError) else 2)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
