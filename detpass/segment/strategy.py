"""Which form of the CPU kernels for which sizes. The choice decides time and memory, never a bit of the result.

``scan``: every owner of a run of segments walks the whole index and adds the rows it owns; no sort. ``sorted``: a
counting sort, then each segment is summed in registers. ``sparse``: the same after renumbering the segments that occur,
for a table far larger than the index that is updated in place. The coefficients are data, measured by
``benchmarks/segment_kernels.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Strategy(enum.IntEnum):
    """The form of a kernel; the numbers are part of the C interface (``Form`` in ``cpp/common.h``)."""

    SCAN = 0
    SORTED = 1
    SPARSE = 2
    PLANNED = 3


@dataclass(frozen=True)
class CostModel:
    """Thresholds of the choice between forms."""

    sorted_row_bytes: int = 256
    """Rows of this many bytes or more are summed in registers after a sort; shorter ones are scanned."""
    sparse_ratio: int = 2
    """An in-place update of a table with more than this many segments a row avoids passes over the table."""
    scratch_share: float = 0.25
    """A scan that needs accumulators besides the output may use this share of the bytes of its operands."""
    owner_bytes: int = 1 << 40
    """The most bytes of accumulators that an owner works on at a time."""


MODEL = CostModel()


@dataclass(frozen=True)
class Sizes:
    """What the choice depends on."""

    batch: int
    rows: int
    segments: int
    features: int
    element_bytes: int
    index_bytes: int
    threads: int
    scannable: bool
    """Whether the kernel has a scan form (sums of most dtypes)."""
    own_accumulators: bool
    """Whether a scan needs accumulators besides the output (16-bit floats, an update in place)."""
    in_place: bool


def choose(sizes: Sizes, model: CostModel = MODEL) -> tuple[Strategy, int]:
    """Return the form and the most bytes of accumulators that a scan's owner may hold at a time."""
    if sizes.rows >= 2**31:
        if not sizes.scannable:
            raise OverflowError(f"{sizes.rows} rows; a reduction other than a sum takes at most {2**31 - 1}")
        return Strategy.SCAN, model.owner_bytes
    if sizes.in_place and sizes.segments > max(4096, model.sparse_ratio * sizes.rows):
        return Strategy.SPARSE, model.owner_bytes
    if not sizes.scannable or sizes.features * sizes.element_bytes >= model.sorted_row_bytes:
        return Strategy.SORTED, model.owner_bytes
    if not sizes.own_accumulators:
        return Strategy.SCAN, model.owner_bytes
    operands = sizes.rows * (sizes.batch * sizes.features * sizes.element_bytes + sizes.index_bytes)
    room = int(model.scratch_share * operands) // max(sizes.threads, 1)
    return Strategy.SCAN, max(1 << 18, room)
