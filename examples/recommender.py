"""A recommender: popular items get their gradient from thousands of places at once.

A user is the sum of the items seen before (``EmbeddingBag``), scored against a candidate item (``Embedding``). A few
items are in nearly every history, so threads add into the same rows of the tables' gradients. Run it:
``python examples/recommender.py``; look inside: ``detpass inspect examples/recommender.py:factory``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import detpass
from detpass.reproducibility import digest

ITEMS, WIDTH, USERS, HISTORY = 5_000, 32, 4_000, 20


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum")
        self.candidate = nn.Embedding(ITEMS, WIDTH)
        self.popularity = nn.Embedding(ITEMS, 1)
        self.user = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, seen: Tensor, item: Tensor, liked: Tensor) -> Tensor:
        """``seen int64[users, history]``, ``item int64[users]``, ``liked float[users]`` -> the loss."""
        user = self.user(self.history(seen))
        score = (user * self.candidate(item)).sum(1) + self.popularity(item).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, liked)


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and one batch in which low item numbers are popular."""
    torch.manual_seed(0)
    popular = (torch.rand(USERS, HISTORY + 1) ** 6 * ITEMS).long()
    return Recommender(), (popular[:, :-1].contiguous(), popular[:, -1].contiguous(), torch.rand(USERS).round())


def train(loss: nn.Module, start: dict[str, Tensor], batch: tuple[Tensor, ...], steps: int = 10) -> str:
    """Train from ``start`` and return the digest of every bit of the parameters."""
    loss.load_state_dict(start)
    optimizer = torch.optim.Adagrad(loss.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    return digest([parameter.detach() for parameter in loss.parameters()])


def main() -> None:
    """Train three times under Inductor and three times under detpass; show what detpass did."""
    model, batch = factory()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for backend in ("inductor", "detpass"):
        torch._dynamo.reset()
        model.compile(backend=backend)
        results = {train(model, start, batch) for _ in range(3)}
        print(f"{backend:<9} {len(results)} different results of 3 trainings")
    print(detpass.last_report())
    assert len(results) == 1


if __name__ == "__main__":
    main()
