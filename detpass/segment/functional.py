"""What rules call: accumulation, counting, last positions and index arithmetic as functions of tensors.

They run eagerly and under ``make_fx`` with fake tensors and symbolic sizes. The device for which code is generated
chooses the form (``form_for``): one opaque operator of ``ops.py``, or a stable sort followed by the Triton kernel of
``triton_kernels.py``. The form never changes a bit of a result.

Index values: with ``wrap`` the legal range is ``[-S, S)`` and a negative value wraps once, without it ``[0, S)``;
``SKIPPED`` (the smallest value of the index dtype) leaves its row out in every mode; anything else raises IndexError
that names ``op``, the value, its position and the size (on a GPU: a device-side assertion).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from detpass.segment import ops as ops  # registers the operators
from detpass.segment import traced
from detpass.segment.reference import Reduction, check_supported

_assumed_device: ContextVar[torch.device | None] = ContextVar("detpass_assumed_device", default=None)


class Form(enum.Enum):
    """How an accumulation is expressed in a graph."""

    OPERATOR = "operator"
    """One opaque ``detpass::*`` operator."""
    TRITON = "triton"
    """Stable sort, segment offsets and the Triton segment sum, visible to the compiler."""


@contextmanager
def assume_device(device: torch.device | str | None) -> Iterator[None]:
    """Inside, emit the form for ``device`` whatever device the tensors are on (None: the tensors' own)."""
    token = _assumed_device.set(None if device is None else torch.device(device))
    try:
        yield
    finally:
        _assumed_device.reset(token)


def form_for(device: torch.device, dtype: torch.dtype | None = None, reduce: str = "sum") -> Form:
    """Return the form for tensors on ``device``. THE dispatch: every function below asks here and nowhere else.

    ``dtype`` and ``reduce`` name the accumulation (None: work on indices alone). Products of complex numbers have no
    Triton kernel; on a GPU the operator then runs ``fallback.py``.
    """
    target = _assumed_device.get() or device
    without_kernel = dtype is not None and dtype.is_complex and reduce == "prod"
    return Form.TRITON if target.type == "cuda" and not without_kernel else Form.OPERATOR


def _call(operator: Callable[..., Any], *arguments: Any) -> Tensor:
    result: Tensor = operator(*arguments)
    return result


def segment_reduce(
    source: Tensor, index: Tensor, num_segments: int, reduce: Reduction = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    """Return the totals of the rows of ``source`` by segment.

    ``source: [B, N, D]``, ``index: int32|int64[N]``, result ``[B, num_segments, D]`` in the dtype of ``source``. A
    segment without members gets the identity: 0, 1, the lowest or the highest value. The order of the additions is
    the canonical one of ``reference.py``. Raises IndexError (see above), TypeError for an unsupported dtype.
    """
    check_supported(source.dtype, reduce)
    if form_for(source.device, source.dtype, reduce) is Form.TRITON:
        perm, offsets = traced.sorted_plan(index, num_segments, wrap, op)
        return planned_reduce(source, perm, offsets, reduce)
    return _call(torch.ops.detpass.segment_reduce.default, source, index, num_segments, reduce, wrap, op)


def segment_accumulate(
    dest: Tensor, index: Tensor, source: Tensor, reduce: Reduction = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    """Return ``dest`` combined with the totals of the rows of ``source`` by segment.

    ``dest: [B, S, D]``, ``index: int32|int64[N]``, ``source: [B, N, D]`` of the dtype of ``dest``, result
    ``[B, S, D]``.
    A segment without members keeps ``dest`` bit for bit; otherwise ``dest`` and the total are combined in the
    accumulation dtype and rounded once. ``amax`` and ``amin`` let NaN win and take ``-0.0 < +0.0``.
    """
    check_supported(source.dtype, reduce)
    if form_for(source.device, source.dtype, reduce) is Form.TRITON:
        return traced.accumulate(dest, index, source, reduce, wrap, op)
    return _call(torch.ops.detpass.segment_accumulate.default, dest, index, source, reduce, wrap, op)


def segment_count(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    """Return ``int64[num_segments]``: how many rows of ``index: int32|int64[N]`` name each segment."""
    if form_for(index.device) is Form.TRITON:
        return traced.segment_count(index, num_segments, wrap, op)
    return _call(torch.ops.detpass.segment_count.default, index, num_segments, wrap, op)


def last_positions(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    """Return ``int64[N]``: for each row the largest position with the same (wrapped) index; skipped rows their own.

    With it "the last write wins": all writers of one place write the value of the last of them.
    """
    if form_for(index.device) is Form.TRITON:
        return traced.last_positions(index, num_segments, wrap, op)
    return _call(torch.ops.detpass.last_positions.default, index, num_segments, wrap, op)


def linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool = False, op: str = "") -> Tensor:
    """Return ``int64[n]``: the broadcast ``indices`` checked against ``sizes`` and combined row-major, flattened.

    A position where any component is skipped is ``SKIPPED``.
    """
    if form_for(indices[0].device) is Form.TRITON:
        return traced.linear_index(indices, sizes, wrap, op)
    return _call(torch.ops.detpass.linear_index.default, list(indices), list(sizes), wrap, op)


def plan(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> tuple[Tensor, Tensor]:
    """Return ``perm [N]`` and ``offsets [S + 1]`` for accumulations that share ``index``.

    ``perm[offsets[s]:offsets[s + 1]]`` are the members of segment ``s`` in increasing position; skipped rows come
    after all of them. On a CPU both are int32 while ``N < 2**31``, otherwise int64; on CUDA ``perm`` is int64.
    """
    if form_for(index.device) is Form.TRITON:
        return traced.sorted_plan(index, num_segments, wrap, op)
    perm, offsets = torch.ops.detpass.plan.default(index, num_segments, wrap, op)
    return perm, offsets


def planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: Reduction = "sum") -> Tensor:
    """``segment_reduce`` with the ``perm`` and ``offsets`` of ``plan``."""
    check_supported(source.dtype, reduce)
    if form_for(source.device, source.dtype, reduce) is Form.TRITON:
        return traced.planned_reduce(source, perm, offsets, reduce)
    return _call(torch.ops.detpass.planned_reduce.default, source, perm, offsets, reduce)


def planned_accumulate(
    dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: Reduction = "sum"
) -> Tensor:
    """``segment_accumulate`` with the ``perm`` and ``offsets`` of ``plan``."""
    check_supported(source.dtype, reduce)
    if form_for(source.device, source.dtype, reduce) is Form.TRITON:
        return traced.planned_accumulate(dest, perm, offsets, source, reduce)
    return _call(torch.ops.detpass.planned_accumulate.default, dest, perm, offsets, source, reduce)
