"""Proofs that an index names no place twice: what is proved is true on real values, what is false is not proved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from detpass.proofs.exact import addition_is_exact
from detpass.proofs.injective import distinct

arange, randperm = torch.arange, torch.randperm

UNIQUE: list[tuple[str, Callable[[Tensor], tuple[Tensor, ...]]]] = [
    ("arange", lambda x: (arange(7),)),
    ("arange with start and step", lambda x: (arange(3, 30, 4),)),
    ("arange downwards", lambda x: (arange(9, -1, -1),)),
    ("negative arange", lambda x: (arange(-5, 0),)),
    ("arange as a matrix", lambda x: (arange(12).reshape(3, 4),)),
    ("arange scaled and shifted", lambda x: (arange(7) * 3 + 2,)),
    ("mixed radix", lambda x: (arange(4)[:, None] * 5 + arange(5)[None, :],)),
    ("mixed radix, flattened", lambda x: ((arange(4)[:, None] * 5 + arange(5)).reshape(-1),)),
    ("outer product of two aranges", lambda x: (arange(4)[:, None], arange(5)[None, :])),
    ("arange beside data", lambda x: (arange(4), (x[:4] * 10).long().abs())),
    ("a permutation", lambda x: (randperm(7),)),
    ("part of a permutation", lambda x: (randperm(7)[2:5],)),
    ("sort", lambda x: (x.sort()[1],)),
    ("argsort", lambda x: (x.argsort(),)),
    ("topk", lambda x: (x.topk(3)[1],)),
    ("sort of rows beside the row", lambda x: (arange(2)[:, None].expand(2, 4), x.reshape(2, 4).sort(1)[1])),
    ("int32", lambda x: (arange(7).to(torch.int32),)),
    ("one place", lambda x: (x[0].long(),)),
]

NOT_UNIQUE: list[tuple[str, Callable[[Tensor], tuple[Tensor, ...]]]] = [
    ("data", lambda x: (x.long(),)),
    ("arange modulo", lambda x: (arange(8) % 4,)),
    ("arange divided", lambda x: (arange(8) // 2,)),
    ("arange times zero", lambda x: (arange(8) * 0,)),
    ("arange repeated", lambda x: (arange(4)[None, :].expand(3, 4),)),
    ("one arange over an outer shape", lambda x: (arange(4)[:, None], x[:5][None, :].long())),
    ("overlapping windows", lambda x: (arange(4)[:, None] * 2 + arange(3)[None, :],)),
    ("arange around zero wraps", lambda x: (arange(-2, 2),)),
    ("one value of a permutation, repeated", lambda x: (randperm(5)[:1].expand(5),)),
    ("sort of rows without the row", lambda x: (x.reshape(2, 4).sort(1)[1],)),
    ("int8 would wrap", lambda x: (arange(300).to(torch.int8).long(),)),
    ("a single arange element broadcast", lambda x: (arange(1), x.long())),
]


def proof(make: Callable[[Tensor], tuple[Tensor, ...]]) -> str | None:
    graph = make_fx(make, tracing_mode="fake", decomposition_table=_iota())(torch.randn(8)).graph
    (output,) = (n for n in graph.nodes if n.op == "output")
    nodes = output.args[0]
    shape = torch.broadcast_shapes(*[n.meta["val"].shape for n in nodes])
    return distinct(nodes, shape)


def _iota() -> dict[object, Callable[..., object]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


@pytest.mark.parametrize(("name", "make"), UNIQUE, ids=[n for n, _ in UNIQUE])
def test_proved_and_true(name: str, make: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    assert proof(make) is not None
    for seed in range(5):
        torch.manual_seed(seed)
        tensors = torch.broadcast_tensors(*make(torch.randn(8)))
        places = list(zip(*(t.reshape(-1).tolist() for t in tensors), strict=True))
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(("name", "make"), NOT_UNIQUE, ids=[n for n, _ in NOT_UNIQUE])
def test_not_proved(name: str, make: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    assert proof(make) is None


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [
        (torch.int64, True),
        (torch.uint8, True),
        (torch.bool, True),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.complex64, False),
    ],
    ids=str,
)
def test_exact_addition(dtype: torch.dtype, exact: bool) -> None:
    assert addition_is_exact(dtype) is exact
