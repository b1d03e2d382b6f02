"""Backward of replication padding: the border cells add up the copies that were made of them.

Before::

    grad_input = aten.replication_pad2d_backward(grad_output, input, padding)        # atomics on CUDA

After, along each axis: the slice of the gradient over the input itself, its first cell replaced by the sum over the
copies before it, its last by the sum over those after it. Negative padding crops, and a cropped cell gets zero.

Reflection and circular padding need no rule: Inductor lowers the one as a gather and the other as slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Treatment, Verdict
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten


class ReplicationPadBackward(Rule):
    """``replication_pad1d/2d/3d_backward`` as slices and sums over the borders."""

    name = "replication_pad_backward"
    targets = (
        aten.replication_pad1d_backward.default,
        aten.replication_pad2d_backward.default,
        aten.replication_pad3d_backward.default,
    )
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        source = tensor_of(given["self"])
        padding = list(given["padding"])
        if source is None or not all(isinstance(pad, int) for pad in padding):
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the padding must be numbers")
        operands = (given["grad_output"], given["self"])
        reason = "only border cells were copied, and the padding says how often"
        return Match(operands, reason, {"padding": tuple(padding)}, Treatment.CLOSED_FORM)

    def replacement(self, grad: torch.Tensor, source: torch.Tensor, *, padding: tuple[int, ...]) -> torch.Tensor:
        cells = source.shape[source.dim() - len(padding) // 2 :]
        total = grad.to(accumulation_dtype(grad.dtype))
        for axis, size in enumerate(cells):
            before, after = padding[2 * (len(cells) - 1 - axis) :][:2]
            total = _collect(total, axis - len(cells), size, before, after)
        return total.to(grad.dtype)


def _collect(grad: torch.Tensor, dim: int, cells: Any, before: int, after: int) -> torch.Tensor:
    """One axis: ``[.., before + cells + after, ..]`` to ``[.., cells, ..]``."""
    if isinstance(cells, int) and cells == 1:
        return grad.sum(dim, keepdim=True)
    length = grad.shape[dim]
    beyond = [0] * (2 * (-1 - dim))
    # Cells that were cropped away get zero; copies are cut off.
    widened = aten.constant_pad_nd.default(grad, [*beyond, max(0, -before), max(0, -after)], 0)
    own: torch.Tensor = widened.narrow(dim, max(0, before), cells)
    cell = torch.arange(cells, device=grad.device).reshape(-1, *[1] * (-1 - dim))
    if before > 0:
        # Cropping the other end may leave fewer copies than were made.
        copies = before + 1 if after >= 0 else torch.sym_min(before + 1, length)
        own = torch.where(cell == 0, grad.narrow(dim, 0, copies).sum(dim, keepdim=True), own)
    if after > 0:
        copies = after + 1 if before >= 0 else torch.sym_min(after + 1, length)
        own = torch.where(cell == cells - 1, grad.narrow(dim, length - copies, copies).sum(dim, keepdim=True), own)
    return own
