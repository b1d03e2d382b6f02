"""The gradient of a pooling over regions as two matrix products, where a bin's weights are those of rows and columns.

Bin ``(i, j)`` of region ``r`` reads cell ``(h, w)`` with weight ``rows[r, i, h] * columns[r, j, w]``: every pooling
over rectangles and every bilinear sampling on a grid has this form. With ``sample[r]``, the sample of a region::

    along_width[r, i, c, w] = sum over j of grad[r, c, i, j] * columns[r, j, w]
    result[b, c, h, w] = sum over (r, i) with sample[r] == b of rows[r, i, h] * along_width[r, i, c, w]

No size depends on the data, whatever the regions cover, and the products sum in the order that the library's kernel
fixes. The position-sensitive form reads another channel in each bin, so only the regions are summed over.

The price of static sizes: the work grows with the cells of all samples times the bins, not with the cells that bins
meet, and a gradient that is infinite or NaN reaches cells outside of its bin, as zero times infinity is NaN. Channels
are taken in blocks of at most ``MOST_VALUES`` intermediate values. Where the user lets matrix products of float32 run
in TF32 (``torch.set_float32_matmul_precision``), so do these.

Neighbours: ``region_weights.py`` (the weights), ``regions.py`` (the rules).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST_VALUES = 1 << 27
"""Values of ``along_width`` at a time: 512 MiB in float32."""
ASSUMED = 1024
"""Stands for a size that is unknown at compile time when blocks are chosen."""


def spread(
    grad: Tensor, rows: Tensor, columns: Tensor, sample: Tensor, batch: Any, sensitive: bool, most: int = MOST_VALUES
) -> Tensor:
    """The gradient ``[batch, channels, height, width]`` of an input from that of its bins.

    ``grad: float[r, c, bins_h, bins_w]``, ``rows: float[r, bins_h, height]``, ``columns: float[r, bins_w, width]``,
    ``sample: int64[r]`` with values below ``batch``. With ``sensitive`` there are ``c * bins_h * bins_w`` channels,
    the bin counting fastest; otherwise ``c``. Results are in the dtype of ``grad``.
    """
    product = _sensitive if sensitive else _plain
    in_sample = sample == torch.arange(batch, device=grad.device).unsqueeze(1)  # [batch, r]
    blocks = _blocks(grad.shape, columns.shape[2], sensitive, most)
    parts = [product(block, rows, columns, in_sample) for block in torch.chunk(grad, blocks, 1)] if blocks > 1 else []
    return torch.cat(parts, 1) if parts else product(grad, rows, columns, in_sample)


def _blocks(shape: Any, width: Any, sensitive: bool, most: int) -> int:
    """How many blocks of channels. A number of channels that is unknown at compile time is one block."""
    regions, channels, bins_h, bins_w = shape
    if not isinstance(channels, int):
        return 1
    values = channels
    for size in (regions, bins_h, width, *((bins_w,) if sensitive else ())):
        values *= size if isinstance(size, int) else ASSUMED
    return min(max(1, -(-values // most)), max(1, channels))


def _plain(grad: Tensor, rows: Tensor, columns: Tensor, in_sample: Tensor) -> Tensor:
    regions, channels, bins_h, bins_w = grad.shape
    batch, height, width = in_sample.shape[0], rows.shape[2], columns.shape[2]
    along_width = torch.matmul(grad.transpose(1, 2).reshape(regions, bins_h * channels, bins_w), columns)
    of_sample = torch.where(in_sample[:, None, :, None], rows.permute(2, 0, 1), 0)  # [batch, height, r, bins_h]
    total = torch.matmul(
        of_sample.reshape(batch * height, regions * bins_h), along_width.reshape(regions * bins_h, channels * width)
    )
    return total.reshape(batch, height, channels, width).transpose(1, 2).contiguous()


def _sensitive(grad: Tensor, rows: Tensor, columns: Tensor, in_sample: Tensor) -> Tensor:
    regions, channels, bins_h, bins_w = grad.shape
    batch, height, width = in_sample.shape[0], rows.shape[2], columns.shape[2]
    values = grad.permute(2, 3, 0, 1).unsqueeze(-1) * columns.transpose(0, 1).unsqueeze(2)  # [bins_h, bins_w, r, c, w]
    of_sample = torch.where(in_sample[:, None, :], rows.permute(1, 2, 0).unsqueeze(1), 0)  # [bins_h, batch, height, r]
    of_sample = of_sample.reshape(bins_h, 1, batch * height, regions)
    of_sample = of_sample.expand(bins_h, bins_w, batch * height, regions)
    total = torch.matmul(of_sample, values.reshape(bins_h, bins_w, regions, channels * width))
    total = total.reshape(bins_h, bins_w, batch, height, channels, width).permute(2, 4, 0, 1, 3, 5)
    return total.reshape(batch, channels * bins_h * bins_w, height, width)
