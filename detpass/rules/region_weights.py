"""With what weight the bins of regions read the cells of one axis, as matrices whose sizes no data decides.

Two kinds of bins. *Sampled* ones (``roi_align`` with ``sampling_ratio <= 0``) have ``ceil(bin)`` sampling points each,
at equal distances, and each point is shared between the two cells around it. ``n >= 2`` points of a bin are more than
``(n - 1) / n`` cells apart, so few of them are within a cell's reach: the sum over all points is one over the
``CANDIDATES`` around the cell. *Covering* ones (``ps_roi_pool``) read a rectangle of whole cells.

The formulas are those of torchvision's ``csrc/ops/cuda/roi_align_kernel.cu`` and ``ps_roi_pool_kernel.cu``, which
compute places in the operands' dtype: results of half precision are rounded after each operation.

Neighbours: ``region_products.py`` (what the matrices are for), ``kernel_rounding.py``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detpass.rules.kernel_rounding import quotient, rounding, size_as_tensor

CANDIDATES = 8
"""All points of a bin that has no more. Else points are over 8/9 of a cell apart, at most three of them are in reach,
and candidates may start up to two cells away from where exact arithmetic would have them."""
AHEAD = 2
"""Candidates before the first that should be in reach."""
LARGEST = 2.0**31 - 128
"""The largest int32 that is a float32."""


@dataclass(frozen=True)
class Extents:
    """Where regions lie on one axis, in cells; float32 or float64."""

    start: Tensor
    """``[r]``."""
    step: Tensor
    """``[r]``: the length of a bin; negative or NaN for a region that is none."""
    dtype: torch.dtype
    """The dtype of the operands, by which places are rounded."""


def in_dtype(value: float, dtype: torch.dtype) -> float:
    """``value`` as the kernels hold it, who take it in the operands' dtype."""
    return float(struct.unpack("e", struct.pack("e", value))[0]) if dtype == torch.float16 else value


def extents(
    low: Tensor, high: Tensor, bins: Any, scale: float, offset: float, least: float | None, dtype: torch.dtype
) -> Extents:
    """Regions from ``low`` to ``high``: ``float[r]``, scaled and moved back by ``offset``, of ``least`` size."""
    rounded = rounding(dtype)
    scale = in_dtype(scale, dtype)
    start, end = (rounded(rounded(corner * scale) - offset) for corner in (low, high))
    extent = rounded(end - start)
    if least is not None:
        extent = extent.clamp(min=least)
    return Extents(start, rounded(quotient(extent, size_as_tensor(bins, extent.device))), dtype)


def bin_starts(axis: Extents, bins: Any) -> Tensor:
    """``[r, bins]``: where bins start."""
    rounded = rounding(axis.dtype)
    number = torch.arange(bins, device=axis.start.device, dtype=axis.start.dtype)
    return rounded(axis.start.unsqueeze(1) + rounded(number * axis.step.unsqueeze(1)))


def places(start: Tensor, step: Tensor, point: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Where sampling point ``point`` of ``count`` lies in the bin of length ``step`` at ``start``; they broadcast.

    ``dtype`` is that of the operands.
    """
    rounded = rounding(dtype)
    along = rounded(rounded(point + 0.5) * step)
    # A last bit matters where it decides how half precision is rounded, or whether a point lies beyond the border.
    return rounded(start + rounded(quotient(along, count)))


def point_counts(axis: Extents) -> Tensor:
    """``float[r]``: how many sampling points the bins of a region have along the axis: whole numbers, or NaN."""
    return axis.step.ceil().clamp(0, LARGEST)


def sampled(axis: Extents, bins: Any, cells: Any) -> Tensor:
    """``[r, bins, cells]``: the sum of a cell's weights over the sampling points of a bin, ``point_counts`` of them.

    Exact to rounding while rounding moves places by less than two cells: below 2**22 in float32, 2**51 in float64 and
    2**11 in float16. A region without points, or one that is not a number, has weight zero.
    """
    shape = (-1, 1, 1, 1)
    start, step = bin_starts(axis, bins)[:, :, None, None], axis.step.reshape(shape)
    count = point_counts(axis).reshape(shape)
    cell = torch.arange(cells, device=start.device, dtype=start.dtype).reshape(1, 1, -1, 1)
    candidate = torch.arange(CANDIDATES, device=start.device, dtype=start.dtype)

    first = ((cell - 1 - start) * count / step - 0.5).floor() - AHEAD
    point = torch.minimum(first, count - CANDIDATES).clamp(min=0) + candidate
    place = places(start, step, point, rounding(axis.dtype)(count), axis.dtype)
    inside = (place >= -1) & (place <= cells) & (point < count)
    # The cells at the borders take all of a point beyond their middle.
    place = place.clamp(0, cells - 1)
    share = torch.minimum(1 - (place - cell), place - (cell - 1)).clamp(min=0)
    return torch.where(inside, share, 0).sum(-1)


@dataclass(frozen=True)
class Cover:
    """The cells that bins cover along one axis."""

    mask: Tensor
    """``bool[r, bins, cells]``."""
    count: Tensor
    """``int64[r, bins]``: how many of them there are."""


def covering(low: Tensor, high: Tensor, bins: Any, scale: float, cells: Any, dtype: torch.dtype) -> Cover:
    """Which cells the bins of regions from ``low`` to ``high``, ``float[r]``, cover: at least one each before clipping.

    Corners that are not numbers count as 0, as in the conversion that CUDA makes.
    """
    rounded = rounding(dtype)
    scale = in_dtype(scale, dtype)
    start, end = (_nearest(rounded(corner * scale)) for corner in (low, high))
    extent = rounded((end - start).clamp(min=1).to(low.dtype))
    step = rounded(quotient(extent, size_as_tensor(bins, low.device))).unsqueeze(1)
    number = torch.arange(bins, device=low.device, dtype=low.dtype)
    first = rounded(number * step).floor().to(torch.int64) + start.unsqueeze(1)
    end_of_bin = rounded((number + 1) * step).ceil().to(torch.int64) + start.unsqueeze(1)
    first, end_of_bin = first.clamp(0, cells).unsqueeze(-1), end_of_bin.clamp(0, cells).unsqueeze(-1)
    cell = torch.arange(cells, device=low.device)
    return Cover((cell >= first) & (cell < end_of_bin), (end_of_bin - first).squeeze(-1))


def _nearest(x: Tensor) -> Tensor:
    """``int64``: the nearest whole number of the float32 nearest to ``x``, halves away from zero; NaN is 0."""
    x = x.to(torch.float32)
    x = torch.where(x.isnan(), 0, x).clamp(-LARGEST, LARGEST)
    whole = x.trunc()
    away = torch.where((x - whole).abs() >= 0.5, torch.sign(x), 0)
    return (whole + away).to(torch.int64)
