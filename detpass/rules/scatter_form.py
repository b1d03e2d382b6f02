"""``scatter``-like arguments brought to canonical form, shared by the scatter rules.

``index`` gives, for each element of ``src``, its place along ``dim``; the other coordinates are its own. When the
index is the same for all of them (it was expanded, as graph libraries do) whole rows move together:
``[B, N, D]`` with one index of length ``N``. Otherwise each element is a row of its own and the index is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.errors import Refusal
from detpass.graph_query import int_argument, is_empty, label, repeats, tensor_of
from detpass.rules.canonical import product


@dataclass(frozen=True)
class Scatter:
    """A scatter in canonical form and the way back; see ``canonical.Canonical``."""

    dest: Tensor
    index: Tensor
    source: Tensor
    num_segments: Any
    restore: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]


def row_index(index: Tensor, dest: Tensor, dim: int) -> bool:
    """Whether the index is the same along all dimensions but ``dim`` and spans the destination there."""
    return all(d == dim or (str(index.shape[d]) == str(dest.shape[d]) and repeats(index, d)) for d in range(dest.dim()))


def check_shapes(node: fx.Node, dest: Tensor, index: Tensor, src: Tensor | None, dim: int) -> None:
    """Raise eager's error (as a Refusal) for shapes that eager refuses."""
    ranks = [max(t.dim(), 1) for t in (dest, index, src) if t is not None]
    if len(set(ranks)) > 1 and not is_empty(index):
        raise Refusal(
            RuntimeError(
                f"{label(node)}: Index tensor must have the same number of dimensions as self and src tensors: "
                f"self {list(dest.shape)}, index {list(index.shape)}"
                + (f", src {list(src.shape)}" if src is not None else "")
            )
        )
    for d in range(index.dim()):
        size: Any = index.shape[d]
        if not isinstance(size, int) or is_empty(index):
            continue
        own = dest.shape[d] if d != dim and dest.dim() else None
        other = src.shape[d] if src is not None and src.dim() else None
        if (isinstance(own, int) and size > own) or (isinstance(other, int) and size > other):
            raise Refusal(
                RuntimeError(
                    f"{label(node)}: Expected index {list(index.shape)} to be no larger than self {list(dest.shape)} "
                    f"apart from dimension {dim}"
                    + (f" and to be no larger size than src {list(src.shape)}" if src is not None else "")
                )
            )


def canonical_scatter(dest: Tensor, dim: int, index: Tensor, src: Tensor, rows: bool, op: str) -> Scatter:
    """Bring ``dest.scatter(dim, index, src)`` to canonical form. ``rows`` is what :func:`row_index` said."""
    shape = dest.shape
    if dest.dim() == 0:
        dest = dest.reshape(1)
    if index.dim() == 0:
        index, src = index.reshape(1), src.reshape(1)
    src = _trim(src, index)
    if rows:
        before, after = product(dest.shape[:dim]), product(dest.shape[dim + 1 :])
        one = index
        for d in reversed(range(dest.dim())):
            if d != dim:
                one = one.select(d, 0)
        source = src.reshape(before, index.shape[dim], after)
        return Scatter(
            dest=dest.reshape(before, dest.shape[dim], after),
            index=_integer(one),
            source=source,
            num_segments=dest.shape[dim],
            restore=lambda result: result.reshape(shape),
            spread=lambda out: out.reshape(index.shape),
        )
    linear = segment.linear_index(coordinates(index, dim), list(dest.shape), False, op)
    return Scatter(
        dest=dest.reshape(1, -1, 1),
        index=linear,
        source=src.reshape(1, -1, 1),
        num_segments=product(dest.shape),
        restore=lambda result: result.reshape(shape),
        spread=lambda out: out.reshape(index.shape),
    )


def coordinates(index: Tensor, dim: int) -> list[Tensor]:
    """One index tensor a dimension: the element's own coordinates, and ``index`` along ``dim``."""
    out = []
    for d in range(index.dim()):
        if d == dim:
            out.append(_integer(index))
        else:
            own = torch.arange(index.shape[d], device=index.device)
            out.append(own.reshape([-1 if k == d else 1 for k in range(index.dim())]))
    return out


def _trim(src: Tensor, index: Tensor) -> Tensor:
    for d in range(index.dim()):
        if str(src.shape[d]) != str(index.shape[d]):
            src = src.narrow(d, 0, index.shape[d])
    return src


def _integer(index: Tensor) -> Tensor:
    return index if index.dtype in (torch.int32, torch.int64) else index.to(torch.int64)


def scatter_dim(node: fx.Node) -> int:
    """The dimension of a scatter-like node, counted from the front."""
    dest = tensor_of(node.args[0])
    assert dest is not None
    return int_argument(node, "dim") % max(dest.dim(), 1)
