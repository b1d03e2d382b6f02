"""Random accumulations and plain writes for hypothesis, each with its result in the canonical order.

A program is written twice. ``run`` calls torch's operator on ``dest`` and ``source``. The other form is flat: where
each element of the source goes (found by letting the operator's reading twin read the numbers of the places) and what
is written there; ``expected_value`` applies the plain reference of the canonical order to it. Nothing is shared with
the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from detpass.segment import reference

aten = torch.ops.aten
Draw = Any

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
REAL = DTYPES[:-1]


@dataclass(frozen=True)
class Program:
    """``run(dest, source, *indices)`` and its flat form."""

    text: str
    """What it does, for messages."""
    run: Callable[..., Tensor]
    read: Callable[..., Tensor]
    """The reading twin, ``read(dest, *indices)``: its gradient is the accumulation at the same places."""
    dest: Tensor
    source: Tensor
    indices: tuple[Tensor, ...]
    places: Tensor
    """int64[n]: the flat place of ``dest`` that each flat element of ``written`` goes to, in index order."""
    written: Callable[[Tensor], Tensor]
    """Maps a source to the flat elements that are written."""
    reduce: str
    """``sum``, ``prod``, ``amax``, ``amin`` or ``last``."""
    include_self: bool = True
    source_gradient: bool = True
    """False where eager has no gradient of the source: a scatter that uses a part of it."""


def expected_value(program: Program) -> Tensor:
    """The result in the canonical order, bit for bit, of ``dest``'s shape."""
    flat = program.dest.detach().reshape(-1)
    written = program.written(program.source.detach()).reshape(-1)
    if program.reduce == "last":
        result = flat.clone()
        for place, value in zip(program.places.tolist(), written, strict=True):
            result[place] = value
        return result.reshape(program.dest.shape)
    rows = written.reshape(1, -1, 1)
    columns = flat.reshape(1, -1, 1)
    kind: reference.Reduction = program.reduce
    if program.include_self:
        total = reference.segment_accumulate(columns, program.places, rows, flat.numel(), kind)
    else:
        touched = torch.zeros(flat.numel(), dtype=torch.bool)
        touched[program.places] = True
        alone = reference.segment_accumulate(None, program.places, rows, flat.numel(), kind)
        total = torch.where(touched.reshape(1, -1, 1), alone, columns)
    return total.reshape(program.dest.shape)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


