"""Triton kernels of a user's own: those whose atomics leave the same bits in any order are proved safe.

``user_kernels.py`` reads the kernel; what it says of any other one stands in the report and the error.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from detpass import user_kernels
from detpass.rule import Inapplicable, NoMatch, Rule, RuleContext, Safe, Verdict


class ExactKernel(Rule):
    """``kernel[grid](...)`` is kept where all of its atomics are exact: integers whose old values nobody reads."""

    name = "exact_kernel"
    targets = user_kernels.LAUNCHES

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        reading = user_kernels.read(node)
        assert reading is not None, "the targets launch kernels"
        if reading.ordered:
            return NoMatch(Inapplicable.KERNEL, node, f"{reading.name}, {'; '.join(reading.ordered)}")
        if not reading.atomics:
            return NoMatch(Inapplicable.KERNEL, node, f"{reading.name}, no atomics")
        return Safe(f"kernel {reading.name}: {'; '.join(map(str, reading.atomics))}")

    def replacement(self, *operands: Any, **parameters: Any) -> Any:
        raise AssertionError(f"{self.name} never matches for a replacement")
