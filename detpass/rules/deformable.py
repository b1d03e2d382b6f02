"""Backward of torchvision's deformable convolution: a segment sum for the input's gradient, gathers for the others.

Before::

    grads = torchvision._deform_conv2d_backward(grad, input, weight, offset, mask, bias, stride ...)   # atomic on CUDA

After, with a point for each tap of the kernel and output position, moved by ``offset``, and four cells around it::

    to_columns  = weight^T @ grad                            # [channels, tap, position]
    grad_input  = segment_reduce(to_columns[point] * mask[point] * share[point, cell], cell[point, cell])
    grad_offset = sum over a group's channels of to_columns * mask * slope of the sampled value
    grad_mask   = sum over a group's channels of to_columns * sampled value
    grad_weight = grad @ (mask * sampled value)^T;  grad_bias = sum of grad

Only the first of torchvision's gradients is atomic, but its operator computes them together. What nobody uses is not
computed. Additions to a cell follow taps, output positions row-major and the four cells of a point. The formulas are
those of torchvision's ``csrc/ops/cuda/deform_conv2d_kernel.cu``; half precision, in which it rounds points, sums in
float32 here. On a CPU its kernels are loops on one thread.

Neighbours: ``regions.py``, ``grid_sample.py`` (the same with one grid for all channels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from detpass import segment
from detpass.graph_query import arguments, known_to_differ, label, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.kernel_rounding import rounding
from detpass.rules.plane_scatter import accumulation_dtype
from detpass.rules.regions import ON_ONE_THREAD, overloads

MOST_SHARES = 1 << 27
"""Products of the segment sum at a time: 512 MiB in float32; channels are taken in blocks."""
ASSUMED = 1024
"""Stands for a size that is unknown at compile time when blocks are chosen."""

TENSORS = ("grad", "input", "weight", "offset", "mask", "bias")
AXES = ("stride", "pad", "dilation")
REFUSED = Safe("torchvision's forward raises an error for operands of these sizes")


class DeformConv2dBackward(Rule):
    """``_deform_conv2d_backward``, with and without a mask, for all groups, strides, paddings and dilations."""

    name = "deform_conv2d_backward"

    @property
    def targets(self) -> tuple[Any, ...]:  # type: ignore[override]  # torchvision may be imported after detpass
        return overloads("_deform_conv2d_backward")

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return ON_ONE_THREAD
        given = arguments(node)
        shapes = [None if (tensor := tensor_of(given[name])) is None else tensor.shape for name in TENSORS]
        groups, offset_groups = _value(given["groups"]), _value(given["offset_groups"])
        if any(value is None for value in (*shapes, groups, offset_groups)):
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        if _are_refused(shapes, groups, offset_groups, given["use_mask"]):
            return REFUSED
        operands = (
            *(given[name] for name in TENSORS),
            *((given[f"{name}_h"], given[f"{name}_w"]) for name in AXES),
            given["groups"],
            given["offset_groups"],
        )
        parameters = {"masked": bool(given["use_mask"]), "op": label(node)}
        return Match(operands, "points share cells; the offsets are data", parameters, Treatment.SEGMENT)

    def replacement(
        self,
        grad: Tensor,
        source: Tensor,
        weight: Tensor,
        offset: Tensor,
        mask: Tensor,
        bias: Tensor,
        stride: tuple[Any, Any],
        pad: tuple[Any, Any],
        dilation: tuple[Any, Any],
        groups: Any,
        offset_groups: Any,
        *,
        masked: bool,
        op: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype = accumulation_dtype(source.dtype)
        n, channels = source.shape[:2]
        taps, positions = weight.shape[2] * weight.shape[3], grad.shape[2] * grad.shape[3]
        outputs = weight.shape[0] // groups
        grouped = grad.to(dtype).reshape(n, groups, outputs, positions).permute(1, 2, 0, 3)
        grouped = grouped.reshape(groups, outputs, n * positions)
        kernel = weight.to(dtype).reshape(groups, outputs, weight.shape[1] * taps)
        to_columns = torch.matmul(kernel.transpose(1, 2), grouped)
        shape = (offset_groups, channels // offset_groups, taps, n, positions)
        to_columns = to_columns.reshape(shape).permute(3, 0, 1, 2, 4)  # [n, offset groups, channels, taps, positions]

        points = _points(offset, weight.shape[2:], grad.shape[2:], source.shape[2:], stride, pad, dilation,
                         offset_groups)  # fmt: skip
        factor = mask.to(dtype).reshape(n, offset_groups, 1, taps, positions) if masked else 1.0
        planes = source.to(dtype).reshape(
            n, offset_groups, channels // offset_groups, source.shape[2] * source.shape[3]
        )
        values = _read(planes, points)

        scaled = to_columns * factor
        slope_y, slope_x = _slopes(values, points)
        grad_offset = torch.stack([(scaled * slope_y).sum(2), (scaled * slope_x).sum(2)], 3)
        sampled = _sampled(values, points)
        grad_mask = (to_columns * sampled).sum(2).reshape(mask.shape) if masked else torch.zeros_like(mask)
        columns = (sampled * factor).permute(1, 2, 3, 0, 4).reshape(groups, weight.shape[1] * taps, n * positions)
        grad_weight = torch.matmul(grouped, columns.transpose(1, 2))
        return (
            _to_input(scaled, points, source, op),
            grad_weight.reshape(weight.shape).to(weight.dtype),
            grad_offset.reshape(offset.shape).to(offset.dtype),
            grad_mask.to(mask.dtype),
            grad.to(dtype).sum((0, 2, 3)).to(bias.dtype),
        )


def _value(size: Any) -> Any:
    """A size that the graph computes is a node."""
    return size.meta.get("val") if isinstance(size, fx.Node) else size


def _are_refused(shapes: list[Any], groups: Any, offset_groups: Any, masked: bool) -> bool:
    """Whether sizes that are known contradict each other: nothing checks them before the forward runs."""
    grad, source, weight, offset, mask, bias = shapes
    taps = offset_groups * weight[2] * weight[3]
    expected = [
        (source[1], weight[1] * groups),
        (weight[0] % groups, 0),
        (source[1] % offset_groups, 0),
        (offset[0], source[0]),
        (offset[1], 2 * taps),
        (grad[1], bias[0]),
        *(zip(mask, (source[0], taps, *offset[2:]), strict=False) if masked else ()),
    ]
    return any(known_to_differ(found, size) for found, size in expected)


@dataclass(frozen=True)
class _Points:
    """Where the taps read, ``[n, offset groups, 1, taps, positions]`` each; the four cells row-major."""

    cells: tuple[Tensor, ...]
    """``int64``: flat numbers; meaningless where not inside."""
    inside: tuple[Tensor, ...]
    """``bool``."""
    down: Tensor
    """How far a point is below the upper two cells."""
    right: Tensor
    """How far a point is from the left two cells."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The share of each cell in the sampled value."""
        up, left = 1 - self.down, 1 - self.right
        return up * left, up * self.right, self.down * left, self.down * self.right


