"""Which form of the CPU kernels for which sizes. The choice decides time and memory, never a bit of the result.

``scan``: every owner of a run of segments walks the whole index and adds the rows it owns; no sort. ``sorted``: a
counting sort, then each segment is summed in registers. ``sparse``: the same after renumbering the segments that occur,
for a table far larger than the index that is updated in place. The coefficients are data, measured by
``benchmarks/segment_kernels.py``.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import SymInt


class Strategy(enum.IntEnum):
    """The form of a kernel; the numbers are part of the C interface (``Form`` in ``cpp/common.h``)."""

    SCAN = 0
    SORTED = 1
    SPARSE = 2
    PLANNED = 3


@dataclass(frozen=True)
class CostModel:
    """Thresholds of the choice between forms."""

    scan_row_bytes: int = 512
    """Rows shorter than this are scanned, longer ones summed in registers after a sort (several threads)."""
    scan_row_bytes_alone: int = 2048
    """The same for one thread, which owns every row and reads the source straight through."""
    sparse_ratio: int = 2
    """A table with more than this many segments a row is updated without a pass over it (on a CPU: in place)."""
    least_sparse: int = 4096
    """... and of one with more segments than this."""
    scratch_share: float = 0.14
    """Accumulators of a scan besides the output (16-bit floats, an update in place, a single column beside its count)
    may take this share of the bytes of its operands."""
    least_scratch: int = 1 << 18
    """Bytes that an owner may use in any case; below, it would walk the index too often."""
    hot_share: float = 0.5
    """With several threads a scan gives way to a sort where one segment has more than this share of the rows."""
    one_thread_bytes: int = 1 << 19
    """Calls that read and write less than this take one thread: waking others costs more than it saves."""
    index_row_bytes: int = 16
    """What a row costs besides its own bytes."""
    hot_row_bytes: int = 32
    """... if rows have at least this many bytes: for shorter ones the sort costs more than the imbalance."""


MODEL = CostModel()


class Sizes(NamedTuple):
    """What the choice depends on. A named tuple, as one is made at every call."""

    batch: int
    rows: int
    segments: int
    features: int
    element_bytes: int
    index_bytes: int
    threads: int
    scannable: bool
    """Whether the kernel has a scan form (sums of most dtypes)."""
    in_place: bool


@dataclass(frozen=True)
class Choice:
    """A form and its parameters."""

    form: Strategy
    owner_bytes: int = 1 << 40
    """The most bytes of accumulators besides the output that an owner of a scan works on at a time."""
    hot_permille: int = 0
    """A scan that finds (in a sample) a larger share of the rows in one segment sorts after all; 0: never."""
    threads: int = 1 << 30
    """The most threads worth waking."""


def worthwhile_threads(batch: int, rows: int, segments: int, row_bytes: int, model: CostModel = MODEL) -> int:
    """Return the most threads worth waking for an accumulation: 1, or as many as there are."""
    moved = batch * (rows * (model.index_row_bytes + row_bytes) + segments * row_bytes)
    return 1 if moved < model.one_thread_bytes else Choice.threads


@functools.lru_cache(maxsize=4096)
def choose(sizes: Sizes, model: CostModel = MODEL) -> Choice:
    """Return the form for ``sizes``. Raises OverflowError where no kernel can address that many rows."""
    if sizes.rows >= 2**31:
        if not sizes.scannable:
            raise OverflowError(f"{sizes.rows} rows; a reduction other than a sum takes at most {2**31 - 1}")
        return Choice(Strategy.SCAN)
    row_bytes = sizes.features * sizes.element_bytes
    if sizes.in_place and far_exceeds(sizes.segments, sizes.rows, model):
        return Choice(Strategy.SPARSE, threads=worthwhile_threads(sizes.batch, sizes.rows, 0, row_bytes, model))
    most = worthwhile_threads(sizes.batch, sizes.rows, sizes.segments, row_bytes, model)
    threads = min(max(sizes.threads, 1), most)
    longest = model.scan_row_bytes_alone if threads == 1 else model.scan_row_bytes
    if not sizes.scannable or row_bytes >= longest:
        return Choice(Strategy.SORTED, threads=most)
    hot = int(1000 * model.hot_share) if threads > 1 and row_bytes >= model.hot_row_bytes else 0
    operands = sizes.rows * (sizes.batch * row_bytes + sizes.index_bytes) + sizes.segments * sizes.batch * row_bytes
    room = int(model.scratch_share * operands) // threads
    return Choice(Strategy.SCAN, max(model.least_scratch, room), hot, most)


def far_exceeds(segments: int | SymInt, rows: int | SymInt, model: CostModel = MODEL) -> bool:
    """Whether a table of ``segments`` rows is so much larger than an index that a pass over it is to be avoided.

    Symbolic sizes are guarded to the answer; of sizes that depend on data nothing is known.
    """
    if isinstance(segments, int) and isinstance(rows, int):
        return segments > max(model.least_sparse, model.sparse_ratio * rows)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(segments > model.least_sparse) and guard_or_false(segments > model.sparse_ratio * rows)
