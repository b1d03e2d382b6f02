"""Buffers that Inductor must write out: a fence between what computes a tensor and what reads it."""

from __future__ import annotations

from typing import Any

import torch


def materialised(values: torch.Tensor, length: Any = None) -> torch.Tensor:
    """``values`` as a contiguous buffer that is fused with no later reader, or the first ``length`` of its last axis.

    ``as_strided`` speaks of memory, so Inductor has to have the memory first.
    """
    buffer = values.clone(memory_format=torch.contiguous_format)
    shape = buffer.shape if length is None else (*buffer.shape[:-1], length)
    return buffer.as_strided(shape, buffer.stride())
