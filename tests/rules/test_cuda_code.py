"""The code that Inductor generates for CUDA from our forms holds no float atomic, look-back scan or unsafe call.

Needs no GPU. That plain Inductor's code for the same functions does hold one is checked beside it, so that a reader of
sources which no longer finds anything cannot pass for a proof.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from detpass.inspection.cuda_code import CudaSettings, cuda_code_with


def flat(*tensors):
    return torch.stack([tensor.sin().sum() for tensor in tensors])


def resampling(x, volume):
    modes = [F.interpolate(x, scale_factor=2, mode=mode) for mode in ("nearest", "bilinear", "bicubic")]
    smooth = F.interpolate(x, size=(7, 9), mode="bilinear", antialias=True)
    return flat(*modes, smooth, F.interpolate(volume, scale_factor=2, mode="trilinear"))


def pooling(x, volume):
    return flat(
        F.max_pool2d(x, 3, 2),
        F.avg_pool2d(x, 3, 2, ceil_mode=True),
        F.adaptive_avg_pool2d(x, 7),
        F.adaptive_max_pool2d(x, 7),
        F.fractional_max_pool2d(x, 3, output_size=7),
        F.max_pool3d(volume, 2),
        F.avg_pool3d(volume, 2),
        F.adaptive_avg_pool3d(volume, 3),
    )


def windows_and_pads(x, volume):
    return flat(F.unfold(x, 3, padding=1).sin(), F.pad(x, (2, 1, 2, 3), mode="replicate"))


def points(x, volume):
    return F.grid_sample(x, x.reshape(2, 8, -1, 2), align_corners=False)


def order(x, volume):
    line = x.flatten(1)
    return flat(line.cumsum(1), line.topk(3, 1)[0], line.kthvalue(3, 1)[0], torch.histc(line.detach(), 10))


def test_ctc_loss_is_one_call_without_atomics():
    lengths = torch.tensor([12, 9]), torch.tensor([3, 2])
    targets = torch.randint(1, 6, (2, 3))

    def loss(logits):
        return F.ctc_loss(logits.log_softmax(-1), targets, *lengths)

    code = cuda_code_with(
        CudaSettings("detpass", compile_kernels=False), loss, [torch.randn(12, 2, 6, requires_grad=True)], {}
    )
    assert "detpass.ctc_loss_backward" in "".join(code.sources.values())
    assert "aten._ctc_loss" not in "".join(code.sources.values())
    assert not code.float_atomics
    assert not code.float_scans
    assert not code.nondeterministic_externs


def rows_that_are_data(x, volume):
    kept = x.flatten(0, 2)
    kept = kept[kept.sum(1) > 0]  # as many rows as the values say
    index = torch.arange(96, device=x.device) % 7
    return torch.zeros_like(kept).index_add(0, index, x.flatten(0, 2)).sin() + kept[index % 5].sum()


def members_that_are_data(x, volume):
    source = x.flatten(0, 2)
    chosen = source.sum(1) > 0
    index = (torch.arange(96, device=x.device) % 7)[chosen]
    sums = source.index_add(0, index, source[chosen])
    return sums.scatter(0, index[:, None].expand(-1, 16), source[chosen]).sin()


@pytest.mark.parametrize("function", [rows_that_are_data, members_that_are_data])
def test_sizes_that_are_data(function):
    """Inductor cannot compare their strides; what a kernel writes must not ask it to."""
    inputs = [torch.randn(2, 3, 16, 16, requires_grad=True), torch.randn(1)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), function, inputs, {})
        plain = cuda_code_with(CudaSettings("inductor", compile_kernels=False), function, inputs, {})
    assert code.deterministic
    assert "segment_level" in "".join(code.sources.values())
    assert not plain.deterministic


@pytest.mark.parametrize(
    "function",
    [*(pytest.param(f, marks=pytest.mark.slow) for f in (resampling, pooling)), windows_and_pads, points, order],
)
def test_nothing_nondeterministic_is_left(function):
    inputs = [torch.randn(2, 3, 16, 16, requires_grad=True), torch.randn(1, 2, 4, 5, 6, requires_grad=True)]
    code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), function, inputs, {})
    assert not code.float_atomics
    assert not code.float_scans
    assert not code.nondeterministic_externs
    plain = cuda_code_with(CudaSettings("inductor", compile_kernels=False), function, inputs, {})
    assert plain.float_atomics or plain.float_scans or plain.nondeterministic_externs


def index_adds(table, index, source):
    table.index_add_(0, index, source)


def index_puts(table, index, source):
    table.index_put_((index,), source, accumulate=True)


def scatter_adds(table, index, source):
    table.scatter_add_(0, index[:, None].expand_as(source), source)


SEGMENTS, ROWS, COLUMNS = 50_021, 700, 3


def code_of_update(function, dynamic=None, compile_kernels=False):
    inputs = torch.randn(SEGMENTS, COLUMNS), torch.randint(0, SEGMENTS, (ROWS,)), torch.randn(ROWS, COLUMNS)
    settings = CudaSettings("detpass", dynamic=dynamic, compile_kernels=compile_kernels)
    code = cuda_code_with(settings, function, inputs, {})
    assert code.deterministic
    (source,) = code.sources.values()
    return source.partition("def call(")[2].partition("def benchmark")[0]


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [index_adds, pytest.param(index_puts, marks=pytest.mark.slow),
                                      pytest.param(scatter_adds, marks=pytest.mark.slow)])  # fmt: skip
def test_few_rows_of_a_large_table_are_updated_in_place(function, dynamic):
    calls = code_of_update(function, dynamic)
    (update,) = [line for line in calls.splitlines() if "update_rows" in line and ".run(" in line]
    table = update.partition(".run(")[2].partition(",")[0]
    assert table.startswith("arg"), "the kernel writes the graph's input itself"
    others = [line for line in calls.splitlines() if re.search(rf"\b{table}\b", line) and line != update]
    assert not [line for line in others if ".run(" in line or "torch.ops" in line], "and nothing else touches it"
    if dynamic is None:
        passes = [line for line in calls.splitlines() if str(SEGMENTS * COLUMNS) in line]
        assert not passes, "no kernel and no buffer is as large as the table"


@pytest.mark.slow
def test_a_table_that_is_read_later_is_kept():
    def add_and_read(table, index, source):
        return table.index_add(0, index, source), table * 2

    calls = code_of_update(add_and_read, compile_kernels=True)
    (update,) = [line for line in calls.splitlines() if "update_rows" in line and ".run(" in line]
    assert not re.search(r"\.run\(arg|reinterpret_tensor\(arg", update)


def test_many_rows_are_one_pass_over_the_table():
    def add(table, index, source):
        return (table * 0.5).index_add(0, index, source)

    inputs = torch.randn(100, 3), torch.randint(0, 100, (700,)), torch.randn(700, 3)
    code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), add, inputs, {})
    (source,) = code.sources.values()
    assert code.deterministic
    assert "update_rows" not in source