def _points(
    offset: Tensor,
    kernel: Any,
    outputs: Any,
    cells: Any,
    stride: tuple[Any, Any],
    pad: tuple[Any, Any],
    dilation: tuple[Any, Any],
    offset_groups: Any,
) -> _Points:
    dtype, device = accumulation_dtype(offset.dtype), offset.device
    moved = offset.to(dtype).reshape(offset.shape[0], offset_groups, *kernel, 2, *outputs)
    low, part = [], []
    for axis in range(2):
        tap = torch.arange(kernel[axis], device=device) * dilation[axis] - pad[axis]
        output = torch.arange(outputs[axis], device=device) * stride[axis]
        at_rest = tap.reshape(-1, *[1] * (4 - axis)) + output.reshape(-1, *[1] * (1 - axis))
        place = rounding(offset.dtype)(at_rest.squeeze(2 - axis).to(dtype) + moved[:, :, :, :, axis])
        whole = place.floor()
        near = torch.where(whole.isnan(), -2, whole.clamp(-2, cells[axis]))
        shape = (offset.shape[0], offset_groups, 1, kernel[0] * kernel[1], outputs[0] * outputs[1])
        low.append(near.to(torch.int64).reshape(shape))
        part.append((place - whole).reshape(shape))
    numbers, inside = [], []
    for row in (low[0], low[0] + 1):
        for column in (low[1], low[1] + 1):
            numbers.append(row * cells[1] + column)
            inside.append((row >= 0) & (row < cells[0]) & (column >= 0) & (column < cells[1]))
    return _Points(tuple(numbers), tuple(inside), part[0], part[1])


