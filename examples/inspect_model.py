"""Inspect a model before training it: in Python, from an exported file, and for a GPU that is not here.

The same from a shell, with a table, JSON, or a page to open in a browser::

    detpass inspect examples/inspect_model.py:factory
    detpass inspect examples/inspect_model.py:factory --target cuda --html report.html
    detpass inspect model.pt2 --json
    detpass rules --op index_add

Run it: ``python examples/inspect_model.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import detpass


class Tagger(nn.Module):
    """Words to tags, with the mean of each sentence added to its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(1000, 16), nn.Linear(16, 8)

    def forward(self, words: Tensor, sentence: Tensor, tags: Tensor) -> Tensor:
        """``words``, ``sentence`` (the number of each word's sentence) and ``tags`` are ``int64[n]``."""
        hidden = self.words(words)
        total = torch.zeros(32, 16).index_add(0, sentence, hidden)
        count = torch.zeros(32, dtype=torch.int64).index_add(0, sentence, torch.ones_like(sentence))
        return F.cross_entropy(self.out(hidden + (total / count.clamp(min=1)[:, None])[sentence]), tags)


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What ``detpass inspect FILE:factory`` calls: a model and its example inputs."""
    torch.manual_seed(0)
    return Tagger(), (torch.randint(0, 1000, (512,)), torch.randint(0, 32, (512,)), torch.randint(0, 8, (512,)))


def main() -> None:
    """Inspect the model on a CPU and for a GPU, then its exported program from a file."""
    model, inputs = factory()
    report = detpass.inspect(model, *inputs)
    print(report)
    for record in report.nondeterministic:
        print(f"{record.op} in the {record.phase} pass: {record.source}")
    assert report.remaining == ()

    on_gpu = detpass.inspect(model, *inputs, target="cuda:sm_90")
    print(f"on {on_gpu.target}: {on_gpu.counts()}, under detpass {on_gpu.verdict('remaining').value}")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(torch.export.export(model, inputs), file)
        exported = detpass.inspect(file)
        page = exported.to_html(Path(folder) / "report.html")
        print(f"from {file.name}: {exported.counts()}; a page of {page.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
