"""The options of a compile: detpass's own beside Inductor's, checked once, frozen afterwards.

``torch.compile(model, backend="detpass", options={...})`` hands one dictionary to the backend. :func:`split_options`
separates what detpass knows from what Inductor knows and refuses the rest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from detpass.errors import ConfigurationError

POLICIES = ("error", "warn", "ignore")
CUBLAS_SETTING = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_ADVICE = f"set {CUBLAS_SETTING}=:4096:8 before the first CUDA call: streams that share a workspace change bits"


def cublas_repeats() -> bool:
    """Whether the environment gives cuBLAS a workspace with which its results repeat on several streams."""
    return os.environ.get(CUBLAS_SETTING) in (":4096:8", ":16:8")


@dataclass(frozen=True)
class Options:
    """detpass's own options of one compile."""

    on_uncovered: str = "error"
    """What to do about a nondeterministic operation that no rule covers: ``"error"``, ``"warn"`` or ``"ignore"``."""
    on_escape: str = "warn"
    """What to do when part of a model runs outside the graphs that detpass rewrites (graph break, recompile limit,
    ``suppress_errors``, a disabled function, an operator of another library that no rule knows): ``"error"``,
    ``"warn"`` or ``"ignore"``."""
    target: str | None = None
    """Apply the rules as for this device type (``"cpu"`` or ``"cuda"``) instead of each node's own: for inspection and
    tests of a device that is not here."""
    rules: tuple[Any, ...] = ()
    """Rules of this compile alone, asked before the registered and the built-in ones."""
    report: Callable[[Any], None] | None = None
    """Called with the :class:`detpass.Report` of each compiled graph, also when it comes from a cache."""

    def __post_init__(self) -> None:
        for name in ("on_uncovered", "on_escape"):
            value = getattr(self, name)
            if value not in POLICIES:
                raise ConfigurationError(f"option {name}={value!r}: expected one of {', '.join(map(repr, POLICIES))}")
        if self.target is not None and self.target not in ("cpu", "cuda"):
            raise ConfigurationError(f"option target={self.target!r}: expected 'cpu', 'cuda' or None")
        if self.report is not None and not callable(self.report):
            raise ConfigurationError(f"option report={self.report!r}: expected a function of one Report")


OPTION_NAMES = tuple(f.name for f in fields(Options))


def split_options(
    options: Mapping[str, Any] | None, inductor_options: Mapping[str, Any], inductor_types: Callable[[str], Any]
) -> tuple[Options, dict[str, Any]]:
    """Separate ``options`` into detpass's :class:`Options` and patches of Inductor's configuration.

    ``inductor_options`` are Inductor's current settings by name; ``inductor_types`` gives a setting's type.
    Raises ConfigurationError for a name that neither knows (the message lists close and known names) and for a value
    of the wrong type.
    """
    own: dict[str, Any] = {}
    patches: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name in OPTION_NAMES:
            own[name] = value
        elif name in inductor_options:
            _check_type(key, value, inductor_types(name), inductor_options[name])
            patches[name] = value
        else:
            raise ConfigurationError(_unknown(key, inductor_options))
    if "rules" in own:
        rules = own["rules"]
        own["rules"] = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    return Options(**own), patches


def _check_type(key: str, value: Any, expected: Any, current: Any) -> None:
    if isinstance(expected, type) and not isinstance(value, expected):
        raise ConfigurationError(
            f"option {key}={value!r}: got {type(value).__name__}, expected {expected.__name__} (now {current!r})"
        )


def _unknown(key: str, inductor_options: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, [*OPTION_NAMES, *inductor_options], n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"unknown option {key!r}.{hint} detpass knows {', '.join(OPTION_NAMES)}; "
        f"Inductor knows {', '.join(sorted(inductor_options))}"
    )


def target_device(options: Options, device: torch.device) -> torch.device:
    """The device that code is generated for: the ``target`` option's, or the node's own."""
    return device if options.target is None else torch.device(options.target)
