"""The numbers that decide the bits of an accumulation, in one place.

They are part of the canonical order (see ``reference.py``): reports print them and they change only with a major
version. The C++ kernels get them as macros from ``build.py``, so they cannot drift apart.
"""

from __future__ import annotations

import torch

CHUNK_ROWS = 256
"""Members of one segment that are accumulated left to right before a partial result is carried upwards."""

FAN_IN = 256
"""Partials of one level that are accumulated left to right before their result is carried to the next level."""

INDEX_DTYPES = (torch.int32, torch.int64)
"""Dtypes of an index."""

SKIPPED = torch.iinfo(torch.int64).min
"""An ``int64`` index with this value means "this row takes part in nothing" (``int32`` uses its own minimum)."""


def skipped_value(dtype: torch.dtype) -> int:
    """Return the index value of ``dtype`` that marks a row as skipped: the smallest one the type can hold."""
    return int(torch.iinfo(dtype).min)
