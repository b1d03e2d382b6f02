"""Triton kernels of a user's own in a plain compile: refused where the order of programs decides, proved or declared.

No GPU: the kernels are traced on the CPU with a driver that names a GPU, and read; none is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import detpass
from detpass import (
    Declared,
    DetpassError,
    Match,
    Report,
    Rule,
    RuleContext,
    RuleError,
    Treatment,
    UncoveredError,
    UncoveredWarning,
    rules,
    segment,
    user_kernels,
)
from detpass import _torch_private_triton as private
from detpass.backend import detpass as backend
from detpass.config import Options
from detpass.rewriting.graph_pass import Rewriter
from detpass.rewriting.registry import RuleSet
from detpass.rule import Verdict

pytest.importorskip("triton", reason="triton is not installed")

import triton

from tests.inspection import user_kernels as kernels

Function = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def offline() -> Iterator[None]:
    with private.offline_triton(90):
        yield


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(100), torch.randint(0, 8, (100,))


def histogram(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8)
    kernels.histogram[(1,)](x, index, out, x.numel(), BLOCK=128)
    return out


def locked(x: Tensor, index: Tensor) -> Tensor:
    out, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    kernels.locked[(1,)](x, out, lock, x.numel(), BLOCK=128)
    return out


def largest(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(1)
    kernels.largest[(1,)](x, out, x.numel(), BLOCK=128)
    return out


def _counted_by(kernel: Any) -> Function:
    def counted(x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(8, dtype=torch.int64)
        kernel[(1,)](index, out, index.numel(), BLOCK=128)
        return out

    return counted


counted = _counted_by(kernels.counted)


def counted_as_floats(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8)
    kernels.counted[(1,)](index, out, index.numel(), BLOCK=128)
    return out


def doubled(x: Tensor, index: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.doubled[(1,)](x, out, x.numel(), BLOCK=128)
    return out


def compacted(x: Tensor, index: Tensor) -> Tensor:
    out, count = torch.zeros(128), torch.zeros(1, dtype=torch.int32)
    kernels.compacted[(1,)](x, out, count, x.numel(), BLOCK=128)
    return out


def _guarded(add: bool) -> Function:
    def guarded(x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(128)
        kernels.guarded[(1,)](x, out, x.numel(), ADD=add, BLOCK=128)
        return out

    return guarded


def tuned(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(128)
    kernels.tuned_adding_first[(1,)](x, out, x.numel())
    return out


def with_more_warps(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8)
    kernels.histogram[(1,)](x, index, out, x.numel(), BLOCK=128, num_warps=8)
    return out


def assembled(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(128)
    kernels.assembled[(1,)](x, out, x.numel(), BLOCK=128)
    return out


@torch.library.triton_op("detpass_tests::histogram_op", mutates_args={})
def histogram_op(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8, device=x.device)
    torch.library.wrap_triton(kernels.histogram)[(1,)](x, index, out, x.numel(), BLOCK=128)
    return out


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return histogram(gradient, ctx.saved_tensors[0]), None


def line_of(text: str, file: str) -> int:
    """The first line of a file at which ``text`` starts."""
    before, found, _ = Path(file).read_text().partition(text)
    assert found
    return before.count("\n") + 1


REFUSED = {
    "histogram": (histogram, "histogram, fadd on f32: floating-point addition by atomics"),
    "lock": (locked, "locked, cas on i32: .*exch on i32: an atomic exchange"),
    "integers added as floats": (counted_as_floats, "counted, fadd on f32"),
    "ticket": (compacted, r"compacted, add on i32: its result, the value before, is used.*\(user_kernels.py:\d+\)"),
    "constant": (_guarded(True), "guarded, fadd on f32"),
    "one configuration": (tuned, "guarded, fadd on f32"),
    "wrapped anew": (with_more_warps, "histogram, fadd on f32"),
    "triton_op": (lambda x, index: histogram_op(x, index), "histogram, fadd on f32"),
    "assembly": (assembled, "assembled, inline assembly with atom.global.add.f32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plain_compile_refuses_what_the_order_of_programs_decides(case: str) -> None:
    function, found = REFUSED[case]
    with pytest.raises(UncoveredError, match=rf"(?s)kernel: {found}.*Remedy:"):
        torch.compile(function, backend=backend)(*inputs())


def test_the_message_names_the_kernel_both_lines_and_the_remedy() -> None:
    with pytest.raises(UncoveredError) as caught:
        torch.compile(histogram, backend=backend)(*inputs())
    message = str(caught.value)
    launch = line_of("kernels.histogram[(1,)](x, index, out, x.numel(), BLOCK=128)\n    return", __file__)
    atomic = line_of("tl.atomic_add(out + tl.load(index + at, mask=at < n), tl.load(x + at", kernels.__file__)
    for part in (
        f"test_user_kernel.py:{launch},",
        f"user_kernels.py:{atomic})",
        "detpass.segment",
        "detpass.Declared(",
    ):
        assert part in message


def test_a_kernel_in_a_backward_graph_is_refused() -> None:
    x, index = torch.randn(8, requires_grad=True), torch.randint(0, 8, (100,))
    with pytest.raises(UncoveredError, match=r"in the backward graph.*histogram, fadd"):
        torch.compile(lambda x: InBackward.apply(x, index).sum(), backend=backend)(x)


class _Rewritten(BaseException):
    """Leaves Dynamo, which catches every Exception, when the graph was rewritten."""


def rewrite(
    function: Function, *own: Rule, on_uncovered: str = "error", then: Callable[[fx.Graph], None] = lambda _: None
) -> Report:
    """What the engine says of the graph of ``function``; ``then`` sees it rewritten. Nothing is lowered."""
    report, errors = Report(), list[Exception]()
    options = Options(on_uncovered=on_uncovered)
    rule_set = RuleSet((*own, *rules.BUILTIN_RULES))
    rewriter = Rewriter(rule_set, rules.hazard, options, segment.assume_device, rules.FINISHERS, rules.unknown)

    def compiler(graph_module: fx.GraphModule, _: Any) -> Any:
        try:
            rewriter.rewrite(graph_module.graph, report)
            then(graph_module.graph)
        except DetpassError as error:
            errors.append(error)
        raise _Rewritten

    with pytest.raises(_Rewritten):
        torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*inputs())
    for error in errors:
        raise error
    return report


def test_an_uncovered_kernel_that_is_accepted_stands_in_the_report() -> None:
    with pytest.warns(UncoveredWarning, match="histogram, fadd on f32"):
        (record,) = rewrite(histogram, on_uncovered="warn")
    assert record.treatment is Treatment.UNCOVERED
    assert record.location is not None
    assert record.location.startswith(__file__)


SAFE = {
    "integers": (counted, "kernel counted: add on i64: exact in any order"),
    "a helper's result that nobody reads": (_counted_by(kernels.counted_by_helper), "add on i64: exact"),
    "float maximum": (largest, "kernel largest: max on i32: exact in any order"),
}


@pytest.mark.parametrize("case", SAFE)
def test_exact_atomics_are_proved(case: str) -> None:
    function, reason = SAFE[case]
    (record,) = rewrite(function)
    assert (record.treatment, record.rule) == (Treatment.SAFE, "exact_kernel")
    assert reason in record.reason


def test_two_kinds_of_atomics_in_one_tensor_are_refused() -> None:
    with pytest.raises(UncoveredError, match="another kind of atomic may act on the same place"):
        rewrite(_counted_by(kernels.counted_and_largest))


@pytest.mark.parametrize("function", [doubled, _guarded(False)], ids=["doubled", "guarded"])
def test_a_kernel_without_atomics_is_let_through(function: Function) -> None:
    report = rewrite(function)
    assert len(report) == 0
    assert report.unknown == []


PROOF = "each program owns its rows"


@pytest.mark.parametrize("target", [kernels.histogram, kernels.histogram.fn], ids=["kernel", "function"])
def test_a_kernel_that_is_declared_is_let_through(target: Any) -> None:
    if target is kernels.histogram.fn:
        target = triton.jit(target)  # another decorated object of the same function
    (record,) = rewrite(histogram, Declared(target, PROOF))
    assert (record.treatment, record.rule, record.reason) == (Treatment.SAFE, "declared: histogram", PROOF)
    with pytest.raises(UncoveredError, match="locked"):
        rewrite(locked, Declared(target, PROOF))


@pytest.mark.parametrize("function", [tuned, _guarded(True)], ids=["autotuned", "plain"])
def test_a_declaration_is_of_the_function_under_the_decorators(function: Function) -> None:
    (record,) = rewrite(function, Declared(kernels.tuned_adding_first, PROOF))
    assert (record.treatment, record.rule) == (Treatment.SAFE, "declared: guarded")


class HistogramAsSum(Rule):
    """``kernels.histogram[...](x, index, out, ...)`` becomes a segment sum."""

    name = "histogram_as_sum"
    targets = (kernels.histogram,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = user_kernels.arguments(node)
        return Match((given["x"], given["index"], given["out"]), "the index is data")

    def replacement(self, x: Tensor, index: Tensor, out: Tensor) -> dict[str, Tensor]:
        return {"out": segment.segment_accumulate(out.view(1, -1, 1), index, x.view(1, -1, 1)).view(-1)}


class ByAnotherName(HistogramAsSum):
    name = "by_another_name"

    def replacement(self, x: Tensor, index: Tensor, out: Tensor) -> dict[str, Tensor]:
        return {"result": out}


class OfAnotherShape(HistogramAsSum):
    name = "of_another_shape"

    def replacement(self, x: Tensor, index: Tensor, out: Tensor) -> dict[str, Tensor]:
        return {"out": out[:1]}


def test_a_rule_can_replace_a_kernel() -> None:
    x, index = inputs()
    options = {"rules": [HistogramAsSum()]}
    compiled = torch.compile(histogram, backend=backend, options=options, fullgraph=True)
    found = compiled(x, index)
    torch.testing.assert_close(found, torch.zeros(8).index_add(0, index, x))
    assert all(torch.equal(compiled(x, index), found) for _ in range(20))
    report = detpass.last_report()
    assert report is not None
    assert [(record.rule, record.treatment) for record in report] == [("histogram_as_sum", Treatment.SEGMENT)]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ByAnotherName(), r"results are \['result'\], the node's are a dictionary of \['out'\]"),
        (OfAnotherShape(), r"result 'out' has shape \(1,\), the node has \(8,\)"),
    ],
    ids=["name", "shape"],
)
def test_a_replacement_that_returns_something_else_is_refused(rule: Rule, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        rewrite(histogram, rule)


def test_a_kernel_that_cannot_be_compiled_is_refused_where_its_source_names_atomics() -> None:
    def launch(kernel: Any) -> Function:
        def broken(x: Tensor, index: Tensor) -> Tensor:
            out = torch.zeros(100)
            kernel[(1,)](x, out, x.numel(), BLOCK=100)  # a block must be a power of two
            return out

        return broken

    assert len(rewrite(launch(kernels.doubled))) == 0
    with pytest.raises(UncoveredError, match=r"it names atomics or assembly and could not be read: its TTIR.*power"):
        rewrite(launch(kernels.largest))


def test_a_changed_kernel_is_another_cache_key() -> None:
    def keys(function: Function) -> set[str]:
        found: set[str] = set()
        rewrite(function, on_uncovered="ignore", then=lambda graph: found.update(
            key for node in graph.nodes if node.op == "call_function" for key in user_kernels.source_keys(node)
        ))  # fmt: skip
        return found

    assert len(keys(histogram)) == 1
    assert keys(histogram) == keys(histogram)
    assert keys(histogram) != keys(doubled)
    assert keys(doubled) != set()
