"""The canonical segment sum on CUDA: a chain of Triton kernels over ``perm`` and ``offsets``, one a level.

``triton_level.py`` holds the kernel and explains the addressing, ``triton_plan.py`` makes ``perm`` and ``offsets``.
The gather through ``perm`` is part of the kernel: no sorted copy of the rows exists. Triton is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detpass.segment.constants import CHUNK_ROWS, FAN_IN
from detpass.segment.reference import REDUCTIONS, check_supported, identity
from detpass.segment.triton_plan import sorted_plan

__all__ = ["Level", "Tile", "levels", "segment_sum_sorted", "sorted_plan", "tile_for"]

Size = int | torch.SymInt

_THREADS = 128
_WARP = 32
_LOAD_BYTES = 16
_UNKNOWN_ROWS = 2**32
_DERIVED = ("mean", "last")
_TRITON_RELEASES = "torch 2.11: triton 3.6, 2.12 and 2.13: triton 3.7, 2.14: triton 3.8"


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut into programs of 128 threads. No choice here can change a bit of the result."""

    block_r: int
    """Chunks of one program."""
    block_d: int
    """Columns of one program."""
    unroll: int = 4
    """Members of a chunk whose loads are in flight together."""


@dataclass(frozen=True)
class Level:
    """One level of the canonical order for ``N`` rows."""

    below: int
    """Rows that one item stands for, 0 for the rows themselves."""
    span: int
    """Rows that one chunk stands for."""
    fan: int
    """Items of a chunk."""
    last: bool
    """Whether every segment is finished after this level."""


def levels(num_rows: Size, chunk_rows: int = CHUNK_ROWS, fan_in: int = FAN_IN) -> tuple[Level, ...]:
    """Return the levels that ``num_rows`` rows in one segment would need. A symbolic size is guarded to a range."""
    found: list[Level] = []
    below, span, fan = 0, chunk_rows, chunk_rows
    while True:
        last = not _exceeds(num_rows, span)
        found.append(Level(below, span, fan, last))
        if last:
            return tuple(found)
        below, span, fan = span, span * fan_in, fan_in


def _exceeds(num_rows: Size, span: int) -> bool:
    if isinstance(num_rows, int):
        return num_rows > span
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return span < _UNKNOWN_ROWS and bool(guard_or_true(num_rows > span))  # a size that depends on data: all levels


