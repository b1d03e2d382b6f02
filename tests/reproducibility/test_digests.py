"""Digests: equal exactly when every bit is."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from detpass.errors import ConfigurationError
from detpass.reproducibility import digest, digests

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 3).to(dtype)
    other = tensor.clone()
    raw = other.view(-1).view(torch.uint8)
    raw[-1] ^= 1
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(other)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3)])
def test_every_shape_has_a_digest_of_its_own(shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape)
    assert digest(ones) == digest(torch.ones(shape))
    assert digest(ones) != digest(torch.ones((*shape, 1)))


def test_zero_signs_and_nan_payloads_count() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(quiet) != digest(payload)
    assert digest(quiet) == digest(quiet.clone())
    assert digest(0.0) != digest(-0.0)
    assert digest(math.nan) == digest(math.nan)


def test_layout_in_memory_does_not_count() -> None:
    tensor = torch.randn(4, 6)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor[:, ::2]) == digest(tensor[:, ::2].contiguous())
    number = torch.randn(4, dtype=torch.complex64)
    assert digest(number.conj()) == digest(number.conj().resolve_conj()) != digest(number)
    assert digest(number.conj().imag) == digest(number.conj().imag.resolve_neg())


def test_order_of_keys_does_not_count_but_names_and_kinds_do() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})
    assert digest([]) != digest({})
    assert digest([a, [b]]) != digest([[a], b])
    assert digest(1) != digest(True) != digest(1.0)
    assert digest(a) != digest(a.double())


def test_modules_optimizers_dataclasses_and_arrays() -> None:
    @dataclasses.dataclass
    class Pair:
        left: torch.Tensor
        right: torch.Tensor

    model = torch.nn.Linear(3, 2)
    assert digest(model) == digest(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    before = digest(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert digest(optimizer) != before
    one = torch.ones(2)
    assert digest(Pair(one, one)) == digest({"left": one, "right": one})
    assert digest(np.ones(2, dtype=np.float32)) == digest(one)


def test_sparse_tensors_are_read_in_coalesced_form() -> None:
    index = torch.tensor([[1, 0, 1]])
    doubled = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, 3.0]), (3,))
    assert digest(doubled) == digest(doubled.coalesce())
    assert digest(doubled) != digest(torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0, 4.0]), (3,)))


def test_objects_without_bits_are_refused_by_path() -> None:
    with pytest.raises(ConfigurationError, match=r"inner\[1\].*object"):
        digest({"inner": [torch.ones(1), object()]})
    with pytest.raises(ConfigurationError, match="sparse_csr"):
        digest(torch.eye(3).to_sparse_csr())


def test_digests_name_each_tensor() -> None:
    result = digests({"w": torch.ones(2), "rest": [torch.zeros(1), 3]})
    assert list(result) == ["rest[0]", "rest[1]", "w"]
    changed = digests({"w": torch.ones(2), "rest": [torch.ones(1), 3]})
    assert [name for name in result if result[name] != changed[name]] == ["rest[0]"]
