"""Each way in which compiled code falls back to code that was not rewritten is noticed, with its place and remedy."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from detpass import rules
from detpass.backend import detpass, last_report
from detpass.errors import ConfigurationError, EscapeError, EscapeWarning, UncoveredError


def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=detpass, options=options or None)


def w(rows: int = 16) -> Tensor:
    return torch.randn(rows, 4, requires_grad=True)


def ids(n: int = 50) -> Tensor:
    return torch.randint(0, 16, (n,))


@torch._dynamo.disable
def outside(x: Tensor) -> Tensor:
    return x * 2


def with_disabled_function(x: Tensor, i: Tensor) -> Tensor:
    return outside(x.sin())[i]


def with_graph_break(x: Tensor, i: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y[i]


@pytest.mark.parametrize("function", [with_disabled_function, with_graph_break])
def test_a_graph_break_warns_with_its_place(function: Callable[..., Tensor]) -> None:
    line = function.__code__.co_firstlineno
    with pytest.warns(EscapeWarning, match=rf"graph break at {re.escape(__file__)}:\d+.*fullgraph=True") as caught:
        compile_(function)(w(), ids())
    places = [int(m[1]) for c in caught if (m := re.search(r"test_escapes.py:(\d+)", str(c.message)))]
    assert all(line <= place <= line + 3 for place in places)


def test_a_break_by_a_size_that_is_data_names_the_setting_that_takes_it_in() -> None:
    with pytest.warns(EscapeWarning, match=r"capture_dynamic_output_shape_ops = True takes this operation"):
        compile_(lambda x, i: x.sin()[x > 0])(w().detach(), ids())


def test_a_graph_break_is_an_error_on_request() -> None:
    with pytest.raises(EscapeError, match="graph break"):
        compile_(with_graph_break, on_escape="error")(w(), ids())


def test_a_graph_break_is_ignored_on_request() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        compile_(with_graph_break, on_escape="ignore")(w(), ids())


def test_a_graph_break_is_in_the_report() -> None:
    reports: list[Any] = []
    compile_(with_graph_break, on_escape="ignore", report=reports.append)(w(), ids())
    assert [len(r.escapes) for r in reports] == [1, 0]


def with_first_break(x: Tensor, i: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()[i]


def with_break_in_loop(x: Tensor, i: Tensor) -> Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x[i]
    return x


def with_disabled_start(x: Tensor, i: Tensor) -> Tensor:
    return outside(x)[i]


NOTHING_TRACED = [with_first_break, with_break_in_loop, with_disabled_start]


@pytest.mark.parametrize("function", NOTHING_TRACED)
def test_a_break_before_anything_was_traced_warns_with_its_place(function: Callable[..., Tensor]) -> None:
    """No graph is ended by it, and no backend is told."""
    line = function.__code__.co_firstlineno
    with pytest.warns(EscapeWarning, match=r"graph break at .*fullgraph=True") as caught:
        compile_(function)(w(), ids(16))
    (warned,) = (each for each in caught if issubclass(each.category, EscapeWarning))  # torch has warnings of its own
    place = re.search(rf"graph break at {re.escape(__file__)}:(\d+)", str(warned.message))
    assert place is not None
    assert line < int(place[1]) <= line + 2


@pytest.mark.parametrize("function", NOTHING_TRACED)
def test_a_break_before_anything_was_traced_is_an_error_on_request(function: Callable[..., Tensor]) -> None:
    compiled = compile_(function, on_escape="error")
    for _ in range(2):
        with pytest.raises(EscapeError, match=rf"graph break at {re.escape(__file__)}"):
            compiled(w(), ids(16))


@pytest.mark.parametrize("function", NOTHING_TRACED)
def test_a_break_before_anything_was_traced_is_ignored_on_request(function: Callable[..., Tensor]) -> None:
    x, i = w(), ids(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        assert torch.allclose(compile_(function, on_escape="ignore")(x, i), function(x, i))


@contextlib.contextmanager
def scale() -> Iterator[float]:
    torch._dynamo.graph_break()
    yield 2.0


def test_breaks_inside_pythons_own_library_are_not_reported() -> None:
    """The break of the function is; those in contextlib's frames, which it then runs eagerly, are not."""

    def f(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with scale() as factor:
            return x * factor

    with pytest.warns(EscapeWarning) as caught:
        compile_(f)(w())
    assert not [c for c in caught if "contextlib.py" in str(c.message)]


DATA_PARALLEL = """
import sys, tempfile, torch
from torch.nn.parallel import DistributedDataParallel
import detpass
torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model, options = torch.nn.Sequential(torch.nn.Linear(4, 4)), {"on_escape": "error"}
if sys.argv[1] == "inside":
    wrapped = DistributedDataParallel(torch.compile(model, backend="detpass", options=options))
else:
    wrapped = torch.compile(DistributedDataParallel(model), backend="detpass", options=options)
wrapped(torch.rand(3, 4)).sum().backward()
print(len(detpass.reports()), "graph")
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo")
@pytest.mark.parametrize(("order", "status", "says"), [("inside", 0, "1 graph"), ("outside", 1, "distributed.py:")])
def test_distributed_data_parallel(order: str, status: int, says: str) -> None:
    """Compiled inside the wrapper, the whole model is a graph; outside, layers of torch.nn run eagerly."""
    run = subprocess.run([sys.executable, "-c", DATA_PARALLEL, order], capture_output=True, text=True, timeout=300)
    assert (run.returncode, says in run.stdout + run.stderr) == (status, True), run.stderr


def test_an_operation_that_cannot_be_traced_warns() -> None:
    with pytest.warns(EscapeWarning, match=rf"graph break at {re.escape(__file__)}:\d+"):
        compile_(lambda x, i: torch.bincount(i, x).sin())(torch.rand(50), ids())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_another_backends_graph_breaks_are_not_ours(backend: str) -> None:
    compile_(lambda x, i: x[i])(w(), ids())
    with warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        for function in (*NOTHING_TRACED, with_graph_break):
            x, i = w(), ids(16)
            assert torch.allclose(torch.compile(function, backend=backend)(x, i), function(x, i))


def test_a_graph_break_warns_once() -> None:
    with pytest.warns(EscapeWarning) as caught:
        compile_(with_graph_break)(w(), ids())
    assert len(caught) == 1


def test_a_whole_graph_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        compile_(lambda x, i: x[i].sin())(w(), ids()).sum().backward()


@pytest.mark.parametrize(("policy", "expected"), [("warn", EscapeWarning), ("error", EscapeError)])
def test_the_recompile_limit(policy: str, expected: type[Exception]) -> None:
    def f(x: Tensor, i: Tensor, k: int) -> Tensor:
        return x[i] * k

    compiled = torch.compile(f, backend=detpass, dynamic=False, options={"on_escape": policy})
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        compiled(w(), ids(), 1)
        compiled(w(), ids(), 2)
        context = pytest.warns if issubclass(expected, Warning) else pytest.raises
        with context(expected, match=r"'f' \(.*test_escapes.py:\d+\) reached recompile_limit=2.*mark_dynamic"):
            compiled(w(), ids(), 3)


def test_another_backends_recompile_limit_is_not_ours() -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return x * k

    compiled = torch.compile(f, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error", EscapeWarning)
        compiled(w(), 1)
        compiled(w(), 2)


def test_suppressed_errors() -> None:
    """A failed compile under suppress_errors runs eagerly: that is said."""

    def broken(graph: Any) -> None:
        raise RuntimeError("a user's pass failed")

    compiled = compile_(lambda x, i: x[i].sin(), joint_custom_pre_pass=broken)
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.warns(EscapeWarning, match="(?s)suppress_errors=True.*a user's pass failed.*suppress_errors=False"),
    ):
        compiled(w(), ids())


def test_our_own_refusal_is_not_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """suppress_errors must not turn an uncovered operation into silent eager code."""
    sin = torch.ops.aten.sin.default
    monkeypatch.setattr(rules, "hazard", lambda node, device: "made up for this test" if node.target is sin else None)
    compiled = compile_(lambda x: x.sin())
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(UncoveredError, match=r"aten\.sin\.default"):
        compiled(w())


@pytest.mark.parametrize(
    "options", [{"use_joint_graph_passes": False}, {"disabled_passes": "joint_custom_post_pass"}], ids=str
)
def test_settings_that_skip_the_pass_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="skips the rewrite; remove"):
        compile_(lambda x, i: x[i], **options)(w(), ids())


def test_last_report_of_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import deque

    from detpass import backend

    monkeypatch.setattr(backend, "_reports", deque())
    assert last_report() is None
