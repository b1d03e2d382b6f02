"""Triton kernels of a user's own: exact atomics are proved safe, and no measurement chooses among configurations.

``user_kernels.py`` reads the kernel; what it says of any other one stands in the report and the error.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from detpass import user_kernels
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict

ADVICE = (
    "Remedy where another configuration is faster: make it the first or the only one of triton.autotune; where all of "
    'them give the same bits, detpass.register_rule(detpass.Declared(kernel, "the proof")) keeps the measurement.'
)


class FirstConfiguration(Rule):
    """``kernel[grid](...)`` with ``triton.autotune`` is launched in the first of its configurations.

    Inductor measures the configurations when the kernel first runs and keeps the fastest, in each process anew (or from
    a cache on disk): tiles set the order of sums, so the bits change with the choice. A kernel that does the same to
    each element in every configuration is kept as it is, measured.
    """

    name = "first_configuration"
    targets = user_kernels.LAUNCHES

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        reading = user_kernels.read(node)
        assert reading is not None, "the targets launch kernels"
        if len(reading.configurations) < 2:
            return NoMatch(Inapplicable.KERNEL, node, f"{reading.name}, one configuration")
        what = f"kernel {reading.name}"
        if reading.unlike is None and not reading.ordered:
            atomics = "".join(f"; {atomic}" for atomic in reading.atomics)
            count = len(reading.configurations)
            return Safe(f"{what}: each of its {count} configurations does the same to every element{atomics}")
        first = user_kernels.read_first_configuration(node)
        assert first is not None, "it has several"
        if first.ordered:
            return NoMatch(Inapplicable.KERNEL, node, f"{first.name}, in its first configuration too")
        if node.target is not user_kernels.LAUNCHES[0]:
            return NoMatch(Inapplicable.KERNEL, node, f"{reading.name}, launched in place")
        leaves, form = pytree.tree_flatten(dict(node.kwargs))
        reason = (
            f"{what} runs in the first of its {len(reading.configurations)} configurations "
            f"({reading.configurations[0]}), where Inductor would measure them and choose in each process: "
            f"{reading.unlike or '; '.join(reading.ordered)}"
        )
        return Match((leaves,), reason, {"form": form}, Treatment.NATIVE, advice=ADVICE)

    def replacement(self, leaves: list[Any], *, form: Any) -> Any:
        return user_kernels.launch_first_configuration(pytree.tree_unflatten(leaves, form))


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
