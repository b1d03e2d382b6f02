"""Which of PyTorch's OpInfos run here; which samples do not, are refused or have several right values, and why.

``OPERATIONS`` are those whose joint graphs hold a node that a rule or a catalogue row names; ``survey.py`` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.conformance.samples import Sample

OPERATIONS = (
    "__getitem__", "gather", "index_add", "index_copy", "index_fill", "index_put", "index_select",
    "index_reduce.mean", "index_reduce.prod", "index_reduce.amin", "index_reduce.amax", "put", "scatter",
    "scatter_add", "scatter_reduce.sum", "scatter_reduce.prod", "scatter_reduce.mean", "scatter_reduce.amin",
    "scatter_reduce.amax", "take", "take_along_dim", "masked_scatter", "masked_select", "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided",
    "as_strided.partial_views", "as_strided_copy", "as_strided_scatter", "unfold", "unfold_copy", "combinations",
    "nn.functional.embedding", "nn.functional.embedding_bag", "repeat_interleave", "nn.functional.cross_entropy",
    "nn.functional.nll_loss", "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss",
    "nn.functional.one_hot", "nn.functional.ctc_loss", "nn.functional.linear_cross_entropy",
    "nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none",
    "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_avg_pool2d", "nn.functional.adaptive_avg_pool3d",
    "nn.functional.adaptive_max_pool1d", "nn.functional.adaptive_max_pool2d", "nn.functional.adaptive_max_pool3d",
    "nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.max_pool1d",
    "nn.functional.max_pool2d", "nn.functional.max_pool3d", "max_pool2d_with_indices_backward",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.max_unpool1d",
    "nn.functional.max_unpool1d.grad", "nn.functional.max_unpool2d", "nn.functional.max_unpool2d.grad",
    "nn.functional.max_unpool3d", "nn.functional.max_unpool3d.grad", "nn.functional.interpolate.nearest",
    "nn.functional.interpolate.nearest-exact", "nn.functional.interpolate.linear",
    "nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic",
    "nn.functional.interpolate.trilinear", "nn.functional.interpolate.area", "nn.functional.upsample_bilinear",
    "nn.functional.upsample_nearest", "_upsample_bilinear2d_aa", "nn.functional.grid_sample", "grid_sampler_2d",
    "grid_sampler_3d", "nn.functional.unfold", "nn.functional.pad.constant", "nn.functional.pad.reflect",
    "nn.functional.pad.replicate", "nn.functional.pad.replicate_negative", "nn.functional.pad.circular",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d",
    "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d",
    "nn.functional.scaled_dot_product_attention", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "cumulative_trapezoid", "prod", "masked.cumsum", "masked.cumprod", "masked.prod", "sort", "msort", "argsort",
    "topk", "kthvalue", "median", "nanmedian", "mode", "masked.median", "quantile", "nanquantile", "isin", "unique",
    "unique_consecutive", "max.reduction_with_dim", "min.reduction_with_dim", "argmax", "argmin", "aminmax",
    "bincount", "histc", "histogram", "histogramdd", "_segment_reduce.lengths", "_segment_reduce.offsets", "stft",
    "istft", "renorm", "nn.functional.pdist", "cdist", "nonzero_static", "searchsorted",
)  # fmt: skip


UNTRACEABLE: Mapping[str, str] = {
    "nn.functional.one_hot": "the number of classes is read off the data",
    "nn.functional.ctc_loss": "no symbolic form of the forward operator",
    "nn.functional.fractional_max_pool3d": "no symbolic form of the backward operator",
    "histogram": "no symbolic form",
    "histogramdd": "no symbolic form",
}
"""Operators of which torch cannot trace some samples, so that Dynamo runs them eagerly. No rule is asked."""

REFUSED: Mapping[str, str] = {}
"""Operators of which some samples are refused as uncovered, and why."""

SAMPLED_AT_ROUNDED_PLACES = (
    "bfloat16 coordinates: rounding moves them into other cells, and torch's own decomposition rounds elsewhere than "
    "its kernel does"
)
UNFIT_DTYPES: Mapping[tuple[str, torch.dtype], str] = {
    ("nn.functional.grid_sample", torch.bfloat16): SAMPLED_AT_ROUNDED_PLACES,
    ("grid_sampler_2d", torch.bfloat16): SAMPLED_AT_ROUNDED_PLACES,
    ("grid_sampler_3d", torch.bfloat16): SAMPLED_AT_ROUNDED_PLACES,
}
"""Operators whose samples of one dtype have no value to compare with."""


def excluded(name: str, dtype: torch.dtype, sample: Sample, dynamic: bool) -> str | None:
    """Why a sample does not run, or None."""
    if dynamic and sample.arguments().get("recompute_scale_factor"):
        return (
            "symbolic sizes: torch computes the recomputed scale factor with Python floats, which only Dynamo records"
        )
    if sample.arguments().get("dropout_p"):
        return "random: a compiled graph draws other numbers than eager does"
    return UNFIT_DTYPES.get((name, dtype))


def _stable_sort(x: Tensor, dim: int = -1, descending: bool = False, **_: object) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(x, stable=True, dim=dim, descending=descending)
    return values, order


def _stable_topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(x, stable=True, dim=dim, descending=largest)
    return values.narrow(dim, 0, k), order.narrow(dim, 0, k)


def _first_of(pick: Callable[..., object]) -> Callable[..., object]:
    """``pick`` (of ``x, ..., dim, keepdim``) with the first place of the value that it picks."""

    def call(x: Tensor, *args: int, **kwargs: int) -> object:
        picked = pick(x, *args, **kwargs)
        if isinstance(picked, Tensor) or x.dim() == 0:
            return picked
        given = dict(zip(("k", "dim", "keepdim") if pick is torch.kthvalue else ("dim", "keepdim"), args, strict=False))
        dim, keepdim = {**given, **kwargs}.get("dim", -1), {**given, **kwargs}.get("keepdim", False)
        value = picked[0].detach() if keepdim else picked[0].detach().unsqueeze(dim)
        first = torch.argmax(((x == value) | (x.isnan() & value.isnan())).int(), dim, keepdim=True)
        chosen = x.gather(dim, first)
        return (chosen, first) if keepdim else (chosen.squeeze(dim), first.squeeze(dim))

    return call


STABLE: Mapping[str, Callable[..., object]] = {
    "sort": _stable_sort,
    "msort": lambda x: _stable_sort(x, 0)[0],
    "argsort": lambda x, *args, **kwargs: torch.argsort(x, *args, **{**kwargs, "stable": True}),
    "topk": _stable_topk,
    "kthvalue": _first_of(torch.kthvalue),
    "median": _first_of(torch.median),
    "nanmedian": _first_of(torch.nanmedian),
    "mode": _first_of(torch.mode),
}
"""For operators that leave the order of equal values open: the smallest index first, as the GPU rules do."""
