"""flex_attention on a CPU, rewritten as for CUDA and executed, and the same attention written out.

torch has no backward of it on a CPU and says so before a graph is made; :func:`as_on_cuda` lifts that. The joint graph
is rewritten by the engine with every built-in rule and then interpreted: torch's dense form stands for the kernel, the
segment sums run on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from detpass import rules
from detpass._torch_private_cuda import flex_attention_as_on_cuda as as_on_cuda
from detpass.config import Options
from detpass.rewriting.graph_pass import Rewriter
from detpass.rewriting.registry import RuleSet
from detpass.rewriting.report import Report

Score = Callable[..., Tensor]
"""score, batch, head, query, key, captured tensors -> score."""


@dataclass(frozen=True)
class Attended:
    """What is attended to and how."""

    tensors: tuple[Tensor, Tensor, Tensor]
    """query, key, value."""
    score: Score
    captured: tuple[Tensor, ...]
    block_mask: BlockMask | None = None
    logsumexp: bool = False
    """Whether the loss reads the log-sum-exp, too."""
    scale: float | None = None


def by_flex(case: Attended) -> Callable[..., Tensor]:
    """A loss of query, key, value and captured tensors, by flex_attention."""

    def loss(*tensors: Tensor) -> Tensor:
        query, key, value, *captured = tensors

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return case.score(value, b, h, i, j, *captured)

        gqa = query.shape[1] != key.shape[1]
        settings: dict[str, Any] = {"block_mask": case.block_mask, "enable_gqa": gqa, "scale": case.scale}
        if not case.logsumexp:
            return weighted(flex_attention(query, key, value, score, **settings))
        out, lse = flex_attention(query, key, value, score, return_lse=True, **settings)
        return weighted(out) + weighted(torch.where(lse == -math.inf, 0, lse))

    return loss


def written_out(case: Attended, dead: Tensor | None = None) -> Callable[..., Tensor]:
    """The same loss in float64 by a softmax over all positions; ``dead: bool[B, H, M, N]`` are left out."""

    def loss(*tensors: Tensor) -> Tensor:
        query, key, value, *captured = (tensor.double() for tensor in tensors)
        shared = query.shape[1] // key.shape[1]
        key, value = (x.expand(len(query), *x.shape[1:]).repeat_interleave(shared, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
        scores = query @ key.transpose(-1, -2) * scale
        places = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
        left_out = torch.zeros_like(scores, dtype=torch.bool) if dead is None else dead
        places = tuple(torch.where(left_out, 0, place) for place in places)
        modified = case.score(scores, *places, *captured).masked_fill(left_out, -math.inf)
        empty = left_out.all(-1, keepdim=True)
        weights = torch.softmax(modified.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        total = weighted(weights @ value)
        if case.logsumexp:
            total = total + weighted(modified.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty[..., 0], 0))
        return total

    return loss


def weighted(result: Tensor) -> Tensor:
    """A sum with weights that differ."""
    return (result.double() * torch.arange(result.numel(), dtype=torch.float64).cos().reshape(result.shape)).sum()


def gradients(loss: Callable[..., Tensor], case: Attended) -> list[Tensor]:
    """Of query, key, value and the captured tensors."""
    fresh = [tensor.detach().clone().requires_grad_() for tensor in (*case.tensors, *case.captured)]
    return list(torch.autograd.grad(loss(*fresh), fresh))


def rewritten(
    loss: Callable[..., Tensor], dynamic: bool | None = False, graphs: list[fx.Graph] | None = None
) -> tuple[Callable[..., Tensor], Report]:
    """``loss`` compiled to its rewritten joint graph, which is interpreted; ``graphs`` gets each."""
    torch._dynamo.reset()
    report = Report(compile_id=None)
    rewriter = Rewriter(RuleSet(rules.BUILTIN_RULES), rules.hazard, Options(target="cuda"), finish=rules.FINISHERS)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        rewriter.rewrite(joint.graph, report)
        if graphs is not None:
            graphs.append(joint.graph)
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return default_partition(joint, inputs, **options)

    def interpret(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        # Captured tensors that need no gradient: torch's dense form then asks for none, as CUDA's kernel does.
        return make_boxed_func(lambda *a: graph(*(x.detach() if isinstance(x, Tensor) else x for x in a)))

    backend = aot_autograd(
        fw_compiler=interpret, bw_compiler=interpret, partition_fn=partition, decompositions=select_decomp_table
    )
    return torch.compile(loss, backend=backend, fullgraph=True, dynamic=dynamic), report


__all__ = ["Attended", "as_on_cuda", "by_flex", "gradients", "rewritten", "weighted", "written_out"]
