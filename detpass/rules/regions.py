"""Backward of torchvision's pooling over regions of interest: a segment sum over shared cells, or matrix products.

Before::

    grad_input = torchvision._roi_align_backward(grad, rois, scale, ..., sampling_ratio, aligned)   # atomic on CUDA

After, with ``ratio * ratio`` sampling points in each bin and four cells around each point::

    grad_input = segment_reduce(grad[bin] * weight[point, cell] / ratio ** 2, cell[point, cell])

``sampling_ratio <= 0``, torchvision's default, makes the number of points depend on the regions. Then, with the weights
of ``region_weights.py``, whose sizes do not, and the two products of ``region_products.py``::

    grad_input = spread(grad / points, row_weights, column_weights, sample)

So it is for ``ps_roi_pool``, whose bins are rectangles of cells. The position-sensitive forms read another group of
channels in each bin. ``roi_pool`` recorded the cell that each value came from: one segment sum over those numbers.
In segment sums additions to a cell follow regions, bins row-major, points and cells of a point in order. The formulas
are those of torchvision's ``csrc/ops/cuda``; half precision, which they compute places in, sums in float32 here. On a
CPU its kernels are one loop on one thread. torchvision need not be installed.

Neighbours: ``deformable.py``, ``grid_sample.py`` (a grid that is data), ``max_pooling.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import arguments, label
from detpass.rule import Match, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.kernel_rounding import size_as_tensor
from detpass.rules.plane_scatter import accumulation_dtype
from detpass.rules.region_products import spread
from detpass.rules.region_weights import Extents, bin_starts, covering, extents, places, point_counts, sampled

ON_ONE_THREAD = Safe("torchvision's CPU kernel is a loop on one thread")
SIZES = ("batch_size", "channels", "height", "width")


def overloads(*names: str) -> tuple[Any, ...]:
    """Operators of torchvision; for one that is not loaded its name, which is no node's target."""
    library = torch.ops.torchvision
    return tuple(
        getattr(library, name).default if hasattr(library, name) else f"torchvision.{name}.default" for name in names
    )


class RoiAlignBackward(Rule):
    """``_roi_align_backward`` and ``_ps_roi_align_backward``, the number of sampling points given or adaptive."""

    name = "roi_align_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return overloads("_roi_align_backward", "_ps_roi_align_backward")

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_ONE_THREAD
        given = arguments(node)
        sensitive = "channel_mapping" in given
        parameters = {
            "scale": given["spatial_scale"],
            "ratio": given["sampling_ratio"],
            "aligned": sensitive or given["aligned"],
            "sensitive": sensitive,
            "op": label(node),
        }
        operands = (given["grad"], given["rois"], *(given[name] for name in SIZES))
        if given["sampling_ratio"] > 0:
            return Match(operands, "regions share cells; they are data", parameters, Treatment.SEGMENT)
        reason = "each bin's weights are the product of those of rows and of columns"
        return Match(operands, reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self,
        grad: Tensor,
        rois: Tensor,
        batch: Any,
        channels: Any,
        height: Any,
        width: Any,
        *,
        scale: float,
        ratio: int,
        aligned: bool,
        sensitive: bool,
        op: str,
    ) -> Tensor:
        regions = _Regions(rois.to(accumulation_dtype(rois.dtype)), rois.dtype)
        wide = grad.to(accumulation_dtype(grad.dtype))
        # The position-sensitive kernel takes malformed regions as they are, and so does an aligned one.
        y, x = regions.extents(grad.shape[2:], scale, 0.5 if aligned else 0.0, None if aligned else 1.0)
        if ratio > 0:
            total = _at_points(wide, regions.numbers, y, x, batch, height, width, ratio, sensitive, op)
        else:
            total = _adaptive(wide, segment.linear_index([regions.numbers], [batch], False, op), y, x, batch, height,
                              width, sensitive)  # fmt: skip
        return total.reshape(batch, channels, height, width).to(grad.dtype)


def _at_points(
    grad: Tensor,
    sample: Tensor,
    y_axis: Extents,
    x_axis: Extents,
    batch: Any,
    height: Any,
    width: Any,
    ratio: int,
    sensitive: bool,
    op: str,
) -> Tensor:
    """A segment sum over the cells around ``ratio * ratio`` points in each bin."""
    regions, depth, rows, columns = grad.shape
    y = _points(y_axis, rows, ratio, height)  # [regions, rows, 1, ratio, 1, 2, 1]
    x = _points(x_axis, columns, ratio, width)
    y, x = y.spread(2, 4, 6), x.spread(1, 3, 5)

    groups = rows * columns if sensitive else 1
    group = sample.reshape(-1, 1, 1) * groups
    if sensitive:
        group = group + torch.arange(rows * columns, device=grad.device).reshape(1, rows, columns)
    group = group.expand(regions, rows, columns).reshape(regions, rows, columns, 1, 1, 1, 1)
    cell = (group * height + y.cell) * width + x.cell
    index = torch.where(y.inside & x.inside, cell, segment.skipped_value(torch.int64))

    values = grad.permute(0, 2, 3, 1).reshape(regions, rows, columns, 1, 1, 1, 1, depth)
    shares = values * (y.weight * x.weight).unsqueeze(-1) / (ratio * ratio)
    total = segment.segment_reduce(
        shares.reshape(1, -1, depth), index.reshape(-1), batch * groups * height * width, "sum", False, op
    )
    return total.reshape(batch, groups, height, width, depth).permute(0, 4, 1, 2, 3)


