"""Small tensors that a rule computes while matching and its replacement uses as constants.

A rule matches and is traced while fake tensor modes are active, where no value can be read. :func:`real_tensors`
steps out of them; :func:`constant` brings a finished table into the traced replacement as a constant of the graph, on
the device where it is used, so that running the graph copies nothing.

Neighbours: ``rule.py`` (match and replacement); ``rules/axis_maps.py`` (the main user).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from detpass import _torch_private


def real_tensors() -> AbstractContextManager[Any]:
    """Inside, tensor operations compute real values, also where a graph is being traced."""
    return _torch_private.outside_tracing()


def constant(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real ``table`` as a constant on ``device`` of the graph that is being traced; a copy when none is."""
    with real_tensors():
        # A device without hardware (code generated for another machine) keeps its constants on the CPU.
        placed = table if device.type == "cuda" and not torch.cuda.is_available() else table.to(device)
    fresh: torch.Tensor = torch.ops.aten.lift_fresh_copy.default(placed)
    return fresh
