"""Compiles a function with detpass and compares it with eager: values, gradients, bits over runs, treatments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from detpass.backend import detpass, reports
from detpass.rule import Rule, RuleContext, Verdict
from tests.rules.direct import bits


class OnCuda(Rule):
    """A rule that decides as for CUDA, in code for a CPU: segment sums stay the CPU's operators, which can run here."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name = f"{rule.name}_on_cuda"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.rule.targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return self.rule.match(node, RuleContext(torch.device("cuda")))

    def replacement(self, *operands: Any, **parameters: Any) -> Any:
        return self.rule.replacement(*operands, **parameters)


RUNS = 20
"""Times that a compiled function is called: a call costs a thousandth of its compile."""


def gradients(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output of ``function`` and the gradients of a weighted sum of it for all inputs that need one."""
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*fresh)
    weight = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    out.backward(weight)
    return [out.detach(), *(x.grad for x in fresh if x.requires_grad)]


def compile_and_compare(
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    rtol: float,
    atol: float,
    runs: int = RUNS,
    dynamic: bool | None = None,
    target: str | None = None,
    rules: Sequence[Rule] = (),
) -> dict[str, tuple[str, str]]:
    """Check that compiled results equal eager's within the tolerance and each other's on the bits.

    Returns ``{op: (treatment, rule)}`` of the records of the compile. float32 inputs are also compared with eager in
    float64 by the caller's choice of tolerance.
    """
    torch._dynamo.reset()
    before = len(reports())
    options: dict[str, Any] = {} if target is None else {"target": target}
    if rules:
        options["rules"] = list(rules)
    compiled = torch.compile(function, backend=detpass, dynamic=dynamic, fullgraph=True, options=options)
    expected = gradients(function, inputs)
    # From scratch, so that the records of the compile are there to be read.
    with torch._inductor.config.patch(force_disable_caches=True):
        results = [gradients(compiled, inputs) for _ in range(runs)]
    for got, want in zip(results[0], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    for run, later in enumerate(results[1:], start=1):
        for number, (first, again) in enumerate(zip(results[0], later, strict=True)):
            assert torch.equal(bits(first), bits(again)), f"result {number} of run 0 and run {run} differ"
    records = [record for report in reports()[before:] for record in report.records]
    return {record.op: (str(record.treatment), str(record.rule)) for record in records}
