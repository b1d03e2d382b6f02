"""Every rewritten operator fits in one CUDA graph, forward and backward: Inductor's own judgement, without a GPU.

With CUDA graphs on, Inductor cuts a graph at what cannot be captured: each uncut run of kernels is a partition, and
what stands between them is called one by one.
"""

from __future__ import annotations

import functools
import re
import sys

import pytest

from detpass.inspection.cuda_code import CudaCode, CudaSettings, cuda_code_with
from tests.test_benchmarks import ROOT, load

sys.path.append(str(ROOT / "benchmarks"))  # they import each other by name
CASES = {case.name: case for case in load("benchmarks/gpu_operators.py").operator_cases(dry=True, gpu=True)}
FAST = {"index_add", "embedding_bag mean", "scatter_reduce amax", "cumsum"}
CUT = {
    "ctc_loss": dict.fromkeys(("forward0", "backward0"), "detpass.ctc_loss"),
    "bincount with weights": {"inference0": "aten.bincount"},
    "index_add, sizes that are data": {"forward0": "aten.index.Tensor"},
}
"""What cannot be captured (a size or lengths are read): for each graph that it cuts, the call in between."""
BY_DEVICE = {"attention bfloat16", "attention float32", "GRU by cuDNN"}
"""Torch chooses another operator on a CPU, where graphs are traced."""


@functools.cache
def generated(name: str) -> CudaCode:
    case = CASES[name]
    settings = CudaSettings("detpass", compile_kernels=False, options={"triton.cudagraphs": True})
    with case.configured():
        return cuda_code_with(settings, case.function, case.fresh_inputs())


def launched_outside(source: str) -> tuple[int, list[str]]:
    """The number of partitions, and the launches and calls that stand outside of them."""
    partitions, _, rest = source.rpartition("class Runner")
    main = rest.partition("runner = Runner(")[0]
    assert main, "Inductor wraps partitions in a class of its own"
    calls = [line for line in main.splitlines() if re.search(r"\.run\(|\btorch\.ops\b|\bextern_kernels\b", line)]
    return len(re.findall(r"^def partition_\d+\(", partitions, re.MULTILINE)), calls


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_one_graph_holds_every_kernel(name: str) -> None:
    found = {graph: launched_outside(source) for graph, source in generated(name).sources.items()}
    assert set(found) == ({"forward0", "backward0"} if CASES[name].backward else {"inference0"})
    cuts = CUT.get(name, {})
    assert all(any(cut in call for call in found[graph][1]) for graph, cut in cuts.items()), found
    assert all(cuts[graph] in call for graph in cuts for call in found[graph][1]), found
    assert all(outside == (1, []) for graph, outside in found.items() if graph not in cuts), found


@pytest.mark.slow
def test_every_row_of_the_catalogue_has_a_case() -> None:
    """What ``make test-gpu`` runs on a GPU; the reports are those of the code generated here."""
    repeats = load("benchmarks/gpu_repeats.py")
    reached = {CASES[name].row for name in BY_DEVICE}
    for name in CASES.keys() - BY_DEVICE:
        report = generated(name).report
        assert report is not None
        reached |= {CASES[name].row} | repeats.rows_shown((record.op, record.rule) for record in report.records)
    missing = {row for row in repeats.promised() if row not in reached and "torchvision" not in row}
    assert missing == {"CTC loss by cuDNN"}, "it needs targets on the CPU"
