"""Convolution and fused attention on CUDA: torch's own deterministic kernel, with its flag set for the one call.

Before: ``aten.convolution_backward(...)``. After: ``detpass.native_aten_convolution_backward(...)``, the same operator
under ``torch.backends.cudnn.deterministic`` and ``torch.use_deterministic_algorithms`` (``native_calls.py``).

A forward convolution writes each output from one place and is left to Inductor; a transposed one is the backward of
another and is not. On a CPU these operators are deterministic and are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass.graph_query import argument
from detpass.rule import Match, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.native_calls import native

aten = torch.ops.aten

_NAMES = (
    "convolution_backward",
    "convolution",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
    "_cudnn_attention_backward",
    "_cudnn_rnn_backward",
    "miopen_rnn_backward",
)
"""A torch that lacks one of them has nothing to rewrite."""

_OVERLOADS = tuple(getattr(aten, name).default for name in _NAMES if hasattr(aten, name))


class DeterministicKernel(Rule):
    """Operators with a deterministic ATen or cuDNN kernel behind torch's flags."""

    name = "deterministic_kernel"
    targets = _OVERLOADS

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return Safe("the CPU kernels sum in a fixed order")
        if node.target is aten.convolution.default and not argument(node, "transposed"):
            return Safe("cuDNN's forward algorithms write each output from one place")
        names = tuple(node.kwargs)
        operands = (*node.args, *(node.kwargs[name] for name in names))
        parameters = {"target": node.target, "names": names}
        return Match(operands, "a deterministic kernel stands behind torch's flag", parameters, Treatment.NATIVE)

    def replacement(self, *operands: Any, target: Any, names: tuple[str, ...]) -> Any:
        positional = operands[: len(operands) - len(names)]
        return native(target)(*positional, **dict(zip(names, operands[len(positional) :], strict=True)))


for _target in _OVERLOADS:
    # Before any graph is compiled: an artifact from the cache calls them without this rule having matched.
    native(_target)
