"""Every example runs, repeats where it says so, and offers a factory that ``detpass inspect`` takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from detpass.cli import application

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
LONG = {"gnn", "recommender", "segmentation", "ppo"}
"""Examples with much to compile."""
FOUND = {
    "gnn": {"aten.index_add.default", "aten.index_put.default"},
    "recommender": {"aten.embedding_dense_backward.default"},
    "segmentation": {"aten.index_add.default"},
    "ppo": {"aten.embedding_dense_backward.default"},
    "inspect_model": {"aten.index_add.default", "aten.embedding_dense_backward.default"},
}
"""What the inspection of each factory finds on a CPU, among other operators."""


def parameters() -> list[Any]:
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in EXAMPLES
    ]


@pytest.mark.parametrize("example", parameters())
def test_examples_run(example: Path) -> None:
    assert "def main(" in example.read_text(encoding="utf-8"), "an example has a main()"
    done = subprocess.run(
        [sys.executable, str(example)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_with_a_factory_is_inspected_here() -> None:
    assert {path.stem for path in EXAMPLES if "def factory(" in path.read_text(encoding="utf-8")} == FOUND.keys()


@pytest.mark.parametrize("name", FOUND)
def test_factories_are_inspected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(application(), ["inspect", f"examples/{name}.py:factory", "--json", "--no-lowered"])
    assert done.exit_code == 1, done.output
    body = json.loads(done.stdout)
    assert {record["op"] for record in body["records"] if not record["repeats"]} >= FOUND[name]
    assert body["breaks"] == []
    assert body["incomplete"] is None
    assert body["verdict"] == "nondeterministic"
    places = {record["location"].rpartition(":")[0] for record in body["records"]}
    assert places == {str(ROOT / "examples" / f"{name}.py")}
