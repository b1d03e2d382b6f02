"""Repeated runs: what differs is found and named, what repeats is said to repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from detpass.errors import BitsDifferError, ConfigurationError
from detpass.reproducibility import compare_runs


def test_equal_runs_are_true_and_say_so() -> None:
    report = compare_runs(lambda: {"x": torch.randn(100)}, runs=3)
    assert report
    assert (report.distinct, len(report.runs), report.first_pair) == (1, 6, None)
    assert [run.threads for run in report.runs] == [1, 1, 1, 2, 2, 2]
    report.raise_if_different()
    assert "the same bits" in str(report)


def test_the_first_pair_and_tensor_are_named() -> None:
    calls = iter(range(100))

    def fn() -> dict[str, torch.Tensor]:
        number = next(calls)
        return {"stable": torch.ones(3), "wobbly": torch.full((2,), 1.0 if number < 4 else 1.5)}

    report = compare_runs(fn, runs=3, threads=(1, 2))
    assert not report
    assert report.first_pair is not None
    assert [run.number for run in report.first_pair] == [0, 4]
    assert [found.path for found in report.differences] == ["wobbly"]
    assert report.distinct_by_threads == {1: 1, 2: 2}
    with pytest.raises(BitsDifferError, match=r"run 0 \(1 threads\) and run 4 \(2 threads\) differ in"):
        report.raise_if_different()


def test_a_result_overwritten_by_the_next_run_is_still_compared() -> None:
    buffer = torch.zeros(2)

    def fn() -> torch.Tensor:
        return buffer.add_(1)

    report = compare_runs(fn, runs=2, threads=(1,))
    assert report.differences[0].left == 1.0
    assert report.differences[0].right == 2.0


def test_seed_and_thread_count_are_restored() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    compare_runs(lambda: torch.randn(5), runs=2, seed=3)
    assert torch.equal(torch.randn(3), expected)
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        compare_runs(lambda: 1 // 0, runs=2, threads=(1,))
    assert torch.get_num_threads() == 2


def test_without_a_seed_the_generator_runs_on() -> None:
    assert not compare_runs(lambda: torch.randn(5), runs=2, threads=(1,), seed=None)


@pytest.mark.parametrize("arguments", [{"runs": 0}, {"runs": 1, "threads": (1,)}, {"threads": (0,)}, {"threads": ()}])
def test_too_few_runs_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="at least two runs"):
        compare_runs(lambda: 1, **arguments)


def gradient_of_gather(backend: str) -> Callable[[], torch.Tensor]:
    """The gradient of a table of which 200,000 rows are read, with many duplicates."""
    table = torch.randn(64, 8, requires_grad=True)
    index = torch.randint(0, 64, (200_000,))
    scale = torch.randn(200_000, 8)
    compiled = torch.compile(lambda w: (w[index] * scale).sum(), backend=backend)

    def fn() -> torch.Tensor:
        (gradient,) = torch.autograd.grad(compiled(table), table)
        return gradient

    return fn


def test_inductor_differs_and_the_report_measures_it() -> None:
    report = compare_runs(gradient_of_gather("inductor"), runs=30, threads=(2,))
    assert not report, "Inductor's atomics met in the same order in 30 runs; run the test again"
    assert report.differences[0].max_ulp is not None
    assert 0 < report.differences[0].max_ulp < 10_000


def test_detpass_repeats() -> None:
    compare_runs(gradient_of_gather("detpass"), runs=12, threads=(1, 2)).raise_if_different()
