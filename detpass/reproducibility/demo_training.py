"""The demonstration's training: a byte-level language model with hashed n-gram embeddings, on Python's own sources.

Every machine that runs detpass has this text. Byte n-grams repeat often, so the backward pass of the embeddings adds
many rows into one: the accumulation whose order plain compilers leave to chance. Neighbours: ``demo.py`` (runs this
under three compilers and compares the bits).
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detpass.errors import ConfigurationError
from detpass.reproducibility.digests import digest

BATCH, CONTEXT = 16, 256
"""Sequences in a step and bytes in a sequence."""


@dataclass(frozen=True)
class TrainingRun:
    """One training from scratch."""

    backend: str
    """``eager``, or the backend given to ``torch.compile``."""
    threads: int
    """``torch.get_num_threads()`` meanwhile."""
    losses_digest: str
    """The digest of the losses of all steps."""
    parameters_digest: str
    """The digest of all parameters after the last step."""
    first_loss: float
    """Mean cross entropy a byte at the first step, in nats."""
    last_loss: float
    """The same at the last step."""
    step_ms: float
    """Median duration of a step, compilation left out (the first two steps do not count)."""

    @property
    def digest(self) -> str:
        """Both digests as one text."""
        return f"{self.losses_digest} {self.parameters_digest}"


class NgramLanguageModel(nn.Module):
    """Predicts the next byte from the bytes before it.

    ``bytes_in: int64[batch, time]`` gives logits ``[batch, time, 256]``. Each position looks up its byte and its hashed
    2-, 3- and 4-grams, mixes in what its last positions held through a causal convolution, and goes through an MLP.
    No biases and no affine norm: the gradient of a bias is a dense sum over all positions, which Inductor cuts by
    thread, so its bits depend on the thread count (from run to run they do not).
    """

    def __init__(self, width: int = 64, buckets: int = 1 << 15, orders: int = 4, hidden: int = 256) -> None:
        super().__init__()
        self.byte_table = nn.Embedding(256, width)
        self.ngram_tables = nn.ModuleList(nn.Embedding(buckets, width) for _ in range(orders - 1))
        self.buckets = buckets
        self.mix = nn.Conv1d(width, width, kernel_size=4, groups=width, bias=False)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, bytes_in: torch.Tensor) -> torch.Tensor:
        x = self.byte_table(bytes_in)
        gram = bytes_in
        for order, table in enumerate(self.ngram_tables, start=1):
            earlier = nn.functional.pad(bytes_in, (order, 0))[:, : bytes_in.shape[1]]
            gram = (gram * 257 + earlier + 1) * 0x9E3779B1 % (1 << 31)
            x = x + table(gram % self.buckets)
        mixed = self.mix(nn.functional.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        x = self.norm(x + mixed)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        logits: torch.Tensor = self.head(x)
        return logits


def standard_library_text(limit: int = 4 << 20) -> torch.Tensor:
    """The first ``limit`` bytes of the standard library's top-level modules in name order, ``uint8[bytes]``.

    Raises ConfigurationError where the sources are not installed (fewer bytes than one batch takes).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 4 * BATCH * CONTEXT:
        raise ConfigurationError(f"{folder} holds {len(text)} bytes of Python sources; expected {4 * BATCH * CONTEXT}")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def train(
    backend: str,
    steps: int = 40,
    threads: int = 2,
    options: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
    text: torch.Tensor | None = None,
) -> TrainingRun:
    """Train from fixed seeds for ``steps`` steps and digest losses and parameters.

    ``backend`` is ``"eager"`` or a backend of ``torch.compile``; ``options`` goes with it. ``on_step(step, loss)`` is
    called after each step. The thread count is set here and left so.
    """
    torch.set_num_threads(threads)
    text = standard_library_text() if text is None else text
    torch.manual_seed(0)
    model = NgramLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = torch.Generator().manual_seed(1)

    def loss_of(window: torch.Tensor) -> torch.Tensor:
        logits = model(window[:, :-1])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
        return losses.mean(dim=1).mean()  # row by row: one sum over all positions would depend on the thread count

    compiled = loss_of if backend == "eager" else torch.compile(loss_of, backend=backend, options=options)
    losses, durations = [], []
    for step in range(steps):
        starts = torch.randint(0, text.numel() - CONTEXT - 1, (BATCH, 1), generator=sampler)
        window = text[starts + torch.arange(CONTEXT + 1)].long()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(window)
        loss.backward()
        optimizer.step()
        durations.append(time.perf_counter() - begin)
        losses.append(loss.detach())
        if on_step is not None:
            on_step(step, float(losses[-1]))
    timed = sorted(durations[2:] or durations)
    return TrainingRun(
        backend,
        threads,
        digest(losses),
        digest(model),
        float(losses[0]),
        float(losses[-1]),
        1000 * timed[len(timed) // 2],
    )


def train_values(**arguments: Any) -> dict[str, str]:
    """:func:`train` for a fresh process: both digests by name."""
    run = train(**arguments)
    return {"losses": run.losses_digest, "parameters": run.parameters_digest}
