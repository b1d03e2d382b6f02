"""Autotuned Triton kernels of a user's own: launched in one configuration, unless the choice cannot change a bit.

No GPU: the kernels are traced on the CPU with a driver that names a GPU, and read; none is launched. What Inductor
would do on a GPU is read from the module that it generates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import detpass
from detpass import Declared, ReplacementWarning, Treatment, UncoveredError, escapes, user_kernels
from detpass import _torch_private_triton as private
from detpass.backend import prepare

pytest.importorskip("triton", reason="triton is not installed")

import triton

from tests.inspection import user_kernels as kernels
from tests.rules.test_user_kernel import PROOF, rewrite

Function = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def offline() -> Iterator[None]:
    escapes._warn_of_replacement.cache_clear()
    with private.offline_triton(90):
        yield


def launch(kernel: Any, name: str = "out", **given: Any) -> Function:
    def launched(x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(128)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (triton.cdiv(x.numel(), meta["BLOCK"]),)

        kernel[grid](x.sin(), **{name: out}, n=x.numel(), **given)
        return out * 2

    return launched


totals = launch(kernels.tuned_totals)
FIRST = r"runs in the first of its 2 configurations \(BLOCK=64, num_warps=4.*would measure them and choose"
PINNED = {
    "a sum": (kernels.tuned_totals, "kernel totals", "a configuration can set the order in a loop"),
    "one adds by atomics": (kernels.tuned, "kernel guarded", "its operations differ from one configuration to another"),
    "warps alone": (kernels.tuned_warps, "kernel row_total", "a configuration can set the order in a reduction"),
    "heuristics below": (kernels.tuned_by_rule, "kernel scaled", "its operations differ from one"),
}


@pytest.mark.parametrize("case", PINNED)
def test_a_choice_that_can_change_bits_is_not_made(case: str) -> None:
    kernel, name, why = PINNED[case]
    nodes: list[fx.Node] = []
    (record,) = rewrite(launch(kernel), then=lambda graph: nodes.extend(launches(graph)))
    assert (record.treatment, record.rule) == (Treatment.NATIVE, "first_configuration")
    assert name in record.reason
    assert why in record.reason
    (node,) = nodes
    reading = user_kernels.read(node)
    assert reading is not None
    assert len(reading.configurations) == len(node.kwargs["grid"]) == 1  # type: ignore[arg-type]
    assert f"({reading.configurations[0]})" in record.reason
    assert reading.name in record.reason


def launches(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in user_kernels.LAUNCHES]


def test_the_grid_is_that_of_the_first_configuration() -> None:
    grids: list[Any] = []
    rewrite(totals, then=lambda graph: grids.extend(node.kwargs["grid"] for node in launches(graph)))
    assert grids == [[(2, 1, 1)]]


MEASURED = {
    "elementwise": (
        kernels.tuned_doubled,
        "kernel doubled: each of its 2 configurations does the same to every element",
    ),
    "one configuration": (kernels.tuned_totals_once, None),
    "twice the same": (kernels.tuned_totals_twice, None),
}


@pytest.mark.parametrize("case", MEASURED)
def test_what_cannot_change_bits_is_left_as_it_is(case: str) -> None:
    kernel, reason = MEASURED[case]
    kept: list[int] = []
    report = rewrite(launch(kernel), then=lambda graph: kept.extend(n.kwargs["kernel_idx"] for n in launches(graph)))
    found = [(record.treatment, record.rule, record.reason) for record in report]
    assert found == ([] if reason is None else [(Treatment.SAFE, "first_configuration", reason)])
    assert len(kept) == 1


def test_heuristics_are_no_choice() -> None:
    assert len(rewrite(launch(kernels.by_rule))) == 0


def test_a_kernel_whose_first_configuration_adds_by_atomics_is_refused() -> None:
    with pytest.raises(UncoveredError, match=r"guarded, in its first configuration too.*guarded, fadd on f32"):
        rewrite(launch(kernels.tuned_adding_first))


def test_a_declared_kernel_is_measured() -> None:
    (record,) = rewrite(totals, Declared(kernels.tuned_totals, PROOF))
    assert (record.treatment, record.rule) == (Treatment.SAFE, "declared: totals")


def test_the_order_of_configurations_is_in_the_cache_key() -> None:
    def keys(kernel: Any) -> set[str]:
        found: set[str] = set()
        rewrite(launch(kernel), then=lambda graph: [found.update(user_kernels.source_keys(n)) for n in launches(graph)])
        return found

    assert keys(kernels.tuned_totals) == keys(kernels.tuned_totals)
    assert keys(kernels.tuned_totals) != keys(kernels.tuned_totals_reversed)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return totals(gradient, gradient)[: gradient.shape[0]]


def halved(x: Tensor, index: Tensor) -> Tensor:
    return Halved.apply(x).sum()


INPUTS = torch.randn(100), torch.randint(0, 8, (100,))
CONFIGURATIONS = re.compile(r"user_autotune\(\s*configs=(\[.*?\]),\n", re.DOTALL)


def measured_in(code: detpass.CudaCode) -> list[int]:
    """How many configurations the module of each graph with a kernel of the user's has to choose from."""
    return [text.count("'BLOCK'") for source in code.sources.values() for text in CONFIGURATIONS.findall(source)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_generated_code_has_one_configuration(dynamic: bool, training: bool) -> None:
    function, x = (halved, INPUTS[0].clone().requires_grad_()) if training else (totals, INPUTS[0])
    ours = _code("detpass", dynamic, function, x)
    assert measured_in(ours) == [1]
    assert ours.deterministic
    plain = _code("inductor", dynamic, function, x)
    assert measured_in(plain) == [2]
    assert list(plain.measured_kernels) == ["totals"]
    assert not plain.deterministic


def _code(name: str, dynamic: bool, function: Function, x: Tensor) -> detpass.CudaCode:
    return detpass.cuda_code(function, x, INPUTS[1], backend=name, dynamic=dynamic)


def test_generated_code_measures_what_cannot_change_bits() -> None:
    for name in ("detpass", "inductor"):
        code = _code(name, False, launch(kernels.tuned_doubled), INPUTS[0])
        assert measured_in(code) == [2]
        assert code.deterministic


def test_an_inspection_says_what_happens() -> None:
    report = detpass.inspect(totals, *INPUTS, target="cuda")
    (kernel,) = report.triton_kernels
    assert str(kernel).endswith("a configuration chosen by measurement: a configuration can set the order in a loop")
    (record,) = report.records
    assert not record.repeats
    assert report.problems()
    assert not report.problems("remaining")


def test_a_compile_warns_once() -> None:
    """No GPU, so the compile itself is not done; what stands here is what it does at its end, cached or not."""

    def finish(*launched: Any) -> None:
        for kernel in launched:
            plan = prepare(fx.GraphModule(torch.nn.Module(), fx.Graph()), INPUTS, None, None)
            plan.report.records += rewrite(launch(kernel)).records
            plan.remember()

    with pytest.warns(ReplacementWarning) as warned:
        finish(kernels.tuned_totals, kernels.tuned_totals, kernels.tuned_doubled)
    assert len(warned) == 1
    assert re.match(rf"at .*test_first_configuration.py:\d+: kernel totals {FIRST}.*Remedy", str(warned[0].message))
