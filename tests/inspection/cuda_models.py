"""Small models of many kinds, for which CUDA code is generated with no GPU: what training on one meets in practice.

Sizes are small, and duplicates of an index are many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelCase:
    """A model and its inputs. Inductor's own code for each has something that differs from run to run."""

    name: str
    make: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


class Convolutions(nn.Module):
    """Convolutions, batch norm, pooling, a transposed convolution, interpolation and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(image)))
        low = F.max_pool2d(hidden, 3, 2, 1)
        high = F.interpolate(low, size=hidden.shape[-2:], mode="bilinear", align_corners=False)
        mixed = F.avg_pool2d(self.up(hidden), 2) + high + F.interpolate(low, scale_factor=2, mode="nearest")
        return self.head(F.adaptive_avg_pool2d(mixed, 3).flatten(1)).sum()


class Attention(nn.Module):
    """Tied token embeddings, learned positions, dropout, attention, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.qkv, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        query, key, value = self.qkv(self.norm(hidden)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = F.dropout(hidden + mixed.transpose(1, 2).flatten(2), 0.1, self.training)
        logits = hidden @ self.tokens.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Messages(nn.Module):
    """Messages along edges, added, averaged and maximised at their ends; a softmax over each node's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        sent = self.inner(nodes)[start]
        score = self.score(sent).squeeze(-1)
        largest = torch.full_like(nodes[:, 0], -9.0).scatter_reduce(0, end, score, "amax")
        weight = (score - largest[end]).exp()
        total = torch.zeros_like(largest).index_add(0, end, weight)
        mixed = torch.zeros_like(nodes).index_add(0, end, sent * (weight / total[end])[:, None])
        wide = end[:, None].expand_as(sent)
        mean = torch.zeros_like(nodes).scatter_reduce(0, wide, sent, "mean", include_self=False)
        return (mixed + mean + torch.zeros_like(nodes).scatter_add(0, wide, sent)).square().sum()


class Recurrent(nn.Module):
    """An LSTM and a GRU over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.tokens(tokens))
        return self.gru(hidden)[0].sum()


class Cells(nn.Module):
    """Recurrent cells in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.gru = nn.Embedding(20, 8), nn.LSTMCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.tokens(tokens)
        state = (rows.new_zeros(rows.shape[0], 8), rows.new_zeros(rows.shape[0], 8))
        hidden = rows.new_zeros(rows.shape[0], 8)
        for step in range(3):
            state = self.lstm(rows[:, step], state)
            hidden = self.gru(state[0], hidden)
        return hidden.sum()


class Recommender(nn.Module):
    """Bags of categories, weighted and not, multiplied with dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(30, 8, mode="sum")
        self.means = nn.EmbeddingBag(30, 8, mode="mean")
        self.dense = nn.Linear(4, 8)

    def forward(self, items: Tensor, offsets: Tensor, weights: Tensor, dense: Tensor) -> Tensor:
        left = self.sums(items, offsets, per_sample_weights=weights)
        return (left * self.means(items, offsets) * self.dense(dense)).sum()


