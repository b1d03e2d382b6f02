"""Cumulative sums, products and log-sum-exps with a fixed block order.

On CUDA a long scan passes partial results between thread blocks in the order in which they arrive (decoupled
look-back: Inductor's split scan, and CUB's behind eager). Before: ``aten.cumsum(x, dim)``. After, with the axis cut
into blocks of 256::

    inner  = cumsum within each block            # one thread block, never split
    before = the same scan over the blocks' totals, shifted by one
    result = inner + before

Each block is scanned from a contiguous buffer: Inductor splits a scan over strided data however short it is. On a CPU
every row is one thread's and is left alone. Integer sums and products are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from detpass.graph_query import argument, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.buffers import materialised
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten

BLOCK = 256
"""Elements that one thread block scans."""
LEVELS_OF_UNKNOWN_LENGTH = 4
"""Enough for 2**32 elements."""


@dataclass(frozen=True)
class Scan:
    """What a scan operator combines."""

    within: Callable[[torch.Tensor, int], torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    identity: float


SCANS: dict[Any, Scan] = {
    aten.cumsum.default: Scan(torch.cumsum, torch.add, 0.0),
    aten.cumprod.default: Scan(torch.cumprod, torch.mul, 1.0),
    aten.logcumsumexp.default: Scan(torch.logcumsumexp, torch.logaddexp, -float("inf")),
}


class FixedOrderScan(Rule):
    """``cumsum``, ``cumprod`` and ``logcumsumexp`` in blocks of a fixed size."""

    name = "fixed_order_scan"
    targets = tuple(SCANS)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        source, result = tensor_of(node.args[0]), tensor_of(node)
        if source is None or result is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "no known value")
        if context.device.type != "cuda":
            return Safe("each row is scanned by one thread")
        if not (result.dtype.is_floating_point or result.dtype.is_complex):
            return Safe("integer scans are exact in any order")
        if source.dim() == 0:
            return Safe("one element")
        dim = argument(node, "dim")
        if result.dtype.is_complex:
            return NoMatch(Inapplicable.DTYPE, node, "complex scans have no kernel of one thread block")
        parameters = {"dim": dim % source.dim(), "target": node.target, "dtype": result.dtype}
        reason = f"scanned in blocks of {BLOCK}, whose totals are scanned in turn"
        leaves = {node.target: f"{BLOCK} contiguous elements are scanned within one thread block"}
        return Match((node.args[0],), reason, parameters, Treatment.CLOSED_FORM, leaves)

    def replacement(self, source: torch.Tensor, *, dim: int, target: Any, dtype: torch.dtype) -> torch.Tensor:
        moved = source.to(dtype).to(accumulation_dtype(dtype)).movedim(dim, -1)
        length: Any = moved.shape[-1]
        levels = _levels(length) if isinstance(length, int) else LEVELS_OF_UNKNOWN_LENGTH
        return _scan(moved, SCANS[target], levels).movedim(-1, dim).to(dtype)


def _levels(length: int) -> int:
    levels = 1
    while length > BLOCK:
        length = (length + BLOCK - 1) // BLOCK
        levels += 1
    return levels


def _scan(values: torch.Tensor, scan: Scan, levels: int) -> torch.Tensor:
    """Scan the last axis, of at most ``BLOCK ** levels`` elements."""
    length: Any = values.shape[-1]
    if levels == 1:
        if not isinstance(length, int):  # a length that is known, whatever ``length`` is
            values = torch.constant_pad_nd(values, [0, BLOCK - length], scan.identity)
        return scan.within(materialised(values), -1).narrow(-1, 0, length)
    blocks = (length + BLOCK - 1) // BLOCK
    padded = torch.constant_pad_nd(values, [0, blocks * BLOCK - length], scan.identity)
    inner = scan.within(materialised(padded.reshape(*padded.shape[:-1], blocks, BLOCK)), -1)
    totals = _scan(inner[..., -1], scan, levels - 1)
    before = torch.constant_pad_nd(totals, [1, -1], scan.identity)
    flat = scan.combine(inner, before.unsqueeze(-1)).flatten(-2)
    # With ``narrow``, Inductor would read ``before[i // BLOCK]`` in one loop over the length, and its CPU loop
    # splitting drops the rest of a length that BLOCK does not divide (torch 2.11 to 2.14).
    return materialised(flat, length)
