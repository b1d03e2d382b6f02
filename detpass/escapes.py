"""The ways in which a compiled model runs code that detpass did not rewrite, noticed and reported.

Dynamo falls back to eager code at a graph break (a disabled function is one; nothing need have been traced before it,
and a break in a loop makes the whole frame eager), at the recompile limit and, under ``suppress_errors``, when a
compile fails; some of Inductor's settings skip the pass; an operator of another library is called as it is. Each is
raised or warned about once with its place and remedy, by the option ``on_escape``. What is not seen is a frame that
Dynamo declines before it traces it (``set_stance("force_eager")``, a generator function, a layer of ``torch.nn`` called
from eager code, as in a DistributedDataParallel after the break in its own forward): ``fullgraph=True`` is the remedy
there.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from detpass import _torch_private, _torch_private_breaks
from detpass.config import CUBLAS_ADVICE, CUBLAS_SETTING, cublas_repeats
from detpass.errors import ConfigurationError, EnvironmentWarning, EscapeError, EscapeWarning, ReplacementWarning

PASS_NAME = "joint_custom_post_pass"
_CAPTURE = re.compile(r"torch\._dynamo\.config\.capture_\w+ = True")
"""The setting that Dynamo's hint names for an operation whose result has a size, or a value, that is data."""


def escape(policy: str, message: str) -> None:
    """Report an escape under ``policy``. Raises EscapeError for ``"error"``."""
    if policy == "error":
        raise EscapeError(message)
    if policy == "warn":
        warnings.warn(message, EscapeWarning, stacklevel=3)


def graph_break_message(graph_module: Any) -> str | None:
    """What to say about the graph break that ended ``graph_module``, or None when it was not ended by one."""
    found = _torch_private.graph_break_reason(graph_module)
    if found is None:
        return None
    _torch_private_breaks.break_was_told()
    return _break_message(*found)


def _break_message(reason: str, place: str | None) -> str:
    first = reason.strip().splitlines()[0]
    setting = _CAPTURE.search(reason)
    taken = f"{setting[0]} takes this operation into the graph; else " if setting else ""
    return (
        f"graph break{f' at {place}' if place else ''}: the code there runs outside the compiled graph, where detpass "
        f"does not rewrite it ({first}). Remedy: {taken}compile with fullgraph=True to find every break, and move the "
        "code out of the model or into operations that Dynamo can trace."
    )


def unknown_operator_message(unknown: Any) -> str:
    """What to say about an operator of another library (``op``, ``count``, ``location``) that no rule knows."""
    place = f" at {unknown.location}" if unknown.location else ""
    calls = f" ({unknown.count} calls)" if unknown.count > 1 else ""
    return (
        f"{unknown.op}{place}{calls}: detpass does not see what is inside this operator, and no rule says whether it "
        f'repeats. Remedy: detpass.register_rule(detpass.Declared({unknown.op.removesuffix(".default")}, "the proof")) '
        "where it does, or a rule that replaces it."
    )


def warn_of_replacement(location: str | None, what: str) -> None:
    """Warn, once for each line and message in a process, of what a rule's replacement means for the user."""
    _warn_of_replacement(f"at {location}: {what}" if location else what)


@functools.cache
def _warn_of_replacement(message: str) -> None:
    warnings.warn(message, ReplacementWarning, stacklevel=4)


def check_settings(patches: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse Inductor settings that skip the pass. Raises ConfigurationError naming the setting and the remedy."""
    if patches.get("use_joint_graph_passes") is False:
        raise ConfigurationError("use_joint_graph_passes=False skips the rewrite; remove it from the options")
    disabled = patches.get("disabled_passes", settings.get("disabled_passes")) or ""
    if PASS_NAME in str(disabled):
        raise ConfigurationError(
            f"disabled_passes={disabled!r} (or TORCHINDUCTOR_DISABLED_PASSES) skips the rewrite; "
            f"remove {PASS_NAME} from it"
        )


def check_cublas(devices: Iterable[str]) -> None:
    """Warn, once in a process, when code for CUDA is compiled and cuBLAS is not set up to repeat."""
    if "cuda" in devices and not cublas_repeats():
        _warn_of_cublas()


@functools.cache
def _warn_of_cublas() -> None:
    message = f"{CUBLAS_SETTING} is not set for repeatable results; {CUBLAS_ADVICE}"
    warnings.warn(message, EnvironmentWarning, stacklevel=4)


class FallbackWatcher(logging.Filter):
    """Turns Dynamo's own messages about falling back to eager code into escapes, for frames compiled by ``backend``."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def filter(self, record: logging.LogRecord) -> bool:
        template = str(record.msg)
        limit = template.startswith(_torch_private.RECOMPILE_LIMIT_MESSAGE)
        if not limit and not (record.levelno >= logging.WARNING and record.exc_info):
            return True
        found = _torch_private.compiling_backend()
        if found is None or found[0] is not self._backend:
            return True
        policy = _policy(found[1])
        if limit:
            arguments: Any = record.args
            name, value, function = arguments[0], arguments[1], arguments[2]
            escape(
                policy,
                f"{function} reached {name}={value}: from now on it runs eagerly where no compiled version fits, and "
                "detpass does not rewrite it. Remedy: mark what varies as dynamic (dynamic=True, "
                f"torch._dynamo.mark_dynamic) or raise torch._dynamo.config.{name}.",
            )
        elif record.exc_info:
            escape(
                policy,
                "a compile failed and torch._dynamo.config.suppress_errors=True makes the frame run eagerly, where "
                f"detpass does not rewrite it ({record.exc_info[1]}). Remedy: set suppress_errors=False.",
            )
        return True


def _policy(arguments: Mapping[str, Any]) -> str:
    return str((arguments.get("options") or {}).get("on_escape", "warn"))


def watch(backend: Any) -> None:
    """Start watching Dynamo's fallbacks for ``backend``. Calling it again changes nothing."""
    logger = logging.getLogger(_torch_private.CONVERT_FRAME_LOGGER)
    if any(isinstance(f, FallbackWatcher) for f in logger.filters):
        return
    logger.addFilter(FallbackWatcher(backend))

    def report(broken: Any, arguments: Mapping[str, Any], reason: str, place: str | None) -> None:
        if broken is backend:
            escape(_policy(arguments), _break_message(reason, place))

    _torch_private_breaks.watch_breaks_without_graph(report)
