"""Backward of torchvision's pooling over regions of interest: a segment sum over the cells that regions share.

Before::

    grad_input = torchvision._roi_align_backward(grad, rois, scale, ..., sampling_ratio, aligned)   # atomic on CUDA

After, with ``ratio * ratio`` sampling points in each bin and four cells around each point::

    grad_input = segment_reduce(grad[bin] * weight[point, cell] / ratio ** 2, cell[point, cell])

The position-sensitive form reads another group of channels in each bin: the bin is part of the cell's number there.
``roi_pool`` recorded the cell that each value came from: one segment sum over those numbers. Additions to a cell
follow regions, bins row-major, points and cells of a point in order. The formulas are those of torchvision's
``csrc/ops/cuda/roi_align_kernel.cu`` and its neighbours. On a CPU its kernels are one loop on one thread.

``sampling_ratio <= 0`` makes the number of points depend on the data and is not covered; nor is half precision, whose
places the kernels round in a way that compiled code does not. torchvision need not be installed.

Neighbours: ``grid_sample.py`` (a grid that is data), ``max_pooling.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import arguments, label, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict

ON_ONE_THREAD = Safe("torchvision's CPU kernel is a loop on one thread")
SIZES = ("batch_size", "channels", "height", "width")


def _overloads(*names: str) -> tuple[Any, ...]:
    """Operators of torchvision; for one that is not loaded its name, which is no node's target."""
    library = torch.ops.torchvision
    return tuple(
        getattr(library, name).default if hasattr(library, name) else f"torchvision.{name}.default" for name in names
    )


class RoiAlignBackward(Rule):
    """``_roi_align_backward`` and ``_ps_roi_align_backward`` with a given number of sampling points."""

    name = "roi_align_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return _overloads("_roi_align_backward", "_ps_roi_align_backward")

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_ONE_THREAD
        given = arguments(node)
        grad = tensor_of(given["grad"])
        if grad is None or grad.dtype not in (torch.float32, torch.float64):
            return NoMatch(Inapplicable.DTYPE, node, "places are computed in float32 and float64 only")
        if given["sampling_ratio"] <= 0:
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the number of sampling points depends on the regions")
        sensitive = "channel_mapping" in given
        parameters = {
            "scale": given["spatial_scale"],
            "ratio": given["sampling_ratio"],
            "aligned": sensitive or given["aligned"],
            "sensitive": sensitive,
            "op": label(node),
        }
        operands = (given["grad"], given["rois"], *(given[name] for name in SIZES))
        return Match(operands, "regions share cells; they are data", parameters, Treatment.SEGMENT)

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
        regions, depth, rows, columns = grad.shape
        x0, y0, x1, y1 = (rois[:, 1:] * scale - (0.5 if aligned else 0.0)).unbind(1)
        # The position-sensitive kernel takes malformed regions as they are, and so does an aligned one.
        least = None if aligned else 1.0
        y = _points(y0, y1, least, rows, ratio, height)  # [regions, rows, 1, ratio, 1, 2, 1]
        x = _points(x0, x1, least, columns, ratio, width)
        y, x = y.spread(2, 4, 6), x.spread(1, 3, 5)

        groups = rows * columns if sensitive else 1
        group = rois[:, 0].to(torch.int64).reshape(-1, 1, 1) * groups
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
        return (
            total.reshape(batch, groups, height, width, depth)
            .permute(0, 4, 1, 2, 3)
            .reshape(batch, channels, height, width)
        )


class RoiPoolBackward(Rule):
    """``_roi_pool_backward``: each value goes to the cell that the forward recorded, or nowhere."""

    name = "roi_pool_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return _overloads("_roi_pool_backward")

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


def _points(start: Tensor, end: Tensor, least: float | None, bins: Any, ratio: int, cells: Any) -> _Points:
    extent = end - start
    if least is not None:
        extent = extent.clamp(min=least)
    step = (extent / bins).reshape(-1, 1, 1)
    of_bin = torch.arange(bins, device=start.device, dtype=start.dtype).reshape(1, -1, 1)
    of_point = torch.arange(ratio, device=start.device, dtype=start.dtype) + 0.5
    place = start.reshape(-1, 1, 1) + of_bin * step + of_point * step / ratio
    inside = (place >= -1) & (place <= cells)
    place = torch.where(inside, place.clamp(min=0), 0)
    low = place.to(torch.int64).clamp(max=cells - 1)
    high = (low + 1).clamp(max=cells - 1)
    after = torch.where(low >= cells - 1, 0, place - low)
    weight = torch.stack((1 - after, after), -1)
    return _Points(torch.stack((low, high), -1), weight, inside.unsqueeze(-1).expand(weight.shape))
