"""Large models are inspected in seconds and without their weights' memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def measured(what: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    worker = str(Path(__file__).with_name("speed_worker.py"))
    done = subprocess.run([sys.executable, worker, what], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("what", "seconds"), [("transformer", 30), ("deep", 60)])
def test_inspection_is_quick_and_small(what: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Processor time is held to the limit: what a person waits on an idle machine, and steadier on a busy one."""
    found = measured(what)
    with capsys.disabled():
        print(f"\n{what}: {json.dumps(found)}")
    assert found["processor_seconds"] < seconds
    assert found["peak_megabytes"] < 2000
    assert found["nondeterministic"] > 0
    if what == "transformer":
        assert found["parameters"] > 100_000_000
        assert found["lowered_note"] is None
    else:
        assert found["operators"] >= 20_000
