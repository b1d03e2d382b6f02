"""Random accumulations and plain writes have the bits of the canonical order, in every run.

The graph runs node by node after the rewrite, without code generation, so that many programs can be tried.
``DETPASS_FUZZ_EXAMPLES`` sets how many for each test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from detpass.rewriting.report import Report
from detpass.segment import reference
from tests.conformance.capture import TARGETS, rewritten
from tests.integration.fuzz_programs import (
    ACCUMULATIONS,
    PLAIN_WRITES,
    READINGS,
    Program,
    expected_value,
    numbers,
)
from tests.rules.direct import bits

pytestmark = pytest.mark.fuzz

bounded = settings(
    max_examples=int(os.environ.get("DETPASS_FUZZ_EXAMPLES", "60")),
    deadline=None,  # the first example loads the compiler
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Error allowed, as a share of the largest expected value: some hundred roundings of the dtype's own operations."""


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape
    if found.numel():
        # What underflows is off by up to the smallest number that the dtype has.
        smallest = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
        limit = RELATIVE[found.dtype] * expected.abs().max().item() + smallest
        assert (wide(found) - expected).abs().max().item() <= limit, what


def assert_bits(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    wrong = bits(found.detach()) != bits(expected)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ"


def gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    rest: Sequence[Tensor],
    upstream: Tensor,
    count: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    """The value of ``function`` and its gradients with respect to the first ``count`` of ``inputs``."""
    given = [x.detach().clone() for x in inputs]
    leaves = [x.requires_grad_() for x in given[:count]]
    (value,) = function(*given, *rest)
    if not leaves:
        return value, []
    found = torch.autograd.grad(value, leaves, upstream.to(value.dtype), allow_unused=True)
    return value.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def reads_masks(program: Program) -> bool:
    """How many places a mask reads is known only as a symbol."""
    return any(index.dtype is torch.bool for index in program.indices)


@given(program=ACCUMULATIONS, target=st.sampled_from(TARGETS), dynamic=st.booleans())
@bounded
def test_accumulations(program: Program, target: str, dynamic: bool) -> None:
    """Values have the canonical bits; gradients are those of eager in float64."""
    note(program.text)
    run = lambda *inputs: [program.run(*inputs)]  # noqa: E731
    upstream = numbers(tuple(program.dest.shape), program.dest.dtype, 7)
    compiled = rewritten(run, target, Report(compile_id=None), dynamic or reads_masks(program))
    operands = (program.dest, program.source)
    # torch differentiates a scatter by its source only where all of the source is used, and products and extremes,
    # which tests of their own differentiate, by nothing then.
    count = 0 if program.reduce != "sum" else 1 + program.source_gradient
    value, found = gradients(compiled, operands, program.indices, upstream, count)
    assert_bits(value, expected_value(program), "the value is not that of the canonical order")
    again, _ = gradients(compiled, operands, program.indices, upstream, count)
    assert_bits(value, again, "two runs differ")
    exact = tuple(map(wide, operands))
    right, wanted = gradients(run, exact, program.indices, wide(upstream), count)
    assert_near(value, right, "value")
    for name, mine, yours in zip(("dest", "source"), found, wanted, strict=False):
        assert_near(mine, yours, f"gradient of {name}")


@given(program=READINGS, target=st.sampled_from(TARGETS), dynamic=st.booleans())
@bounded
def test_gradients_of_reads(program: Program, target: str, dynamic: bool) -> None:
    """The gradient of a read is an accumulation into zeros, in the canonical order."""
    note(f"read of {program.text}")
    run = lambda *inputs: [program.read(*inputs)]  # noqa: E731
    shape = tuple(program.read(program.dest, *program.indices).shape)
    upstream = numbers(shape, program.dest.dtype, 7)
    compiled = rewritten(run, target, Report(compile_id=None), dynamic or reads_masks(program))
    _, (found,) = gradients(compiled, (program.dest,), program.indices, upstream)
    zeros = torch.zeros(1, program.dest.numel(), 1, dtype=program.dest.dtype)
    expected = reference.segment_accumulate(zeros, program.places, upstream.reshape(1, -1, 1), program.dest.numel())
    assert_bits(found, expected.reshape(program.dest.shape), "the gradient is not that of the canonical order")
    _, (wanted,) = gradients(run, (wide(program.dest),), program.indices, wide(upstream))
    assert_near(found, wanted, "gradient")


@given(program=PLAIN_WRITES, target=st.sampled_from(TARGETS), dynamic=st.booleans())
@bounded
def test_plain_writes(program: Program, target: str, dynamic: bool) -> None:
    """The last write in index order wins, bit for bit."""
    note(program.text)
    run = lambda *inputs: [program.run(*inputs)]  # noqa: E731
    compiled = rewritten(run, target, Report(compile_id=None), dynamic or reads_masks(program))
    (value,) = compiled(program.dest, program.source, *program.indices)
    assert_bits(value, expected_value(program), "not the last write")
