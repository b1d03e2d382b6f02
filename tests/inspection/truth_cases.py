"""Functions that are nondeterministic on a CPU, or look so, with sizes at which threads meet: for the truth test.

Many rows fall into few places, so that two threads work on one place at once. The operators are those that the
catalogue lists, and some that it says are deterministic on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detpass.reproducibility.targets import load_target

ROWS, PLACES, WIDTH = 50_000, 7, 24


@dataclass(frozen=True)
class TruthCase:
    """A function and what makes its inputs; the gradients of inputs and parameters that require grad count too."""

    name: str
    make: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


def _rows(grad: bool = True) -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=grad)


def _places(count: int = ROWS, places: int = PLACES) -> Tensor:
    return torch.randint(0, places, (count,))


def _table(places: int = PLACES) -> Tensor:
    return torch.randn(places, WIDTH, requires_grad=True)


def _image(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _unary(name: str, function: Callable[[Tensor], Tensor], *shape: int) -> TruthCase:
    return TruthCase(name, lambda: (function, (_image(*shape),)))


def _over(name: str, function: Callable[[Tensor, Tensor], Tensor], *inputs: Callable[[], Tensor]) -> TruthCase:
    return TruthCase(name, lambda: (function, tuple(make() for make in inputs)))


def _module(name: str, module: Callable[[], nn.Module], *inputs: Callable[[], Tensor]) -> TruthCase:
    return TruthCase(name, lambda: (module(), tuple(make() for make in inputs)))


def _fixed() -> Tensor:
    return _rows(grad=False)


def _zeros() -> Tensor:
    return torch.zeros(PLACES, WIDTH)


def _mixed(values: Tensor) -> Tensor:
    """Something whose gradient differs from row to row: equal addends would have one sum in every order."""
    weights = torch.linspace(0.1, 1.7, values.numel()).reshape(values.shape)
    return (values * weights).sin()


def _wide(index: Tensor) -> Tensor:
    return index[:, None].expand(-1, WIDTH)


def _grid() -> Tensor:
    return torch.rand(2, 96, 96, 2) * 0.1


CASES: tuple[TruthCase, ...] = (
    _over("w[i] backward", lambda w, i: _mixed(w[i]), _table, _places),
    _over("index_select backward", lambda w, i: _mixed(w.index_select(0, i)), _table, _places),
    _over("take backward", lambda w, i: _mixed(w.take(i)), _table, _places),
    _over("gather backward", lambda w, i: _mixed(w.gather(0, _wide(i))), _table, _places),
    _over("embedding backward", lambda w, i: _mixed(F.embedding(i, w)), _table, _places),
    _over("embedding_bag backward", lambda w, i: _mixed(F.embedding_bag(i.view(-1, 4), w, mode="sum")), _table,
          _places),
    _over("index_add", lambda x, i: _zeros().index_add(0, i, x), _rows, _places),
    _over("index_add of integers", lambda i, j: torch.zeros(PLACES, dtype=torch.int64).index_add(0, i, j), _places,
          _places),
    _over("index_put accumulate", lambda x, i: _zeros().index_put((i,), x, accumulate=True), _rows, _places),
    _over("index_put, last write", lambda x, i: _zeros().index_put((i,), x), _rows, _places),
    _over("index_put, unique places", lambda x, i: x.index_put((torch.arange(100),), x[100:200]), _rows, _places),
    _over("index_reduce amax", lambda x, i: _zeros().index_reduce(0, i, x, "amax"), _fixed, _places),
    _over("index_reduce prod", lambda x, i: _zeros().index_reduce(0, i, x * 1e-3 + 1, "prod"), _fixed,
          _places),
    _over("index_copy", lambda x, i: _zeros().index_copy(0, i, x), _rows, _places),
    _over("scatter_add", lambda x, i: _zeros().scatter_add(0, _wide(i), x), _rows, _places),
    _over("scatter", lambda x, i: _zeros().scatter(0, _wide(i), x), _rows, _places),
    _over("scatter_reduce mean", lambda x, i: _zeros().scatter_reduce(0, _wide(i), x, "mean"), _rows, _places),
    _over("scatter_reduce amax", lambda x, i: _zeros().scatter_reduce(0, _wide(i), x, "amax"), _fixed, _places),
    _over("masked_scatter", lambda x, i: x[:900].masked_scatter(x[:900] > 0, x[:900].detach() * 2), _rows, _places),
    _unary("max_pool2d backward", lambda x: _mixed(F.max_pool2d(x, 3, 2)), 4, 16, 64, 64),
    _unary("adaptive_avg_pool2d backward", lambda x: _mixed(F.adaptive_avg_pool2d(x, 5)), 4, 16, 33, 33),
    _over("grid_sample backward", lambda x, g: _mixed(F.grid_sample(x, g, align_corners=False)),
          lambda: _image(2, 8, 12, 12), _grid),
    _unary("bilinear backward", lambda x: _mixed(F.interpolate(x, scale_factor=3.0, mode="bilinear")), 2, 8, 20, 20),
    _unary("reflection pad backward", lambda x: _mixed(F.pad(x, (5, 5, 5, 5), "reflect")), 4, 8, 40, 40),
    _unary("replication pad backward", lambda x: _mixed(F.pad(x, (9, 9, 9, 9), "replicate")), 4, 8, 20, 20),
    _unary("fold", lambda x: _mixed(F.fold(x, (20, 20), 3)), 4, 27, 324),
    _unary("cumsum", lambda x: _mixed(x.cumsum(0)), ROWS, WIDTH),
    _unary("histc", lambda x: torch.histc(x.detach(), 20), ROWS, WIDTH),
    _unary("sort, unstable", lambda x: _mixed(x.round().sort(dim=0).values), ROWS, 4),
    _unary("sum and softmax", lambda x: x.softmax(0).sum(1).sin() + x.mean(), ROWS, WIDTH),
    _module("linear layers", lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 3)), _rows),
    _module("convolution and batch norm", lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)),
            lambda: _image(4, 8, 24, 24)),
    _over("index_fill", lambda x, i: x[:900].index_fill(0, i[:600] * 7, 2.0).sin(), _rows, _places),
    _over("put_ accumulate", lambda x, i: torch.zeros(PLACES).put_(i, x[:, 0], accumulate=True), _rows, _places),
    _over("scatter_reduce prod", lambda x, i: _zeros().scatter_reduce(0, _wide(i), x * 1e-3 + 1, "prod"), _fixed,
          _places),
    _unary("unfold backward", lambda x: _mixed(x.unfold(0, 7, 3)), ROWS, 4),
    _unary("nearest backward", lambda x: _mixed(F.interpolate(x, scale_factor=2.5)), 2, 8, 20, 20),
    _unary("bicubic backward", lambda x: _mixed(F.interpolate(x, scale_factor=2.5, mode="bicubic")), 2, 8, 20, 20),
    _unary("antialiased backward", lambda x: _mixed(F.interpolate(x, size=9, mode="bilinear", antialias=True)), 2, 8,
           20, 20),
    _unary("cumprod backward", lambda x: _mixed((x * 1e-3 + 1).cumprod(0)), ROWS, 4),
    _unary("median", lambda x: _mixed(x.round().median(0).values), ROWS, 4),
    _unary("norms and variance", lambda x: x.norm(dim=0).sum() + x.var(0).sin() + F.layer_norm(x, (WIDTH,)).sum(0),
           ROWS, WIDTH),
    _unary("attention", lambda x: F.scaled_dot_product_attention(x, x, x).sin(), 2, 4, 128, 16),
)  # fmt: skip
"""One for each node family; the truth test runs them all."""


def example(path: Path) -> TruthCase:
    """The model and inputs that an example's factory makes, inspected as the file would be from the command line."""
    return TruthCase(f"examples/{path.name}", lambda: load_target(f"{path}:factory")())


EXAMPLES = tuple(
    example(path)
    for path in sorted(Path(__file__).parents[2].glob("examples/*.py"))
    if "def factory(" in path.read_text()
)
"""The models of the examples."""
