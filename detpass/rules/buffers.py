"""Buffers that Inductor must write out: a fence between what computes a tensor and what reads it."""

from __future__ import annotations

from typing import Any

import torch


def materialised(values: torch.Tensor, length: Any = None, dim: int = -1) -> torch.Tensor:
    """``values`` as a contiguous buffer fused with no later reader, or its first ``length`` places along ``dim``.

    ``as_strided`` speaks of memory, so Inductor has to have the memory first.
    """
    buffer = values.clone(memory_format=torch.contiguous_format)
    shape = list(buffer.shape)
    if length is not None:
        shape[dim] = length
    return buffer.as_strided(shape, buffer.stride())
