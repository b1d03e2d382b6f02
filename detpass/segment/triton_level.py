"""One level of the canonical order as a Triton kernel.

Importing this file needs triton; ``triton_kernels.py`` does it late.

Nothing about the segments is tabulated beforehand. With ``n`` the members of a segment, ``start`` the first of them in
``perm`` and ``span`` the rows that one chunk of this level stands for, every address is a closed form of ``start``:

* an *entry* of the level is one chunk. Level 0 has an entry for each segment (its first chunk, also when it is empty)
  and ``N // span`` entries for all the other chunks: chunk ``c >= 1`` of a segment is entry
  ``start // span + c - 1`` of those, and that entry belongs to the segment that holds row ``(entry + 1) * span - 1``.
  Two chunks never meet: there are at least ``ceil(n / span) - 1`` multiples of ``span`` in ``(start, start + n]``.
* above level 0 only segments of more than ``below`` rows take part (``below`` is the span of the level beneath). Their
  first chunks are the ``N // (below + 1)`` leading entries, one being ``start // (below + 1)``.
* the partials of a segment of more than ``span`` rows lie at ``start // (span + 1) + start // span + c``.

So a level needs a binary search over ``offsets`` for the few entries that are not first chunks, no scan, no table, no
host synchronisation, and its grid depends on sizes alone. A hot segment is so many equal chunks; an empty one is an
entry that writes the identity once.

Index tensors are two-dimensional from the start: with one-dimensional ones, expanded later, Triton 3.6 and 3.7 fail in
a layout pass. No tree reduction touches a floating-point value, and no product stands next to a sum.
"""

# Triton's decorators are untyped and a kernel's arguments are values of its own language; constants are set by branch.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-redef"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _widen(value, ACC: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter flushes bfloat16 denormals; integer operations are exact everywhere
        if value.dtype == tl.bfloat16:
            return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            return value.to(ACC)
    else:
        return value.to(ACC)


