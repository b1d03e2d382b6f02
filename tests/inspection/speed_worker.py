"""Inspects one large model in a process of its own and prints, as JSON, what it took."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import detpass


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 20_000, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 12) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.tokens.weight.T).flatten(0, 1), targets.flatten())


class Deep(nn.Module):
    """Twelve nodes of the joint graph for each step of a long chain."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.tokens = nn.Embedding(100, 16)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(self.steps):
            x = torch.tanh(x * self.weight) + x
        return x.sum()


def main() -> None:
    if sys.argv[1] == "transformer":
        with torch.device("meta"):
            model: nn.Module = Transformer()
        ids = torch.randint(0, 20_000, (4, 256))
        arguments: tuple[Tensor, ...] = (ids, ids)
    else:
        model, arguments = Deep(1670), (torch.randint(0, 100, (8,)),)
    wall, processor = time.perf_counter(), time.process_time()
    report = detpass.inspect(model, *arguments)
    taken = {
        "wall_seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": sum(graph.nodes for graph in report.graphs),
        "nondeterministic": len(report.nondeterministic),
        "lowered_note": report.lowered_note,
    }
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