class SpatialTransformer(nn.Module):
    """A localisation network, an affine grid and grid_sample, padded in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(3 * 8 * 8, 6)

    def forward(self, image: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(image.flatten(1)).view(-1, 2, 3), list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, padding_mode="border", align_corners=False).square().sum()


class Experts(nn.Module):
    """Tokens sent to the best two of four experts with a fixed capacity, and brought back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, expert = self.router(tokens).softmax(-1).topk(2, dim=-1)
        flat, source = expert.flatten().sort(stable=True)
        rank = torch.arange(flat.numel(), device=flat.device) - torch.searchsorted(flat, flat)
        slot = torch.where(rank < 16, flat * 16 + rank, 64)
        bins = tokens.new_zeros(65, 8).index_copy(0, slot, tokens[source // 2])[:64].view(4, 16, 8)
        done = F.pad(torch.bmm(bins, self.experts).flatten(0, 1), (0, 0, 0, 1))[slot]
        return torch.zeros_like(tokens).index_add(0, source // 2, done * weight.flatten()[source, None]).square().sum()


class Mixed(nn.Module):
    """Many of the above in one graph: buffers changed in place, views written to, slices, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(40, 16), nn.Conv1d(16, 16, 3, padding=1, padding_mode="circular")
        self.norm, self.gru, self.messages = nn.BatchNorm1d(16), nn.GRU(16, 8, batch_first=True), Messages()
        self.register_buffer("counts", torch.zeros(40))
        self.register_buffer("weights", torch.tensor([0.5, 0.25, 0.25]))

    def forward(self, tokens: Tensor, edges: Tensor) -> Tensor:
        self.counts.index_add_(0, tokens.flatten(), torch.ones_like(tokens.flatten(), dtype=torch.float32))
        rows = self.norm(self.conv(self.words(tokens).transpose(1, 2))).transpose(1, 2)
        state = self.gru(rows)[0].clone()
        state[:, 1:, :3] += rows[:, :-1, :3] * self.weights.to(rows.dtype)
        state[state > 1.0] = 0.0
        picked, _ = state.flatten(0, 1).cumsum(0).sort(dim=0)
        return self.messages(picked, edges) + state[:, 0].index_select(0, tokens[:, 0] % 3).median(0).values.sum()


def _padding(image: Tensor) -> Tensor:
    modes = ("reflect", "replicate", "circular", "constant")
    return torch.stack([F.pad(image, (2, 1, 1, 2), mode=mode).sin().sum() for mode in modes])


def _volumes(volume: Tensor) -> Tensor:
    kinds = (F.max_pool3d(volume, 2), F.avg_pool3d(volume, 2), F.adaptive_avg_pool3d(volume, 3))
    smooth = F.interpolate(volume, scale_factor=2, mode="trilinear")
    return torch.stack([x.sin().sum() for x in (*kinds, smooth, F.pad(volume, (1, 1, 1, 1, 1, 1), "replicate"))])


def _order(x: Tensor) -> Tensor:
    scans = (x.cumsum(0), x.cumprod(0), x.logcumsumexp(0), x.cummax(0).values)
    picked = (x.sort(0).values, x.topk(3, 0).values, x.median(0).values, x.kthvalue(2, 0).values, x.quantile(0.3, 0))
    return torch.stack([y.sin().sum() for y in (*scans, *picked, x.mode(0).values)])


def _view_scatter(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(9).index_put((index,), x[:, 0], accumulate=True)


def _written_views(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:3] = x[:2] * 2
    y.diagonal().add_(1.0)
    y[:, 1].mul_(x[:, 0])
    return y.as_strided((4, 2), (3, 1)).sin() * x.unfold(0, 2, 1)[:4, :2, 0]


def _losses(x: Tensor, labels: Tensor) -> Tensor:
    near = F.triplet_margin_loss(x[:10], x[10:20], x[20:30])
    return F.cross_entropy(x, labels) + F.multi_margin_loss(x, labels) + near + torch.cdist(x, x).sum()


def _folds(image: Tensor) -> Tensor:
    columns = F.unfold(image, 3, padding=1)
    return F.fold(columns.sin(), image.shape[-2:], 3, padding=1).square().sum()


def _complex(table: Tensor, index: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(table)[index]).square().sum()


def _half(table: Tensor, index: Tensor) -> Tensor:
    rows = table.to(torch.bfloat16)[index]
    return torch.zeros_like(table, dtype=torch.bfloat16).index_add(0, index, rows.sin()).float().sum()


def _case(name: str, function: Callable[..., Tensor], *inputs: Callable[[], Tensor]) -> ModelCase:
    return ModelCase(name, lambda: (function, tuple(make() for make in inputs)))


def _module(name: str, kind: type[nn.Module], *inputs: Callable[[], Tensor]) -> ModelCase:
    return ModelCase(name, lambda: (kind(), tuple(make() for make in inputs)))


def _values(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, requires_grad=True)


def _ids(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape)


MODELS = (
    _module("convolutions", Convolutions, _values(2, 3, 16, 16)),
    _module("attention", Attention, _ids(50, 2, 16)),
    _module("messages", Messages, _values(12, 8), _ids(12, 2, 60)),
    _module("recurrent layers", Recurrent, _ids(20, 3, 5)),
    _module("recurrent cells", Cells, _ids(20, 3, 5)),
    _module("recommender", Recommender, _ids(30, 40), lambda: torch.arange(0, 40, 10), _values(40), _values(4, 4)),
    _module("spatial transformer", SpatialTransformer, _values(2, 3, 8, 8)),
    _module("experts", Experts, _values(24, 8)),
    _module("mixed", Mixed, _ids(40, 3, 6), _ids(18, 2, 50)),
    _case("padding", _padding, _values(2, 3, 8, 8)),
    _case("volumes", _volumes, _values(1, 2, 6, 6, 6)),
    _case("order", _order, _values(20, 6)),
    _case("view scatter", _view_scatter, _values(20, 3), _ids(9, 20)),
    _case("written views", _written_views, _values(8, 3)),
    _case("losses", _losses, _values(30, 6), _ids(6, 30)),
    _case("folds", _folds, _values(1, 2, 6, 6)),
    _case("complex", _complex, _values(9, 2), _ids(9, 40)),
    _case("half precision", _half, _values(9, 6), _ids(9, 40)),
)
"""Every model, with the inputs of one training step."""
