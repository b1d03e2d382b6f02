"""Two small models trained twice, and every operator that detpass rewrites run 20 times, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gpu_operators import Case, operator_cases
from gpu_setting import Found, Setting, digest
from measuring import table
from torch import Tensor, nn

import detpass
from detpass import rules
from detpass.backend import detpass as backend
from detpass.errors import DetpassError

STEPS, RUNS = 30, 20


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


def operators(setting: Setting) -> Found:
    """Every operator case under detpass: equal bits in every run; under eager torch: how many different results."""
    rows: list[list[object]] = []
    failures: list[str] = []
    seen: set[str] = set()
    left_out = []
    for case in operator_cases(setting.dry):
        if setting.over:
            left_out.append(case.name)
            continue
        try:
            count, treated = _distinct(setting, case, backend)
        except (DetpassError, RuntimeError, TypeError, ValueError, LookupError) as error:
            text = " ".join(str(error).split())[:160]
            rows.append([case.name, "failed", "", text])
            failures.append(f"{case.name}: {type(error).__name__}: {text}")
            continue
        seen |= set(treated)
        eager = _distinct_eager(setting, case)
        rows.append([case.name, count, eager, ", ".join(f"{op}: {how}" for op, how in treated.items())])
        if count != 1:
            failures.append(f"{case.name}: {count} different results in {_runs(setting)} runs under detpass")
    known = {str(target) for rule in rules.BUILTIN_RULES for target in rule.targets}
    notes = [f"operators with a rule that no case reached: {', '.join(sorted(known - seen)) or 'none'}"]
    if left_out:
        notes.append(f"no time left for: {', '.join(left_out)}")
        failures.append(notes[-1])
    header = ["case", f"results in {_runs(setting)} runs, detpass", "eager", "treatment"]
    return Found({"rows": rows, "notes": notes}, "\n\n".join([table(header, rows), *notes]), failures)


def _runs(setting: Setting) -> int:
    return 2 if setting.dry else RUNS


def _distinct(setting: Setting, case: Case, compiler: Any) -> tuple[int, Mapping[str, str]]:
    torch._dynamo.reset()
    before = len(detpass.reports())
    compiled = torch.compile(case.function, backend=compiler)
    results = {_step(setting, case, compiled) for _ in range(_runs(setting))}
    records = [record for report in detpass.reports()[before:] for record in report.records]
    return len(results), {record.op: str(record.treatment) for record in records}


def _distinct_eager(setting: Setting, case: Case) -> int:
    return len({_step(setting, case, case.function) for _ in range(_runs(setting))})


def _step(setting: Setting, case: Case, function: Callable[..., Any]) -> str:
    inputs = []
    for value in case.inputs:
        moved = value.detach().clone().to(setting.device)
        inputs.append(moved.requires_grad_() if case.backward and moved.is_floating_point() else moved)
    result = function(*inputs)
    values = list(result) if isinstance(result, tuple) else [result]
    gradients: list[Tensor] = []
    if case.backward:
        wanted = [value for value in inputs if value.requires_grad]
        total = sum(
            (value * torch.linspace(-1, 1, value.numel(), device=value.device).view_as(value)).sum()
            for value in values
            if value.requires_grad
        )
        found: tuple[Tensor | None, ...] = torch.autograd.grad(total, wanted, allow_unused=True)
        gradients = [gradient for gradient in found if gradient is not None]
    return digest(*values, *gradients)
