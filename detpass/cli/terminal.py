"""What commands share: consoles (coloured and as wide as the terminal, plain when piped) and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def environment_variables(**values: str) -> Iterator[None]:
    """Environment variables set within, as before afterwards."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
