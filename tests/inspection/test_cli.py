"""``detpass inspect``: exit status, JSON, HTML, messages for misuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from detpass.cli import application
from detpass.errors import ConfigurationError, DetpassError, InspectionError

ROOT = Path(__file__).parents[2]
MODELS = "tests/inspection/models.py"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["inspect", *arguments])


def test_status_1_and_the_table_when_something_differs() -> None:
    result = run(f"{MODELS}:tower")
    assert result.exit_code == 1
    assert "index_add" in result.stdout
    assert "\x1b[" not in result.stdout
    assert "repeats with torch.compile" in result.stdout


def test_status_0_when_clean() -> None:
    result = run("tests.inspection.models:clean")
    assert result.exit_code == 0
    assert "Nothing here differs" in result.stdout


@pytest.mark.parametrize(("fail_on", "status"), [("nondeterministic", 1), ("remaining", 0), ("never", 0)])
def test_what_fails_is_the_users_choice(fail_on: str, status: int) -> None:
    assert run(f"{MODELS}:tower", "--fail-on", fail_on).exit_code == status


@pytest.mark.parametrize(("fail_on", "status"), [("nondeterministic", 1), ("remaining", 1), ("never", 0)])
def test_status_1_when_something_was_not_read(fail_on: str, status: int) -> None:
    result = run("tests.inspection.models:clean", "--no-lowered", "--fail-on", fail_on)
    assert result.exit_code == status
    assert "Not read: the lowered code." in result.stdout
    assert "Nothing here differs" not in result.stdout


def test_json_is_all_that_is_printed() -> None:
    result = run(f"{MODELS}:tower", "--json", "--target", "cpu")
    assert json.loads(result.stdout)["target"] == "cpu"


def test_html_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = run(f"{MODELS}:tower", "--html", str(path), "--no-lowered")
    assert result.exit_code == 1
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert str(path) in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((f"{MODELS}:wrong",), InspectionError, "returned a int"),
        ((f"{MODELS}:absent",), ConfigurationError, "no callable 'absent'"),
        ((f"{MODELS}:line_of",), InspectionError, "missing 1 required positional argument"),
        ((MODELS,), InspectionError, f"name its factory: {MODELS}:NAME"),
        (("torch:matmull",), ConfigurationError, "'matmul'"),
        (("missing.py:f",), ConfigurationError, "not found"),
        (("missing.pt2",), InspectionError, "not found"),
        ((f"{MODELS}:tower", "--fail-on", "sometimes"), InspectionError, "expected one of"),
        ((f"{MODELS}:tower", "--target", "tpu"), ConfigurationError, "expected 'cpu'"),
    ],
)
def test_misuse_is_explained(arguments: tuple[str, ...], error: type[DetpassError], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_misuse_ends_with_status_2_and_one_message() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "detpass", "inspect", "missing.pt2"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().startswith("error: file 'missing.pt2' not found")
    assert "Traceback" not in done.stderr


def rules(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["rules", *arguments])


def test_rules_lists_every_row_of_the_catalogue() -> None:
    from detpass.rules.catalogue import entries

    result = rules()
    assert result.exit_code == 0
    text = "".join(result.stdout.split())
    assert all(entry.rule is None or entry.rule in text for entry in entries())
    listed = json.loads(rules("--json").stdout)
    assert [row["what"] for row in listed] == [entry.what for entry in entries()]


@pytest.mark.parametrize("name", ["cumsum", "torch.cumsum", "aten.cumsum.default", "torch.ops.aten.cumsum.default"])
def test_rules_explains_an_operator_by_any_of_its_names(name: str) -> None:
    result = rules("--op", name)
    assert result.exit_code == 0
    assert "why" in result.stdout
    assert "cumsum" in result.stdout


def test_rules_for_a_device() -> None:
    rows = json.loads(rules("--device", "cpu", "--json").stdout)
    assert rows
    assert all("cpu" in row["devices"] for row in rows)
    assert len(rows) < len(json.loads(rules("--json").stdout))


@pytest.mark.parametrize("arguments", [("--op", "no_such_operator"), ("--device", "tpu")])
def test_rules_refuses_what_it_does_not_know(arguments: tuple[str, ...]) -> None:
    assert isinstance(rules(*arguments).exception, ConfigurationError)
