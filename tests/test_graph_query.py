"""The place that reports, errors and inspection name: the user's line, never one inside torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import detpass
from detpass import rules
from detpass.errors import UncoveredError
from detpass.graph_query import frames, trace_location

HERE = Path(__file__)
TORCH = Path(torch.__file__).parent


def functional(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table).sin()  # functional


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        return self.tokens(index).sin() + table.sum()  # module


def bag(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding_bag(index.view(-1, 2), table, mode="sum").sin()  # bag


def line_of(marker: str) -> str:
    lines = HERE.read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))
    return f"{HERE}:{number}"


MODELS = [(functional, "functional"), (Module(), "module"), (bag, "bag")]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, requires_grad=True), torch.tensor([1, 1, 2, 4])


@pytest.mark.parametrize(("model", "marker"), MODELS, ids=[marker for _, marker in MODELS])
def test_reports_name_the_line_that_calls_into_torch(model: Callable[..., Tensor], marker: str) -> None:
    torch.compile(model, backend="detpass")(*inputs()).sum().backward()
    reported = [record for report in detpass.reports() for record in report][-1]
    assert reported.location == line_of(marker)
    places = [record.location for record in detpass.inspect(model, *inputs())]
    assert places
    assert set(places) == {line_of(marker)}


def test_errors_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Tensor) -> Tensor:
        return F.softsign(x)  # uncovered

    absolute = torch.ops.aten.abs.default
    monkeypatch.setattr(rules, "hazard", lambda node, device: "made up" if node.target is absolute else None)
    with pytest.raises(UncoveredError, match=r"aten\.abs") as caught:
        torch.compile(layer, backend="detpass")(torch.randn(3))
    assert line_of("uncovered") in str(caught.value)
    assert str(TORCH) not in str(caught.value)


def test_the_innermost_frame_of_the_user_is_taken() -> None:
    trace = f"""
  File "/home/a/train.py", line 3, in step
    loss = model(x)
  File "/home/a/model.py", line 14, in forward
    return F.embedding(x, w)
  File "{TORCH}/nn/functional.py", line 2542, in embedding
    return torch.embedding(weight, input)
  File "<eval_with_key>.7", line 5, in forward
"""
    assert trace_location(trace) == "/home/a/model.py:14"
    elsewhere = trace.replace(str(TORCH), "/opt/python/lib/python3.12/site-packages/torch")
    assert trace_location(elsewhere) == "/home/a/model.py:14"
    assert len(frames(trace)) == 4


def test_a_trace_of_torch_alone_names_its_last_line_and_no_trace_names_none() -> None:
    assert trace_location(f'  File "{TORCH}/a.py", line 1, in f\n  File "{TORCH}/b.py", line 2, in g') == (
        f"{TORCH}/b.py:2"
    )
    assert trace_location("") is trace_location(None) is None
