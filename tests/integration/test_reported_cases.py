"""Programs that users reported to torch as wrong, crashing or wrongly accepted, with the right values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detpass.backend import detpass

aten = torch.ops.aten


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=detpass, **kwargs)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def i(*values: int) -> Tensor:
    return torch.tensor(values)


def write_then_read_mirrored(x: Tensor, index: Tensor) -> Tensor:
    x = x.clone()
    x.index_put_((index,), 2 * x[index])
    return x.add_(x.flip(0))


def index_computed_in_the_graph(x: Tensor) -> Tensor:
    v = x.clone().view(-1)
    index = torch.arange(4) % 2
    v[index] = v[index] + 1
    return v


def one_row_then_gather(f: Tensor, batch: Tensor) -> Tensor:
    return torch.zeros(1, 1).index_add_(0, batch, f)[batch]


def repeated_permutation_value(x: Tensor) -> Tensor:
    index = torch.randperm(5)[:1].expand(5)
    return x.index_put((index,), x[index] + 1).sum()


CASES: list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = [
    ("mirrored read after a write", write_then_read_mirrored, lambda: (r(4, 8), torch.arange(2))),
    ("mirrored read, large", write_then_read_mirrored, lambda: (r(512, 64), torch.arange(100))),
    ("index computed in the graph", index_computed_in_the_graph, lambda: (torch.arange(4.0).reshape(2, 2),)),
    ("one permutation value five times", repeated_permutation_value, lambda: (torch.zeros(5),)),
    ("a one-row buffer read back", one_row_then_gather,
     lambda: (torch.ones(1024, 1), torch.zeros(1024, dtype=torch.int64))),
    ("one element of destination", lambda s: torch.zeros(1).index_add(0, torch.zeros(64, dtype=torch.int64), s),
     lambda: (torch.arange(64.0),)),
    ("fold of a permuted tensor",
     lambda x: F.fold(x.permute(0, 1, 3, 4, 2).reshape(1, -1, 4)[:, :1728], (4, 4), (3, 3), padding=1, stride=2),
     lambda: (r(1, 6, 4, 9, 32),)),
    ("a negative index of index_fill", lambda x, k: x.index_fill(0, k, 1.0), lambda: (r(4, 3), i(0, -1))),
    ("index_fill after permute", lambda x: x.permute(2, 0, 1).index_fill(0, i(0, 2), 1.0), lambda: (r(5, 1, 3),)),
    ("scatter by an empty float index", lambda x: x.scatter(0, torch.empty(0, 0), x), lambda: (r(4, 0),)),
    ("scatter_add by an empty index",
     lambda x: x.scatter_add(0, torch.empty(0, 3, dtype=torch.int64), x), lambda: (r(4, 3),)),
    ("scatter_add into out", lambda x, k, s: torch.scatter_add(x, 0, k, s, out=torch.empty_like(x)),
     lambda: (r(4, 3), torch.randint(0, 4, (4, 3), generator=torch.Generator().manual_seed(0)), r(4, 3))),
    ("a scalar over rows", lambda x: x.index_put((i(1, 3),), torch.tensor(2.0)), lambda: (r(5, 3),)),
    ("a row over a mask",
     lambda x: x.index_put((torch.tensor([True, False, True]),), torch.arange(2.0)), lambda: (r(3, 2),)),
    ("a row over indices", lambda x: x.index_put((i(1, 0),), torch.arange(5.0), accumulate=True), lambda: (r(3, 5),)),
    ("three indices and one value", lambda x: x.index_put((i(1, 0),) * 3, torch.ones(1), accumulate=True),
     lambda: (r(3, 5, 2),)),
    ("vmap of an accumulation", torch.vmap(lambda x, k, s: x.index_put((k,), s, accumulate=True)),
     lambda: (r(3, 5), torch.randint(0, 5, (3, 7), generator=torch.Generator().manual_seed(0)), r(3, 7))),
    ("negative indices wrap for put and take", lambda x, k, s: x.put(k, s, accumulate=True).take(k),
     lambda: (r(4, 3), i(-1, -12, 0, -1), r(4))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "make"), CASES, ids=[name for name, _, _ in CASES])
def test_value(name: str, function: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    expected = function(*make())
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(function)(*make()), expected)


GRADIENTS: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    ("a full permutation", lambda x: x[torch.randperm(6)].sum(0), (6, 4)),
    ("pooling with an overhanging window", lambda x: F.avg_pool1d(x, 3, 2, ceil_mode=True), (1, 1, 6)),
    ("an embedding of one element", lambda w: F.embedding(torch.zeros(8, dtype=torch.int64), w), (1, 1)),
    ("amax with rows that get nothing", lambda x: x.new_zeros(5, 3).scatter_reduce(
        0, torch.tensor([[0, 1, 2]] * 6), x, "amax", include_self=False), (6, 3)),
    ("nll_loss of one sample", lambda x: F.nll_loss(x.log_softmax(0), torch.tensor(2)), (4,)),
    ("fold", lambda x: F.fold(x, (4, 4), (2, 2), stride=2), (1, 4, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "shape"), GRADIENTS, ids=[name for name, _, _ in GRADIENTS])
def test_gradient(name: str, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        x = r(*shape).requires_grad_()
        run(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(compiled(function)), gradient(function))


OUT_OF_RANGE: list[tuple[str, Callable[..., Any], tuple[Any, ...], str]] = [
    ("index_add, negative", lambda x, k, s: x.index_add(0, k, s), (r(4, 3), i(0, -1), r(2, 3)),
     "aten.index_add.*index -1.*size 4"),
    ("index_add, large", lambda x, k, s: x.index_add(0, k, s), (r(2, 3), i(0, 2), r(2, 3)),
     "aten.index_add.*index 2.*size 2"),
    ("index_copy, negative", lambda x, k, s: x.index_copy(0, k, s), (r(4, 3), i(0, -1), r(2, 3)),
     "aten.index_copy.*index -1"),
    ("scatter_add, negative", lambda x, k, s: x.scatter_add(0, k, s), (r(4), i(0, -1), r(2)),
     "aten.scatter_add.*index -1"),
    ("scatter_reduce, negative", lambda x, k, s: x.scatter_reduce(0, k, s, "sum"), (r(4), i(0, -1), r(2)), "index -1"),
    ("scatter, negative", lambda x, k, s: x.scatter(0, k, s), (r(4), i(0, -1), r(2)), "aten.scatter.src.*index -1"),
    ("index_put, large", lambda x, k, s: x.index_put((k,), s, accumulate=True), (r(2, 3), i(0, 2), r(2, 3)),
     "index 2.*-2 <= index < 2"),
    ("index_put, far negative", lambda x, k, s: x.index_put((k,), s), (r(2, 3), i(0, -3), r(2, 3)), "index -3"),
    ("second of two indices", lambda x, k, s: x.index_put((k, k), s, accumulate=True),
     (r(4, 2, 3), i(0, 2), r(2, 3)), "index 2.*size 2"),
    ("embedding backward", lambda g, k: aten.embedding_dense_backward(g, k, 4, -1, False), (r(2, 3), i(0, 9)),
     "index 9.*size 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "inputs", "message"), OUT_OF_RANGE, ids=[c[0] for c in OUT_OF_RANGE])
def test_an_index_out_of_range(name: str, function: Callable[..., Any], inputs: tuple[Any, ...], message: str) -> None:
    """IndexError with the operator, the model's line, the value, its position and the size."""
    with pytest.raises(IndexError, match=message) as caught:
        compiled(function)(*inputs)
    assert re.search(r"test_reported_cases\.py:\d+.*: index -?\d+ at position 1 ", str(caught.value))


REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...], str]] = [
    ("index_add of a vector", lambda x, s: x.index_add(0, torch.arange(5), s),
     (r(5, 5), r(5)), r"source.shape = \[5\]; expected \[5, 5\]"),
    ("a value that does not fit", lambda x, s: x.index_put((i(0, 1),), s, accumulate=True), (r(4, 3, 3), r(2, 2, 3)),
     r"shape mismatch: value tensor of shape \[2, 2, 3\].*\[2, 3, 3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "inputs", "message"), REFUSED, ids=[c[0] for c in REFUSED])
def test_what_eager_refuses(name: str, function: Callable[..., Any], inputs: tuple[Any, ...], message: str) -> None:
    """The error has eager's type, names the operator and the model's line, and does not come wrapped by Dynamo."""
    with pytest.raises(Exception) as eager:  # noqa: PT011
        function(*inputs)
    with pytest.raises(type(eager.value), match=message) as caught:
        compiled(function)(*inputs)
    assert type(caught.value) is type(eager.value)
    assert "test_reported_cases.py:" in str(caught.value)
