"""Applies one rule to one operator call on real tensors, with neither a compiler nor the engine.

The call becomes a node whose tensor arguments are placeholders; ``match`` reads it, and the replacement runs eagerly
on the tensors themselves. What is tested is the arithmetic; the tests of the engine cover the graph surgery.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass.rule import Match, Rule, RuleContext, Verdict


def node_of(target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, dict[fx.Node, torch.Tensor]]:
    """A node that calls ``target`` and the tensors that its placeholders stand for."""
    graph = fx.Graph()
    tensors: dict[fx.Node, torch.Tensor] = {}

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            placeholder = graph.placeholder(f"arg{len(tensors)}")
            placeholder.meta["val"] = value
            tensors[placeholder] = value
            return placeholder
        if isinstance(value, (list, tuple)):
            return type(value)(lift(item) for item in value)
        return value

    node = graph.call_function(target, tuple(lift(a) for a in args), {k: lift(v) for k, v in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs)
    return node, tensors


def verdict_of(rule: Rule, target: Any, *args: Any, device: str = "cpu", **kwargs: Any) -> Verdict:
    """What ``rule`` says of the call when code is generated for ``device``."""
    node, _ = node_of(target, *args, **kwargs)
    return rule.match(node, RuleContext(device=torch.device(device)))


def replaced(rule: Rule, target: Any, *args: Any, device: str = "cpu", **kwargs: Any) -> Any:
    """The value of the deterministic form of the call. Fails when the rule does not match."""
    node, tensors = node_of(target, *args, **kwargs)
    verdict = rule.match(node, RuleContext(device=torch.device(device)))
    assert isinstance(verdict, Match), f"{rule.name} gave {verdict} for {target}"

    def fill(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return tensors[value]
        if isinstance(value, (list, tuple)):
            return type(value)(fill(item) for item in value)
        return value

    return rule.replacement(*(fill(operand) for operand in verdict.operands), **verdict.parameters)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor, so that NaN and -0.0 count in comparisons."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.element_size()]
    return tensor.resolve_conj().contiguous().view(integer)
