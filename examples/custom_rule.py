"""A rule of your own: make a custom operator repeatable under ``torch.compile(..., backend="detpass")``.

A library has an operator ``shop::tally`` that adds prices into shelves by atomics: fast, and different in every run.
The rule below tells detpass how to compute the same thing in a fixed order. Run it: ``python examples/custom_rule.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

import detpass
from detpass import Match, Rule, RuleContext, segment
from detpass.graph_query import label


@torch.library.custom_op("shop::tally", mutates_args=())
def tally(prices: Tensor, shelf: Tensor, shelves: int) -> Tensor:
    """The library's operator: ``prices float[n]``, ``shelf int64[n]`` -> totals ``float[shelves]``, in any order."""
    order = torch.randperm(len(shelf))  # stands for threads that arrive as they please
    totals = prices.new_zeros(shelves)
    for position in order.tolist():
        totals[shelf[position]] += prices[position]
    return totals


@tally.register_fake
def _(prices: Tensor, shelf: Tensor, shelves: int) -> Tensor:
    return prices.new_empty(shelves)


class Tally(Rule):
    """``shop::tally(prices, shelf, shelves)`` becomes one segment sum."""

    name = "shop_tally"
    targets = (torch.ops.shop.tally.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Match:
        prices, shelf, shelves = node.args
        return Match(operands=(prices, shelf, shelves), parameters={"op": label(node)}, reason="shelves repeat")

    def replacement(self, prices: Tensor, shelf: Tensor, shelves: int, op: str) -> Tensor:
        return segment.segment_reduce(prices.reshape(1, -1, 1), shelf, shelves, op=op).reshape(shelves)


def main() -> None:
    """Sum a thousand prices ten times, without the rule and with it, and count the different results."""
    generator = torch.Generator().manual_seed(0)
    prices = torch.rand(1000, generator=generator) * 100
    shelf = torch.randint(0, 4, (1000,), generator=generator)

    def total(prices: Tensor, shelf: Tensor) -> Tensor:
        return torch.ops.shop.tally(prices, shelf, 4)

    plain = {tuple(total(prices, shelf).tolist()) for _ in range(10)}
    compiled = torch.compile(total, backend="detpass", options={"rules": [Tally()]})
    fixed = {tuple(compiled(prices, shelf).tolist()) for _ in range(10)}
    print(f"the operator itself: {len(plain)} different results in 10 runs")
    print(f"with the rule:       {len(fixed)} different result in 10 runs")
    print(detpass.last_report())
    assert len(fixed) == 1


if __name__ == "__main__":
    main()
