"""Cases for each operator that is nondeterministic on CUDA: collisions everywhere, sizes that run in parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A function of tensors; with ``backward`` its gradients for every floating-point input are compared too."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    backward: bool = True


def operator_cases(dry: bool) -> list[Case]:
    """The cases, made on the CPU; ``dry`` makes them tiny."""
    generator = torch.Generator().manual_seed(7)
    rows, places, columns = (40, 7, 3) if dry else (20_000, 50, 16)
    batch, side = (1, 8) if dry else (4, 64)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def randint(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    index, source, dest = randint(places, rows), randn(rows, columns), randn(places, columns)
    wide = index[:, None].expand(-1, columns).contiguous()
    image, volume, line = randn(batch, 4, side, side), randn(1, 2, 8, side // 2, side // 2), randn(batch, 4, side)
    grid = torch.rand(batch, side, side, 2, generator=generator) * 2.2 - 1.1
    bags = randint(rows // 4, rows // 20 + 1).sort().values
    bags[0] = 0

    accumulations = [
        Case("index_put accumulate", lambda d, i, s: d.index_put((i,), s, accumulate=True), (dest, index, source)),
        Case("index_put, last write", lambda d, i, s: d.index_put((i,), s), (dest, index, source), False),
        Case("index_add", lambda d, i, s: d.index_add(0, i, s, alpha=0.5), (dest, index, source)),
        Case("index_add bfloat16", lambda d, i, s: d.bfloat16().index_add(0, i, s.bfloat16()), (dest, index, source)),
        Case("index_copy", lambda d, i, s: d.index_copy(0, i, s), (dest, index, source), False),
        Case("gather", lambda d, i: d.gather(0, i), (dest, wide)),
        Case("index_select", lambda d, i: d.index_select(0, i), (dest, index)),
        Case("indexing", lambda d, i: d[i], (dest, index)),
        Case("take", lambda d, i: d.take(i), (dest, index)),
        Case("put accumulate", lambda d, i, s: d.put(i, s[:, 0], accumulate=True), (dest, index, source)),
        Case("scatter_add", lambda d, i, s: d.scatter_add(0, i, s), (dest, wide, source)),
        Case("scatter, last write", lambda d, i, s: d.scatter(0, i, s), (dest, wide, source), False),
        Case("scatter reduce=add", lambda d, i, s: d.scatter(0, i, s, reduce="add"), (dest, wide, source), False),
        Case("embedding", lambda i, w: F.embedding(i, w, padding_idx=1), (index, dest)),
        Case("embedding by frequency", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), (index, dest)),
        Case("embedding_bag sum", lambda i, w, o: F.embedding_bag(i, w, o, mode="sum"), (index, dest, bags)),
        Case("embedding_bag mean", lambda i, w, o: F.embedding_bag(i, w, o, mode="mean"), (index, dest, bags)),
        Case("embedding_bag max", lambda i, w, o: F.embedding_bag(i, w, o, mode="max"), (index, dest, bags)),
    ]
    for reduce in ("sum", "mean", "prod", "amax", "amin"):
        accumulations.append(
            Case(
                f"scatter_reduce {reduce}",
                lambda d, i, s, how=reduce: d.scatter_reduce(0, i, s, how),
                (dest, wide, source),
                reduce in ("sum", "mean"),
            )
        )
    for reduce in ("mean", "prod", "amax", "amin"):
        accumulations.append(
            Case(
                f"index_reduce {reduce}",
                lambda d, i, s, how=reduce: d.index_reduce(0, i, s, how),
                (dest, index, source),
                False,
            )
        )
    pooling = [
        Case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1), (image,)),
        Case("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 1, 1), (volume,)),
        Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), (image,)),
        Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 3), (volume,)),
        Case("max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1), (image,)),
        Case("max_pool3d", lambda x: F.max_pool3d(x, 3, 1, 1), (volume,)),
        Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 7), (image,)),
        Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 3), (volume,)),
        Case("fold", lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1), (image,)),
        Case("replication_pad1d", lambda x: F.pad(x, (3, 2), mode="replicate"), (line,)),
        Case("replication_pad2d", lambda x: F.pad(x, (3, 2, 1, 4), mode="replicate"), (image,)),
        Case("replication_pad3d", lambda x: F.pad(x, (3, 2, 1, 4, 1, 1), mode="replicate"), (volume,)),
        Case("reflection_pad2d", lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect"), (image,)),
    ]
    for mode in ("nearest", "bilinear", "bicubic"):
        pooling.append(
            Case(f"upsample {mode}", lambda x, how=mode: F.interpolate(x, scale_factor=1.7, mode=how), (image,))
        )
    pooling += [
        Case("upsample linear", lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (line,)),
        Case("upsample trilinear", lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"), (volume,)),
        Case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (image, grid)),
    ]
    order = [
        Case("median", lambda x: x.round().median(dim=0), (source,), False),
        Case("kthvalue", lambda x: x.round().kthvalue(3, dim=0), (source,), False),
        Case("mode", lambda x: x.round().mode(dim=0), (source,), False),
        Case("sort", lambda x: x.round().sort(dim=0), (source,), False),
        Case("topk", lambda x: x.round().topk(5, dim=0), (source,), False),
        Case("histc", lambda x: torch.histc(x, 20, -2.0, 2.0), (source,), False),
        Case("cumsum", lambda x: x.cumsum(0), (source,)),
        Case("nll_loss2d", lambda x, t: F.nll_loss(x.log_softmax(1), t), (image, randint(4, batch, side, side))),
    ]
    return [*accumulations, *pooling, *order]
