"""Cases for each row of the catalogue that is about CUDA: collisions everywhere, sizes that run in parallel."""

# torchvision need not be there; torch takes lists where its types say tensors.
# mypy: disable-error-code="import-not-found, arg-type, unused-ignore"

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    row: str = ""
    """The row of the catalogue that it shows; empty where the rule that rewrites it tells."""
    gpu_only: bool = False
    """Torch has no kernel for it on a CPU, or chooses another operator there while tracing."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Dynamo that it needs."""

    def fresh_inputs(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Copies of the inputs on ``device``; with ``backward`` the floating-point ones require grad."""
        copies = [value.detach().clone().to(device) for value in self.inputs]
        return [value.requires_grad_(self.backward and value.is_floating_point()) for value in copies]

    def configured(self) -> contextlib.AbstractContextManager[Any]:
        """Dynamo's settings, as the case needs them, inside."""
        return torch._dynamo.config.patch(dict(self.settings)) if self.settings else contextlib.nullcontext()


SIZES = {"capture_dynamic_output_shape_ops": True}
"""The setting of Dynamo for results whose sizes are data."""


@dataclass(frozen=True)
class _Maker:
    """Random tensors of a fixed seed; ``dry`` makes sizes tiny."""

    dry: bool
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    @property
    def rows(self) -> int:
        return 40 if self.dry else 20_000

    @property
    def places(self) -> int:
        return 7 if self.dry else 50

    @property
    def columns(self) -> int:
        return 3 if self.dry else 16

    def image(self) -> Tensor:
        return self.randn(1, 4, 8, 8) if self.dry else self.randn(4, 4, 64, 64)

    def volume(self) -> Tensor:
        return self.randn(1, 2, 8, 4, 4) if self.dry else self.randn(1, 2, 8, 32, 32)

    def line(self) -> Tensor:
        return self.randn(1, 4, 8) if self.dry else self.randn(4, 4, 64)

    def source(self) -> Tensor:
        return self.randn(self.rows, self.columns)


def operator_cases(dry: bool, gpu: bool | None = None) -> list[Case]:
    """The cases, made on the CPU; ``dry`` makes them tiny, ``gpu`` adds those for a GPU alone (by default: not dry)."""
    make = _Maker(dry)
    families = (_accumulations, _reductions, _spatial, _resampling, _order, _libraries, _suspected, _regions, _users)
    wanted = not dry if gpu is None else gpu
    return [case for family in families for case in family(make) if wanted or not case.gpu_only]


def _accumulations(make: _Maker) -> list[Case]:
    index, source, dest = make.randint(make.places, make.rows), make.source(), make.randn(make.places, make.columns)
    wide = index[:, None].expand(-1, make.columns).contiguous()
    bags = make.randint(make.rows // 4, make.rows // 20 + 1).sort().values
    bags[0] = 0
    return [
        Case("index_put accumulate", lambda d, i, s: d.index_put((i,), s, accumulate=True), (dest, index, source)),
        Case("index_put, last write", lambda d, i, s: d.index_put((i,), s), (dest, index, source), False),
        Case(
            "masked index_put",
            lambda d, i, s: torch.ops.aten._unsafe_masked_index_put_accumulate(d, i % 3 > 0, [i], s[:, 0]),
            (dest[:, 0].contiguous(), index, source),
            False,
        ),
        Case("index_add", lambda d, i, s: d.index_add(0, i, s, alpha=0.5), (dest, index, source)),
        Case("index_add bfloat16", lambda d, i, s: d.bfloat16().index_add(0, i, s.bfloat16()), (dest, index, source)),
        Case("index_add, sizes that are data", _selected, (dest, index, source), settings=SIZES),
        Case("index_copy", lambda d, i, s: d.index_copy(0, i, s), (dest, index, source), False),
        Case("index_fill", lambda d, i: d.index_fill(0, i, 2.5), (dest, index)),
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


def _selected(dest: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Into so many rows, and from so many, as the values say."""
    kept, chosen = dest[dest[:, 0] < 0.5], source[:, 0] > 0
    return torch.zeros_like(kept).index_add(0, index[chosen] % 2, source[chosen])


def _reductions(make: _Maker) -> list[Case]:
    index, source, dest = make.randint(make.places, make.rows), make.source(), make.randn(make.places, make.columns)
    wide = index[:, None].expand(-1, make.columns).contiguous()
    scattered = [
        Case(
            f"scatter_reduce {reduce}",
            lambda d, i, s, how=reduce: d.scatter_reduce(0, i, s, how),
            (dest, wide, source),
            reduce in ("sum", "mean"),
        )
        for reduce in ("sum", "mean", "prod", "amax", "amin")
    ]
    indexed = [
        Case(
            f"index_reduce {reduce}",
            lambda d, i, s, how=reduce: d.index_reduce(0, i, s, how),
            (dest, index, source),
            False,
        )
        for reduce in ("mean", "prod", "amax", "amin")
    ]
    return [*scattered, *indexed]


def _spatial(make: _Maker) -> list[Case]:
    image, volume, line = make.image(), make.volume(), make.line()
    side, deep = image.shape[-1], min(volume.shape[2:]) // 2
    places, corners = make.rand(*image.shape[:2], 2), make.rand(*volume.shape[:2], 3)
    pad4, pad6 = (3, 2, 1, 4), (3, 2, 1, 3, 1, 1)
    return [
        Case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1), (image,)),
        Case("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 1, 1), (volume,)),
        Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), (image,)),
        Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 3), (volume,)),
        Case("max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1), (image,)),
        Case("max_pool3d", lambda x: F.max_pool3d(x, 3, 1, 1), (volume,)),
        Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 7), (image,)),
        Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 3), (volume,)),
        Case(
            "fractional_max_pool2d",
            lambda x, at: F.fractional_max_pool2d(x, 3, side // 2, _random_samples=at.detach()),
            (image, places),
        ),
        Case(
            "fractional_max_pool3d",
            lambda x, at: F.fractional_max_pool3d(x, 2, deep, _random_samples=at.detach()),
            (volume, corners),
        ),
        Case("Tensor.unfold", lambda x: x.unfold(-1, 5, 2).sin(), (image,)),
        Case("fold", lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1), (image,)),
        Case("replication_pad1d", lambda x: F.pad(x, (3, 2), mode="replicate"), (line,)),
        Case("replication_pad2d", lambda x: F.pad(x, pad4, mode="replicate"), (image,)),
        Case("replication_pad3d", lambda x: F.pad(x, pad6, mode="replicate"), (volume,)),
        Case("reflection_pad2d", lambda x: F.pad(x, pad4, mode="reflect"), (image,), row="reflection padding backward"),
        Case("circular_pad2d", lambda x: F.pad(x, pad4, mode="circular"), (image,), row="circular padding backward"),
    ]


def _resampling(make: _Maker) -> list[Case]:
    image, volume, line = make.image(), make.volume(), make.line()
    grid = make.rand(image.shape[0], *image.shape[2:], 2) * 2.2 - 1.1
    cube = make.rand(volume.shape[0], *volume.shape[2:], 3) * 2.2 - 1.1
    modes = [
        Case(f"upsample {mode}", lambda x, how=mode: F.interpolate(x, scale_factor=1.7, mode=how), (image,))
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    ]
    return [
        *modes,
        Case("upsample antialias", lambda x: F.interpolate(x, (9, 9), mode="bilinear", antialias=True), (image,)),
        Case("upsample linear", lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (line,)),
        Case("upsample trilinear", lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"), (volume,)),
        Case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (image, grid)),
        Case("grid_sample 3-d", lambda x, g: F.grid_sample(x, g, align_corners=False), (volume, cube)),
    ]


def _order(make: _Maker) -> list[Case]:
    source, index, weights = make.source(), make.randint(make.places, make.rows), make.randn(make.rows)
    positive = source.abs() / source.abs().max() + 0.5
    steps, batch, classes = (12, 2, 6) if make.dry else (100, 16, 30)
    logits, targets = make.randn(steps, batch, classes), 1 + make.randint(classes - 1, batch, 3)
    lengths, target_lengths = [steps] * batch, [3] * batch
    return [
        Case("median", lambda x: x.round().median(dim=0), (source,), False),
        Case("nanmedian", lambda x: x.round().nanmedian(dim=0), (source,), False),
        Case("kthvalue", lambda x: x.round().kthvalue(3, dim=0), (source,), False),
        Case("mode", lambda x: x.round().mode(dim=0), (source,), False),
        Case("sort", lambda x: x.round().sort(dim=0), (source,), False),
        Case("sort stable=False", lambda x: torch.sort(x.round(), stable=False, dim=0), (source,), False),
        Case("topk", lambda x: x.round().topk(5, dim=0), (source,), False),
        Case("histc", lambda x: torch.histc(x, 20, -2.0, 2.0), (source,), False),
        Case(
            "bincount with weights",
            lambda i, w: torch.bincount(i, w, 60) * 2,
            (index, weights),
            False,
            settings=SIZES,
        ),
        Case("cumsum", lambda x: x.cumsum(0), (source,)),
        Case("cumprod", lambda x: x.cumprod(0), (positive,)),
        Case("logcumsumexp", lambda x: x.logcumsumexp(0), (source,)),
        Case("associative_scan", _scanned, (source,), False, gpu_only=True),
        Case("ctc_loss", lambda x, t: F.ctc_loss(x.log_softmax(-1), t, lengths, target_lengths), (logits, targets)),
    ]


def _scanned(x: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    scanned: Tensor = associative_scan(lambda a, b: a + b, x, 0, combine_mode="pointwise")
    return scanned


def _libraries(make: _Maker) -> list[Case]:
    image, kernel, up = make.image(), make.randn(6, 4, 3, 3), make.randn(4, 6, 3, 3)
    heads = (make.randn(2, 2, 16, 16) for _ in range(3)) if make.dry else (make.randn(2, 4, 256, 64) for _ in range(3))
    query, key, value = heads
    half = tuple(tensor.bfloat16() for tensor in (query, key, value))
    table = make.randn(query.shape[1], 2 * query.shape[2] - 1)
    steps, batch, width = (5, 2, 4) if make.dry else (64, 16, 64)
    x, state = make.randn(steps, batch, width), make.randn(1, batch, width)
    gates = (make.randn(3 * width, width), make.randn(3 * width, width), make.randn(3 * width), make.randn(3 * width))
    attention = "scaled_dot_product_attention backward"
    return [
        Case("conv2d", lambda x, w: F.conv2d(x, w, padding=1), (image, kernel)),
        Case("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w), (image, up)),
        Case("attention bfloat16", F.scaled_dot_product_attention, half, row=attention, gpu_only=True),
        Case("attention float32", F.scaled_dot_product_attention, (query, key, value), row=attention, gpu_only=True),
        Case("flex_attention, captured bias", _attended, (query, key, value, table), gpu_only=True),
        Case(
            "GRU by cuDNN",
            lambda x, h, *w: torch.gru(x, h, list(w), True, 1, 0.0, True, False, False)[0],
            (x, state, *gates),
            row="cuDNN and MIOpen RNN backward",
            gpu_only=True,
        ),
    ]


def _attended(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return value + table[h, i - j + query.shape[2] - 1]

    attended: Tensor = flex_attention(query, key, value, score)  # type: ignore[assignment]
    return attended


def _suspected(make: _Maker) -> list[Case]:
    image, source, points = make.image(), make.source(), make.randn(max(make.rows // 100, 8), make.columns)
    classes, labels = make.randint(4, image.shape[0], *image.shape[2:]), make.randint(make.columns, make.rows)
    pooled, indices = F.max_pool2d(image, 2, return_indices=True)
    lengths = torch.full((4,), make.rows // 4)
    weight, bias = make.randn(image.shape[1]), make.randn(image.shape[1])
    norms = "sums, means, norms, batch norm, layer norm"
    scans = "cummax, cummin, quantile, margin losses (backward)"
    return [
        Case(
            "nll_loss2d",
            lambda x, t: F.nll_loss(x.log_softmax(1), t),
            (image, classes),
            row="nll_loss, cross_entropy",
        ),
        Case("max_unpool2d", lambda x, i: F.max_unpool2d(x, i, 2), (pooled, indices), row="max_unpool"),
        Case("cummax", lambda x: x.cummax(0).values, (source,), row=scans),
        Case("quantile", lambda x: x.quantile(0.3, 0), (points,), row=scans),
        Case("multi_margin_loss", lambda x, t: F.multi_margin_loss(x, t), (source, labels), row=scans),
        Case("cdist", lambda x: torch.cdist(x, x * 0.5), (points,), row="cdist, pdist backward"),
        Case(
            "segment_reduce",
            lambda x, n: torch.segment_reduce(x, "sum", lengths=n, unsafe=True),
            (source, lengths),
            row="segment_reduce",
        ),
        Case(
            "masked_scatter",
            lambda x, s: x.masked_scatter(x > 0, s),
            (source, source + 1),
            row="masked_scatter, masked_select",
        ),
        Case("sums and norms", lambda x: (x.sum(0), x.mean(1), x.norm(dim=0)), (source,), row=norms),
        Case("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), (source,), row=norms),
        Case("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, weight, bias), row=norms),
    ]


def _regions(make: _Maker) -> list[Case]:
    """torchvision's, where it is installed."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    from torchvision import ops

    image = make.randn(1, 4, 16, 16) if make.dry else make.randn(2, 16, 32, 32)
    corners = make.rand(6 if make.dry else 200, 2) * 8
    boxes = torch.cat([make.randint(image.shape[0], len(corners), 1).float(), corners, corners + 6], 1)
    offset, kernel = make.randn(image.shape[0], 18, *image.shape[2:]), make.randn(4, image.shape[1], 3, 3)
    forward = "roi_align, roi_pool, ps_roi_align, ps_roi_pool, deform_conv2d, nms (torchvision), forward"
    return [
        Case("roi_align", lambda x, b: ops.roi_align(x, b.detach(), 4, sampling_ratio=2), (image, boxes), row=forward),
        Case("ps_roi_align", lambda x, b: ops.ps_roi_align(x, b.detach(), 2, sampling_ratio=2), (image, boxes)),
        Case("roi_pool", lambda x, b: ops.roi_pool(x, b.detach(), 4), (image, boxes)),
        Case("ps_roi_pool", lambda x, b: ops.ps_roi_pool(x, b.detach(), 2), (image, boxes)),
        Case("deform_conv2d", lambda x, o, w: ops.deform_conv2d(x, o, w, padding=1), (image, offset, kernel)),
    ]


def _users(make: _Maker) -> list[Case]:
    """Triton kernels of a user's own; without triton none."""
    if importlib.util.find_spec("triton") is None:
        return []

    index, source = make.randint(make.places, make.rows), make.randn(make.places, make.rows)
    mine = "Triton kernels of your own"
    exact = f"{mine}, with other integer atomics, maxima or minima"
    alike = f"{mine} with `triton.autotune`, where each element has the same operations"
    return [
        Case(
            "kernel with integer atomics",
            lambda i: _kernels().counted(i, make.places),
            (index,),
            False,
            row=exact,
            gpu_only=True,
        ),
        Case("autotuned sum", lambda x: _kernels().row_sums(x), (source,), False, gpu_only=True),
        Case(
            "autotuned, element by element", lambda x: _kernels().doubled(x), (source,), False, row=alike, gpu_only=True
        ),
    ]


def _kernels() -> Any:
    import gpu_user_kernels  # late: Triton's interpreter has no autotuner

    return gpu_user_kernels
