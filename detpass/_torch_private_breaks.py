"""Graph breaks of the frames that Dynamo converts, those with no graph included.

A fifth part of ``_torch_private.py``, under the same rule. A backend is told of a graph break by the graph that the
break ended; where nothing was traced before it there is no graph, and no backend is called. So the two methods that
every break and every frame pass are watched: ``InstructionTranslatorBase.log_graph_break``, which Dynamo calls once
for each break that it accepts (torch 2.11 to 2.14), and ``ConvertFrame.__call__``, from which an exception reaches the
caller of the compiled model unwrapped.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from detpass._torch_private import unwrapped_backend


@dataclass
class _Conversion:
    """What happened while Dynamo converted one frame."""

    found: tuple[str, str | None] | None = None
    """The reason and the place (``file:line``) of the last graph break."""
    told: bool = False
    """Whether a backend was told of a break by the graph that it ended."""


_conversion: ContextVar[_Conversion | None] = ContextVar("detpass_conversion", default=None)


def break_was_told() -> None:
    """Say that a backend was told of the graph break of the frame being converted: it is not reported again."""
    conversion = _conversion.get()
    if conversion is not None:
        conversion.told = True


def watch_breaks_without_graph(report: Callable[[Any, dict[str, Any], str, str | None], None]) -> None:
    """Call ``report(backend, its keyword arguments, reason, place)`` for each graph break that ended no graph.

    It is called when Dynamo has converted the frame, and what it raises reaches the caller of the compiled model.
    A break inside a frame of Python's own library (``contextlib``, run by code that is eager already) is not reported:
    no operation of a model stands there, and the functions that it calls are converted as frames of their own.
    """
    from torch._dynamo.convert_frame import ConvertFrame
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    translator: Any = InstructionTranslatorBase
    converter: Any = ConvertFrame
    log_graph_break = translator.log_graph_break
    convert = converter.__call__

    @functools.wraps(log_graph_break)
    def noting_log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        conversion = _conversion.get()
        if conversion is not None:
            conversion.found = (str(getattr(exc, "msg", exc)), _place(getattr(exc, "real_stack", None)))
        log_graph_break(self, code_options, reason=reason, exc=exc)

    @functools.wraps(convert)
    def watched_convert(self: Any, frame: Any, *arguments: Any, skip: int = 0) -> Any:
        conversion = _Conversion()
        token = _conversion.set(conversion)
        try:
            converted = convert(self, frame, *arguments, skip=skip + 1)
        finally:
            _conversion.reset(token)
        if conversion.found is not None and not conversion.told:
            reason, place = conversion.found
            if not (_of_python(frame.f_code.co_filename) and _of_python(place or "")):
                report(*unwrapped_backend(self._torchdynamo_orig_backend), reason, place)
        return converted

    translator.log_graph_break = noting_log_graph_break
    converter.__call__ = watched_convert


def _of_python(path: str) -> bool:
    return path.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in path


def _place(stack: Any) -> str | None:
    frames = list(stack or ())
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
