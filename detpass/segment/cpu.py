"""The CPU form of the operators."""

from detpass.segment.fallback import (
    last_positions,
    linear_index,
    plan,
    planned_accumulate,
    planned_accumulate_,
    planned_reduce,
    segment_accumulate,
    segment_accumulate_,
    segment_count,
    segment_reduce,
)

__all__ = [
    "last_positions",
    "linear_index",
    "plan",
    "planned_accumulate",
    "planned_accumulate_",
    "planned_reduce",
    "segment_accumulate",
    "segment_accumulate_",
    "segment_count",
    "segment_reduce",
]
