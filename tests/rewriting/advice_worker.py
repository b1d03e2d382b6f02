"""Compiles two graphs of one line with a rule that advises; prints whether they came from a cache, and warnings."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, fx

from detpass import DetpassWarning, Match, Rule, RuleContext, reports
from detpass.backend import detpass


class Advising(Rule):
    name = "advising"
    targets = (torch.ops.aten.sin.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Match:
        return Match(operands=(node.args[0],), reason="twice", advice="Remedy: divide by two.")

    def replacement(self, x: Tensor) -> Tensor:
        return x * 2


def wave(x: Tensor) -> Tensor:
    return x.sin()


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shift in (lambda x: wave(x) + 1, lambda x: wave(x) + 2):
            torch.compile(shift, backend=detpass, options={"rules": (Advising(),)})(torch.ones(8))
    (cached,) = {report.from_cache for report in reports()}
    print(cached)
    for warning in caught:
        if issubclass(warning.category, DetpassWarning):
            print(warning.category.__name__, warning.message)