def _adaptive(
    grad: Tensor, sample: Tensor, y: Extents, x: Extents, batch: Any, height: Any, width: Any, sensitive: bool
) -> Tensor:
    """Two products with the weights of rows and columns; ``sample`` is checked."""
    bins_h, bins_w = grad.shape[2:]
    points = (point_counts(y) * point_counts(x)).reshape(-1, 1, 1, 1)
    share = torch.where(points > 0, grad / points, 0)
    return spread(share, sampled(y, bins_h, height), sampled(x, bins_w, width), sample, batch, sensitive)


class PsRoiPoolBackward(Rule):
    """``_ps_roi_pool_backward``: each bin's gradient is shared evenly between the cells of its rectangle."""

    name = "ps_roi_pool_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return overloads("_ps_roi_pool_backward")

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_ONE_THREAD
        given = arguments(node)
        parameters = {"scale": given["spatial_scale"], "op": label(node)}
        operands = (given["grad"], given["rois"], *(given[name] for name in SIZES))
        return Match(operands, "a bin covers some rows and some columns", parameters, Treatment.CLOSED_FORM)

    def replacement(
        self,
        grad: Tensor,
        rois: Tensor,
        batch: Any,
        channels: Any,
        height: Any,
        width: Any,
        *,
        scale: float,
        op: str,
    ) -> Tensor:
        regions = _Regions(rois.to(accumulation_dtype(rois.dtype)), rois.dtype)
        wide = grad.to(accumulation_dtype(grad.dtype))
        x0, y0, x1, y1 = regions.corners
        rows = covering(y0, y1, grad.shape[2], scale, height, rois.dtype)
        columns = covering(x0, x1, grad.shape[3], scale, width, rois.dtype)
        area = rows.count.unsqueeze(2) * columns.count.unsqueeze(1)  # [regions, rows, columns]
        share = wide / area.clamp(min=1).unsqueeze(1)
        sample = segment.linear_index([regions.numbers], [batch], False, op)
        total = spread(share, rows.mask.to(wide.dtype), columns.mask.to(wide.dtype), sample, batch, True)
        return total.reshape(batch, channels, height, width).to(grad.dtype)


class RoiPoolBackward(Rule):
    """``_roi_pool_backward``: each value goes to the cell that the forward recorded, or nowhere."""

    name = "roi_pool_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return overloads("_roi_pool_backward")

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_ONE_THREAD
        given = arguments(node)
        operands = (given["grad"], given["rois"], given["argmax"], *(given[name] for name in SIZES))
        return Match(operands, "regions share cells; the recorded indices are data", {"op": label(node)})

    def replacement(
        self, grad: Tensor, rois: Tensor, argmax: Tensor, batch: Any, channels: Any, height: Any, width: Any, *, op: str
    ) -> Tensor:
        sample = rois[:, 0].to(torch.int64).reshape(-1, 1, 1, 1)
        plane = sample * channels + torch.arange(channels, device=grad.device).reshape(1, -1, 1, 1)
        index = torch.where(argmax < 0, segment.skipped_value(torch.int64), plane * (height * width) + argmax)
        total = segment.segment_reduce(
            grad.reshape(1, -1, 1), index.reshape(-1), batch * channels * height * width, "sum", False, op
        )
        return total.reshape(batch, channels, height, width)


@dataclass(frozen=True)
class _Regions:
    """Regions of samples, ``[r, 5]``: a sample's number and two corners."""

    values: Tensor
    """In an accumulation dtype."""
    dtype: torch.dtype
    """What they came in, which the kernels compute places in."""

    @property
    def numbers(self) -> Tensor:
        """``int64[r]``: the sample of each region, not checked."""
        return self.values[:, 0].to(torch.int64)

    @property
    def corners(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[r]`` each: x and y of the first corner and of the second."""
        x0, y0, x1, y1 = self.values[:, 1:].unbind(1)
        return x0, y0, x1, y1

    def extents(self, bins: Any, scale: float, offset: float, least: float | None) -> tuple[Extents, Extents]:
        """Along the rows (y) and along the columns (x) of cells."""
        x0, y0, x1, y1 = self.corners
        return (
            extents(y0, y1, bins[0], scale, offset, least, self.dtype),
            extents(x0, x1, bins[1], scale, offset, least, self.dtype),
        )


@dataclass(frozen=True)
class _Points:
    """The two cells around each sampling point along one axis: ``[regions, bins, points, 2]`` each."""

    cell: Tensor
    weight: Tensor
    inside: Tensor

    def spread(self, *dims: int) -> _Points:
        """With dimensions of size one inserted, for the other axis."""

        def one(tensor: Tensor) -> Tensor:
            for dim in dims:
                tensor = tensor.unsqueeze(dim)
            return tensor

        return _Points(one(self.cell), one(self.weight), one(self.inside))


def _points(axis: Extents, bins: Any, ratio: int, cells: Any) -> _Points:
    point = torch.arange(ratio, device=axis.start.device, dtype=axis.start.dtype)
    start = bin_starts(axis, bins).unsqueeze(-1)
    place = places(start, axis.step.reshape(-1, 1, 1), point, size_as_tensor(ratio, start.device), axis.dtype)
    inside = (place >= -1) & (place <= cells)
    place = torch.where(inside, place.clamp(min=0), 0)
    low = place.to(torch.int64).clamp(max=cells - 1)
    high = (low + 1).clamp(max=cells - 1)
    after = torch.where(low >= cells - 1, 0, place - low)
    weight = torch.stack((1 - after, after), -1)
    return _Points(torch.stack((low, high), -1), weight, inside.unsqueeze(-1).expand(weight.shape))
