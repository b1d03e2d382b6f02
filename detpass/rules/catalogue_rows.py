"""The rows of the catalogue that graphs show, by the operators' names in a joint graph (torch 2.11 to 2.14).

Sources: the documentation of ``torch.use_deterministic_algorithms``, the not-deterministic alerts of ATen's CUDA code,
and what Inductor's lowerings emit (atomics, plain scatters, look-back scans), read off 212 operations.
"""

from __future__ import annotations

from detpass import user_kernels
from detpass.rule import Treatment
from detpass.rules.catalogue import (
    CPU,
    CUDA,
    Entry,
    captures_gradients,
    has_ordered_atomics,
    has_weights,
    is_flash,
    is_inexact,
    is_left_to_cudnn,
    is_measured,
    is_transposed,
    is_unstable,
)

SEGMENT, CLOSED, NATIVE, SAFE, UNCOVERED = (
    Treatment.SEGMENT,
    Treatment.CLOSED_FORM,
    Treatment.NATIVE,
    Treatment.SAFE,
    Treatment.UNCOVERED,
)
LAUNCHES = tuple(map(str, user_kernels.LAUNCHES))
BOTH, GPU = (CPU, CUDA), (CUDA,)
ATOMIC = "threads add into shared places in the order in which they arrive"
RACE = "several writers of one place, and the last one wins"
LOOK_BACK = "thread blocks pass partial results on in the order in which they arrive"
KERNEL = "the fast kernel adds partial results atomically"
NN, T = "torch.nn.", "torch.Tensor."


def _backwards(*names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}_backward.default" for name in names)


def _test(name: str) -> str:
    return f"tests/rules/test_{name}.py"


ACCUMULATION_TEST = "tests/integration/test_accumulations.py"

ACCUMULATIONS = (
    Entry("indexing backward, index_put, take, put_ (accumulating)",
          ("aten.index_put.default", "aten.index_put_.default", "aten._unsafe_index_put.default"),
          BOTH, ATOMIC, SEGMENT, "index_put_accumulate", ACCUMULATION_TEST,
          (T + "__getitem__", T + "index_put", T + "put_", "torch.index_select", "torch.repeat_interleave"),
          is_inexact),
    Entry("index_put, x[i] = v, put_ (plain writes)",
          ("aten.index_put.default", "aten.index_put_.default", "aten._unsafe_index_put.default"),
          BOTH, RACE, SEGMENT, "index_put_last_write", ACCUMULATION_TEST, (T + "index_put", T + "put_")),
    Entry("masked index_put (embedding backward, decomposed)", ("aten._unsafe_masked_index_put_accumulate.default",),
          BOTH, ATOMIC, SEGMENT, "masked_index_put_accumulate", ACCUMULATION_TEST, (), is_inexact),
    Entry("embedding backward", _backwards("embedding_dense"),
          BOTH, ATOMIC, SEGMENT, "embedding_dense_backward", ACCUMULATION_TEST, (NN + "Embedding",)),
    Entry("embedding_bag backward", _backwards("_embedding_bag", "_embedding_bag_dense"),
          GPU, ATOMIC, SEGMENT, "embedding_bag_backward", ACCUMULATION_TEST, (NN + "EmbeddingBag",)),
    Entry("index_add, index_reduce", ("aten.index_add.default", "aten.index_reduce.default"),
          BOTH, ATOMIC, SEGMENT, "index_add", ACCUMULATION_TEST, ("torch.index_add",), is_inexact),
    Entry("index_copy", ("aten.index_copy.default",),
          BOTH, RACE, SEGMENT, "index_copy", ACCUMULATION_TEST, (T + "index_copy",)),
    Entry("scatter_add, scatter_reduce, gather backward",
          ("aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.reduce", "aten.scatter.value_reduce",
           "aten.scatter_reduce_.two", "aten.scatter_add_.default"),
          GPU, ATOMIC, SEGMENT, "scatter_reduce", ACCUMULATION_TEST,
          (T + "scatter_add_", "torch.gather", T + "scatter_reduce"), is_inexact),
    Entry("index_fill", ("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor"),
          BOTH, "several writers of one place", CLOSED, "index_fill", ACCUMULATION_TEST),
    Entry("scatter with a source", ("aten.scatter.src", "aten.scatter_.src"),
          BOTH, RACE, SEGMENT, "scatter_last_write", ACCUMULATION_TEST, (T + "scatter",)),
)  # fmt: skip

