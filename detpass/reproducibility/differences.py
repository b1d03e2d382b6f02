"""Where two results differ, and by how much: elements, first position, distance in units in the last place.

Neighbours: ``digests.py`` says whether results differ, this module says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from detpass.reproducibility.flattening import dense_bytes, walk

_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor or value that has other bits in the right result than in the left one."""

    path: str
    """Where it stands in the result; empty when the result is a lone tensor."""
    detail: str
    """What differs when it is not the elements: a dtype, a shape, a plain value, a missing entry; else empty."""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    differing: int = 0
    """How many elements have other bits."""
    elements: int = 0
    """How many elements there are."""
    first_index: tuple[int, ...] = ()
    """The first of them in row-major order."""
    left: Any = None
    """The element at ``first_index`` on the left."""
    right: Any = None
    """The element at ``first_index`` on the right."""
    max_ulp: int | None = None
    """The largest distance in units in the last place (0: only the sign of a zero differs); None for non-floats
    and when NaN stands against a number."""

    def __str__(self) -> str:
        name = self.path or "result"
        if self.detail:
            return f"{name}: {self.detail}"
        ulp = "" if self.max_ulp is None else f", at most {self.max_ulp} ulp apart"
        return (
            f"{name} ({self.dtype}, shape {list(self.shape)}): "
            f"{self.differing} of {self.elements} elements differ{ulp}; "
            f"first at {list(self.first_index)}: {self.left!r} against {self.right!r}"
        )


def first_difference(left: Any, right: Any) -> Difference | None:
    """The first entry of two results, in the order of ``walk``, whose bits differ; None when all bits are equal."""
    return next(iter(all_differences(left, right)), None)


def all_differences(left: Any, right: Any) -> tuple[Difference, ...]:
    """Every entry of two results whose bits differ, entries that only one of them has included."""
    left_entries, right_entries = dict(walk(left)), dict(walk(right))
    found = []
    for path, value in left_entries.items():
        if path not in right_entries:
            found.append(Difference(path, "only in the left result"))
            continue
        difference = _compare(path, value, right_entries[path])
        if difference is not None:
            found.append(difference)
    found.extend(Difference(path, "only in the right result") for path in right_entries if path not in left_entries)
    return tuple(found)


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The number of representable values between each pair of elements, ``int64`` of the same shape.

    ``left`` and ``right``: the same real floating dtype and shape. The two zeros are at distance 0; a distance that
    does not fit is given as the largest int64. Meaningless where an element is NaN.
    """
    a, b = _ordered(left), _ordered(right)
    # Only float64 of opposite signs can wrap: then the int64 difference has the sign of the subtrahend.
    difference = a - b
    wrapped = ((a < 0) != (b < 0)) & ((difference < 0) != (a < 0)) & (a != 0)
    return torch.where(wrapped, torch.iinfo(torch.int64).max, difference.abs())


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Floats as int64 in the same order, neighbours one apart, both zeros at 0."""
    integer = _INTEGER_OF_WIDTH[tensor.element_size()]
    bits = dense_bytes(tensor).view(integer).reshape(tensor.shape).to(torch.int64)
    magnitude = bits & torch.iinfo(integer).max
    return torch.where(bits < 0, -magnitude, magnitude)


def _compare(path: str, left: Any, right: Any) -> Difference | None:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        same = type(left) is type(right) and (
            left.hex() == right.hex() if isinstance(left, float) else repr(left) == repr(right)
        )
        return None if same else Difference(path, f"{left!r} against {right!r}")
    if left.dtype != right.dtype or left.shape != right.shape:
        kinds = f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        return Difference(path, kinds, left.dtype, tuple(left.shape))
    width = left.element_size()
    unequal = (dense_bytes(left).view(-1, width) != dense_bytes(right).view(-1, width)).any(dim=1)
    positions = unequal.nonzero().flatten()
    if positions.numel() == 0:
        return None
    first = int(positions[0])
    left_flat, right_flat = (side.detach().to("cpu").reshape(-1)[positions] for side in (left, right))
    return Difference(
        path,
        "",
        left.dtype,
        tuple(left.shape),
        differing=positions.numel(),
        elements=left.numel(),
        first_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(first), left.shape)),
        left=left_flat[0].item(),
        right=right_flat[0].item(),
        max_ulp=_max_ulp(left_flat, right_flat),
    )


def _max_ulp(left: torch.Tensor, right: torch.Tensor) -> int | None:
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if not left.dtype.is_floating_point:
        return None
    if bool((left.to(torch.float64).isnan() | right.to(torch.float64).isnan()).any()):
        return None
    return int(ulp_distance(left, right).max())
