"""Runs in fresh processes, named as a user types them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from detpass.errors import BitsDifferError, ConfigurationError
from detpass.reproducibility import compare_processes, digest, run_in_process
from detpass.reproducibility.targets import load_target

SOURCE = """
import os
import torch

def stable(scale=1.0):
    return {"x": torch.randn(3) * scale, "threads": torch.get_num_threads(), "name": "stable"}

def wobbly():
    return {"same": torch.ones(1), "pid": torch.tensor(os.getpid())}

def failing():
    raise RuntimeError("no")

NUMBER = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return str(path)


def test_a_fresh_process_gives_the_bits_of_this_one(source: str) -> None:
    run = run_in_process(f"{source}:stable", {"scale": 2.0}, threads=2, seed=5)
    torch.manual_seed(5)
    here = load_target(f"{source}:stable")(scale=2.0)
    assert run.digest == digest(here)
    assert run.values == {"threads": 2, "name": "stable"}
    assert set(run.entries) == {"x", "threads", "name"}
    assert run_in_process(f"{source}:stable", threads=1, seed=5).values["threads"] == 1


@pytest.mark.slow
def test_processes_that_differ_are_named_with_their_tensor(source: str) -> None:
    assert len(compare_processes(f"{source}:stable")) == 2
    with pytest.raises(BitsDifferError, match=r"processes 0 and 1 .* differ in pid"):
        compare_processes(f"{source}:wobbly")


def test_a_failing_child_raises(source: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_in_process(f"{source}:failing")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "expected package.module:function"),
        (":name", "expected package.module:function"),
        ("math:not a name", "expected package.module:function"),
        ("no_such_module_here:f", "cannot be imported"),
        ("no_such_file.py:f", "not found"),
        ("math:pi", "no callable 'pi'; it has"),
    ],
)
def test_bad_targets_are_refused(target: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_target(target)


def test_a_module_target_is_loaded() -> None:
    assert load_target("math:sqrt")(9.0) == 3.0
