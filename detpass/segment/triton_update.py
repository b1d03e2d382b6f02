"""Accumulation into a few rows of a large table on CUDA: only the rows that the index names are read and written.

The totals are summed by ``triton_kernels.py`` as ever, over groups instead of segments (``triton_plan.sorted_groups``);
one more kernel combines each with its row. The rows are all different, so no two programs meet. In a compiled graph the
kernel mutates the table functionally, and Inductor updates it in place where nobody reads the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detpass.segment import triton_kernels


def accumulate_rows(
    dest: Tensor, rows: Tensor, source: Tensor, perm: Tensor, offsets: Tensor, reduce: str = "sum"
) -> Tensor:
    """Return ``dest`` with the totals of the groups of ``source`` combined into its ``rows``.

    ``dest: [B, S, D]``, ``source: [B, N, D]`` of one dtype (not bool); ``perm: int[N]``, ``offsets: int[N + 1]`` and
    ``rows: int[N]`` of :func:`detpass.segment.triton_plan.sorted_groups`. The bits are those of the canonical order:
    one combination in the accumulation dtype, one rounding; other rows keep theirs.
    """
    if dest.dtype.is_complex:
        pair = torch.view_as_real(dest.resolve_conj().contiguous()).flatten(-2)
        parts = torch.view_as_real(source.resolve_conj().contiguous()).flatten(-2)
        updated = accumulate_rows(pair, rows, parts, perm, offsets, reduce)
        return torch.view_as_complex(updated.unflatten(-1, (dest.shape[-1], 2)))
    totals = triton_kernels.segment_sum_sorted(source, perm, offsets, reduce, triton_kernels.accumulator(source.dtype))
    table = dest.contiguous()
    if not torch.compiler.is_dynamo_compiling():
        from detpass import _torch_private

        if _torch_private.traces_functional_graph():
            traced: Tensor = _torch_private.functionalized(_update)(table, rows, totals, reduce)
            return traced
    result: Tensor = _operator(table, rows, totals, reduce)
    return result


@torch.library.triton_op("detpass::update_rows", mutates_args=())
def _operator(table: Tensor, rows: Tensor, totals: Tensor, reduce: str) -> Tensor:
    """The registered form for eager code and AOTAutograd."""
    return _update(table.clone(), rows, totals, reduce)


def _update(table: Tensor, rows: Tensor, totals: Tensor, reduce: str) -> Tensor:
    """Combine ``totals [B, N, D]`` into ``table [B, S, D]`` itself."""
    wrap: Callable[[Any], Any] = triton_kernels.plain if triton_kernels.interpreted() else torch.library.wrap_triton
    launch(table, rows, totals, reduce, wrap)
    return table


def launch(table: Tensor, rows: Tensor, totals: Tensor, reduce: str, wrap: Callable[[Any], Any]) -> None:
    """Launch the kernel; nothing is done for a table or an index that is known to be empty."""
    batch, num_groups, columns = totals.shape
    if any(triton_kernels.is_zero(size) for size in totals.shape):
        return
    shape = triton_kernels.tile_for(columns, totals.element_size())
    tiles = triton_kernels.ceil_div(num_groups, shape.block_r)
    wrap(triton_kernels.kernels().update_rows)[(tiles * triton_kernels.ceil_div(columns, shape.block_d) * batch,)](
        table,
        rows,
        totals,
        table.shape[1],
        num_groups,
        tiles,
        **update_constants(totals.dtype, columns, shape, reduce),
        INTERPRETED=triton_kernels.interpreted(),
    )


def update_constants(accumulate: torch.dtype, columns: int, tile: triton_kernels.Tile, reduce: str) -> dict[str, Any]:
    """What ``update_rows`` is compiled for, with totals of ``columns`` values of ``accumulate``."""
    return {
        "D": columns,
        "REDUCE": reduce,
        "ACC": triton_kernels.language_dtype(accumulate),
        "BLOCK_R": tile.block_r,
        "BLOCK_D": tile.block_d,
        "COLUMN_BLOCKS": triton_kernels.ceil_div(columns, tile.block_d),
    }
