"""Which operators that generated CUDA code calls are nondeterministic there, by name.

Generated code is text: it has names and arguments, no nodes. The catalogue of ``detpass/rules`` is asked first; the
table here adds the names that Inductor gives to in-place and grouped forms of the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ATOMIC = "adds by atomics in an order that differs from run to run"
_DUPLICATES = "writers of one place race; which one wins differs from run to run"
_CUDNN = "cuDNN may pick an algorithm that adds by atomics unless torch.backends.cudnn.deterministic is set"
_ATTENTION = "the backward kernel adds the query's gradient by atomics"
_LOOK_BACK = "its scan combines blocks in an order that differs from run to run"
_TIES = "which of several equal values is returned differs from run to run"

_WHY: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "index_add",
            "index_reduce",
            "scatter_add",
            "scatter_reduce",
            "put",
            "_embedding_bag_backward",
            "embedding_bag_backward",
            "_embedding_bag_dense_backward",
            "_embedding_bag_per_sample_weights_backward",
            "adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward",
            "adaptive_max_pool3d_backward",
            "avg_pool3d_backward",
            "fractional_max_pool2d_backward",
            "fractional_max_pool3d_backward",
            "max_pool2d_with_indices_backward",
            "max_pool3d_with_indices_backward",
            "max_unpool2d",
            "max_unpool3d",
            "upsample_linear1d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
            "upsample_trilinear3d_backward",
            "upsample_nearest1d_backward",
            "upsample_nearest2d_backward",
            "upsample_nearest3d_backward",
            "_upsample_bilinear2d_aa_backward",
            "_upsample_bicubic2d_aa_backward",
            "grid_sampler_2d_backward",
            "grid_sampler_3d_backward",
            "reflection_pad1d_backward",
            "reflection_pad2d_backward",
            "reflection_pad3d_backward",
            "replication_pad1d_backward",
            "replication_pad2d_backward",
            "replication_pad3d_backward",
            "_ctc_loss_backward",
            "_cudnn_ctc_loss",
            "histc",
            "segment_reduce",
            "_segment_reduce_backward",
            "nll_loss2d_forward",
            "col2im",
            "_thnn_fused_lstm_cell_backward",
            "roi_align",
            "_roi_align_backward",
            "roi_pool",
            "_roi_pool_backward",
            "ps_roi_align",
        ),
        _ATOMIC,
    ),
    **dict.fromkeys(("scatter", "index_copy", "masked_scatter"), _DUPLICATES),
    **dict.fromkeys(("convolution_backward", "cudnn_convolution_transpose"), _CUDNN),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_flash_attention_backward",
            "_efficient_attention_backward",
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), _LOOK_BACK),
    **dict.fromkeys(("kthvalue", "median", "nanmedian", "mode"), _TIES),
}


def hazard_of(
    operator: str,
    arguments: Sequence[str] = (),
    keywords: Mapping[str, str] | None = None,
    integers: bool = False,
) -> str | None:
    """Why a call is nondeterministic on CUDA, or None.

    ``operator`` is dotted as in generated code, arguments are text. ``integers`` says that the first argument holds
    integers, whose sums do not depend on order.
    """
    name, given = base_name(operator), keywords or {}
    if operator.startswith("torch.ops.detpass."):
        return None
    if name in ("index_put", "_unsafe_index_put", "_index_put_impl"):
        accumulate = given.get("accumulate") or (arguments[3] if len(arguments) > 3 else "False")
        why: str | None = _DUPLICATES if accumulate == "False" else _ATOMIC
    elif name == "convolution":
        why = _CUDNN if given.get("transposed") == "True" else None
    elif name == "bincount":  # without weights it counts, which is exact
        weights = given.get("weights") or (arguments[1] if len(arguments) > 1 else "None")
        why = None if weights == "None" else _ATOMIC
    else:
        why = _WHY.get(name)
    return None if integers and why in (_ATOMIC, _LOOK_BACK) else why


def base_name(operator: str) -> str:
    """``index_add`` for ``aten.index_add_``, ``torch.ops.aten.index_add.default`` and ``extern_kernels.index_add``."""
    parts = operator.split(".")
    if parts[:2] == ["torch", "ops"]:
        parts = parts[2:]
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.rstrip("_") or name