@dataclass(frozen=True)
class Setting:
    """What all programs draw: dtype, seed, a destination of zeros or of numbers."""

    dtype: torch.dtype
    seed: int
    zeros: bool

    def dest(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype) if self.zeros else numbers(shape, self.dtype, self.seed)

    def source(self, shape: tuple[int, ...]) -> Tensor:
        return numbers(shape, self.dtype, self.seed + 1)

    def index(self, shape: tuple[int, ...], size: int, wrap: bool, dtype: torch.dtype, hot: bool) -> Tensor:
        """Random places of ``[0, size)`` (``[-size, size)`` with ``wrap``); ``hot``: nearly all in one."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        found = torch.randint(-size if wrap else 0, max(size, 1), shape, generator=generator)
        if hot:
            found = torch.where(torch.rand(shape, generator=generator) < 0.9, torch.zeros_like(found), found)
        return found.to(dtype)


NUMBER_OF_ROWS = st.sampled_from((0, 1, 2, 7, 40, 255, 256, 257, 600))
SIDES = st.integers(1, 6)


@st.composite
def setting(draw: Draw, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Setting:
    return Setting(draw(st.sampled_from(dtypes)), draw(st.integers(0, 10_000)), draw(st.booleans()))


def _place_numbers(dest: Tensor) -> Tensor:
    return torch.arange(dest.numel()).reshape(dest.shape)


@st.composite
def index_put(draw: Draw, accumulate: bool) -> Program:
    """Every index form: None slots, several broadcasting tensors, 0-d, negative, int32, masks, broadcasting values."""
    s: Setting = draw(setting())
    rank: int = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(SIDES, min_size=rank, max_size=rank)))
    dest = s.dest(shape)
    slots: list[bool] = draw(st.lists(st.booleans(), min_size=rank, max_size=rank).filter(any))
    common: tuple[int, ...] = draw(st.one_of(
        st.just(()), NUMBER_OF_ROWS.map(lambda n: (n,)),
        st.tuples(st.integers(1, 20), st.integers(1, 20))))  # fmt: skip
    wrap, hot = draw(st.booleans()), draw(st.booleans())
    kind = draw(st.sampled_from((torch.int64, torch.int64, torch.int32)))
    tensors: list[Tensor] = []
    form: list[Tensor | None] = []
    last = max(dim for dim, indexed in enumerate(slots) if indexed)
    for dim, indexed in enumerate(slots):
        if not indexed:
            form.append(None)
            continue
        mine = tuple(1 if n > 1 and draw(st.integers(0, 4)) == 0 else n for n in common)
        # torch's tracing takes the shape of the last index for the shape of all where that one is 0-d.
        shortest = len(mine) - (dim == last and len(mine) > 0)
        mine = mine[draw(st.integers(0, shortest)) :] if draw(st.integers(0, 4)) == 0 else mine
        if draw(st.integers(0, 7)) == 0 and common == (1,) and not any(t.dtype is torch.bool for t in tensors):
            # A mask among the indices reads as many places as it has trues; one broadcasts with every shape. One mask
            # only: torch's tracing cannot read through two.
            mask = torch.zeros(shape[dim], dtype=torch.bool)
            mask[s.seed % shape[dim]] = True
            found = mask
        else:
            found = s.index(mine, shape[dim], bool(wrap), kind, bool(hot))
        tensors.append(found)
        form.append(found)
    positions = aten.index(_place_numbers(dest), form)
    # Values broadcast from the right; a dimension of one repeats.
    source_shape = tuple(1 if draw(st.integers(0, 5)) == 0 else n for n in positions.shape)
    source_shape = source_shape[draw(st.integers(0, len(source_shape))) :] if draw(st.booleans()) else source_shape
    places = [n for n, indexed in enumerate(slots) if indexed]

    def filled(given: tuple[Tensor, ...]) -> list[Tensor | None]:
        full: list[Tensor | None] = [None] * rank
        for place, tensor in zip(places, given, strict=True):
            full[place] = tensor
        return full

    return Program(
        f"index_put({shape}, {[None if f is None else (tuple(f.shape), f.dtype) for f in form]}, {source_shape}, "
        f"{accumulate}) {s}", lambda d, v, *i: aten.index_put(d, filled(i), v, accumulate),
        lambda d, *i: aten.index(d, filled(i)), dest, s.source(source_shape), tuple(tensors), positions.reshape(-1),
        lambda v: v.expand(positions.shape), "sum" if accumulate else "last")  # fmt: skip


@st.composite
def along_dim(draw: Draw, kind: str) -> Program:
    """``index_add`` and ``index_copy``: a vector of places along one dimension."""
    s: Setting = draw(setting())
    rank: int = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(SIDES, min_size=rank, max_size=rank)))
    dim: int = draw(st.integers(-rank, rank - 1))
    rows: int = draw(NUMBER_OF_ROWS)
    scalar = rows == 1 and draw(st.booleans())
    index = s.index(
        (rows,), shape[dim], False, draw(st.sampled_from((torch.int64, torch.int32))), bool(draw(st.booleans()))
    )
    dest = s.dest(shape)
    positions = _place_numbers(dest).index_select(dim, index)
    source = s.source(tuple(positions.shape))
    alpha: float = draw(st.sampled_from((1.0, -0.3, 2.0))) if kind == "index_add" else 1.0
    given = index.reshape(()) if scalar else index

    def run(d: Tensor, v: Tensor, i: Tensor) -> Tensor:
        return d.index_add(dim, i, v, alpha=alpha) if kind == "index_add" else d.index_copy(dim, i.long(), v)

    return Program(
        f"{kind}({shape}, dim={dim}, {tuple(given.shape)} {index.dtype}, alpha={alpha}) {s}", run,
        lambda d, i: d.index_select(dim, i), dest, source, (given,), positions.reshape(-1),
        lambda v: v if alpha == 1 else v * alpha, "sum" if kind == "index_add" else "last")  # fmt: skip


@st.composite
def scatter(draw: Draw, kind: str) -> Program:
    """``scatter_add``, ``scatter_reduce`` and ``scatter``: an index smaller than the source and the destination."""
    s: Setting = draw(setting(DTYPES if kind in ("scatter_add", "scatter") else REAL))
    rank: int = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(SIDES, min_size=rank, max_size=rank)))
    dim: int = draw(st.integers(-rank, rank - 1))
    rows: int = draw(NUMBER_OF_ROWS)
    index_shape = [draw(st.integers(1, n)) for n in shape]
    index_shape[dim] = rows
    source_shape = tuple(n + draw(st.integers(0, 2)) for n in index_shape)
    expanded = rank == 2 and draw(st.booleans())
    index = s.index(tuple(index_shape), shape[dim], False, torch.int64, bool(draw(st.booleans())))
    if expanded:
        index = index.narrow(1 - dim % 2, 0, 1).expand(index_shape)
    dest = s.dest(shape)
    positions = _place_numbers(dest).gather(dim, index)
    corner = tuple(slice(0, n) for n in index_shape)
    include_self = bool(draw(st.booleans())) if kind not in ("scatter_add", "scatter") else True
    reduce = {"scatter_add": "sum", "scatter": "last"}.get(kind, kind)

    def run(d: Tensor, v: Tensor, i: Tensor) -> Tensor:
        if kind == "scatter_add":
            return d.scatter_add(dim, i, v)
        if kind == "scatter":
            return d.scatter(dim, i, v)
        return d.scatter_reduce(dim, i, v, kind, include_self=include_self)

    return Program(
        f"scatter {kind}({shape}, dim={dim}, {index_shape} of {source_shape}, include_self={include_self}, "
        f"expanded={expanded}) {s}", run, lambda d, i: d.gather(dim, i), dest, s.source(source_shape), (index,),
        positions.reshape(-1), lambda v: v[corner], reduce, include_self,
        source_shape == tuple(index_shape))  # fmt: skip


@st.composite
def put(draw: Draw, accumulate: bool) -> Program:
    """Flat places, negative ones wrap."""
    s: Setting = draw(setting())
    rank: int = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(SIDES, min_size=rank, max_size=rank)))
    rows: int = draw(NUMBER_OF_ROWS)
    dest = s.dest(shape)
    index = s.index((rows,), dest.numel(), bool(draw(st.booleans())), torch.int64, bool(draw(st.booleans())))
    return Program(
        f"put({shape}, {rows}, {accumulate}) {s}", lambda d, v, i: d.put(i, v, accumulate),
        lambda d, i: d.take(i), dest, s.source((rows,)), (index,), index % dest.numel(), lambda v: v,
        "sum" if accumulate else "last")  # fmt: skip


@st.composite
def embedding(draw: Draw) -> Program:
    """A table read by ids; written, it is an ``index_add`` of rows."""
    s: Setting = draw(setting(REAL))
    rows, width, ids = draw(SIDES), draw(SIDES), draw(NUMBER_OF_ROWS)
    index = s.index((ids,), rows, False, draw(st.sampled_from((torch.int64, torch.int32))), bool(draw(st.booleans())))
    dest = s.dest((rows, width))
    positions = _place_numbers(dest)[index.long()]
    return Program(
        f"embedding({rows}, {width}, {ids}, {index.dtype}) {s}", lambda d, v, i: d.index_add(0, i, v),
        lambda d, i: functional.embedding(i, d), dest, s.source((ids, width)), (index,), positions.reshape(-1),
        lambda v: v, "sum")  # fmt: skip


ACCUMULATIONS: st.SearchStrategy[Program] = st.one_of(
    index_put(True), along_dim("index_add"), scatter("scatter_add"), put(True),
    scatter("sum"), scatter("prod"), scatter("amax"), scatter("amin"),
)  # fmt: skip
PLAIN_WRITES: st.SearchStrategy[Program] = st.one_of(
    index_put(False), along_dim("index_copy"), scatter("scatter"), put(False)
)
READINGS: st.SearchStrategy[Program] = st.one_of(
    index_put(True), along_dim("index_add"), scatter("scatter_add"), put(True), embedding()
)
