"""Every exception and warning that detpass raises.

A message gives the value found, the value expected and the remedy; where a line of the model is known, it is named.
"""

from __future__ import annotations

from collections.abc import Iterator


class DetpassError(Exception):
    """The root of all errors raised by detpass."""


class ConfigurationError(DetpassError, ValueError):
    """An option, mode or target that detpass does not know, or a value it cannot take."""


class RuleError(DetpassError):
    """A rule that breaks its contract: a duplicate name, a changed shape or dtype, an accumulation left in place."""


class UncoveredError(DetpassError):
    """A nondeterministic operation for which no rule has a deterministic form."""


class NondeterministicArtifactError(DetpassError):
    """Lowered code that still holds a nondeterministic operation after the rewrite."""


class Refusal(DetpassError):
    """Carries the error with which eager torch refuses the same arguments; the compiled model raises that one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
        """An exception of eager's type, with a message that names the operation and the model's line."""


class EscapeError(DetpassError):
    """Part of the model runs outside the graphs that detpass rewrites."""


class InspectionError(DetpassError):
    """A model or file that cannot be inspected, and why."""


class DetpassWarning(UserWarning):
    """The root of all warnings issued by detpass."""


class EscapeWarning(DetpassWarning):
    """Part of the model runs outside the graphs that detpass rewrites (``on_escape="warn"``)."""


class UncoveredWarning(DetpassWarning):
    """A nondeterministic operation was left as it is (``on_uncovered="warn"``)."""


class EnvironmentWarning(DetpassWarning):
    """A setting of the process can cost repeatability."""


class KernelBuildWarning(DetpassWarning):
    """The native CPU kernels could not be built; a slower form with the same bits is used."""


class ReplacementWarning(DetpassWarning):
    """A rule's replacement has a consequence that the user can decide otherwise (``Match.advice``)."""


class BitsDifferError(DetpassError, AssertionError):
    """Results that should have the same bits do not; the message names the first pair and tensor."""


class NondeterminismError(DetpassError):
    """An inspected model holds something that may differ from run to run; the message lists it."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and, from the outside in, each exception that it wraps, torch's ``inner_exception`` included."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__


def own_error(error: BaseException) -> Exception | None:
    """The error of ours, or of eager's kind, that torch's compile stack wrapped; None when there is none."""
    for cause in causes(error):
        if isinstance(cause, Refusal):
            return cause.error
        if isinstance(cause, DetpassError):
            return cause
    return None
