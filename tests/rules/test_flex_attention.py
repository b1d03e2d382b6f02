"""flex_attention: gradients of captured tensors are refused for CUDA with the way around, which is tested.

torch has no backward of it on a CPU and says so before the graph is made; that check is out of the way here, so that
the graph that CUDA would get reaches the rules.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from detpass.errors import UncoveredError
from tests.rules.compiled import compile_and_compare

SIZE = 16


def biased(q, k, v, bias):
    def score(value, batch, head, i, j):
        return value + bias[i - j + SIZE]

    return flex.flex_attention(q, k, v, score_mod=score)


def dense(q, k, v, bias):
    places = torch.arange(SIZE)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias[places.unsqueeze(1) - places + SIZE]
    )


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    queries = [torch.randn(1, 2, SIZE, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    return *queries, torch.randn(2 * SIZE + 1, dtype=dtype, requires_grad=True)


def test_a_captured_tensor_that_needs_a_gradient_is_refused(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    compiled = torch.compile(biased, backend="detpass", options={"target": "cuda"})
    with pytest.raises(UncoveredError, match="scaled_dot_product_attention"):
        compiled(*inputs())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_way_around_has_the_gradient_of_the_bias(dtype):
    # Sums of 16 products in another order than eager's.
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    records = compile_and_compare(dense, *inputs(dtype), rtol=tolerance, atol=tolerance)
    assert ("segment", "index_put_accumulate") in records.values()


def test_the_way_around_computes_the_same():
    given = [value.detach() for value in inputs(torch.float64)]
    with torch.no_grad():
        torch.testing.assert_close(dense(*given), biased(*given), rtol=1e-12, atol=1e-12)
