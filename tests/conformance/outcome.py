"""Runs one sample under the rules and says how it ended; keeps the counts that the terminal summary prints."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from detpass.errors import UncoveredError
from detpass.rewriting.report import Report
from tests.conformance.capture import NOT_TRACEABLE, rewritten, values_and_gradients
from tests.conformance.comparison import difference_of_bits, difference_of_values
from tests.conformance.operations import STABLE, excluded
from tests.conformance.samples import Sample

RUNS = 3
EQUAL = "equal"
EQUAL_IN_FLOAT64 = "equal to eager float64"
EQUAL_TO_STABLE = "equal with the smallest index among equals"
REFUSED = "refused"
NO_GRAPH = "not in one graph"
EXCLUDED = "excluded"
NO_TIME = "left out for time"


@dataclass
class Tally:
    """What became of the samples of one operator."""

    operator: str
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why samples were refused or excluded."""
    treatments: Counter[str] = field(default_factory=Counter)
    """How many nodes the rules treated how, in all graphs."""
    failures: list[str] = field(default_factory=list)

    def note(self, status: str, reason: str = "") -> None:
        self.counts[status] += 1
        if reason:
            self.reasons[f"{status}: {reason}"] += 1


def run_sample(sample: Sample, dtype: torch.dtype, target: str, dynamic: bool, tally: Tally) -> None:
    """Compare the rewritten sample with eager and with itself; add the outcome to ``tally``."""
    reason = excluded(tally.operator, dtype, sample, dynamic)
    if reason is not None:
        tally.note(EXCLUDED, reason)
        return
    report = Report(compile_id=None)
    function = rewritten(sample.function, target, report, dynamic)
    tensors = sample.tensors
    where = f"{dtype} for {target}{', symbolic sizes' if dynamic else ''}: {sample.description}"
    try:
        results = [values_and_gradients(function, tensors) for _ in range(RUNS)]
    except UncoveredError:
        tally.note(REFUSED, f"{target}: {', '.join(r.reason for r in report if str(r.treatment) == 'uncovered')}")
        return
    except NOT_TRACEABLE as error:
        if dynamic:
            tally.note(NO_GRAPH, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        else:  # a size that depends on data has a name only among symbolic ones
            run_sample(sample, dtype, target, True, tally)
        return
    except Exception as error:  # noqa: BLE001 - any error is a failure of this sample; the others still run
        tally.failures.append(f"{where}: {type(error).__name__}: {str(error).strip()[:600]}")
        return
    finally:
        tally.treatments.update(str(record.treatment) for record in report)
    for number, again in enumerate(results[1:], start=1):
        why = difference_of_bits(results[0], again)
        if why is not None:
            tally.failures.append(f"{where}: {why} (0 and {number})")
            return
    why = difference_of_values(results[0], values_and_gradients(sample.function, tensors), dtype)
    if why is None:
        tally.note(EQUAL)
        return
    wide = sample.widened()
    still = difference_of_values(results[0], values_and_gradients(wide.function, wide.tensors), dtype)
    if still is None:
        tally.note(EQUAL_IN_FLOAT64)
    elif tally.operator in STABLE and _equals(sample.instead(STABLE[tally.operator]), results[0], dtype):
        tally.note(EQUAL_TO_STABLE)
    else:
        tally.failures.append(f"{where}: against eager {why}; against eager in float64 {still}")


def _equals(other: Sample, results: list[Any], dtype: torch.dtype) -> bool:
    return difference_of_values(results, values_and_gradients(other.function, other.tensors), dtype) is None


class Clock:
    """Shares ``DETPASS_CONFORMANCE_SECONDS`` among the tests of a process; what one does not use, later ones may."""

    def __init__(self, tests: int) -> None:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        seconds = float(os.environ.get("DETPASS_CONFORMANCE_SECONDS", "300"))
        self._share = seconds * workers / max(tests, 1)
        self._saved = 0.0

    def within_share(self, samples: Iterable[Any], tally: Tally) -> Iterator[Any]:
        """Yield samples while there is time, at least one; note the others as left out."""
        start = time.monotonic()
        allowed = self._share + self._saved
        for number, sample in enumerate(samples):
            if number and time.monotonic() - start > allowed:
                tally.note(NO_TIME)
            else:
                yield sample
        self._saved = max(0.0, allowed - (time.monotonic() - start))
