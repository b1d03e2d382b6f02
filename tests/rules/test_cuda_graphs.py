"""Every rewritten operator fits in one CUDA graph, forward and backward: Inductor's own judgement, without a GPU.

With CUDA graphs on, Inductor cuts a graph at what cannot be captured: each uncut run of kernels is a partition, and
what stands between them is called one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from tests.test_benchmarks import load

CASES = {case.name: case for case in load("benchmarks/gpu_operators.py").operator_cases(dry=True)}
FAST = {"index_add", "embedding_bag mean", "scatter_reduce amax", "cumsum"}


def launched_outside(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Mapping[str, tuple[int, list[str]]]:
    """For each graph the number of partitions, and the launches and calls that stand outside of them."""
    settings = CudaSettings("detpass", compile_kernels=False, options={"triton.cudagraphs": True})
    found = {}
    for name, source in cuda_code_with(settings, function, inputs).sources.items():
        partitions, _, rest = source.rpartition("class Runner")
        main = rest.partition("runner = Runner(")[0]
        assert main, "Inductor wraps partitions in a class of its own"
        calls = [line for line in main.splitlines() if re.search(r"\.run\(|\btorch\.ops\b|\bextern_kernels\b", line)]
        found[name] = (len(re.findall(r"^def partition_\d+\(", partitions, re.MULTILINE)), calls)
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_one_graph_holds_every_kernel(name: str) -> None:
    case = CASES[name]
    inputs = [value.detach().clone() for value in case.inputs]
    for value in inputs:
        value.requires_grad_(case.backward and value.is_floating_point())
    found = launched_outside(case.function, tuple(inputs))
    assert found == dict.fromkeys(["forward0", "backward0"] if case.backward else ["inference0"], (1, []))


def test_what_cannot_be_captured_is_seen() -> None:
    lengths, targets = (torch.tensor([12, 9]), torch.tensor([3, 2])), torch.randint(1, 6, (2, 3))

    def loss(logits: Tensor) -> Tensor:
        return F.ctc_loss(logits.sin().log_softmax(-1), targets, *lengths)

    found = launched_outside(loss, (torch.randn(12, 2, 6, requires_grad=True),))
    assert set(found) == {"forward0", "backward0"}
    assert all(any("detpass.ctc_loss" in call for call in calls) for _, calls in found.values())