SPATIAL = (
    Entry("max pooling backward", _backwards("max_pool2d_with_indices", "max_pool3d_with_indices"),
          GPU, ATOMIC, CLOSED, "max_pool_backward", _test("max_pooling"), (NN + "MaxPool3d",)),
    Entry("average pooling backward", _backwards("avg_pool2d", "avg_pool3d"),
          GPU, ATOMIC, CLOSED, "avg_pool_backward", _test("pooling"), (NN + "AvgPool3d",)),
    Entry("adaptive average pooling backward", _backwards("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
          GPU, ATOMIC, CLOSED, "adaptive_avg_pool_backward", _test("adaptive_pooling"),
          (NN + "AdaptiveAvgPool2d", NN + "AdaptiveAvgPool3d")),
    Entry("adaptive max pooling backward", _backwards("adaptive_max_pool2d", "adaptive_max_pool3d"),
          GPU, ATOMIC, CLOSED, "adaptive_max_pool_backward", _test("adaptive_pooling"), (NN + "AdaptiveMaxPool2d",)),
    Entry("fractional max pooling backward", _backwards("fractional_max_pool2d", "fractional_max_pool3d"),
          GPU, ATOMIC, SEGMENT, "fractional_max_pool_backward", _test("adaptive_pooling"),
          (NN + "FractionalMaxPool2d", NN + "FractionalMaxPool3d")),
    Entry("replication padding backward", _backwards("replication_pad1d", "replication_pad2d", "replication_pad3d"),
          GPU, ATOMIC, CLOSED, "replication_pad_backward", _test("padding"),
          (NN + "ReplicationPad1d", NN + "ReplicationPad2d", NN + "ReplicationPad3d")),
    Entry("fold, unfold backward", ("aten.col2im.default",), BOTH, ATOMIC, CLOSED, "col2im", _test("folding")),
    Entry("Tensor.unfold backward, istft", ("aten.unfold_backward.default",),
          BOTH, ATOMIC, CLOSED, "unfold_backward", _test("folding")),
    Entry("interpolate backward, nearest and antialiased included",
          _backwards("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
                     "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
                     "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
                     "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
          BOTH, ATOMIC, CLOSED, "resampling_backward", _test("resampling"), ("torch.nn.functional.interpolate",)),
    Entry("grid_sample backward", _backwards("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler"),
          GPU, ATOMIC, SEGMENT, "grid_sample_backward", _test("grid_sample"), ("torch.nn.functional.grid_sample",)),
    Entry("roi_align, ps_roi_align backward (torchvision)",
          ("torchvision._roi_align_backward.default", "torchvision._ps_roi_align_backward.default"),
          GPU, ATOMIC, SEGMENT, "roi_align_backward", _test("regions")),
    Entry("roi_pool backward (torchvision)", ("torchvision._roi_pool_backward.default",),
          GPU, ATOMIC, SEGMENT, "roi_pool_backward", _test("regions")),
    Entry("ps_roi_pool backward (torchvision)", ("torchvision._ps_roi_pool_backward.default",),
          GPU, ATOMIC, CLOSED, "ps_roi_pool_backward", _test("regions")),
    Entry("deform_conv2d backward (torchvision)", ("torchvision._deform_conv2d_backward.default",),
          GPU, ATOMIC, SEGMENT, "deform_conv2d_backward", _test("deformable")),
)  # fmt: skip

ORDER = (
    Entry("cumsum, cumprod, logcumsumexp", ("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default"),
          GPU, LOOK_BACK, CLOSED, "fixed_order_scan", _test("scan"), ("torch.cumsum",), is_inexact),
    Entry("associative_scan", ("associative_scan",),
          GPU, LOOK_BACK, CLOSED, "associative_scan", _test("associative_scan")),
    Entry("median, nanmedian, kthvalue, mode, topk",
          ("aten.median.dim", "aten.nanmedian.dim", "aten.kthvalue.default", "aten.mode.default", "aten.topk.default"),
          GPU, "which of several equal values an index names is left open", CLOSED, "smallest_index_among_equals",
          _test("ties"), ("torch.median",)),
    Entry("sort, unstable", ("aten.sort.default",), GPU, "the order of equal values is left open", CLOSED,
          "smallest_index_among_equals", _test("ties")),
    Entry("sort with stable=False", ("aten.sort.stable",), GPU, "the order of equal values is left open", CLOSED,
          "smallest_index_among_equals", _test("ties"), (), is_unstable),
    Entry("histc", ("aten.histc.default",), GPU, "float counters are increased atomically", SEGMENT, "histc",
          _test("histogram"), ("torch.histc",), is_inexact),
    Entry("histogram with weights", ("aten.histogram.bin_ct", "aten.histogram.bins_tensor"), (CPU,),
          "threads add their partial histograms as they finish", SEGMENT, "weighted_histogram", _test("histogram"),
          (), has_weights),
    Entry("bincount with weights", ("aten.bincount.default",), GPU, ATOMIC, SEGMENT, "weighted_bincount",
          _test("histogram"), ("torch.bincount",), has_weights,
          "torch.zeros(n, ...).index_add(0, x, weights) is the same sum with a size known beforehand"),
    Entry("CTC loss",
          ("aten._ctc_loss.default", "aten._ctc_loss.Tensor", "aten._ctc_loss_backward.default",
           "aten._ctc_loss_backward.Tensor"),
          GPU, ATOMIC, SEGMENT, "ctc_loss", _test("ctc"), (NN + "CTCLoss",)),
    Entry("CTC loss by cuDNN", ("aten._cudnn_ctc_loss.default", "aten._cudnn_ctc_loss.Tensor"), GPU, KERNEL, NATIVE,
          "cudnn_ctc_loss", _test("ctc"), (NN + "CTCLoss",), is_left_to_cudnn),
)  # fmt: skip

KERNELS = (
    Entry("convolution backward", _backwards("convolution"), GPU, "cuDNN may choose an algorithm that adds atomically",
          NATIVE, "deterministic_kernel", _test("native"),
          tuple(f"{NN}{name}{n}d" for name in ("Conv", "ConvTranspose") for n in (1, 2, 3))),
    Entry("transposed convolution", ("aten.convolution.default",), GPU,
          "cuDNN may choose an algorithm that adds atomically", NATIVE, "deterministic_kernel", _test("native"),
          tuple(f"{NN}ConvTranspose{n}d" for n in (1, 2, 3)), is_transposed),
    Entry("scaled_dot_product_attention backward",
          _backwards("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
                     "_flash_attention", "_efficient_attention", "_cudnn_attention"),
          GPU, KERNEL, NATIVE, "deterministic_kernel", _test("native")),
    Entry("cuDNN and MIOpen RNN backward", _backwards("_cudnn_rnn", "miopen_rnn"), GPU,
          "cuDNN may choose an algorithm that adds atomically", NATIVE, "deterministic_kernel", _test("native")),
    Entry("flex_attention, gradients of captured tensors", ("flex_attention_backward",), GPU, ATOMIC, SEGMENT,
          "flex_attention_backward", _test("flex_attention"), applies=captures_gradients),
    Entry("flex_attention by FlashAttention", ("flex_attention_backward",), GPU, ATOMIC, UNCOVERED, None,
          _test("flex_attention"), applies=is_flash, note="kernel_options={'BACKEND': 'TRITON'} does not"),
)  # fmt: skip

USERS = (
    Entry("Triton kernels of your own, with float atomics, locks or atomics whose results are read", LAUNCHES,
          BOTH, "programs reach one place in any order", UNCOVERED,
          None, _test("user_kernel"), applies=has_ordered_atomics,
          note="sum with detpass.segment instead, or declare the kernel: detpass.Declared(kernel, reason)"),
    Entry("Triton kernels of your own, with other integer atomics, maxima or minima", LAUNCHES,
          BOTH, "programs reach one place in any order", SAFE, "exact_kernel", _test("user_kernel")),
    Entry("Triton kernels of your own with `triton.autotune`, where tiles set the order of a sum", LAUNCHES, BOTH,
          "Inductor measures their configurations and picks one in each process", NATIVE, "first_configuration",
          _test("first_configuration"), applies=is_measured),
    Entry("Triton kernels of your own with `triton.autotune`, where each element has the same operations", LAUNCHES,
          BOTH, "Inductor measures their configurations and picks one in each process", SAFE, "first_configuration",
          _test("first_configuration")),
)  # fmt: skip

ROWS = (*ACCUMULATIONS, *SPATIAL, *ORDER, *KERNELS, *USERS)
