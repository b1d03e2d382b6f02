"""Small models for the tests of inspection; each line that matters is found by its marker, never by its number."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FILE = Path(__file__)


def line_of(marker: str) -> str:
    """``file:line`` of the line of this file that ends with ``# marker``."""
    for number, line in enumerate(FILE.read_text().splitlines(), 1):
        if line.rstrip().endswith(f"# {marker}"):
            return f"{FILE}:{number}"
    raise AssertionError(f"no line is marked {marker!r}")


class Tower(nn.Module):
    """An embedding, blocks that gather with repeated indices, and a scatter."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden, places)
        pooled = torch.zeros(4, 8).index_add(0, places % 4, hidden)  # index_add
        return self.norm(pooled).square().sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(hidden))[places] + hidden  # gather


def tower_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 32, (16,)), torch.randint(0, 16, (16,))


def tower() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A factory for the command line."""
    return Tower(), tower_inputs()


def clean() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A factory of a model with nothing nondeterministic."""
    return nn.Linear(4, 4), (torch.randn(2, 4),)


def wrong() -> int:
    """A factory that returns no model."""
    return 3
