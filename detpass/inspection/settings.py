"""How an inspection is done: the target and what to look at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from detpass.errors import ConfigurationError

_TARGET = re.compile(r"(cpu)|cuda(?::(?:sm_)?(\d{2,3}))?")


@dataclass(frozen=True)
class Target:
    """The device whose code is inspected; it need not be here."""

    type: str
    """``"cpu"`` or ``"cuda"``."""
    capability: int | None = None
    """The compute capability of the GPU, such as 90; None on the CPU."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """``"cpu"``, ``"cuda"`` (taken as sm_90) or ``"cuda:sm_90"``. Raises ConfigurationError for anything else."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"target={text!r}: expected 'cpu', 'cuda' or 'cuda:sm_90' (a compute capability)")
        return cls("cpu") if match[1] else cls("cuda", int(match[2] or 90))

    def __str__(self) -> str:
        return self.type if self.capability is None else f"{self.type}:sm_{self.capability}"


@dataclass(frozen=True)
class Settings:
    """What :func:`detpass.inspection.inspect_with` does besides its defaults."""

    target: str | None = None
    """As in :func:`detpass.inspect`; None takes the device of the example inputs and parameters."""
    dynamic: bool | None = None
    """``torch.compile``'s argument."""
    read_lowered: bool | None = None
    """Lower the rewritten graphs and read what is left: yes, no, or (None) for up to ``LOWERING_LIMIT`` operators."""
    allow_pickle: bool = False
    """Load files whose loading runs code that they hold: only for files that are trusted as a program is."""
    progress: Callable[[str], None] = lambda _: None
    """Told in words what happens."""


LOWERING_LIMIT = 8000
"""Operators up to which lowering is done without being asked for: it takes about as long as tracing does."""
