"""Cumulative sums, products and log-sum-exps with a fixed block order.

On CUDA a long scan passes partial results between thread blocks in the order in which they arrive (decoupled
look-back: Inductor's split scan, and CUB's behind eager). Before: ``aten.cumsum(x, dim)``. After, with the axis cut
into blocks of 256::

    inner  = cumsum within each block            # one thread block, never split
    before = the same scan over the blocks' totals, shifted by one
    result = inner + before

Each block is scanned from a contiguous buffer: Inductor splits a scan over strided data however short it is. On a CPU
every row is one thread's and is left alone. Integer sums and products are exact in any order. Complex sums are two real
ones; other complex scans go by ``doubling.py``, as no code is generated that scans complex numbers in a thread block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from detpass.graph_query import argument, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules import complex_logarithms, complex_pairs, doubling
from detpass.rules.buffers import materialised
from detpass.rules.doubling import BLOCK
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten


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
        parameters = {"dim": argument(node, "dim") % source.dim(), "target": node.target, "dtype": result.dtype}
        reason = f"scanned in blocks of {BLOCK}, whose totals are scanned in turn"
        leaves = {node.target: f"{BLOCK} contiguous elements are scanned within one thread block"}
        return Match((node.args[0],), reason, parameters, Treatment.CLOSED_FORM, leaves)

    def replacement(self, source: torch.Tensor, *, dim: int, target: Any, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_complex:
            return _complex_scan(source.to(dtype), dim, target)
        moved = source.to(dtype).to(accumulation_dtype(dtype)).movedim(dim, -1)
        return _scan(moved, SCANS[target], doubling.levels(moved.shape[-1])).movedim(-1, dim).to(dtype)


def _complex_scan(source: torch.Tensor, dim: int, target: Any) -> torch.Tensor:
    if target is aten.logcumsumexp.default:
        parts: Sequence[torch.Tensor] = complex_logarithms.cumulative(source.movedim(dim, 0))
    else:
        moved = complex_pairs.pair_of(source.movedim(dim, 0), accumulation_dtype(source.dtype.to_real()))
        if target is aten.cumsum.default:
            both = torch.stack([part.movedim(0, -1) for part in moved])
            parts = _scan(both, SCANS[target], doubling.levels(both.shape[-1])).movedim(-1, 1).unbind(0)
        else:
            parts = doubling.scan(moved, complex_pairs.product)
    # Contiguous, as eager's result: Inductor's sums of complex tensors read the last axis as pairs.
    return complex_pairs.complex_of([part.movedim(0, dim) for part in parts], source.dtype)


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
