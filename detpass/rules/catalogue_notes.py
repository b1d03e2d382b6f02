"""Rows for what torch documents as nondeterministic, or a reader suspects, and a compiled graph settles otherwise."""

from __future__ import annotations

from detpass.rule import Treatment
from detpass.rules.catalogue import CPU, CUDA, Entry

SAFE, UNCOVERED = Treatment.SAFE, Treatment.UNCOVERED
GPU = (CUDA,)
ATOMIC = "eager's kernel adds atomically"
NN = "torch.nn."

NOTES = (
    Entry("reflection padding backward", (), GPU, ATOMIC, SAFE, None, None,
          (NN + "ReflectionPad1d", NN + "ReflectionPad2d", NN + "ReflectionPad3d"),
          note="Inductor decomposes it into a gather"),
    Entry("circular padding backward", (), GPU, ATOMIC, SAFE, note="it is made of slices and sums"),
    Entry("nll_loss, cross_entropy", (), GPU, ATOMIC, SAFE, None, None, (NN + "NLLLoss",),
          note="Inductor decomposes it into gathers, and the backward writes each place once"),
    Entry("max_unpool", (), GPU, "several writers of one place", SAFE, None, None,
          (NN + "MaxUnpool1d", NN + "MaxUnpool2d", NN + "MaxUnpool3d"),
          note="it arrives as index_put and its backward as a gather: see there"),
    Entry("cummax, cummin, quantile, margin losses (backward)", (), GPU, ATOMIC, SAFE,
          note="they arrive as scatter_add: see there"),
    Entry("cdist, pdist backward", ("aten._cdist_backward.default", "aten._pdist_backward.default"), GPU,
          "often suspected", SAFE, note="the kernels write every pair's share and reduce it in a fixed order"),
    Entry("segment_reduce", ("aten.segment_reduce.default", "aten._segment_reduce_backward.default"), GPU,
          "often suspected", SAFE, note="one thread walks a segment"),
    Entry("masked_scatter, masked_select", ("aten.masked_scatter.default", "aten.masked_select.default"), GPU,
          "they scan on CUDA", SAFE, note="the scan is over integers, which are exact in any order"),
    Entry("sums, means, norms, batch norm, layer norm", (), (CPU, CUDA), "often suspected", SAFE,
          note="Inductor reduces in an order that its kernel fixes; autotuning of reductions is off under detpass"),
    Entry("sparse tensors (bmm, mm, coalesce)", (), GPU, ATOMIC, UNCOVERED, None, None, ("torch.bmm",),
          note="torch.compile does not trace them: they run in eager code, which is reported as a graph break"),
    Entry("resize_ of a quantized tensor", (), (CPU, CUDA), "new memory is not initialised", UNCOVERED, None, None,
          ("torch.Tensor.resize_",), note="torch.compile does not trace it"),
    Entry("custom operators", (), (CPU, CUDA), "what their kernels do is unknown", UNCOVERED,
          None, "tests/rewriting/test_unknown_operators.py",
          note="called as they are, with a warning (on_escape); a rule of your own covers one or declares it safe: "
               "detpass.Declared(op, reason)"),
    Entry("roi_align, roi_pool, ps_roi_align, ps_roi_pool, deform_conv2d, nms (torchvision), forward",
          tuple(f"torchvision.{name}.default" for name in
                ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d", "nms")),
          (CPU, CUDA), "often suspected", SAFE, note="each result is written from one place; nms sorts stably"),
    Entry("matrix products by cuBLAS on several streams", (), GPU, "streams share a workspace", UNCOVERED,
          None, "tests/test_cublas.py",
          note="set CUBLAS_WORKSPACE_CONFIG=:4096:8; a compile for CUDA warns once when it is absent"),
    Entry("linalg.lstsq", ("aten.linalg_lstsq.default",), (CPU,),
          "MKL's threads change the last bits (seen with two threads)", UNCOVERED,
          note="torch.compile does not trace it; torch.linalg.pinv(a) @ b is repeatable"),
)  # fmt: skip
