"""Nested results as a flat, ordered list of named tensors and plain values.

Digests, comparisons and ledgers all look at a result through this one walk, so they agree on what a result holds.
Neighbours: ``digests.py`` (hashes the list), ``differences.py`` (compares two lists).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from detpass.errors import ConfigurationError

Plain = bool | int | float | complex | str | bytes | None
"""Values that count by themselves, beside tensors."""


def walk(obj: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor | Plain]]:
    """Every tensor and plain value in ``obj`` with its path, in a fixed order.

    Containers are mappings (walked in the order of their keys' text, so insertion order does not count), sequences,
    sets of plain values, dataclasses, modules and optimizers (through ``state_dict()``), and anything with
    ``__array__`` (NumPy). A wrapper subclass of Tensor is walked through its inner tensors. Container sizes and kinds
    are yielded too: an empty list is not an empty dict.

    Raises ConfigurationError for an object of any other kind, naming its path.
    """
    if isinstance(obj, torch.Tensor):
        yield from _walk_tensor(obj, path)
    elif obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
        yield path, obj
    elif isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
        yield from walk(obj.state_dict(), path)
    elif isinstance(obj, Mapping):
        yield f"{path}#", f"mapping of {len(obj)}"
        for key in sorted(obj, key=lambda key: (str(key), type(key).__name__)):
            yield from walk(obj[key], f"{path}.{key}" if path else str(key))
    elif isinstance(obj, (list, tuple, torch.Size)):
        yield f"{path}#", f"sequence of {len(obj)}"
        for position, item in enumerate(obj):
            yield from walk(item, f"{path}[{position}]")
    elif isinstance(obj, (set, frozenset)):
        yield from walk(sorted(obj, key=repr), path)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        yield from walk({field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}, path)
    elif isinstance(obj, (torch.dtype, torch.device)):
        yield path, str(obj)
    elif hasattr(obj, "__array__"):
        yield from walk(torch.as_tensor(obj), path)
    else:
        raise ConfigurationError(
            f"cannot read the bits of {path or 'the result'}: it is a {type(obj).__qualname__}; return tensors, "
            "numbers, strings, and lists, dicts or dataclasses of them"
        )


def named_tensors(obj: Any) -> dict[str, torch.Tensor]:
    """The tensors of ``obj`` by path, in the order of :func:`walk`. A lone tensor has the path ``""``."""
    return {path: value for path, value in walk(obj) if isinstance(value, torch.Tensor)}


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a strided tensor as ``uint8[numel * itemsize]`` on the CPU, in logical (row-major) order.

    Views, strides, lazy conjugation and lazy negation do not count. The result may share memory with ``tensor``.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _walk_tensor(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, torch.Tensor | Plain]]:
    if hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        for name in inner:
            yield from _walk_tensor(getattr(tensor, name), f"{path}.{name}" if path else name)
    elif tensor.layout is torch.strided:
        yield path, tensor
    elif tensor.layout is torch.sparse_coo:
        coalesced = tensor.detach().coalesce()
        yield f"{path}#", f"sparse {tuple(tensor.shape)}"
        yield f"{path}.indices", coalesced.indices()
        yield f"{path}.values", coalesced.values()
    else:
        raise ConfigurationError(
            f"cannot read the bits of {path or 'the result'}: layout {tensor.layout}; expected strided or sparse_coo, "
            "convert it first"
        )