def tile_for(columns: int, item_bytes: int) -> Tile:
    """Choose the tile for rows of ``columns`` values: the widest load that divides a row, a warp across it at most.

    Where a row's length allows narrow loads only, a thread takes up to four of them, to have as much in flight.
    """
    vector = math.gcd(_LOAD_BYTES // item_bytes, columns)
    block_d = min(1 << (columns - 1).bit_length(), _WARP * max(vector, 4))
    per_thread = max(vector, block_d // _WARP)
    return Tile(max(1, _THREADS * per_thread // block_d), block_d)


def kernels() -> Any:
    """The module of the kernels. Raises ImportError, with the remedy, where triton is missing."""
    try:
        from detpass.segment import triton_level
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "detpass needs triton for CUDA and found none: pip install 'detpass[triton]', or the release that goes "
            f"with torch {torch.__version__} ({_TRITON_RELEASES})",
            name="triton",
        ) from error
    return triton_level


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    return type(kernels().segment_level).__name__ == "InterpretedFunction"


def plain(kernel: Any) -> Any:
    return kernel


def launches(
    source: Tensor,
    perm: Tensor,
    offsets: Tensor,
    reduce: str,
    out_dtype: torch.dtype,
    dest: Tensor | None = None,
    wrap: Callable[[Any], Any] = plain,
    tile: Tile | None = None,
    chunk_rows: int = CHUNK_ROWS,
    fan_in: int = FAN_IN,
) -> Tensor:
    """Launch the levels for ``source: [B, N, D]`` and ``dest: [B, S, D]`` (real, contiguous), return ``[B, S, D]``.

    ``tile``, ``chunk_rows`` and ``fan_in`` are for measurements and tests; the last two change the bits.
    """
    kernel = kernels().segment_level
    batch, num_rows, columns = source.shape
    num_segments = offsets.shape[0] - 1
    out = _flat((batch, num_segments, columns), out_dtype, source.device)
    if any(is_zero(size) for size in (columns, num_segments, batch)):
        return out.view(batch, num_segments, columns)
    accumulate = accumulator(source.dtype)
    current, current_rows = source, source.shape[1]
    for level in levels(num_rows, chunk_rows, fan_in):
        shape = tile or tile_for(columns, current.element_size())
        firsts = num_segments if level.below == 0 else num_rows // (level.below + 1)
        tiles = ceil_div(firsts + num_rows // level.span, shape.block_r)
        partial_rows = num_rows // (level.span + 1) + num_rows // level.span
        partial = current  # a kernel of the last level writes no partials
        if not level.last:
            partial = _flat((batch, partial_rows, columns), accumulate, source.device)
        wrap(kernel)[(tiles * ceil_div(columns, shape.block_d) * batch,)](
            current,
            perm,
            offsets,
            partial,
            current if dest is None else dest,
            out,
            num_segments,
            num_rows,
            current_rows,
            partial_rows,
            tiles,
            **level_constants(source.dtype, columns, level, shape, reduce, dest is not None),
            INTERPRETED=interpreted(),
        )
        current, current_rows = partial, partial_rows
    return out.view(batch, num_segments, columns)


def _flat(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a tensor of ``shape`` in one dimension.

    A kernel writes through a pointer, and Inductor cannot say of a size that is data (a ``nonzero``) that the strides
    of more dimensions are those it asks a written tensor for: it would put a copy of itself in the tensor's place.
    """
    return torch.empty((shape[0] * shape[1] * shape[2],), dtype=dtype, device=device)


def level_constants(
    dtype: torch.dtype, columns: int, level: Level, tile: Tile, reduce: str, has_dest: bool
) -> dict[str, Any]:
    """What ``segment_level`` is compiled for, on a level of the sum of rows of ``columns`` values of ``dtype``."""
    return {
        "D": columns,
        "BELOW": level.below,
        "SPAN": level.span,
        "FAN": level.fan,
        "LAST": level.last,
        "HAS_DEST": has_dest,
        "REDUCE": reduce,
        "IDENTITY": _integer_identity(dtype, reduce),
        "ACC": language_dtype(accumulator(dtype)),
        "BLOCK_R": tile.block_r,
        "BLOCK_D": tile.block_d,
        "COLUMN_BLOCKS": ceil_div(columns, tile.block_d),
        "UNROLL": tile.unroll,
    }


def _integer_identity(dtype: torch.dtype, reduce: str) -> int:
    """The kernel writes infinities itself: their Python form does not survive as text in generated code."""
    return 0 if dtype.is_floating_point and reduce in ("amax", "amin") else int(identity(dtype, reduce))


def is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0  # a symbolic size is not: torch makes 0 and 1 constants


def ceil_div(size: Any, divisor: int) -> Any:
    return (size + (divisor - 1)) // divisor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype inside the kernel. Integers wrap around, so any width that is not narrower gives the same result."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64


def language_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64}[dtype]


def _real(values: Tensor) -> Tensor:
    """Complex values as pairs of columns, bool as bytes."""
    if values.dtype.is_complex:
        return torch.view_as_real(values.resolve_conj().contiguous()).flatten(-2)
    return values.to(torch.uint8) if values.dtype == torch.bool else values.contiguous()


def _launch_any(
    source: Tensor,
    perm: Tensor,
    offsets: Tensor,
    reduce: str,
    out_dtype: torch.dtype,
    dest: Tensor | None = None,
) -> Tensor:
    wrap = plain if interpreted() else torch.library.wrap_triton
    real_dtype = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.bool: torch.uint8}
    how = {"sum": "amax", "prod": "amin"}.get(reduce, reduce) if source.dtype == torch.bool else reduce
    total = launches(
        _real(source),
        perm.contiguous(),
        offsets.contiguous(),
        how,
        real_dtype.get(out_dtype, out_dtype),
        None if dest is None else _real(dest),
        wrap,
    )
    if source.dtype.is_complex:
        return torch.view_as_complex(total.unflatten(-1, (source.shape[-1], 2)))
    return total.to(torch.bool) if source.dtype == torch.bool else total


@torch.library.triton_op("detpass::segment_sum_sorted", mutates_args=())
def _operator(
    source: Tensor,
    perm: Tensor,
    offsets: Tensor,
    reduce: str,
    out_dtype: torch.dtype,
    dest: Tensor | None = None,
) -> Tensor:
    """The registered form: eager code launches it, AOTAutograd and torch.export decompose it to its kernels."""
    return _launch_any(source, perm, offsets, reduce, out_dtype, dest)


def segment_sum_sorted(
    source: Tensor,
    perm: Tensor,
    offsets: Tensor,
    reduce: str = "sum",
    out_dtype: torch.dtype | None = None,
    dest: Tensor | None = None,
) -> Tensor:
    """Accumulate the rows of each segment in the canonical order, on CUDA.

    ``source: [B, N, D]`` or ``[N, D]``; ``perm: int[N]`` and ``offsets: int[S + 1]`` of a stable sort
    (:func:`sorted_plan`), shared by the whole batch. ``reduce`` is ``sum``, ``prod``, ``amax``, ``amin``, ``mean`` (the
    total divided by the count) or ``last`` (the last member's bits). Returns ``[B, S, D]`` (``[S, D]``) of
    ``out_dtype``, by default the source's dtype; pass the accumulation dtype to go on in it. An empty segment has the
    identity; for ``mean`` and ``last`` that is 0. With ``dest`` of the result's shape, ``dest`` is combined with the
    total in the accumulation dtype before the one rounding, and an empty segment keeps ``dest`` bit for bit.

    The bits depend on the operands alone: not on the device model, the tile, the batch or neighbouring segments. Sizes
    may be symbolic except ``D``; nothing is read back to the host. float16 and bfloat16 accumulate in float32,
    complex numbers by component, integers wrap around, bool takes any / all.

    Raises TypeError or ValueError for operands without a meaning, TypeError for products of complex numbers (the
    compiler could contract them; ``segment/fallback.py`` computes them), ImportError without triton.
    """
    result_dtype = out_dtype or (source if dest is None else dest).dtype
    _check(source, perm, offsets, reduce, result_dtype, dest)
    if reduce == "mean":
        return _mean(source, perm, offsets, result_dtype)
    if reduce == "last":
        return _last(source, perm, offsets, dest).to(result_dtype)
    if source.dim() == 2:
        rows = None if dest is None else dest.unsqueeze(0)
        return segment_sum_sorted(source.unsqueeze(0), perm, offsets, reduce, result_dtype, rows).squeeze(0)
    if not torch.compiler.is_dynamo_compiling():
        from detpass import _torch_private

        if _torch_private.traces_functional_graph():
            traced: Tensor = _torch_private.functionalized(_launch_any)(
                source, perm, offsets, reduce, result_dtype, dest
            )
            return traced
    result: Tensor = _operator(source, perm, offsets, reduce, result_dtype, dest)
    return result


def _mean(source: Tensor, perm: Tensor, offsets: Tensor, result_dtype: torch.dtype) -> Tensor:
    accumulate = source.dtype if source.dtype.is_complex else accumulator(source.dtype)
    total = segment_sum_sorted(source, perm, offsets, "sum", accumulate)
    count = (offsets[1:] - offsets[:-1]).clamp(min=1).unsqueeze(-1)
    return (total / count.to(accumulate.to_real())).to(result_dtype)


def _last(source: Tensor, perm: Tensor, offsets: Tensor, dest: Tensor | None) -> Tensor:
    count = (offsets[1:] - offsets[:-1]).unsqueeze(-1)
    if is_zero(perm.shape[0]):
        return source.new_zeros((*source.shape[:-2], count.shape[0], source.shape[-1])) if dest is None else dest
    rows = perm[(offsets[1:] - 1).clamp(min=0)]
    return torch.where(count > 0, source.index_select(-2, rows), source.new_zeros(()) if dest is None else dest)


def _check(
    source: Tensor, perm: Tensor, offsets: Tensor, reduce: str, result_dtype: torch.dtype, dest: Tensor | None
) -> None:
    if source.dim() not in (2, 3) or perm.dim() != 1 or offsets.dim() != 1:
        shapes = f"source {tuple(source.shape)}, perm {tuple(perm.shape)}, offsets {tuple(offsets.shape)}"
        raise ValueError(f"expected source [B, N, D] or [N, D], perm [N] and offsets [S + 1]; got {shapes}")
    if reduce not in (*_DERIVED, *REDUCTIONS):
        raise ValueError(f"reduce={reduce!r} is not one of {', '.join((*REDUCTIONS, *_DERIVED))}")
    check_supported(source.dtype, "sum" if reduce in _DERIVED else reduce)
    if reduce == "mean" and not (source.dtype.is_floating_point or source.dtype.is_complex):
        raise TypeError(f"mean of {source.dtype}: it would have to be rounded; convert to a floating dtype first")
    if reduce == "prod" and source.dtype.is_complex:
        raise TypeError(f"prod of {source.dtype} has no CUDA kernel; detpass.segment.fallback computes it")
    if dest is not None and (dest.dim() != source.dim() or dest.dtype != result_dtype or reduce == "mean"):
        raise ValueError(
            f"{reduce} of source {source.dtype}{tuple(source.shape)} into dest {dest.dtype}{tuple(dest.shape)} as "
            f"{result_dtype}: expected a dest of the result's shape and dtype, and another reduction than mean"
        )
    if result_dtype.is_complex != source.dtype.is_complex:
        raise TypeError(f"segment_sum_sorted of {source.dtype} into {result_dtype}: one is complex, the other is not")
