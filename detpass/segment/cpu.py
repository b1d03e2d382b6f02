"""The operators on a CPU: each call is packed into one record for the kernels of ``cpp/``.

Where no compiler was found (``build.py``), and for complex products, the same functions of ``fallback.py`` run.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from detpass.segment import build, fallback
from detpass.segment.reference import identity
from detpass.segment.strategy import Choice, Sizes, Strategy, choose, worthwhile_threads

FIELDS = (
    *("index", "index_stride", "index_bytes", "wrap"),
    *("batch", "rows", "segments", "features"),
    *("source", "source_batch", "source_row"),
    *("dest", "dest_batch", "dest_row"),
    *("out", "out_batch", "out_row"),
    *("perm", "offsets"),
    *("threads", "form", "owner_bytes", "hot_permille"),
)
"""The record ``Call`` of ``cpp/common.h``: int64 each, in this order."""

_pack = struct.Struct(f"={len(FIELDS)}q").pack
_OK, _OUT_OF_MEMORY = -1, -2
_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_LIBRARY = {
    "float32": "sums",
    "bfloat16": "sums",
    "float16": "wide",
    "float64": "wide",
    "int64": "wide",
    "int32": "wide",
}
"""The library of each sum that has a scan form."""

Kernel = Callable[[bytes], int]


@functools.cache
def _kernel(dtype: torch.dtype, reduce: str) -> tuple[Kernel, bool] | None:
    """Return the kernel and whether it can scan, or None where ``fallback.py`` has to do it."""
    if dtype not in _NAMES:
        return None
    name = _NAMES[dtype]
    if name == "bool":
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce)  # any and all
    elif name == "uint8" and reduce in ("sum", "prod"):
        name = "int8"
    scannable = reduce == "sum" and name in _LIBRARY
    kernel = _function(_LIBRARY[name] if scannable else "others", f"detpass_{reduce}_{name}")
    return None if kernel is None else (kernel, scannable)


@functools.cache
def _function(library: str, symbol: str) -> Kernel | None:
    loaded = build.load(library)
    if loaded is None:
        return None
    function = getattr(loaded, symbol)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return function  # type: ignore[no-any-return]


@functools.cache
def _linear_index_function() -> Callable[..., int] | None:
    loaded = build.load("sums")
    if loaded is None:
        return None
    function = loaded.detpass_linear_index
    number, record = ctypes.c_int64, ctypes.c_char_p
    function.argtypes = [record, number, record, number, number, number, ctypes.c_void_p]
    function.restype = number
    return function


def _raise(status: int, index: Tensor, size: int, wrap: bool, op: str) -> None:
    if status >= 0:
        raise fallback.out_of_bounds(op, int(index[status].item()), status, size, wrap)
    raise MemoryError(f"{op}: no memory for an accumulation of {index.numel()} rows into {size} segments")


def _accumulate(
    kernel: tuple[Kernel, bool],
    out: Tensor,
    dest: Tensor | None,
    source: Tensor,
    index: Tensor | None,
    plan_: tuple[Tensor, Tensor] | None,
    wrap: bool,
    op: str,
) -> None:
    """Run ``kernel`` on ``[B, S, D]`` and ``[B, N, D]`` operands of any strides."""
    call, scannable = kernel
    batch, rows, features = source.shape
    segments = out.shape[1]
    source_batch, source_row, source_feature = source.stride()
    out_batch, out_row, out_feature = out.stride()
    dest_batch, dest_row, dest_feature = dest.stride() if dest is not None else (0, 0, 1)
    if features > 1 and not (source_feature == out_feature == dest_feature == 1):
        # Each column becomes a batch entry of its own: a transposed source is then read along its memory.
        if batch > 1:
            for b in range(batch):
                at = slice(b, b + 1)
                part = None if dest is None else dest[at]
                _accumulate(kernel, out[at], part, source[at], index, plan_, wrap, op)
            return
        batch, features = features, 1
        source_batch, out_batch, dest_batch = source_feature, out_feature, dest_feature
    threads = torch.get_num_threads()
    element = source.element_size()
    in_place = dest is not None and dest.data_ptr() == out.data_ptr()
    if plan_ is not None:
        choice = Choice(Strategy.PLANNED, threads=worthwhile_threads(batch, rows, segments, features * element))
        where = (0, 0, 0, 0)
        plan_pointers = (plan_[0].data_ptr(), plan_[1].data_ptr())
    else:
        assert index is not None
        index_bytes = index.element_size()
        choice = choose(Sizes(batch, rows, segments, features, element, index_bytes, threads, scannable, in_place))
        where = (index.data_ptr(), index.stride(0), index_bytes, int(wrap))
        plan_pointers = (0, 0)
    status = call(
        _pack(
            *where,
            batch,
            rows,
            segments,
            features,
            source.data_ptr(),
            source_batch,
            source_row,
            0 if dest is None else dest.data_ptr(),
            dest_batch,
            dest_row,
            out.data_ptr(),
            out_batch,
            out_row,
            *plan_pointers,
            min(threads, choice.threads),
            choice.form,
            choice.owner_bytes,
            choice.hot_permille,
        )
    )
    if status != _OK:
        assert index is not None
        _raise(status, index, segments, wrap, op)


def _fresh(shape: tuple[int, int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _components(tensor: Tensor) -> Tensor:
    """Return a complex ``[B, R, D]`` as real ``[B, R, 2 * D]``, a view where the columns are adjacent."""
    return torch.view_as_real(tensor).flatten(2)


def segment_reduce(source: Tensor, index: Tensor, num_segments: int, reduce: str, wrap: bool, op: str) -> Tensor:
    """See ``functional.segment_reduce``."""
    if source.dtype.is_complex and reduce == "sum":
        real = segment_reduce(_components(source), index, num_segments, reduce, wrap, op)
        return torch.view_as_complex(real.unflatten(2, (-1, 2)))
    kernel = _kernel(source.dtype, reduce)
    if kernel is None:
        return fallback.segment_reduce(source, index, num_segments, reduce, wrap, op)
    out = _fresh((source.shape[0], num_segments, source.shape[2]), source)
    if source.numel() == 0:
        fallback.settle(index, num_segments, wrap, op)
        return out.fill_(identity(source.dtype, reduce))
    _accumulate(kernel, out, None, source, index, None, wrap, op)
    return out


def segment_accumulate(dest: Tensor, index: Tensor, source: Tensor, reduce: str, wrap: bool, op: str) -> Tensor:
    """See ``functional.segment_accumulate``."""
    if source.dtype.is_complex and reduce == "sum":
        real = segment_accumulate(_components(dest), index, _components(source), reduce, wrap, op)
        return torch.view_as_complex(real.unflatten(2, (-1, 2)))
    kernel = _kernel(source.dtype, reduce)
    if kernel is None:
        return fallback.segment_accumulate(dest, index, source, reduce, wrap, op)
    out = _fresh((dest.shape[0], dest.shape[1], dest.shape[2]), dest)
    if source.numel() == 0:
        fallback.settle(index, dest.shape[1], wrap, op)
        return out.copy_(dest)
    _accumulate(kernel, out, dest, source, index, None, wrap, op)
    return out


def segment_accumulate_(dest: Tensor, index: Tensor, source: Tensor, reduce: str, wrap: bool, op: str) -> Tensor:
    """``segment_accumulate`` into ``dest`` itself; only rows of segments with members are touched."""
    kernel = None if dest.dtype.is_complex else _kernel(dest.dtype, reduce)
    if dest.dtype.is_complex and reduce == "sum" and dest.stride(2) == 1:
        segment_accumulate_(_components(dest), index, _components(source), reduce, wrap, op)
    elif kernel is None:
        fallback.segment_accumulate_(dest, index, source, reduce, wrap, op)
    elif source.numel() == 0:
        fallback.settle(index, dest.shape[1], wrap, op)
    else:
        _accumulate(kernel, dest, dest, source, index, None, wrap, op)
    return dest


def plan(index: Tensor, num_segments: int, wrap: bool, op: str) -> tuple[Tensor, Tensor]:
    """See ``functional.plan``."""
    function = _function("sums", "detpass_plan")
    dtype = fallback.plan_dtype(index.shape[0])
    if function is None or dtype != torch.int32:
        return fallback.plan(index, num_segments, wrap, op)
    perm = torch.empty(index.shape, dtype=dtype)
    offsets = torch.empty(num_segments + 1, dtype=dtype)
    _index_call(function, index, num_segments, wrap, op, Strategy.SORTED, None, (perm.data_ptr(), offsets.data_ptr()))
    return perm, offsets


def planned_reduce(source: Tensor, perm: Tensor, offsets: Tensor, reduce: str) -> Tensor:
    """See ``functional.planned_reduce``."""
    if source.dtype.is_complex and reduce == "sum":
        return torch.view_as_complex(planned_reduce(_components(source), perm, offsets, reduce).unflatten(2, (-1, 2)))
    kernel = _kernel(source.dtype, reduce) if perm.dtype == offsets.dtype == torch.int32 else None
    if kernel is None:
        return fallback.planned_reduce(source, perm, offsets, reduce)
    out = _fresh((source.shape[0], offsets.shape[0] - 1, source.shape[2]), source)
    if source.numel() == 0:
        return out.fill_(identity(source.dtype, reduce))
    _accumulate(kernel, out, None, source, None, (perm.contiguous(), offsets.contiguous()), False, "")
    return out


def planned_accumulate(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> Tensor:
    """See ``functional.planned_accumulate``."""
    if source.dtype.is_complex and reduce == "sum":
        real = planned_accumulate(_components(dest), perm, offsets, _components(source), reduce)
        return torch.view_as_complex(real.unflatten(2, (-1, 2)))
    kernel = _kernel(source.dtype, reduce) if perm.dtype == offsets.dtype == torch.int32 else None
    if kernel is None:
        return fallback.planned_accumulate(dest, perm, offsets, source, reduce)
    out = _fresh((dest.shape[0], dest.shape[1], dest.shape[2]), dest)
    if source.numel() == 0:
        return out.copy_(dest)
    _accumulate(kernel, out, dest, source, None, (perm.contiguous(), offsets.contiguous()), False, "")
    return out


def planned_accumulate_(dest: Tensor, perm: Tensor, offsets: Tensor, source: Tensor, reduce: str) -> Tensor:
    """``planned_accumulate`` into ``dest`` itself."""
    kernel = _kernel(dest.dtype, reduce) if perm.dtype == offsets.dtype == torch.int32 else None
    if dest.dtype.is_complex and reduce == "sum" and dest.stride(2) == 1:
        planned_accumulate_(_components(dest), perm, offsets, _components(source), reduce)
    elif kernel is None:
        fallback.planned_accumulate_(dest, perm, offsets, source, reduce)
    elif source.numel():
        _accumulate(kernel, dest, dest, source, None, (perm.contiguous(), offsets.contiguous()), False, "")
    return dest


def _index_call(
    function: Kernel,
    index: Tensor,
    segments: int,
    wrap: bool,
    op: str,
    form: Strategy,
    out: Tensor | None,
    plan_: tuple[int, int] = (0, 0),
) -> None:
    where = (index.data_ptr(), index.stride(0), index.element_size(), int(wrap))
    address = 0 if out is None else out.data_ptr()
    threads = torch.get_num_threads() if index.shape[0] >= 8192 else 1
    status = function(
        _pack(*where, 1, index.shape[0], segments, 1, *(0,) * 6, address, 0, 0, *plan_, threads, form, 0, 0)
    )
    if status != _OK:
        _raise(status, index, segments, wrap, op)


def segment_count(index: Tensor, num_segments: int, wrap: bool, op: str) -> Tensor:
    """See ``functional.segment_count``."""
    function = _function("sums", "detpass_segment_count")
    if function is None:
        return fallback.segment_count(index, num_segments, wrap, op)
    out = torch.empty(num_segments, dtype=torch.int64)
    _index_call(function, index, num_segments, wrap, op, Strategy.SCAN, out)
    return out


def last_positions(index: Tensor, num_segments: int, wrap: bool, op: str) -> Tensor:
    """See ``functional.last_positions``."""
    function = _function("sums", "detpass_last_positions")
    if function is None:
        return fallback.last_positions(index, num_segments, wrap, op)
    rows = index.shape[0]
    out = torch.empty(rows, dtype=torch.int64)
    sparse = num_segments > max(65536, 16 * rows) and rows < 2**31
    _index_call(function, index, num_segments, wrap, op, Strategy.SPARSE if sparse else Strategy.SCAN, out)
    return out


def linear_index(indices: Sequence[Tensor], sizes: Sequence[int], wrap: bool, op: str) -> Tensor:
    """See ``functional.linear_index``."""
    function = _linear_index_function()
    if function is None:
        return fallback.linear_index(indices, sizes, wrap, op)
    spread = torch.broadcast_tensors(*indices)
    shape = spread[0].shape
    out = torch.empty(spread[0].numel(), dtype=torch.int64)
    layout: list[int] = []
    for component, size in zip(spread, sizes, strict=True):
        layout += (component.data_ptr(), component.element_size(), size, *component.stride())
    threads = torch.get_num_threads()
    status = function(
        struct.pack(f"={len(shape)}q", *shape),
        len(shape),
        struct.pack(f"={len(layout)}q", *layout),
        len(spread),
        wrap,
        threads,
        out.data_ptr(),
    )
    if status != _OK:
        axis, position = divmod(status, out.numel())
        where = f"{op} (index {axis})" if op else f"index {axis}"
        _raise(position, spread[axis].reshape(-1), sizes[axis], wrap, where)
    return out
