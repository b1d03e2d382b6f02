"""Consoles of the command line: coloured and as wide as the terminal, plain when piped."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 160
"""Columns assumed where there is no terminal, so that tables are not cut."""


def console() -> Console:
    """Where results go."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH, no_color=True, highlight=False)


def error_console() -> Console:
    """Where errors and progress go."""
    found = Console(stderr=True)
    return found if found.is_terminal else Console(stderr=True, width=PIPED_WIDTH, no_color=True, highlight=False)
