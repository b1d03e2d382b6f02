"""Scans in fixed blocks: values, lengths around the block sizes, refusals, and compiled, sizes known or not."""

from __future__ import annotations

import pytest
import torch

from detpass.backend import detpass, reports
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Inapplicable, NoMatch, Safe
from detpass.rules.scan import BLOCK, SCANS, FixedOrderScan
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
RULE = FixedOrderScan()


def data(target, shape, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    return 1 + x / 100 if target is aten.cumprod.default else x


@pytest.mark.parametrize("target", list(SCANS), ids=str)
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, 1000, BLOCK**2, BLOCK**2 + 1])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values(target, length, dim):
    shape = [2, 3]
    shape[dim] = length
    x = data(target, shape)
    torch.testing.assert_close(replaced(RULE, target, x, dim, device="cuda"), target(x, dim), rtol=1e-10, atol=1e-10)


def test_a_block_is_scanned_left_to_right_and_the_totals_before_it_are_added_last():
    x = data(aten.cumsum.default, (2 * BLOCK + 5,), torch.float32)
    blocks = [x[:BLOCK], x[BLOCK : 2 * BLOCK], x[2 * BLOCK :]]
    inner = [block.cumsum(0) for block in blocks]
    expected = torch.cat([inner[0], inner[1] + inner[0][-1], inner[2] + (inner[0][-1] + inner[1][-1])])
    assert torch.equal(bits(replaced(RULE, aten.cumsum.default, x, 0, device="cuda")), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scans_in_float32(dtype):
    x = data(aten.cumsum.default, (3, 700), torch.float32).to(dtype)
    wide = replaced(RULE, aten.cumsum.default, x.float(), 1, device="cuda")
    assert torch.equal(bits(replaced(RULE, aten.cumsum.default, x, 1, device="cuda")), bits(wide.to(dtype)))


def test_the_dtype_argument_is_applied_first():
    x = torch.arange(600, dtype=torch.int64)
    got = replaced(RULE, aten.cumsum.default, x, 0, dtype=torch.float32, device="cuda")
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.cumsum(x, 0, dtype=torch.float32))


def test_infinity_and_nan_follow_eager():
    x = data(aten.cumsum.default, (700,), torch.float32)
    x[300], x[650] = float("inf"), float("nan")
    got, want = replaced(RULE, aten.cumsum.default, x, 0, device="cuda"), x.cumsum(0)
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.isnan(), want.isnan())


def test_what_is_left_alone():
    cuda = {"device": "cuda"}
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.randn(1000), 0, device="cpu"), Safe)
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.arange(1000), 0, **cuda), Safe)
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.tensor(1.0), 0, **cuda), Safe)
    refused = verdict_of(RULE, aten.cumsum.default, torch.randn(1000, dtype=torch.complex64), 0, **cuda)
    assert isinstance(refused, NoMatch)
    assert refused.why is Inapplicable.DTYPE


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled(dynamic):
    torch._dynamo.reset()
    before = len(reports())
    compiled = torch.compile(
        lambda x: x.cumsum(-1) * x.logcumsumexp(-1), backend=detpass, options={"target": "cuda"}, dynamic=dynamic
    )
    for length in (1000, 777):
        x = data(aten.cumsum.default, (3, length))
        with torch._inductor.config.patch(force_disable_caches=True):
            got = compiled(x)
        torch.testing.assert_close(got, x.cumsum(-1) * x.logcumsumexp(-1), rtol=1e-10, atol=1e-10)
    rules = {record.rule for report in reports()[before:] for record in report.records}
    assert rules == {"fixed_order_scan"}


def test_the_code_for_cuda_has_no_look_back():
    def scans(tall, wide, short):
        return tall.cumsum(0), wide.cumsum(1), wide.t().logcumsumexp(0), short.cumsum(0)

    settings = CudaSettings(compile_kernels=False)
    inputs = [torch.randn(shape) for shape in ((3000, 2), (2, 70000), (200, 3))]
    assert not cuda_code_with(settings, scans, inputs, {}).float_scans
