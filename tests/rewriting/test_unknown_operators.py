"""Operators of other libraries: a compile calls them as they are and says so; a rule or a declaration settles them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import detpass
from detpass import Declared, EscapeError, EscapeWarning, RuleError, Treatment
from detpass.backend import detpass as backend
from detpass.backend import last_report


@torch.library.custom_op("detpass_unknown::spread", mutates_args=())
def spread(x: Tensor) -> Tensor:
    return x * 2


spread.register_fake(torch.empty_like)
spread.register_autograd(lambda ctx, gradient: torch.ops.detpass_unknown.spread_back(gradient))


@torch.library.custom_op("detpass_unknown::spread_back", mutates_args=())
def spread_back(gradient: Tensor) -> Tensor:
    return gradient * 2


spread_back.register_fake(torch.empty_like)


def twice(x: Tensor) -> Tensor:
    return spread(spread(x)).sum()


def report_of(**options: object) -> detpass.Report:
    torch.compile(twice, backend=backend, options=options)(torch.ones(3, requires_grad=True))
    report = last_report()
    assert report is not None
    return report


def test_the_report_and_a_warning_name_each_with_its_place() -> None:
    with pytest.warns(
        EscapeWarning, match=r"detpass_unknown\.spread\.default at .*\(2 calls\).*detpass\.Declared"
    ) as all_:
        report = report_of()
    found = {(item.op, item.count) for item in report.unknown}
    assert found == {("detpass_unknown.spread.default", 2), ("detpass_unknown.spread_back.default", 2)}
    place = f"{__file__}:{twice.__code__.co_firstlineno + 1}"
    assert report.unknown[0].location == place
    assert f"unknown operator detpass_unknown.spread.default x2 at {place}" in str(report)
    assert len(report.escapes) == 2
    assert {str(w.message) for w in all_ if w.category is EscapeWarning} == set(report.escapes)
    assert len(report) == 0, "nothing is known of it, so it is no record of a nondeterministic node"


def test_on_escape_decides() -> None:
    with pytest.raises(EscapeError, match="no rule says whether it repeats"):
        report_of(on_escape="error")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        report_of(on_escape="ignore")


@pytest.mark.parametrize("target", [spread, torch.ops.detpass_unknown.spread.default], ids=["custom_op", "overload"])
def test_a_declaration_settles_it(target: object) -> None:
    rules = [Declared(target, "every element is written once"), Declared(spread_back, "so is this one")]
    report = report_of(on_escape="error", rules=rules)
    assert report.unknown == []
    assert {(r.op, r.treatment, r.reason) for r in report} == {
        ("detpass_unknown.spread.default", Treatment.SAFE, "every element is written once"),
        ("detpass_unknown.spread_back.default", Treatment.SAFE, "so is this one"),
    }


def test_a_target_that_no_graph_holds_is_refused() -> None:
    with pytest.raises(RuleError, match=r"which graphs do not hold: name its overload.*spread\.default"):
        report_of(rules=[Declared(torch.ops.detpass_unknown.spread, "a packet of overloads")])


WORKER = """
import sys, torch, warnings, detpass
from tests.rewriting.test_unknown_operators import twice
policy = sys.argv[1]
try:
    torch.compile(twice, backend="detpass", options={"on_escape": policy})(torch.ones(3, requires_grad=True)).backward()
except detpass.EscapeError:
    print("refused", end=" ")
report = detpass.last_report()
print(report.from_cache, [(item.op, item.count) for item in report.unknown])
"""


@pytest.mark.slow
def test_it_is_known_of_what_comes_from_a_cache(tmp_path: Path) -> None:
    """The second process runs no pass over the graph; the option may have become stricter since."""
    import os

    root = Path(__file__).parents[2]
    settings = {**os.environ, "PYTHONPATH": str(root), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORKER, policy],
            capture_output=True, text=True, check=True, env=settings, cwd=root,
        ).stdout.strip()
        for policy in ("ignore", "error")
    ]  # fmt: skip
    listed = "[('detpass_unknown.spread.default', 2), ('detpass_unknown.spread_back.default', 2)]"
    assert said == [f"False {listed}", f"refused True {listed}"]


def test_generated_code_with_an_unknown_operator_is_not_called_deterministic() -> None:
    pytest.importorskip("triton")
    for chosen in ("detpass", "inductor"):
        code = detpass.cuda_code(twice, torch.ones(3), backend=chosen)
        assert [(item.op, item.count) for item in code.unknown_ops] == [("detpass_unknown.spread.default", 2)]
        assert not code.deterministic
    detpass.register_rule(Declared(spread, "every element is written once"))
    try:
        code = detpass.cuda_code(twice, torch.ones(3))
        assert code.unknown_ops == ()
        assert code.deterministic
    finally:
        detpass.unregister_rule("declared: detpass_unknown.spread.default")
