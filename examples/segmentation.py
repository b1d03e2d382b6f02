"""An image segmenter: pads by reflection, pools, and upsamples; all three scatter in the backward pass on a GPU.

A small encoder and decoder with a Dice loss, which adds each pixel's probability to its class (``index_add``: that
one races on a CPU, too). No GPU is needed to see what would happen on one. Run it:
``python examples/segmentation.py``; look inside: ``detpass inspect examples/segmentation.py:factory --target cuda``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import detpass
from detpass.reproducibility import digest

CLASSES = 4


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 16, 3), nn.Conv2d(28, CLASSES, 3)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """``image float[n, 3, h, w]``, ``label int64[n, h, w]`` -> the loss."""
        fine = F.relu(self.down(F.pad(image, (1, 1, 1, 1), mode="reflect")))
        coarse = F.relu(self.deep(F.pad(F.max_pool2d(fine, 3, stride=2, padding=1), (1, 1, 1, 1), mode="reflect")))
        wide = F.interpolate(coarse, size=image.shape[-2:], mode="bilinear", align_corners=False)
        scores = self.up(F.pad(torch.cat([fine, wide], 1), (1, 1, 1, 1), mode="reflect"))
        return F.cross_entropy(scores, label) + dice(scores, label)


def dice(scores: Tensor, label: Tensor) -> Tensor:
    """One minus the mean overlap of predicted and true classes."""
    truth = label.flatten()
    right = scores.softmax(1).gather(1, label[:, None]).flatten()
    overlap = torch.zeros(CLASSES).index_add(0, truth, right)
    size = torch.zeros(CLASSES).index_add(0, truth, torch.ones_like(right)) + scores.softmax(1).sum((0, 2, 3))
    return 1 - (2 * overlap / size.clamp(min=1)).mean()


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and a batch of images."""
    torch.manual_seed(0)
    return Segmenter(), (torch.randn(4, 3, 64, 64), torch.randint(0, CLASSES, (4, 64, 64)))


def train(loss: nn.Module, start: dict[str, Tensor], batch: tuple[Tensor, ...], steps: int = 8) -> str:
    """Train from ``start`` and return the digest of every bit of the parameters."""
    loss.load_state_dict(start)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    return digest([parameter.detach() for parameter in loss.parameters()])


def main() -> None:
    """Count the different results of three trainings, then ask what a GPU would do with the same model."""
    model, batch = factory()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for backend in ("inductor", "detpass"):
        torch._dynamo.reset()
        model.compile(backend=backend)
        results = {train(model, start, batch) for _ in range(3)}
        print(f"{backend:<9} {len(results)} different results of 3 trainings")
    assert len(results) == 1

    model, batch = factory()
    report = detpass.inspect(model, *batch, target="cuda")
    print(f"on a GPU: {len(report.nondeterministic)} nondeterministic operations, {len(report.remaining)} left")
    for operator in sorted({record.op for record in report.nondeterministic}):
        print(f"  {operator}")


if __name__ == "__main__":
    main()
