"""A graph network: messages are added into nodes, in another order in every run, unless detpass fixes the order.

Two layers of message passing over a random graph with hubs. Each edge brings a message to its target node
(``index_add``); the backward pass adds the messages' gradients into their source nodes. Run it:
``python examples/gnn.py``; look inside: ``detpass inspect examples/gnn.py:factory``.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detpass.reproducibility import digest

NODES, EDGES, FEATURES, CLASSES = 500, 20_000, 16, 5


class MessagePassing(nn.Module):
    """``nodes float[n, features]``, ``edges int64[2, m]`` -> mean of the incoming messages, ``float[n, out]``."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(features, out), nn.Linear(features, out)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(nodes)[source]
        total = torch.zeros_like(messages[: len(nodes)]).index_add(0, target, messages)
        degree = torch.zeros(len(nodes)).scatter_add(0, target, torch.ones(len(target)))
        return self.own(nodes) + total / degree.clamp(min=1)[:, None]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MessagePassing(FEATURES, 32), MessagePassing(32, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(F.relu(self.first(nodes, edges)), edges), labels)


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network, which returns its loss, and a graph in which a few nodes have most of the edges."""
    torch.manual_seed(0)
    hubs = (torch.rand(2, EDGES) ** 4 * NODES).long()
    return Network(), (torch.randn(NODES, FEATURES), hubs, torch.randint(0, CLASSES, (NODES,)))


def train(loss: nn.Module, start: dict[str, Tensor], batch: tuple[Tensor, ...], steps: int = 10) -> str:
    """Train from ``start`` and return the digest of every bit of the parameters."""
    loss.load_state_dict(start)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    return digest([parameter.detach() for parameter in loss.parameters()])


def main() -> None:
    """Train three times under Inductor and three times under detpass, and count the different results."""
    model, batch = factory()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for backend in ("inductor", "detpass"):
        torch._dynamo.reset()
        model.compile(backend=backend)
        train(model, start, batch, steps=1)  # compiles
        began = time.perf_counter()
        results = {train(model, start, batch) for _ in range(3)}
        print(f"{backend:<9} {len(results)} different results of 3 trainings, {time.perf_counter() - began:.1f} s")
    assert len(results) == 1


if __name__ == "__main__":
    main()
