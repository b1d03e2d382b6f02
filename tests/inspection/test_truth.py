"""What inspection says of a CPU against what real runs show, in both directions.

A function that differs between runs and was called clean is a failure. One that was called nondeterministic and never
differed here proves nothing and is listed: threads have to meet at the wrong moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import detpass
from detpass.inspection import Verdict
from detpass.reproducibility import compare_runs
from tests.inspection.truth_cases import CASES, EXAMPLES, TruthCase

RUNS = 20
FAST = frozenset({"w[i] backward", "index_add of integers"})


@dataclass(frozen=True)
class Truth:
    """What was said and what was seen of one case."""

    name: str
    claimed: bool
    """Inspection calls it nondeterministic."""
    left: bool
    """Inspection says that detpass leaves something."""
    eager: bool
    """Runs in eager mode differed."""
    inductor: bool
    """Runs under Inductor differed."""

    @property
    def missed(self) -> bool:
        return not self.claimed and (self.eager or self.inductor)

    @property
    def unseen(self) -> bool:
        return self.claimed and not (self.eager or self.inductor)

    def __str__(self) -> str:
        words = {True: "differs", False: "same"}
        verdict = "MISSED" if self.missed else "never showed" if self.unseen else "agrees"
        said = "nondeterministic" if self.claimed else "clean"
        return f"{self.name:<32}{said:<18}eager {words[self.eager]:<9}inductor {words[self.inductor]:<9}{verdict}"


def examine(case: TruthCase, runs: int = RUNS) -> Truth:
    """Inspect a case, then run it under both compilers."""
    torch.manual_seed(0)
    function, arguments = case.make()
    report = detpass.inspect(function, *arguments, target="cpu")
    assert report.incomplete is None, report.incomplete
    assert not report.breaks, report.breaks
    learned = [tensor for tensor in (*arguments, *parameters(function)) if tensor.requires_grad]
    compiled = torch.compile(function, backend="inductor")

    def differs(call: Callable[..., Tensor]) -> bool:
        def step() -> list[Tensor | None]:
            result = call(*arguments)
            if not result.requires_grad:
                return [result]
            return [result, *torch.autograd.grad(result.sum(), learned, allow_unused=True)]

        return not compare_runs(step, runs, [2], 0)

    return Truth(
        case.name,
        claimed=bool(report.problems("nondeterministic")),
        left=bool(report.problems("remaining")),
        eager=differs(function),
        inductor=differs(compiled),
    )


def parameters(function: object) -> Iterable[Tensor]:
    return function.parameters() if isinstance(function, nn.Module) else ()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAST], ids=lambda case: case.name)
def test_a_clean_verdict_is_true(case: TruthCase) -> None:
    truth = examine(case)
    assert not truth.missed, truth
    assert not truth.left, truth


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_every_verdict_against_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for case in (*CASES, *EXAMPLES):
        found.append(examine(case))
        torch._dynamo.reset()
    with capsys.disabled():
        print("\ninspection on the CPU against real runs, two threads:")
        print("\n".join(map(str, found)))
        print(f"{sum(t.unseen for t in found)} of {sum(t.claimed for t in found)} claims never showed here")
    assert not [str(truth) for truth in found if truth.missed]
    assert not [str(truth) for truth in found if truth.left]
    assert any(truth.inductor for truth in found), "no nondeterminism was seen at all: the runs prove nothing"


def test_what_differs_and_cannot_be_traced_is_never_called_clean() -> None:
    """MKL's least squares differs between runs with two threads; torch.compile runs it outside of any graph."""
    report = detpass.inspect(lambda a, b: torch.linalg.lstsq(a, b).solution, torch.randn(9, 4), torch.randn(9, 2))
    assert report.verdict() is not Verdict.CLEAN
    assert report.verdict("remaining") is not Verdict.CLEAN


def test_the_names_of_the_cases_are_unique_and_the_fast_ones_exist() -> None:
    names = [case.name for case in (*CASES, *EXAMPLES)]
    assert len(names) == len(set(names))
    assert set(names) >= FAST
