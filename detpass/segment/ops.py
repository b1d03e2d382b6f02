"""The operators ``detpass::*``: schemas, fake kernels and dispatch. ``functional.py`` is what callers use.

They are opaque to compilers on a CPU (one call into the kernels of ``cpu.py``); any other device runs ``fallback.py``.
The accumulating ones come as a functional form and as one that mutates ``dest``, so that Inductor can update a large
table in place. They hold no autograd formula: they appear in graphs that are differentiated already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from detpass.segment import cpu, fallback
from detpass.segment.constants import INDEX_DTYPES
from detpass.segment.reference import check_supported

_SCHEMAS = (
    "segment_reduce(Tensor source, Tensor index, SymInt num_segments, str reduce='sum', bool wrap=False, "
    "str op='') -> Tensor",
    "segment_accumulate(Tensor dest, Tensor index, Tensor source, str reduce='sum', bool wrap=False, "
    "str op='') -> Tensor",
    "segment_accumulate_(Tensor(a!) dest, Tensor index, Tensor source, str reduce='sum', bool wrap=False, "
    "str op='') -> Tensor(a!)",
    "segment_count(Tensor index, SymInt num_segments, bool wrap=False, str op='') -> Tensor",
    "last_positions(Tensor index, SymInt num_segments, bool wrap=False, str op='') -> Tensor",
    "linear_index(Tensor[] indices, SymInt[] sizes, bool wrap=False, str op='') -> Tensor",
    "plan(Tensor index, SymInt num_segments, bool wrap=False, str op='') -> (Tensor, Tensor)",
    "planned_reduce(Tensor source, Tensor perm, Tensor offsets, str reduce='sum') -> Tensor",
    "planned_accumulate(Tensor dest, Tensor perm, Tensor offsets, Tensor source, str reduce='sum') -> Tensor",
    "planned_accumulate_(Tensor(a!) dest, Tensor perm, Tensor offsets, Tensor source, str reduce='sum') -> Tensor(a!)",
)


def _tags() -> tuple[torch.Tag, ...]:
    """Return the tags: compiler-safe, any strides accepted (no layout copies), not inside a CUDA graph."""
    names = ("pt2_compliant_tag", "flexible_layout", "cudagraph_unsafe")
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


LIBRARY = torch.library.Library("detpass", "DEF")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=_tags())


def _check_index(index: Tensor, num_segments: int | torch.SymInt | None) -> None:
    if index.dim() != 1:
        raise ValueError(f"index has shape {tuple(index.shape)}; expected one dimension (see linear_index)")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"index has dtype {index.dtype}; expected int32 or int64")
    if isinstance(num_segments, int) and num_segments < 0:
        raise ValueError(f"num_segments is {num_segments}; expected 0 or more")


def _check_source(source: Tensor, rows: int | torch.SymInt, reduce: str) -> None:
    check_supported(source.dtype, reduce)
    if source.dim() != 3:
        raise ValueError(f"source has shape {tuple(source.shape)}; expected [batch, rows, features]")
    if source.shape[1] != rows:
        raise ValueError(f"source has {source.shape[1]} rows (shape {tuple(source.shape)}), the index has {rows}")


def _check_dest(dest: Tensor, source: Tensor) -> None:
    if dest.dim() != 3:
        raise ValueError(f"dest has shape {tuple(dest.shape)}; expected [batch, segments, features]")
    if dest.dtype != source.dtype:
        raise TypeError(f"dest is {dest.dtype} and source is {source.dtype}; expected one dtype")
    if dest.shape[0] != source.shape[0] or dest.shape[2] != source.shape[2]:
        raise ValueError(
            f"dest is {tuple(dest.shape)} and source is {tuple(source.shape)}; expected equal batch and feature sizes"
        )


def _check_plan(perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> None:
    if perm.dim() != 1 or offsets.dim() != 1 or not {perm.dtype, offsets.dtype} <= set(INDEX_DTYPES):
        raise ValueError(
            f"perm is {perm.dtype}{tuple(perm.shape)}, offsets {offsets.dtype}{tuple(offsets.shape)}; "
            "expected two vectors of int32 or int64, as plan() gives them"
        )
    _check_source(source, perm.shape[0], reduce)


def _check_components(indices: Sequence[Tensor], sizes: Sequence[int]) -> None:
    if not indices or len(indices) != len(sizes):
        raise ValueError(f"{len(indices)} indices for {len(sizes)} sizes; expected as many, and at least one")
    for index in indices:
        if index.dtype not in INDEX_DTYPES:
            raise TypeError(f"index has dtype {index.dtype}; expected int32 or int64 (a mask: take its nonzero())")


# -- the implementations: check, then the kernels (CPU) or torch operations (elsewhere) ------------------------------


def _forms(tensor: Tensor) -> ModuleType:
    return cpu if tensor.is_cpu else fallback


def _segment_reduce(
    source: Tensor, index: Tensor, num_segments: int, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _check_index(index, num_segments)
    _check_source(source, index.shape[0], reduce)
    result: Tensor = _forms(source).segment_reduce(source, index, num_segments, reduce, wrap, op)
    return result


def _segment_accumulate(
    dest: Tensor, index: Tensor, source: Tensor, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _check_index(index, None)
    _check_source(source, index.shape[0], reduce)
    _check_dest(dest, source)
    result: Tensor = _forms(source).segment_accumulate(dest, index, source, reduce, wrap, op)
    return result


def _segment_accumulate_(
    dest: Tensor, index: Tensor, source: Tensor, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _check_index(index, None)
    _check_source(source, index.shape[0], reduce)
    _check_dest(dest, source)
    _forms(source).segment_accumulate_(dest, index, source, reduce, wrap, op)
    return dest


def _segment_count(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    _check_index(index, num_segments)
    result: Tensor = _forms(index).segment_count(index, num_segments, wrap, op)
    return result


def _last_positions(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    _check_index(index, num_segments)
    result: Tensor = _forms(index).last_positions(index, num_segments, wrap, op)
    return result


def _linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool = False, op: str = "") -> Tensor:
    _check_components(indices, sizes)
    result: Tensor = _forms(indices[0]).linear_index(indices, sizes, wrap, op)
    return result


def _plan(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> tuple[Tensor, Tensor]:
    _check_index(index, num_segments)
    result: tuple[Tensor, Tensor] = _forms(index).plan(index, num_segments, wrap, op)
    return result


def _planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str = "sum") -> Tensor:
    _check_plan(perm, offsets, source, reduce)
    result: Tensor = _forms(source).planned_reduce(source, perm, offsets, reduce)
    return result


def _planned_accumulate(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str = "sum") -> Tensor:
    _check_plan(perm, offsets, source, reduce)
    _check_dest(dest, source)
    result: Tensor = _forms(source).planned_accumulate(dest, perm, offsets, source, reduce)
    return result


def _planned_accumulate_(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str = "sum") -> Tensor:
    _check_plan(perm, offsets, source, reduce)
    _check_dest(dest, source)
    _forms(source).planned_accumulate_(dest, perm, offsets, source, reduce)
    return dest


# -- fake kernels: shapes and dtypes, no data -------------------------------------------------------------------------


def _fake_segment_reduce(
    source: Tensor, index: Tensor, num_segments: int, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _check_index(index, num_segments)
    _check_source(source, index.shape[0], reduce)
    return source.new_empty((source.shape[0], num_segments, source.shape[2]))


def _fake_segment_accumulate(
    dest: Tensor, index: Tensor, source: Tensor, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _check_index(index, None)
    _check_source(source, index.shape[0], reduce)
    _check_dest(dest, source)
    return dest.new_empty(dest.shape)


def _fake_segment_accumulate_(
    dest: Tensor, index: Tensor, source: Tensor, reduce: str = "sum", wrap: bool = False, op: str = ""
) -> Tensor:
    _fake_segment_accumulate(dest, index, source, reduce, wrap, op)
    return dest


def _fake_segment_count(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    _check_index(index, num_segments)
    return index.new_empty((num_segments,), dtype=torch.int64)


def _fake_last_positions(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> Tensor:
    _check_index(index, num_segments)
    return index.new_empty(index.shape, dtype=torch.int64)


def _fake_linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool = False, op: str = "") -> Tensor:
    _check_components(indices, sizes)
    rows = torch.broadcast_tensors(*indices)[0].numel()
    return indices[0].new_empty((rows,), dtype=torch.int64)


def _fake_plan(index: Tensor, num_segments: int, wrap: bool = False, op: str = "") -> tuple[Tensor, Tensor]:
    _check_index(index, num_segments)
    dtype = fallback.plan_dtype(index.shape[0])
    return index.new_empty(index.shape, dtype=dtype), index.new_empty((num_segments + 1,), dtype=dtype)


def _fake_planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str = "sum") -> Tensor:
    _check_plan(perm, offsets, source, reduce)
    return source.new_empty((source.shape[0], offsets.shape[0] - 1, source.shape[2]))


def _fake_planned_accumulate(
    dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str = "sum"
) -> Tensor:
    _check_plan(perm, offsets, source, reduce)
    _check_dest(dest, source)
    return dest.new_empty(dest.shape)


def _fake_planned_accumulate_(
    dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str = "sum"
) -> Tensor:
    _fake_planned_accumulate(dest, perm, offsets, source, reduce)
    return dest


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "segment_reduce": (_segment_reduce, _fake_segment_reduce),
    "segment_accumulate": (_segment_accumulate, _fake_segment_accumulate),
    "segment_accumulate_": (_segment_accumulate_, _fake_segment_accumulate_),
    "segment_count": (_segment_count, _fake_segment_count),
    "last_positions": (_last_positions, _fake_last_positions),
    "linear_index": (_linear_index, _fake_linear_index),
    "plan": (_plan, _fake_plan),
    "planned_reduce": (_planned_reduce, _fake_planned_reduce),
    "planned_accumulate": (_planned_accumulate, _fake_planned_accumulate),
    "planned_accumulate_": (_planned_accumulate_, _fake_planned_accumulate_),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"detpass::{_name}", _fake, lib=LIBRARY)

INPLACE_VARIANTS = (
    (torch.ops.detpass.segment_accumulate.default, torch.ops.detpass.segment_accumulate_.default),
    (torch.ops.detpass.planned_accumulate.default, torch.ops.detpass.planned_accumulate_.default),
)
"""Pairs (functional, in place); argument 0 is the one mutated. The backend tells Inductor about them."""


def _functionalize(functional: Any, inplace: Any) -> None:
    """Under functionalization, turn a call of ``inplace`` into ``functional`` and a replacement of its argument.

    Inductor also asks for this kernel before it accepts a mutating operator that returns its argument.
    """

    @inplace.py_functionalize_impl  # type: ignore[untyped-decorator]
    def _(context: Any, dest: Tensor, *others: Any, **options: Any) -> Tensor:
        inner = context.unwrap_tensors((dest, *others))
        with context.redispatch_to_next():
            updated = functional(*inner, **options)
        context.replace(dest, updated)
        context.commit_update(dest)
        context.sync(dest)
        return dest


for _pair in INPLACE_VARIANTS:
    _functionalize(*_pair)
