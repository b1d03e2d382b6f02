"""The command line: what it prints, and its exit status (0 clean, 1 bits differ, 2 misuse)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from detpass import environment
from detpass.cli import COMMANDS, application
from detpass.cli import demo as demo_command
from detpass.reproducibility import Ledger, demo, demo_training
from detpass.reproducibility.demo import DemoReport, Entry

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
import torch
calls = iter(range(1000))

def stable():
    return torch.randn(4)

def wobbly():
    return torch.tensor(float(next(calls)))
"""


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return str(path)


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "detpass", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_help_lists_every_command(runner: CliRunner) -> None:
    result = runner.invoke(application(), ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


def test_an_unknown_command_is_misuse() -> None:
    assert run_process("nothing").returncode == 2


def test_errors_are_one_message_and_status_two() -> None:
    result = run_process("repeat", "math:no_such_function")
    assert result.returncode == 2
    assert "has no callable 'no_such_function'" in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_as_json_and_as_table(runner: CliRunner) -> None:
    result = runner.invoke(application(), ["doctor", "--json"])
    assert result.exit_code == 0
    found = {finding["name"]: finding for finding in json.loads(result.output)}
    assert found["torch"]["value"] == torch.__version__
    assert found["torch's deterministic flag"]["value"] == "off"
    table = runner.invoke(application(), ["doctor"]).output
    assert "C++ compiler" in table


def test_doctor_reports_settings_that_cost_repeatability(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch._dynamo.config.patch(suppress_errors=True):
        levels = {finding.name: finding.level for finding in environment.findings()}
        assert levels["Dynamo suppress_errors"] is environment.Level.WARNING
        assert levels["cuDNN benchmark"] is environment.Level.WARNING
        assert runner.invoke(application(), ["doctor"]).exit_code == 0
        assert runner.invoke(application(), ["doctor", "--strict"]).exit_code == 1


def test_doctor_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = {finding.name: finding for finding in environment.findings()}
    assert found["C++ compiler"].level is environment.Level.WARNING
    assert "install" in found["C++ compiler"].advice


def test_repeat(runner: CliRunner, source: str) -> None:
    good = runner.invoke(application(), ["repeat", f"{source}:stable", "--runs", "3", "--processes", "1"])
    assert good.exit_code == 0, good.output
    assert "6 runs with 1, 2 threads: the same bits" in good.output
    assert "process 0 (2 threads): the same bits" in good.output
    bad = runner.invoke(application(), ["repeat", f"{source}:wobbly", "--runs", "3"])
    assert bad.exit_code == 1
    assert "run 0 (1 threads) and run 1 (1 threads) differ" in bad.output


def test_repeat_refuses_bad_thread_counts() -> None:
    result = run_process("repeat", "math:sqrt", "--threads", "1,x")
    assert result.returncode == 2
    assert "expected numbers separated by commas" in result.stderr


def test_ledger(runner: CliRunner, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        Ledger(tmp_path / name).record(5, loss=value)
    a, b, c = (str(tmp_path / name) for name in "abc")
    same = runner.invoke(application(), ["ledger", a, b])
    assert (same.exit_code, same.output.strip()) == (0, "every step has the same bits")
    other = runner.invoke(application(), ["ledger", a, c])
    assert (other.exit_code, other.output.strip()) == (1, "step 5: other bits in loss")
    assert runner.invoke(application(), ["ledger", a, str(tmp_path / "none")]).exit_code == 2


def fake_report(*bits: tuple[str, str]) -> DemoReport:
    """A demonstration whose runs had these labels and digests."""
    run = demo_training.TrainingRun("x", 2, "l", "p", 5.0, 2.5, 10.0)
    entries = tuple(Entry(label, digest, digest, run) for label, digest in bits)
    return DemoReport(entries, "detpass", 40)


@pytest.mark.parametrize(
    ("bits", "status", "said"),
    [
        ((("inductor", "1"), ("inductor", "2"), ("detpass", "3"), ("detpass", "3")), 0, "detpass repeats."),
        ((("inductor", "1"), ("inductor", "1"), ("detpass", "3"), ("detpass", "3")), 0, "happened not to differ"),
        ((("inductor", "1"), ("inductor", "2"), ("detpass", "3"), ("detpass", "4")), 1, "detpass DOES NOT REPEAT."),
        ((("inductor", "1"), ("detpass", "3"), ("detpass, 1 thread", "4")), 1, "detpass, 1 thread: OTHER BITS"),
    ],
)
def test_the_demo_says_what_happened(
    runner: CliRunner,
    monkeypatch: pytest.MonkeyPatch,
    bits: tuple[tuple[str, str], ...],
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: fake_report(*bits))
    result = runner.invoke(application(), ["demo"])
    assert result.exit_code == status
    assert said in result.output


def test_the_demo_keeps_the_environment(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: fake_report(("inductor", "1"), ("detpass", "1")))
    before = dict(os.environ)
    runner.invoke(application(), ["demo"])
    assert dict(os.environ) == before
    assert demo_command.command.__doc__


def test_the_demo_text_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bytes(demo_training.standard_library_text(1 << 16).tolist()).decode()
    assert len(text) == 1 << 16
    assert "import " in text


@pytest.mark.slow
def test_the_demo_runs_in_full() -> None:
    result = run_process("demo", "--steps", "6", "--runs", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "detpass repeats." in result.stdout
    assert "detpass, fresh process: the same bits" in result.stdout
    assert "detpass, 1 thread: the same bits" in result.stdout
