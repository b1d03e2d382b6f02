"""PyTorch's own samples of every operator that can yield a nondeterministic node, rewritten and run, against eager.

Each sample runs with the rules for a CPU and with those for a GPU (on the CPU's arithmetic), the first ones with
symbolic sizes too: value and gradients as eager's, three runs equal on the bits. ``DETPASS_CONFORMANCE_SECONDS``
bounds this file; what is left out for time is counted in the summary.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

from tests.conformance.capture import TARGETS
from tests.conformance.operations import OPERATIONS, REFUSED, UNTRACEABLE
from tests.conformance.outcome import NO_GRAPH, NO_TIME, Clock, Tally, run_sample
from tests.conformance.outcome import REFUSED as REFUSAL
from tests.conformance.samples import Sample, samples_of

pytestmark = pytest.mark.conformance

SYMBOLIC = 4
"""Samples of each operator that are traced with symbolic sizes as well."""

WANTED = (torch.float32, torch.bfloat16, torch.complex64)
"""An operator runs in each of these that it supports; in int64 when it supports none."""


@functools.cache
def operators() -> dict[str, Any]:
    """OpInfos by name; loaded by the first test and not at collection, since the import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    # The import forbids setting torch.backends' flags, in this process and for good; other tests set them.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    return {f"{i.name}.{i.variant_test_name}" if i.variant_test_name else str(i.name): i for i in op_db}


@functools.cache
def clock() -> Clock:
    return Clock(len(OPERATIONS))


def in_turn(info: Any) -> list[tuple[torch.dtype, Sample]]:
    """All samples, the dtypes in turn and in a shuffled order: a bounded run still meets every kind of argument."""
    groups = []
    for dtype in [d for d in WANTED if d in info.dtypes] or [torch.int64]:
        samples = list(samples_of(info, dtype))
        random.Random(0).shuffle(samples)
        groups.append([(dtype, sample) for sample in samples])
    return [pair for row in itertools.zip_longest(*groups) for pair in row if pair is not None]


@pytest.mark.parametrize("name", OPERATIONS)
def test_samples(name: str, keep_tally: Any) -> None:
    info = operators().get(name)
    if info is None:
        pytest.skip(f"torch {torch.__version__} has no OpInfo {name}")
    tally = Tally(name)
    samples = in_turn(info)
    for number, (dtype, sample) in enumerate(clock().within_share(samples, tally)):
        # Past the first ones, the other dtypes run with the rules for a GPU alone: here those rewrite the most.
        for target in TARGETS if number < SYMBOLIC or dtype is WANTED[0] else TARGETS[1:]:
            run_sample(sample, dtype, target, False, tally)
        if number < SYMBOLIC:
            run_sample(sample, dtype, "cpu", True, tally)
    keep_tally(tally)
    assert not tally.failures, f"{len(tally.failures)} failures:\n" + "\n".join(tally.failures)
    for status, table in ((REFUSAL, REFUSED), (NO_GRAPH, UNTRACEABLE)):
        if tally.counts[status]:
            assert name in table, f"{status}, which no table explains: {dict(tally.reasons)}"
        elif not tally.counts[NO_TIME]:
            assert name not in table, f"no sample is {status} any more: remove the row {name!r}"


def test_the_tables_name_operators_that_run() -> None:
    """A row for an operator that does not run would explain nothing."""
    assert {*REFUSED, *UNTRACEABLE} <= set(OPERATIONS)
    assert len(set(OPERATIONS)) == len(OPERATIONS)
