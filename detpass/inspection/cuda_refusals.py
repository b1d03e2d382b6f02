"""Why no CUDA code was generated (``cuda_code.py``): the operator or graph break at fault, its place, what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from detpass import _torch_private_capture
from detpass.errors import InspectionError, causes, own_error

_WRAPPED = re.compile(r"^backend='[^']*' raised:\s*")
_HINT = re.compile(r"Hint: ([^\n]+)")
_CONTEXT = re.compile(r"Developer debug context: ([^\n]+)")
RECURRENT = (
    "torch._dynamo.config.allow_rnn = True compiles nn.RNN, nn.LSTM and nn.GRU; nn.LSTMCell and nn.GRUCell in a loop "
    "need no setting"
)
"""The remedy for the layers that Dynamo leaves to eager code by default."""


def refusal(error: Exception) -> Exception:
    """Our own error or eager's refusal as it is, anything else as an InspectionError that says what to do."""
    own = own_error(error)
    if own is not None:
        return own
    if isinstance(error, _torch_private_capture.DATA_ERRORS):
        what = "code between two graphs needs data, which a trace does not have; make the model one graph"
    elif isinstance(error, _torch_private_capture.lowering_errors()):
        what = "Inductor could not lower it for CUDA without a GPU"
    else:
        what = "it could not be traced; check that it runs in eager mode with these inputs"
    operator = operator_at_fault(error)
    text = _WRAPPED.sub("", " ".join(str(error).strip().split("\n\n")[0].split()))[:400].rstrip(".")
    at = f"at operator {operator}: " if operator else ""
    return InspectionError(f"no CUDA code was generated: {at}{what} ({type(error).__name__}: {text})")


def operator_at_fault(error: BaseException) -> str | None:
    """The innermost operator that was being traced or lowered when ``error`` was raised.

    None where torch's own backward formulas in C++ raised: which of them it was is in no frame.
    """
    for cause in reversed(list(causes(error))):
        for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
            if frame.f_code.co_name == "_engine_run_backward":
                return None
            for value in frame.f_locals.values():
                target = value.target if isinstance(value, fx.Node) else value
                if isinstance(target, torch._ops.OpOverload):
                    return str(target)
    return None


def described_breaks(breaks: Iterable[tuple[str, str | None]]) -> tuple[str, ...]:
    """Each graph break once: torch's reason, what it is about, the place and torch's hint or ours."""
    return tuple(dict.fromkeys(_described(reason, place) for reason, place in breaks))


def _described(reason: str, place: str | None) -> str:
    found: list[Any] = [" ".join(reason.strip().splitlines()[0].split())]
    about, hint = _CONTEXT.search(reason), _HINT.search(reason)
    if about:
        found.append(f" ({about[1].strip()[:120]})")
    if place:
        found.append(f" at {place}")
    if "allow_rnn" in reason:
        found.append(f"; {RECURRENT}")
    elif hint:
        found.append(f"; {hint[1].strip()}")
    return "".join(found)


def nothing_compiled(breaks: tuple[str, ...]) -> InspectionError:
    """Dynamo called the backend with no graph at all."""
    if breaks:
        return InspectionError(f"no graph was compiled: Dynamo leaves it to eager code: {breaks[0]}")
    return InspectionError(
        "no graph was compiled: the function runs eagerly as a whole (it holds no tensor operation, or is "
        "disabled by torch.compiler.disable)"
    )
