"""Exported programs, printed graphs and saved modules give the records of the model itself; nothing in them is run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import detpass
from detpass.errors import InspectionError
from detpass.inspection import Settings, inspect_with
from tests.inspection import models

PRINTING = """
import torch
from tests.inspection import models

model, arguments = models.Tower(depth=1), models.tower_inputs()
compiled = torch.compile(model, dynamic=True)
compiled(*arguments).backward()
with torch.no_grad():
    compiled(*arguments)
"""


@pytest.fixture(scope="module")
def debug_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What TORCH_COMPILE_DEBUG writes for a training step and an inference call of the tower, with symbolic sizes."""
    folder = tmp_path_factory.mktemp("debug")
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "TORCH_COMPILE_DEBUG": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(root),
    }
    done = subprocess.run([sys.executable, "-c", PRINTING], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "torch_compile_debug"


def ops(report: detpass.InspectionReport) -> list[str]:
    return sorted(record.op for record in report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["readable", "runnable"])
def test_printed_graphs_hold_what_inductor_was_given(debug_folder: Path, kind: str) -> None:
    reports = {}
    for path in debug_folder.rglob(f"fx_graph_{kind}.py"):
        report = detpass.inspect(path)
        reports[report.graphs[0].kind] = report
    assert set(reports) == {"forward", "backward", "inference"}
    assert ops(reports["forward"]) == ops(reports["inference"]) == ["aten.index_put.default"]
    assert ops(reports["backward"]) == ["aten._unsafe_masked_index_put_accumulate.default", "aten.index_put.default"]
    assert {record.phase for record in reports["backward"]} == {"backward"}
    assert all(record.rule is not None for report in reports.values() for record in report)
    assert all(report.lowered_note is None for report in reports.values())
    if kind == "readable":
        assert {record.location for record in reports["forward"]} == {models.line_of("index_add")}


def test_an_exported_program_gives_the_models_records(tmp_path: Path) -> None:
    model, arguments = models.Tower(depth=2).eval(), models.tower_inputs()
    program = torch.export.export(model, arguments)
    path = tmp_path / "tower.pt2"
    torch.export.save(program, path)
    expected = detpass.inspect(model, *arguments)
    for subject in (program, path, str(path)):
        report = detpass.inspect(subject)
        assert ops(report) == ops(expected)
        assert {record.location for record in report} == {record.location for record in expected}
        assert [graph.kind for graph in report.graphs] == ["joint"]


def test_dynamic_exports_are_read(tmp_path: Path) -> None:
    class Gather(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            half = index.shape[0] // 2
            top, rest = x[index].split([half, index.shape[0] - half])
            return top.sum(0), [rest * index.shape[0], torch.topk(rest, 1, dim=0).values]

    shapes = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    arguments = torch.randn(9, 3, requires_grad=True), torch.randint(0, 9, (6,))
    program = torch.export.export(Gather(), arguments, dynamic_shapes=shapes)
    path = tmp_path / "gather.pt2"
    torch.export.save(program, path)
    report = detpass.inspect(path)
    assert [graph.kind for graph in report.graphs] == [detpass.inspect(program).graphs[0].kind]


class Bomb:
    """Unpickling an instance makes a file: the proof that code was run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


def test_pickles_are_not_loaded_unless_allowed(tmp_path: Path) -> None:
    path, mark = tmp_path / "saved.pt", tmp_path / "mark"
    torch.save(Bomb(mark), path)
    with pytest.raises(InspectionError, match="allow-pickle"):
        detpass.inspect(path)
    assert not mark.exists()
    with pytest.raises(InspectionError, match="no graph"):
        inspect_with(Settings(allow_pickle=True), path)
    assert mark.exists()


def test_sample_inputs_of_an_archive_are_not_unpickled(tmp_path: Path) -> None:
    path, mark, poisoned = tmp_path / "model.pt2", tmp_path / "mark", tmp_path / "poisoned.pt2"
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),)), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(poisoned, "w") as target:
        for name in source.namelist():
            harmless = not name.endswith("sample_inputs/model.pt")
            target.writestr(name, source.read(name) if harmless else pickle.dumps(Bomb(mark)))
    assert detpass.inspect(poisoned).graphs[0].kind == "joint"
    assert not mark.exists()


def test_a_saved_graph_module_is_read_when_allowed(tmp_path: Path) -> None:
    arguments = torch.randn(5), torch.tensor([0, 0, 1])
    traced = torch.fx.symbolic_trace(lambda x, index: x.index_put((index,), x[:3], accumulate=True))
    path = tmp_path / "graph.pt"
    torch.save(traced, path)
    report = inspect_with(Settings(allow_pickle=True), path, arguments)
    assert ops(report) == ["aten.index_put.default"]
    with pytest.raises(InspectionError, match="example inputs"):
        inspect_with(Settings(allow_pickle=True), path)


def test_printed_text_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "fx_graph_readable.py"
    path.write_text(
        f"open({str(mark)!r}, 'w')\n"
        "class GraphModule(torch.nn.Module):\n"
        '    def forward(self, arg0_1: "f32[3]"):\n'
        f"        x = open({str(mark)!r}, 'w')\n"
        "        return (x,)\n"
    )
    with pytest.raises(InspectionError, match="no ATen operator"):
        detpass.inspect(path)
    assert not mark.exists()


HEAD = """
class GraphModule(torch.nn.Module):
    def forward(self, a: {annotation}):
        {line}
        return (b,)
"""


@pytest.mark.parametrize(
    ("line", "annotation", "message"),
    [
        ("b = torch.ops.aten.nothing.default(a)", '"f32[3]"', "not registered"),
        ("b = torch.nn.functional.relu(a)", '"f32[3]"', "no ATen operator"),
        ("b = torch.ops.aten.mm.default(a, a)", '"f32[3]"', "refuses its arguments"),
        ("b = torch.ops.higher_order.cond(a)", '"f32[3]"', "higher-order"),
        ("b = torch.ops.aten.relu(a)", '"f32[3]"', "no overload"),
        ("b = torch.ops.aten.relu.default(a)", '"tensor"', "describes no tensor"),
        ("b = [i for i in a]", '"f32[3]"', "cannot read"),
        ("b = torch.ops.aten.relu.default(c)", '"f32[3]"', "cannot read c"),
        ("for b in a: pass", '"f32[3]"', "unexpected statement"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, line: str, annotation: str, message: str) -> None:
    path = tmp_path / "fx_graph_readable.py"
    path.write_text(HEAD.format(line=line, annotation=annotation))
    with pytest.raises(InspectionError, match=message) as caught:
        detpass.inspect(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pt2", None, "not found"),
        ("plain.py", "x = 1\n", "0 classes with a forward"),
        ("broken.py", "class (\n", "not Python text"),
        ("notes.txt", "hello", "neither Python text nor a zip"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InspectionError, match=message):
        detpass.inspect(path)


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme", "hello")
    with pytest.raises(InspectionError, match="something else"):
        detpass.inspect(path)


def test_weights_alone_are_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(InspectionError, match="no graph"):
        detpass.inspect(path)
