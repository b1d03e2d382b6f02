"""Bisection: the node that does not repeat is named, with the model's line; what repeats is cleared."""

from __future__ import annotations

import inspect

import pytest
import torch

from detpass.errors import ConfigurationError
from detpass.reproducibility import bisect


def gather(table: torch.Tensor, index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (table[index] * scale).tanh()


def test_the_accumulation_is_named_with_its_line() -> None:
    table = torch.randn(64, 8, requires_grad=True)
    report = bisect(gather, table, torch.randint(0, 64, (200_000,)), torch.randn(200_000, 8), runs=20, threads=2)
    assert not report, "eager atomics met in the same order in 20 runs; run the test again"
    assert [source.target for source in report.sources] == ["aten.index_put.default"]
    first = report.first
    assert first is not None
    assert first.graph == "backward"
    line = inspect.getsourcelines(gather)[1] + 1
    assert first.location == f"{__file__}:{line}"
    assert first.distinct > 1
    assert first.difference is not None
    assert "aten.index_put.default" in str(report)


def test_a_model_that_repeats_is_cleared() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
    report = bisect(model, torch.randn(4, 8), runs=3)
    assert report, str(report)
    assert report.nodes > 5
    assert all(parameter.grad is None for parameter in model.parameters())


def test_consequences_are_not_blamed() -> None:
    calls = iter(range(100))

    @torch.library.custom_op("detpass_test::wobble", mutates_args=())
    def wobble(x: torch.Tensor) -> torch.Tensor:
        return x + next(calls)

    @wobble.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    report = bisect(lambda x: wobble(x.sin()).cos().exp(), torch.randn(5), runs=3)
    assert [source.target for source in report.sources] == ["detpass_test.wobble.default"]
    assert report.sources[0].distinct == 3


def test_a_loss_chooses_what_the_backward_pass_starts_from() -> None:
    weight = torch.randn(3, requires_grad=True)
    report = bisect(lambda w: {"out": w.exp(), "aux": w}, weight, runs=2, loss=lambda out: out["out"].sum())
    assert report
    assert report.nodes >= 2


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least two runs"):
        bisect(torch.sin, torch.ones(1), runs=1)
    with pytest.raises(ConfigurationError, match="nothing was captured"):
        bisect(lambda: 3, runs=2)
    calls = iter(range(100))

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if next(calls) % 2 else x.cos().exp()

    with pytest.raises(ConfigurationError, match="executed different nodes"):
        bisect(unsteady, torch.ones(2), runs=4)
