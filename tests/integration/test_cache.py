"""Inductor's and AOTAutograd's caches: hit when nothing changed, missed when the rewrite could differ, never stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from detpass import Match, NoMatch, Rule, RuleContext
from detpass.backend import fingerprint
from detpass.config import Options
from detpass.rewriting.registry import RuleSet
from detpass.rule import Inapplicable, Verdict

WORKER = Path(__file__).with_name("cache_worker.py")


def run(cache: Path, threads: int = 2) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, str(WORKER), str(threads)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def cold_and_warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two processes, one after the other, with one cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    return run(folder), run(folder)


@pytest.mark.slow
def test_processes_threads_and_caches_give_the_same_bits(cold_and_warm: Any, tmp_path: Path) -> None:
    cold, warm = cold_and_warm
    other = run(tmp_path, threads=1)
    assert (cold["hits"], cold["misses"], cold["bypasses"]) == (0, 1, 0)
    assert (warm["hits"], warm["misses"]) == (1, 0), "the second process takes the artifact from the cache"
    assert len(cold["digests"]) == 1
    assert cold["digests"] == warm["digests"] == other["digests"]


def test_the_report_survives_a_cache_hit(cold_and_warm: Any) -> None:
    cold, warm = cold_and_warm
    assert (cold["from_cache"], warm["from_cache"]) == ([False], [True])
    assert len(cold["records"]) == 1
    assert "embedding_dense_backward" in cold["records"][0]
    assert "cache_worker.py" in cold["records"][0]
    assert cold["records"] == warm["records"]


class _First(Rule):
    name = "first"
    targets = (torch.ops.aten.sin.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return NoMatch(Inapplicable.DEVICE, node)

    def replacement(self, x: Tensor) -> Tensor:
        return x


class _Second(_First):
    name = "second"

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Match(operands=(), reason="")


def graph(body: str = "x.sin()") -> fx.GraphModule:
    scope: dict[str, Any] = {}
    exec(f"def f(x): return {body}", scope)
    return fx.symbolic_trace(scope["f"])


def key(rules: tuple[Rule, ...] = (), body: str = "x.sin()", **options: Any) -> str:
    return fingerprint(graph(body), Options(**options), RuleSet(rules))


def test_the_key_stays() -> None:
    assert key() == key()
    assert key((_First(), _Second())) == key((_First(), _Second()))
    assert key(on_escape="ignore") == key(), "a policy about escapes does not change the code"
    assert key(report=print) == key()


@pytest.mark.parametrize(
    "changed",
    [
        {"rules": (_First(),)},
        {"rules": (_Second(), _First())},
        {"target": "cuda"},
        {"on_uncovered": "warn"},
        {"body": "x.cos()"},
    ],
    ids=["rule", "rules", "target", "policy", "model"],
)
def test_the_key_changes(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


def test_the_key_covers_the_order_of_rules() -> None:
    assert key((_First(), _Second())) != key((_Second(), _First()))
