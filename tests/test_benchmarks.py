"""The benchmarks' own arithmetic, and that each runs and stores its table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """A script as a module of its own name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


measuring = load("benchmarks/measuring.py")
accumulation = load("benchmarks/accumulation.py")
fill_readme = load("scripts/fill_readme.py")


def test_rounds_are_interleaved_and_ratios_pair_them() -> None:
    order: list[str] = []
    timing = measuring.interleaved(
        {
            "slow": lambda: (order.append("slow"), time.sleep(0.01)),
            "fast": lambda: (order.append("fast"), time.sleep(0.002)),
        },
        budget_s=0,
        least=5,
    )
    assert order[4:] == ["slow", "fast"] * 5
    assert timing.ratio("slow", "fast") > 1.5
    assert timing.ratio("slow", "slow") == 1.0


def test_geometric_mean() -> None:
    assert measuring.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_the_flag_is_on_only_during_the_call() -> None:
    call = measuring.under_flag(torch.are_deterministic_algorithms_enabled)
    assert call()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError):
        measuring.under_flag(lambda: 1 // 0)()
    assert not torch.are_deterministic_algorithms_enabled()


def test_peak_memory_sees_scratch_that_is_freed_again() -> None:
    def scratch() -> torch.Tensor:
        torch.ones(64 << 20, dtype=torch.uint8)  # 64 MiB, written and dropped
        return torch.ones(1)

    peak = measuring.peak_bytes(scratch)
    if peak is None:
        pytest.skip("this system does not let a process reset its peak")
    assert 60 << 20 < peak < 80 << 20


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "one segment"])
def test_indices_have_the_distribution_they_are_named_for(distribution: str) -> None:
    index = accumulation.make_index(distribution, 50_000, 1000)
    assert index.shape == (50_000,)
    assert 0 <= int(index.min()) <= int(index.max()) < 1000
    largest = index.bincount(minlength=1000).max().item() / 50_000
    low, high = {"uniform": (0.001, 0.003), "zipf": (0.1, 0.3), "one segment": (0.89, 0.91)}[distribution]
    assert low < largest < high


def test_wrong_results_are_not_timed() -> None:
    index, source = torch.tensor([0, 0, 1]), torch.ones(3, 1)
    good = torch.tensor([[2.0], [1.0]])
    accumulation.check(good, good.clone(), index, source)
    with pytest.raises(RuntimeError, match="other bits"):
        accumulation.check(good, good.nextafter(good + 1), index, source)
    with pytest.raises(RuntimeError, match="outside the error bound"):
        accumulation.check(good + 0.01, good + 0.01, index, source)


def cell(threads: int, dtype: str, ratio: float) -> accumulation.Cell:
    ratios = dict.fromkeys(accumulation.RIVALS, ratio)
    return accumulation.Cell(threads, dtype, "uniform", (10, 5, 2), {"detpass": 1.0}, ratios, 1.0, False)


def test_the_summary_names_the_worst_cell() -> None:
    rows = accumulation.summary([cell(2, "fp32", 0.1), cell(2, "bf16", 0.4), cell(1, "fp32", 1.0)])
    row = next(row for row in rows if (row["threads"], row["rival"], row["dtype"]) == (2, "inductor", "all"))
    assert row["geometric_mean"] == pytest.approx(0.2)
    assert (row["best"], row["worst"], row["mean_aimed_at"]) == (0.1, 0.4, 0.20)
    assert row["worst_cell"] == "(10, 5, 2) bf16 uniform"


def test_readme_is_filled_between_its_markers(tmp_path: Path) -> None:
    text = "a\n<!-- table: cpu_accumulation -->\nold\n<!-- end of table -->\nb\n"
    assert fill_readme.filled(text, tmp_path) == text, "a table that was never measured stays"
    found = [cell(2, "fp32", 0.123)]
    data = {"machine": measuring.machine(), "summary": accumulation.summary(found), "cells": [vars(c) for c in found]}
    measuring.store("cpu_accumulation", data, accumulation.markdown(found, data["machine"]), tmp_path)
    after = fill_readme.filled(text, tmp_path)
    assert "old" not in after
    assert "| 2 | inductor | 0.12 | 0.12 | 0.12 |" in after
    assert fill_readme.filled(after, tmp_path) == after
    with pytest.raises(KeyError):
        fill_readme.filled(text.replace("cpu_accumulation", "unknown"), tmp_path)


def run_gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=settings, check=False, cwd="/")


def test_without_a_gpu_its_checks_are_skipped_and_say_so(tmp_path: Path) -> None:
    finished = run_gpu(OUT=str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("skipped: no GPU")
    assert not list(tmp_path.iterdir())


def test_the_checks_for_a_gpu_import_nothing_but_torch() -> None:
    """What a machine that has torch and triton alone lacks cannot be imported here; the rest of the script can."""
    program = (
        "import sys\n"
        "for name in ('pytest', 'hypothesis', 'rich', 'typer', 'numpy', 'setuptools'): sys.modules[name] = None\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        "import gpu, gpu_bits, gpu_operators, gpu_repeats, gpu_setting, gpu_speed, gpu_training, detpass\n"
        "print(gpu.PARTS)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "'training'" in finished.stdout


@pytest.mark.slow
def test_the_checks_of_bits_for_a_gpu_rehearse_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    finished = run_gpu("--dry-run", "--only", "bits", "training", "--budget", "2000", OUT=str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.endswith("every check of bits passed\n")
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["failures"] == {}
    assert len(data["bits"]["cases"]) == 12
    assert (tmp_path / "gpu.md").read_text().startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "name"),
    [
        ("accumulation.py", ["--quick", "--shapes", "2000,50,4", "--budget", "0.1"], "cpu_accumulation"),
        ("closed_forms.py", ["--quick", "--only", "reflection"], "cpu_closed_forms"),
        ("compile_time.py", ["--quick", "--only", "perceptron"], "compile_time"),
        ("cuda_kernels.py", ["--quick", "--capability", "90"], "cuda_kernels"),
    ],
)
def test_benchmarks_run_and_store(script: str, arguments: list[str], name: str, tmp_path: Path) -> None:
    if name == "cuda_kernels":
        pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert (tmp_path / f"{name}.md").read_text().startswith("# ")