def _read(source: Tensor, points: _Points) -> list[Tensor]:
    """The values of the four cells, ``[n, offset groups, channels, taps, positions]`` each; 0 outside.

    ``source: [n, offset groups, channels, cells]``.
    """
    values = []
    for number, inside in zip(points.cells, points.inside, strict=True):
        cell = torch.where(inside, number, 0).flatten(3)
        read = source.gather(3, cell.expand(-1, -1, source.shape[2], -1))
        values.append(torch.where(inside, read.unflatten(3, number.shape[3:]), 0))
    return values


def _sampled(values: list[Tensor], points: _Points) -> Tensor:
    weighted = [
        torch.where(inside, value * weight, 0)
        for value, weight, inside in zip(values, points.weights, points.inside, strict=True)
    ]
    return weighted[0] + weighted[1] + weighted[2] + weighted[3]


def _slopes(values: list[Tensor], points: _Points) -> tuple[Tensor, Tensor]:
    """The derivatives of the sampled value by a point's row and by its column."""
    upper_left, upper_right, lower_left, lower_right = values
    by_row = points.right * (lower_right - upper_right) + (1 - points.right) * (lower_left - upper_left)
    by_column = points.down * (lower_right - lower_left) + (1 - points.down) * (upper_right - upper_left)
    return by_row, by_column


def _to_input(scaled: Tensor, points: _Points, source: Tensor, op: str) -> Tensor:
    """``scaled: [n, offset groups, channels, taps, positions]`` to the gradient of ``source``."""
    n, offset_groups = scaled.shape[:2]
    size = source.shape[2] * source.shape[3]
    plane = torch.arange(n * offset_groups, device=source.device).reshape(n, offset_groups, 1, 1, 1) * size
    index = torch.stack(
        [
            torch.where(inside & (weight > 0), number + plane, segment.skipped_value(torch.int64))
            for number, inside, weight in zip(points.cells, points.inside, points.weights, strict=True)
        ],
        -1,
    )
    perm, offsets = segment.plan(index.reshape(-1), n * offset_groups * size, False, op)
    weights = torch.stack(points.weights, -1)  # [n, offset groups, 1, taps, positions, 4]
    totals = []
    for block in torch.chunk(scaled, _blocks(scaled.shape), 2):
        rows = (block.unsqueeze(-1) * weights).permute(0, 1, 3, 4, 5, 2)
        total = segment.planned_reduce(rows.reshape(1, -1, block.shape[2]), perm, offsets)
        totals.append(total.reshape(n, offset_groups, size, block.shape[2]).transpose(2, 3))
    return torch.cat(totals, 2).reshape(source.shape).to(source.dtype)


def _blocks(shape: Any) -> int:
    """How many blocks of channels. A number of channels that is unknown at compile time is one block."""
    channels = shape[2]
    if not isinstance(channels, int):
        return 1
    shares = 4
    for size in shape:
        shares *= size if isinstance(size, int) else ASSUMED
    return min(max(1, -(-shares // MOST_SHARES)), max(1, channels))
