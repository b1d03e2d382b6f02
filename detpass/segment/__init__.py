"""The arithmetic that replaces atomics: canonical-order accumulation over tensors, usable without a compiler."""

from detpass.segment.constants import CHUNK_ROWS, FAN_IN, SKIPPED, skipped_value
from detpass.segment.functional import (
    Form,
    assume_device,
    form_for,
    last_positions,
    linear_index,
    plan,
    planned_accumulate,
    planned_reduce,
    segment_accumulate,
    segment_count,
    segment_reduce,
)
from detpass.segment.reference import Reduction

__all__ = [
    "CHUNK_ROWS",
    "FAN_IN",
    "SKIPPED",
    "Form",
    "Reduction",
    "assume_device",
    "form_for",
    "last_positions",
    "linear_index",
    "plan",
    "planned_accumulate",
    "planned_reduce",
    "segment_accumulate",
    "segment_count",
    "segment_reduce",
    "skipped_value",
]
