"""Advanced indexing in the canonical form of an accumulation: ``dest [B, S, D]``, ``index [N]``, ``source [B, N, D]``.

NumPy's rule decides where the indexed dimensions go: adjacent index tensors keep their place, others move to the
front. :func:`canonical` is traced, so its sizes may be symbolic; :func:`check_values` and the like read fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.errors import Refusal
from detpass.graph_query import is_one, known_to_differ, label, repeats, tensor_of

MASK_DTYPES = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Canonical:
    """An accumulation in canonical form and the way back."""

    dest: Tensor
    """``[B, S, D]``: a view of the destination, or a copy where its strides do not allow a view."""
    index: Tensor
    """``int[N]``, not yet wrapped or checked when there is one index tensor."""
    source: Tensor
    """``[B, N, D]``."""
    num_segments: Any
    """``S``, an int or a symbolic size."""
    restore: Callable[[Tensor], Tensor]
    """Turns a result ``[B, S, D]`` into the shape of the destination."""
    spread: Callable[[Tensor], Tensor]
    """Turns rows ``[B, N, D]`` into the shape of an indexing result."""


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes that may be symbolic; 1 for none."""
    return math.prod(sizes)


def canonical(dest: Tensor, indices: Sequence[Tensor | None], values: Tensor, wrap: bool, op: str) -> Canonical:
    """Bring ``dest[indices] (+)= values`` to canonical form. ``indices`` may hold None; integer tensors only."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    rest = [d for d in range(dest.dim()) if d not in dims]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    before = rest[: dims[0]] if adjacent else []
    after = rest[len(before) :]
    order = [*before, *dims, *after]
    moved = dest if adjacent else dest.permute(order)
    sizes = [dest.shape[d] for d in dims]
    b, s, d_ = (product([dest.shape[d] for d in group]) for group in (before, dims, after))
    n = product(shape)
    result_shape = [*(dest.shape[d] for d in before), *shape, *(dest.shape[d] for d in after)]
    index = tensors[0].reshape(-1) if len(tensors) == 1 else segment.linear_index(tensors, sizes, wrap, op)
    if index.dtype not in (torch.int32, torch.int64):
        index = index.to(torch.int64)
    moved_shape = moved.shape
    inverse = [order.index(d) for d in range(dest.dim())]

    def restore(result: Tensor) -> Tensor:
        shaped = result.reshape(moved_shape)
        return shaped if adjacent else shaped.permute(inverse)

    return Canonical(
        dest=moved.reshape(b, s, d_),
        index=index,
        source=values.expand(result_shape).reshape(b, n, d_),
        num_segments=s,
        restore=restore,
        spread=lambda rows: rows.reshape(result_shape),
    )


def expand_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace boolean masks by the coordinates of their true elements, row-major.

    Their number is read off the index tensors beside them, so the result has a known size. Without masks, the same
    list comes back.
    """
    out: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASK_DTYPES:
            out.append(index)
            continue
        count = next(i.shape[-1] for i in indices if i is not None and i.dtype not in MASK_DTYPES and not is_single(i))
        coordinates = torch.ops.aten.nonzero_static(index != 0, size=count, fill_value=0)
        out.extend(coordinates[:, d] for d in range(index.dim()))
    return out


def is_single(value: Tensor) -> bool:
    """Whether a tensor is known to hold one element."""
    return all(is_one(size) for size in value.shape)


def is_mask(node: Any) -> bool:
    """Whether an index argument is a boolean (or uint8) mask."""
    value = tensor_of(node)
    return value is not None and value.dtype in MASK_DTYPES


def index_shape(indices: Sequence[Any]) -> torch.Size:
    """The shape to which integer index nodes broadcast. Raises RuntimeError when they do not."""
    shapes = [value.shape for index in indices if (value := tensor_of(index)) is not None]
    shape: torch.Size = torch.broadcast_shapes(*shapes)
    return shape


def result_shape(dest: Tensor, indices: Sequence[Any]) -> list[Any] | None:
    """The shape of ``dest[indices]`` for integer index nodes, or None when they do not broadcast."""
    try:
        shape = index_shape(indices)
    except RuntimeError:
        return None
    dims = [d for d, index in enumerate(indices) if index is not None]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    rest = [dest.shape[d] for d in range(dest.dim()) if d not in dims]
    lead = dims[0] if adjacent else 0
    return [*rest[:lead], *shape, *rest[lead:]]


def index_dims(dest: Tensor, indices: Sequence[Any]) -> tuple[int, int]:
    """Where the index dimensions stand in the indexing result: first and one past the last."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    rank = max(value.dim() for index in indices if (value := tensor_of(index)) is not None)
    lead = dims[0] if adjacent else 0
    return lead, lead + rank


def check_values(node: fx.Node, values: Tensor, shape: Sequence[Any]) -> None:
    """Raise eager's error (as a Refusal) when ``values`` cannot be broadcast to an indexing result of ``shape``."""
    bad = values.dim() > len(shape)
    for have, want in zip(reversed(values.shape), reversed(shape), strict=False):
        bad = bad or (known_to_differ(have, want) and not is_one(have))
    if bad:
        raise Refusal(
            RuntimeError(
                f"{label(node)}: shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
                f"indexing result of shape {list(shape)}"
            )
        )


def constant_along_index(values: Tensor, shape: Sequence[Any], first: int, last: int) -> bool:
    """Whether every writer of one place carries equal values: ``values`` is broadcast over all index dimensions."""
    lead = len(shape) - values.dim()
    return all(d < lead or repeats(values, d - lead) for d in range(first, last))
