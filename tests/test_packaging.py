"""AOTInductor packages: the bits of a compile, in a process of their own, and refusals as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import detpass
from detpass.errors import ConfigurationError, UncoveredError

ROWS, SEGMENTS = 5000, 30


class Messages(nn.Module):
    """An embedding, messages added at the ends of edges, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(SEGMENTS, 8), nn.Linear(8, 8)

    def forward(self, words: Tensor, end: Tensor) -> Tensor:
        sent = self.inner(self.words(words))
        wide = end[:, None].expand_as(sent)
        total = torch.zeros(SEGMENTS, 8).index_add(0, end, sent)
        return total + torch.zeros(SEGMENTS, 8).scatter_reduce(0, wide, sent, "mean", include_self=False)


class Counts(nn.Module):
    """For CUDA, torch adds weights with atomics."""

    def forward(self, index: Tensor, weights: Tensor) -> Tensor:
        return torch.bincount(index, weights, minlength=SEGMENTS)


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(0, SEGMENTS, (rows,))


def packaged(program: torch.export.ExportedProgram, path: Path, **options: Any) -> Callable[..., Any]:
    made = detpass.aoti_compile_and_package(program, path, options=options)
    assert made == str(path)
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(made)
    return loaded


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


LOAD = """
import sys, torch, detpass
torch.set_num_threads(int(sys.argv[2]))
loaded = torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
inputs, expected = torch.load(sys.argv[1] + "/data.pt")
assert all(torch.equal(loaded(*inputs), expected) for _ in range(5)), "other bits"
"""


@pytest.mark.slow
def test_a_package_gives_a_compiles_bits_for_every_size_and_in_another_process(tmp_path: Path) -> None:
    model = Messages().eval().requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    program = torch.export.export(model, (ids(), ids()), dynamic_shapes=({0: rows}, {0: rows}))
    reports: list[detpass.Report] = []
    loaded = packaged(program, tmp_path / "model.pt2", report=reports.append)
    assert reports == [detpass.last_report()]
    assert {(record.op, str(record.treatment)) for record in reports[0].records} >= {
        ("aten.index_add.default", "segment")
    }
    compiled = torch.compile(model, backend="detpass", dynamic=True)
    for count in (ROWS, 3, 70_000):
        inputs = (ids(count), ids(count))
        expected = compiled(*inputs)
        assert equal(loaded(*inputs), expected)
        assert torch.allclose(expected, model(*inputs), atol=1e-3)  # sums of up to 2,500 rows in float32
    torch.save((inputs, expected), tmp_path / "data.pt")
    environment = {**os.environ, "PYTHONPATH": str(Path(detpass.__file__).parents[1])}
    for threads in ("1", "2"):
        command = [sys.executable, "-c", LOAD, str(tmp_path), threads]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert run.returncode == 0, run.stderr


def test_a_training_step_is_a_program_whose_gradients_are_outputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(SEGMENTS, 8), nn.Linear(8, 3))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}

    def step(parameters: dict[str, Tensor], words: Tensor, labels: Tensor) -> Any:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, parameters, (words,)), labels)

        return torch.func.grad_and_value(loss)(parameters)

    inputs = (parameters, ids(), torch.randint(0, 3, (ROWS,)))
    loaded = packaged(torch.export.export(make_fx(step)(*inputs), inputs), tmp_path / "step.pt2")
    report = detpass.last_report()
    assert report is not None
    assert [record.op for record in report.records] == ["aten.embedding_dense_backward.default"]
    gradients, loss = loaded(*inputs)
    expected, expected_loss = torch.compile(step, backend="detpass")(*inputs)
    assert equal(loss, expected_loss)
    assert all(equal(gradients[name], expected[name]) for name in parameters)
    reference, _ = step(*inputs)
    assert all(torch.allclose(gradients[name], reference[name], atol=1e-5) for name in parameters)  # float32 sums


def test_refusals_are_not_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"found Messages; make one with torch\.export\.export"):
        detpass.aoti_compile_and_package(Messages(), tmp_path / "no.pt2")  # type: ignore[arg-type]
    program = torch.export.export(Messages(), (ids(), ids()))
    with pytest.raises(ConfigurationError, match="on_uncoverd"):
        detpass.aoti_compile_and_package(program, tmp_path / "no.pt2", options={"on_uncoverd": "warn"})
    counts = torch.export.export(Counts(), (ids(), torch.rand(ROWS)))
    monkeypatch.setattr("detpass.rules.BUILTIN_RULES", ())
    with pytest.raises(UncoveredError, match="bincount"):
        detpass.aoti_compile_and_package(counts, tmp_path / "no.pt2", options={"target": "cuda"})
    assert not list(tmp_path.iterdir())
