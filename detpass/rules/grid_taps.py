"""Which cells the points of a sampling grid read, with what weight, and how the weights change with the coordinates.

The formulas are those of ATen's ``native/GridSampler.h`` (``grid_sampler_unnormalize``, ``clip_coordinates_set_grad``,
``reflect_coordinates_set_grad``, ``cubic_interp1d``): coordinates from -1 to 1, three paddings, three interpolations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
KEYS_A = -0.75
NOWHERE = -100.0
"""The coordinate that ATen gives a point which is not finite or too far away for an integer."""


@dataclass(frozen=True)
class PointTaps:
    """The taps of ``p`` points of each of ``n`` samples over flat cells."""

    cell: torch.Tensor
    """``int64[n, p, k]``; meaningless where the tap is not inside."""
    weight: torch.Tensor
    """``float[n, p, k]``."""
    inside: torch.Tensor
    """``bool[n, p, k]``: whether the tap meets a cell."""
    slopes: tuple[torch.Tensor, ...]
    """For each axis, outermost first, ``float[n, p, k]``: the weight's derivative by the grid's value; empty when it is
    zero everywhere (nearest)."""


@dataclass(frozen=True)
class _AxisTap:
    cell: torch.Tensor
    weight: torch.Tensor
    slope: torch.Tensor
    inside: torch.Tensor


def point_taps(grid: torch.Tensor, cells: Sequence[Any], mode: int, padding: int, aligned: bool) -> PointTaps:
    """The taps of ``grid: float[n, *points, axes]`` over an input of ``cells``."""
    axes = len(cells)
    # A grid names its axes innermost first.
    by_axis = [
        _axis_taps(grid[..., axes - 1 - axis].flatten(1), size, mode, padding, aligned, planar=axes == 2)
        for axis, size in enumerate(cells)
    ]
    chosen = list(itertools.product(*by_axis))
    cell, weight, inside = [], [], []
    slopes: list[list[torch.Tensor]] = [[] for _ in cells]
    for taps in chosen:
        flat: Any = 0
        product: Any = 1
        met: Any = True
        for tap, size in zip(taps, cells, strict=True):
            flat = flat * size + tap.cell
            product = tap.weight * product
            met = tap.inside & met
        cell.append(flat)
        weight.append(product)
        inside.append(met)
        for axis, tap in enumerate(taps):
            slope = tap.slope
            for other in (*taps[:axis], *taps[axis + 1 :]):
                slope = slope * other.weight
            slopes[axis].append(slope)
    varying = () if mode == NEAREST else tuple(torch.stack(of_axis, -1) for of_axis in slopes)
    return PointTaps(torch.stack(cell, -1), torch.stack(weight, -1), torch.stack(inside, -1), varying)


def _axis_taps(x: torch.Tensor, size: Any, mode: int, padding: int, aligned: bool, planar: bool) -> list[_AxisTap]:
    """The taps along one axis of points ``x: float[n, p]``.

    The nearest cell of a point midway is a matter of rounding, and the gradient belongs to the cell that was read: in
    two dimensions the forward is torch's decomposition, in three ATen's kernel.
    """
    step = (size - 1) / 2 if aligned else size / 2
    place = (x + 1) / 2 * (size - 1) if aligned else ((x + 1) * size - 1) / 2
    if mode == NEAREST and planar:
        place = x * (size * 0.5 - 0.5 if aligned else size * 0.5) + (size * 0.5 - 0.5)
    if mode == BICUBIC:
        return _cubic(place, step, size, padding, aligned)
    place, turn = _pad(place, size, padding, aligned)
    slope = turn * step
    if mode == NEAREST:
        return [_tap(place.round(), torch.ones_like(place), torch.zeros_like(place), size)]
    low = place.floor()
    high = low + 1
    return [_tap(low, high - place, -slope, size), _tap(high, place - low, slope, size)]


def _tap(cell: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor, size: Any) -> _AxisTap:
    number = cell.to(torch.int64)
    return _AxisTap(number, weight, slope, (number >= 0) & (number < size))


def _cubic(place: torch.Tensor, step: Any, size: Any, padding: int, aligned: bool) -> list[_AxisTap]:
    low = place.floor()
    t = place - low
    weights = (_far(t + 1), _near(t), _near(1 - t), _far(2 - t))
    slopes = (_far_slope(t + 1), _near_slope(t), -_near_slope(1 - t), -_far_slope(2 - t))
    taps = []
    for offset, weight, slope in zip(range(-1, 3), weights, slopes, strict=True):
        cell, _ = _pad(low + offset, size, padding, aligned)
        taps.append(_tap(cell, weight, slope * step, size))
    return taps


def _near(x: torch.Tensor) -> torch.Tensor:
    return ((KEYS_A + 2) * x - (KEYS_A + 3)) * x * x + 1


def _far(x: torch.Tensor) -> torch.Tensor:
    return ((KEYS_A * x - 5 * KEYS_A) * x + 8 * KEYS_A) * x - 4 * KEYS_A


def _near_slope(x: torch.Tensor) -> torch.Tensor:
    return (3 * (KEYS_A + 2) * x - 2 * (KEYS_A + 3)) * x


def _far_slope(x: torch.Tensor) -> torch.Tensor:
    return (3 * KEYS_A * x - 10 * KEYS_A) * x + 8 * KEYS_A


def _pad(place: torch.Tensor, size: Any, padding: int, aligned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The place after padding, and the factor that padding puts on its derivative."""
    turn = torch.ones_like(place)
    if padding == REFLECTION:
        place, turn = _reflect(place, size, aligned)
    if padding in (BORDER, REFLECTION):
        turn = torch.where((place > 0) & (place < size - 1), turn, 0)
        # NaN goes to the first cell, as ATen's fmin/fmax let it.
        place = torch.where(place.isnan(), 0, place).clamp(0, size - 1)
    usable = (place > -(2**31)) & (place < 2**31 - 1)
    return torch.where(usable, place, NOWHERE), turn


def _reflect(place: torch.Tensor, size: Any, aligned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(size, int) and size == 1 and aligned:
        return torch.zeros_like(place), torch.zeros_like(place)
    low, span = (0.0, size - 1) if aligned else (-0.5, size)
    distance = place - low
    sign = torch.where(distance < 0, -1.0, 1.0).to(place.dtype)
    distance = distance.abs()
    # Remainders are exact. A quotient rounded down at a whole number of spans would name the cell at the other end.
    there_and_back = torch.fmod(distance, 2 * span)
    even = there_and_back < span
    place = torch.where(even, there_and_back, 2 * span - there_and_back) + low
    return place, torch.where(even, sign, -sign)
