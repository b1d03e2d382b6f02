"""What flex_attention's backward computes at every position of the attention matrix, in blocks of queries.

For a block of query rows: the scores, what the score function makes of them, the probabilities that the forward's
log-sum-exp gives, and from them the gradient of the modified scores. Matrix products and pointwise work alone, so the
same bits in every run; the block bounds the memory.

Positions count as the kernels count them: those of a full block, and those of a partial block that the mask function
admits. A block that the mask does not list is never looked at, whatever the mask function says of it.

The formulas are those of torch's own dense form (``torch/_higher_order_ops/flex_attention.py``); its log-sum-exp is to
base two.

Neighbours: ``flex_attention.py`` (the rule), ``flex_gradients.py``, ``flex_totals.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass.rules.flex_bodies import evaluate, inputs_of, results_of, spread

MOST_AT_ONCE = 2**27
"""Positions of the attention matrix that a block has at most, as long as that leaves few blocks."""
MOST_BLOCKS = 16
"""Blocks at most: each is a copy of the same operations in the graph."""


@dataclass(frozen=True)
class Mask:
    """Which positions take part: the forward lists of blocks of keys for each block of queries, and the function."""

    function: fx.GraphModule
    captured: tuple[Any, ...]
    partial_count: Tensor
    """``int[B or 1, H or 1, query blocks]``: how many blocks of keys the function is asked about."""
    partial: Tensor
    """``int[B or 1, H or 1, query blocks, at most]``: which."""
    full_count: Tensor | None
    full: Tensor | None
    """The same for blocks that the function is not asked about; None where there are none."""
    query_block: Any
    key_block: Any


@dataclass(frozen=True)
class Attention:
    """The operands of a backward."""

    query: Tensor
    """``[B, H, M, D]``."""
    key: Tensor
    """``[B or 1, heads of keys, N, D]``."""
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    """``[B, H, M]``, to base two."""
    grad_out: Tensor | None
    grad_logsumexp: Tensor | None
    scale: Any
    function: fx.GraphModule
    """The score function: score, batch, head, query, key, captured tensors."""
    captured: tuple[Any, ...]
    mask: Mask


@dataclass(frozen=True)
class Positions:
    """A block of query rows: what the joint graph of the score function is given, ``[B, H, rows, N]``."""

    scores: Tensor
    """Before the score function."""
    grads: Tensor
    """The gradient of the modified scores; 0 at positions that take no part."""
    alive: Tensor
    """Which positions take part; broadcasts to the scores' shape."""
    places: Sequence[Tensor]
    """The numbers of batch, head, query and key: four tensors that broadcast to the scores' shape."""


def blocks(attention: Attention, count: int) -> Iterator[Positions]:
    """The positions of all query rows in ``count`` blocks, in order."""
    query, key, value = attention.query, attention.key, attention.value
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, length = query.shape[:3]
    width: Any = length // count
    keys = key.to(working).expand(batch, *key.shape[1:]).transpose(-2, -1)
    values = value.to(working).expand(batch, *value.shape[1:]).transpose(-2, -1)
    grad_out = torch.zeros_like(attention.out) if attention.grad_out is None else attention.grad_out
    delta = (attention.out.to(working) * grad_out.to(working)).sum(-1)
    if attention.grad_logsumexp is not None:
        delta = delta - attention.grad_logsumexp / math.log(2)
    for number in range(count):
        start = number * width
        rows: Any = width if number < count - 1 else length - start

        def of_block(tensor: Tensor, start: Any = start, rows: Any = rows) -> Tensor:
            return tensor.narrow(2, start, rows)

        extents = ((0, batch), (0, heads), (start, rows), (0, key.shape[2]))
        places = [
            torch.arange(first, first + size, device=query.device).reshape([-1 if d == dim else 1 for d in range(4)])
            for dim, (first, size) in enumerate(extents)
        ]
        scores = _by_keys(of_block(query).to(working), keys) * attention.scale
        modified = _result(attention.function, (scores, *places), attention.captured)
        alive = _alive(attention.mask, places)
        lse = of_block(attention.logsumexp).to(working).unsqueeze(-1) * math.log(2)
        alive_row = alive & (lse != -math.inf)
        weights = torch.where(alive_row, torch.exp(modified - lse), 0)
        from_values = _by_keys(of_block(grad_out).to(working), values)
        grads = torch.where(alive_row, weights * (from_values - of_block(delta).unsqueeze(-1)), 0)
        yield Positions(scores, grads, alive_row, places)


def block_count(sizes: Sequence[Any]) -> int:
    """How many blocks a backward of so many batches, heads, queries and keys is cut into.

    Of a symbolic size the value of this compile decides; it is no promise about later ones.
    """
    seen = [_seen(size) for size in sizes]
    return max(1, min(math.ceil(math.prod(seen) / MOST_AT_ONCE), MOST_BLOCKS, seen[2]))


def _seen(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _by_keys(rows: Tensor, transposed: Tensor) -> Tensor:
    """``rows [B, H, R, D]`` times ``transposed [B, heads of keys, D, N]``; several heads may share one of keys."""
    batch, heads, count, depth = rows.shape
    shared = transposed.shape[1]
    product = rows.reshape(batch, shared, heads // shared * count, depth) @ transposed
    return product.reshape(batch, heads, count, transposed.shape[-1])


def _alive(mask: Mask, places: Sequence[Tensor]) -> Tensor:
    """Which positions take part: a tensor that broadcasts to the scores' shape."""
    rows, columns = places[2].reshape(-1), places[3].reshape(-1)
    row_blocks, column_blocks = rows // mask.query_block, columns // mask.key_block
    many = (columns.shape[0] + mask.key_block - 1) // mask.key_block

    def listed(count: Tensor, which: Tensor) -> Tensor:
        numbers = torch.arange(many, device=rows.device).unsqueeze(-1)
        valid = torch.arange(which.shape[-1], device=rows.device) < count.unsqueeze(-1)
        table = ((which.unsqueeze(-2) == numbers) & valid.unsqueeze(-2)).any(-1)
        return table[:, :, row_blocks][:, :, :, column_blocks]

    alive = listed(mask.partial_count, mask.partial) & _result(mask.function, places, mask.captured)
    if mask.full_count is not None and mask.full is not None:
        alive = alive | listed(mask.full_count, mask.full)
    return alive


def _result(function: fx.GraphModule, positional: Sequence[Tensor], captured: Sequence[Any]) -> Tensor:
    """What a function of one position returns at all of them."""
    given = dict(zip(inputs_of(function), (*positional, *captured), strict=True))
    value: Tensor = evaluate(function, results_of(function), given, len(positional))[0]
    return spread(value)