@triton.jit
def _narrow(value, OUT: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter truncates float32 to bfloat16 where it should round to nearest even
        if tl.bfloat16 == OUT:
            bits = value.to(tl.uint32, bitcast=True)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return value.to(OUT)
    else:
        return value.to(OUT)


@triton.jit
def _finish(value, OUT: tl.constexpr, INTERPRETED: tl.constexpr):
    # Round to the output dtype; every NaN becomes the type's default quiet NaN with a clear sign.
    narrow = _narrow(value, OUT, INTERPRETED)
    if OUT.is_floating():
        nan = value != value
        if tl.float64 == OUT:
            bits = tl.where(nan, 0x7FF8000000000000, narrow.to(tl.int64, bitcast=True))
        elif tl.float32 == OUT:
            bits = tl.where(nan, 0x7FC00000, narrow.to(tl.int32, bitcast=True))
        elif tl.bfloat16 == OUT:
            bits = tl.where(nan, 0x7FC0, narrow.to(tl.int16, bitcast=True)).to(tl.int16)
        else:
            bits = tl.where(nan, 0x7E00, narrow.to(tl.int16, bitcast=True)).to(tl.int16)
        return bits.to(OUT, bitcast=True)
    else:
        return narrow


@triton.jit
def _tie(left, right, LARGEST: tl.constexpr):
    # Of two equal values the larger (smaller) zero: +0.0 is above -0.0.
    if left.dtype == tl.float64:
        if LARGEST:
            return (left.to(tl.int64, bitcast=True) & right.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
        else:
            return (left.to(tl.int64, bitcast=True) | right.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
    elif left.dtype == tl.float32:
        if LARGEST:
            return (left.to(tl.int32, bitcast=True) & right.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        else:
            return (left.to(tl.int32, bitcast=True) | right.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        return left


@triton.jit
def _combine(left, right, REDUCE: tl.constexpr):
    if REDUCE == "sum":
        return left + right
    elif REDUCE == "prod":
        return left * right
    elif REDUCE == "amax":
        picked = tl.where((left > right) | (left != left), left, right)
        return tl.where(left == right, _tie(left, right, True), picked)
    else:
        picked = tl.where((left < right) | (left != left), left, right)
        return tl.where(left == right, _tie(left, right, False), picked)


@triton.jit(do_not_specialize=["num_segments", "num_rows", "source_rows", "partial_rows", "tiles"])
def segment_level(
    source,  # [B, source_rows, D]: the rows at level 0, the partials of the level beneath above it
    perm,  # int[N], read at level 0 only
    offsets,  # int[S + 1]
    partial,  # [B, partial_rows, D] of the accumulation dtype
    dest,  # [B, S, D], what the totals are combined with (HAS_DEST)
    out,  # [B, S, D]
    num_segments,
    num_rows,
    source_rows,
    partial_rows,
    tiles,  # programs along the entries
    D: tl.constexpr,
    BELOW: tl.constexpr,  # rows that one item read here stands for; 0 at level 0
    SPAN: tl.constexpr,  # rows that one chunk summed here stands for
    FAN: tl.constexpr,  # items of one chunk
    LAST: tl.constexpr,  # no segment can be longer than SPAN
    HAS_DEST: tl.constexpr,
    REDUCE: tl.constexpr,
    IDENTITY: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    column = (program % COLUMN_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    in_row = column < D
    tile = (program // COLUMN_BLOCKS) % tiles
    zero = tl.full((), 0, tl.int64)
    batch = ((program // COLUMN_BLOCKS) // tiles).to(tl.int64)
    source += batch * source_rows * D
    entry = (zero + tile) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]

    if BELOW == 0:
        firsts = zero + num_segments
        position = (entry - firsts + 1) * SPAN
        size = tl.where((zero + tile + 1) * BLOCK_R > firsts, firsts + 1, 1)  # first chunks need no search
    else:
        firsts = (zero + num_rows) // (BELOW + 1)
        position = tl.where(entry < firsts, (entry + 1) * (BELOW + 1), (entry - firsts + 1) * SPAN)
        size = zero + num_segments + 1
    # The last segment that starts before ``position``. Written out here: torch's analysis of what a kernel writes would
    # take ``offsets`` for an output if a function returned the result.
    segment = tl.zeros((BLOCK_R, 1), tl.int64)
    while size > 1:
        half = size // 2
        bound = tl.load(offsets + segment + half).to(tl.int64)
        segment = tl.where(bound < position, segment + half, segment)
        size -= half
    if BELOW == 0:
        segment = tl.where(entry < firsts, entry, segment)
    is_first = entry < firsts
    live = (entry < firsts + (zero + num_rows) // SPAN) & (segment < num_segments)
    start = tl.load(offsets + segment, mask=live, other=0).to(tl.int64)
    count = tl.load(offsets + segment + 1, mask=live, other=0).to(tl.int64) - start
    chunk = tl.where(is_first, 0, 1 + entry - firsts - start // SPAN)
    if BELOW == 0:
        live = live & (is_first | (chunk * SPAN < count))
        items = count
        item = start + chunk * FAN
    else:
        live = live & (count > BELOW) & tl.where(is_first, entry == start // (BELOW + 1), chunk * SPAN < count)
        items = (count + (BELOW - 1)) // BELOW
        item = start // (BELOW + 1) + start // BELOW + chunk * FAN
    length = tl.where(live, tl.minimum(items - chunk * FAN, FAN), 0).to(tl.int32)
    longest = tl.max(tl.max(length, axis=1), axis=0)

    if REDUCE == "amax" and ACC.is_floating():
        identity: tl.constexpr = float("-inf")
    elif REDUCE == "amin" and ACC.is_floating():
        identity: tl.constexpr = float("inf")
    else:
        identity: tl.constexpr = IDENTITY
    total = tl.full((BLOCK_R, BLOCK_D), identity, ACC)
    for i in range(0, longest, UNROLL):
        for u in tl.static_range(UNROLL):
            member = (i + u) < length
            if BELOW == 0:
                row = tl.load(perm + item + i + u, mask=member, other=0).to(tl.int64)
            else:
                row = item + i + u
            here = member & in_row
            value = tl.load(source + row * D + column, mask=here, other=identity)
            wide = _widen(value, ACC, INTERPRETED)
            if INTERPRETED:  # its bfloat16 has no 1.0 or infinity to fill masked lanes with
                wide = tl.where(here, wide, identity)
            total = _combine(total, wide, REDUCE)

    finished = live & (count <= SPAN) & in_row
    cell = (batch * num_segments + segment) * D + column
    if HAS_DEST:
        before = tl.load(dest + cell, mask=finished, other=0)
        after = _combine(_widen(before, ACC, INTERPRETED), total, REDUCE)
        result = tl.where(count > 0, _finish(after, out.dtype.element_ty, INTERPRETED), before)
    else:
        result = _finish(total, out.dtype.element_ty, INTERPRETED)
    tl.store(out + cell, result, mask=finished)
    if not LAST:
        slot = start // (SPAN + 1) + start // SPAN + chunk
        unfinished = live & (count > SPAN)
        tl.store(partial + (batch * partial_rows + slot) * D + column, total, mask=unfinished & in_row)


@triton.jit(do_not_specialize=["num_segments", "num_groups", "tiles"])
def update_rows(
    table,  # [B, S, D], written in place
    rows,  # int[N]: the row of the table for each group, all different; negative for none
    totals,  # [B, N, D] of the accumulation dtype
    num_segments,
    num_groups,
    tiles,  # programs along the groups
    D: tl.constexpr,
    REDUCE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Step 4 of the canonical order for a few rows of a large table: no other row is read or written.
    program = tl.program_id(0)
    column = (program % COLUMN_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tile = (program // COLUMN_BLOCKS) % tiles
    zero = tl.full((), 0, tl.int64)
    batch = ((program // COLUMN_BLOCKS) // tiles).to(tl.int64)
    group = (zero + tile) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    row = tl.load(rows + group, mask=group < num_groups, other=-1).to(tl.int64)
    here = (row >= 0) & (column < D)
    cell = table + (batch * num_segments + row) * D + column
    total = tl.load(totals + (batch * num_groups + group) * D + column, mask=here, other=0)
    before = _widen(tl.load(cell, mask=here, other=0), ACC, INTERPRETED)
    result = _finish(_combine(before, total.to(ACC), REDUCE), table.dtype.element_ty, INTERPRETED)
    tl.store(cell, result, mask=here)
