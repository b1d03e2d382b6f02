"""Two small models trained twice: losses and parameters, bit by bit, under detpass and under Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_setting import Found, Setting, digest
from measuring import table
from torch import Tensor, nn

from detpass.backend import detpass as backend

STEPS = 30


class HashedWords(nn.Module):
    """Token and hashed bigram embeddings with repeated tokens, a linear layer, cross entropy: embedding backward."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, columns)
        self.pairs = nn.Embedding(4096, columns)
        self.out = nn.Linear(columns, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = (tokens[:, :-1] * 257 + tokens[:, 1:]) % 4096
        hidden = torch.relu(self.tokens(tokens[:, 1:]) + self.pairs(pairs))
        return F.cross_entropy(self.out(hidden[:, :-1]).flatten(0, 1), tokens[:, 2:].flatten())


class MessagePassing(nn.Module):
    """Two layers that gather along edges and add up at their ends: gather backward and index_add."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.first = nn.Linear(columns, columns)
        self.second = nn.Linear(columns, columns)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            nodes = torch.zeros_like(nodes).index_add(0, target, torch.relu(layer(nodes[source])))
        return nodes.square().mean()


def _models(setting: Setting) -> dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(1)
    scale = 1 if setting.dry else 16
    tokens = torch.randint(97, 123, (4 * scale, 64), generator=generator)
    nodes = torch.randn(128 * scale, 8, generator=generator)
    edges = torch.randint(0, nodes.shape[0], (2, 1024 * scale), generator=generator)
    edges[1] //= 16  # many edges end at few nodes
    return {
        "hashed words": (lambda: HashedWords(16), (tokens,)),
        "message passing": (lambda: MessagePassing(8), (nodes, edges[0], edges[1])),
    }


def _trained(setting: Setting, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], name: Any) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend=name)
    moved = [value.to(setting.device) for value in inputs]
    losses = []
    for _ in range(3 if setting.dry else STEPS):
        optimizer.zero_grad()
        loss = compiled(*moved)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return digest(torch.stack(losses), *model.parameters())


def training(setting: Setting) -> Found:
    """Losses and parameters after some steps: twice under detpass (must be equal) and twice under Inductor."""
    rows: list[list[object]] = []
    failures: list[str] = []
    for model, (make, inputs) in _models(setting).items():
        for label, compiler in (("detpass", backend), ("inductor", "inductor")):
            digests = [_trained(setting, make, inputs, compiler) for _ in range(2)]
            same = digests[0] == digests[1]
            rows.append([model, label, *digests, "equal" if same else "differ"])
            if label == "detpass" and not same:
                failures.append(f"{model} trained twice under detpass: {digests[0]} and {digests[1]}")
    return Found(rows, table(["model", "compiler", "first run", "second run", "bits"], rows), failures)
