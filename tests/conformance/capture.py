"""Captures a function's joint graph, rewrites it with the built-in rules and runs it without code generation.

What Inductor would compile is what runs here: AOTAutograd's functional joint graph with Inductor's decompositions under
the settings of ``detpass.backend``, the same :class:`Rewriter` and the same finishers. A sample costs a tenth of a
second, not several, so all samples of an operator can be run.

``target="cuda"`` applies the rules as for a GPU while each segment sum stays the CPU's operator: the closed forms,
scans and tie rules that only a GPU needs compute their numbers here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from detpass import _torch_private, rules, segment
from detpass.config import Options
from detpass.rewriting.graph_pass import Rewriter
from detpass.rewriting.registry import RuleSet
from detpass.rewriting.report import Report

RULES = RuleSet(rules.BUILTIN_RULES)
TARGETS = ("cpu", "cuda")

NOT_TRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
"""What torch's tracing raises, before any rule is asked, where a size or a branch depends on data or an operator has no
symbolic form. Dynamo ends a graph there and runs the operator eagerly."""

Flat = Callable[..., Sequence[Any]]
"""A function of tensors that returns a flat sequence."""


def rewritten(function: Flat, target: str, report: Report, dynamic: bool = False) -> Flat:
    """``function`` as the graphs that AOTAutograd makes of it, rewritten for ``target``; traced at its first call.

    ``dynamic`` traces with symbolic sizes. ``report`` receives a record for each node that the rules decided.
    """
    scope = lambda device: segment.assume_device("cpu")  # noqa: E731
    rewriter = Rewriter(RULES, rules.hazard, Options(target=target), scope, rules.FINISHERS)

    def rewrite(graph_module: fx.GraphModule) -> None:
        rewriter.rewrite(graph_module.graph, report)
        graph_module.recompile()

    def partition(joint: fx.GraphModule, inputs: Any, **sizes: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        rewrite(joint)
        forward, backward = default_partition(joint, inputs, **sizes)
        return forward, backward

    def run(graph_module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph_module.forward)

    def infer(graph_module: fx.GraphModule, inputs: Any) -> Any:
        rewrite(graph_module)
        return run(graph_module, inputs)

    compiled = aot_function(
        function,
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=partition,
        decompositions=_torch_private.decomposition_table(),
        inference_compiler=infer,
        dynamic=dynamic,
    )

    def call(*tensors: Tensor) -> Sequence[Any]:
        with RULES.operators_kept_whole():
            result: Sequence[Any] = compiled(*tensors)
        return result

    return call


def values_and_gradients(function: Flat, tensors: Sequence[Tensor]) -> list[Any]:
    """The results of ``function`` and the gradients, for a fixed upstream gradient, of the tensors that require one."""
    torch.manual_seed(42)  # the seed that OpInfo's own wrapper of random operators sets, and a graph does not hold
    results = list(function(*tensors))
    wanted = [x for x in tensors if x.requires_grad]
    differentiable = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    gradients: Sequence[Tensor | None] = []
    if wanted and differentiable:
        generator = torch.Generator().manual_seed(1)
        upstream = [_upstream(result, generator) for result in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, upstream, allow_unused=True)
    return [r.detach() if isinstance(r, Tensor) else r for r in results] + list(gradients)


def _upstream(result: Tensor, generator: torch.Generator) -> Tensor:
    """Multiples of an eighth: exact in every dtype, so that runs in two dtypes get the same upstream gradient."""
    eighths = torch.randint(-16, 17, tuple(result.shape), generator=generator).double() / 8
    return eighths.to(result.dtype)
