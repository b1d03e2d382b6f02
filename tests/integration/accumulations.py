"""The accumulations that detpass promises to repeat: one case an operation and index form, shared by several tests.

A case gives a function of ``(inputs dict of float tensors, dict of index tensors)``; its gradients with respect to
every float input are compared too. Sizes are small enough to compile quickly and large enough for many duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One accumulation: ``run(x, i)`` over float inputs ``x`` (of the dtype under test) and index inputs ``i``."""

    name: str
    run: Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]
    floats: dict[str, tuple[int, ...]]
    indices: Callable[[torch.Generator], dict[str, Tensor]]
    differentiable: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    treatments: frozenset[str] = field(default=frozenset({"segment"}))
    """Treatments of which at least one must be in the report."""
    expected: Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor] | None = None
    """The right result in float64, where eager's own is not (or depends on the order of threads)."""

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Fresh inputs of this case; the same seed gives the same ones."""
        generator = torch.Generator().manual_seed(seed)
        made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in self.floats.items()}
        for name in self.differentiable:
            made[name].requires_grad_()
        return made, self.indices(generator)


def ints(generator: torch.Generator, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=generator).to(dtype)


N = 3000


def _indexing() -> list[Case]:
    def read(name: str, take: Callable[[Tensor, dict[str, Tensor]], Tensor], shape: tuple[int, ...],
             indices: Callable[[torch.Generator], dict[str, Tensor]], **kw: object) -> Case:  # fmt: skip
        return Case(f"read {name}", lambda x, i: take(x["w"], i).sin(), {"w": shape}, indices, ("w",), **kw)  # type: ignore[arg-type]

    return [
        read("w[i]", lambda w, i: w[i["a"]], (17, 5), lambda g: {"a": ints(g, 17, N)}),
        read("w[i] negative", lambda w, i: w[i["a"]], (17, 5), lambda g: {"a": ints(g, 17, N, low=-17)}),
        read("w[i] int32", lambda w, i: w[i["a"]], (17, 5), lambda g: {"a": ints(g, 17, N, dtype=torch.int32)}),
        read("w[i] matrix of indices", lambda w, i: w[i["a"]], (17, 5), lambda g: {"a": ints(g, 17, 60, 50)}),
        read("w[i, j]", lambda w, i: w[i["a"], i["b"]], (7, 6, 5), lambda g: {"a": ints(g, 7, N), "b": ints(g, 6, N)}),
        read("w[i, j] broadcast", lambda w, i: w[i["a"][:, None], i["b"][None, :]], (7, 6, 5),
             lambda g: {"a": ints(g, 7, 60), "b": ints(g, 6, 50)}),
        read("w[:, i]", lambda w, i: w[:, i["a"]], (3, 17), lambda g: {"a": ints(g, 17, N)}),
        read("w[:, i, j]", lambda w, i: w[:, i["a"], i["b"]], (3, 7, 6, 2),
             lambda g: {"a": ints(g, 7, N), "b": ints(g, 6, N)}),
        read("w[i, :, j]", lambda w, i: w[i["a"], :, i["b"]], (7, 3, 6),
             lambda g: {"a": ints(g, 7, N), "b": ints(g, 6, N)}),
        read("w[i, 2]", lambda w, i: w[i["a"], 2], (17, 5), lambda g: {"a": ints(g, 17, N)}),
        read("w[i][j]", lambda w, i: w[i["a"]][i["b"]], (17, 5),
             lambda g: {"a": ints(g, 17, 200), "b": ints(g, 200, N)}),
        read("index_select 0", lambda w, i: w.index_select(0, i["a"]), (17, 5), lambda g: {"a": ints(g, 17, N)}),
        read("index_select 1", lambda w, i: w.index_select(1, i["a"]), (5, 17), lambda g: {"a": ints(g, 17, N)}),
        read("take", lambda w, i: w.take(i["a"]), (7, 5), lambda g: {"a": ints(g, 35, N, low=-35)}),
        read("gather 0", lambda w, i: w.gather(0, i["a"]), (17, 5), lambda g: {"a": ints(g, 17, 600, 5)}),
        read("gather 1", lambda w, i: w.gather(1, i["a"]), (5, 17), lambda g: {"a": ints(g, 17, 5, 600)}),
        read("gather smaller", lambda w, i: w.gather(1, i["a"]), (5, 17), lambda g: {"a": ints(g, 17, 3, 600)}),
        read("gather expanded", lambda w, i: w.gather(0, i["a"][:, None].expand(-1, 5)), (17, 5),
             lambda g: {"a": ints(g, 17, 600)}),
        read("take_along_dim", lambda w, i: w.take_along_dim(i["a"], 1), (5, 17), lambda g: {"a": ints(g, 17, 5, 600)}),
        read("embedding", lambda w, i: F.embedding(i["a"], w), (17, 5), lambda g: {"a": ints(g, 17, 30, 100)}),
        read("embedding padding_idx", lambda w, i: F.embedding(i["a"], w, padding_idx=3), (17, 5),
             lambda g: {"a": ints(g, 17, 30, 100)}),
        read("embedding scale_grad_by_freq", lambda w, i: F.embedding(i["a"], w, scale_grad_by_freq=True), (17, 5),
             lambda g: {"a": ints(g, 17, 30, 100)}),
        read("embedding int32", lambda w, i: F.embedding(i["a"], w), (17, 5),
             lambda g: {"a": ints(g, 17, 30, 100, dtype=torch.int32)}),
        read("repeat_interleave", lambda w, i: w.repeat_interleave(i["a"], 0, output_size=300), (30, 5),
             lambda g: {"a": torch.full((30,), 10)}),
    ]  # fmt: skip


def _bags() -> list[Case]:
    def bag(mode: str, **kw: object) -> Case:
        weighted = bool(kw.pop("weighted", False))
        expected = kw.pop("expected", None)

        def run(x: dict[str, Tensor], i: dict[str, Tensor]) -> Tensor:
            weights = x["p"] if weighted else None
            return F.embedding_bag(i["a"], x["w"], i["o"], mode=mode, per_sample_weights=weights, **kw)  # type: ignore[arg-type]

        floats: dict[str, tuple[int, ...]] = {"w": (17, 5)}
        if weighted:
            floats["p"] = (600,)
        label = " ".join([mode, *(["weighted"] if weighted else []), *(f"{k}={v}" for k, v in kw.items())])
        offsets = torch.tensor([0, 5, 5, 50, 300, 600] if kw.get("include_last_offset") else [0, 5, 5, 50, 300])
        return Case(
            f"embedding_bag {label}",
            run,
            floats,
            lambda g: {"a": ints(g, 17, 600), "o": offsets},
            tuple(floats),
            dtypes=(torch.float32, torch.float64),
            expected=expected,  # type: ignore[arg-type]
        )

    return [
        bag("sum"),
        bag("mean"),
        bag("max"),
        bag("sum", weighted=True),
        bag("sum", padding_idx=3),
        bag("sum", include_last_offset=True),
        bag("mean", scale_grad_by_freq=True, expected=_bag_mean_by_frequency),
    ]


def _bag_mean_by_frequency(x: dict[str, Tensor], i: dict[str, Tensor]) -> Tensor:
    """Bag means whose gradient is divided by the frequency of each id (torch's CPU kernel reads a wrong count)."""
    rows = F.embedding(i["a"], x["w"], scale_grad_by_freq=True)
    ends = [*i["o"][1:].tolist(), len(i["a"])]
    return torch.stack(
        [rows[a:b].mean(0) if b > a else rows[a:b].sum(0) for a, b in zip(i["o"].tolist(), ends, strict=True)]
    )


def _last_write(*names: str | None) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
    """Assign one position after the other, so that the last one wins."""

    def expected(x: dict[str, Tensor], i: dict[str, Tensor]) -> Tensor:
        out = x["d"].detach().clone()
        for n in range(len(i["a"])):
            out[tuple(slice(None) if name is None else i[name][n] for name in names)] = x["s"][n]
        return out

    return expected


def _writes() -> list[Case]:
    def write(name: str, put: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor], dest: tuple[int, ...],
              source: tuple[int, ...], indices: Callable[[torch.Generator], dict[str, Tensor]], grad: bool = True,
              **kw: object) -> Case:  # fmt: skip
        return Case(
            name,
            lambda x, i: put(x["d"], x["s"], i),
            {"d": dest, "s": source},
            indices,
            ("d", "s") if grad else (),
            **kw,  # type: ignore[arg-type]
        )

    rows = lambda g: {"a": ints(g, 17, N)}  # noqa: E731
    small = lambda g: {"a": ints(g, 17, 40, 5)}  # noqa: E731
    cases = [
        write("index_put add", lambda d, s, i: d.index_put((i["a"],), s, accumulate=True), (17, 5), (N, 5), rows),
        write("index_put add broadcast row", lambda d, s, i: d.index_put((i["a"],), s, accumulate=True), (17, 5), (5,),
              rows),
        write("index_put add scalar value", lambda d, s, i: d.index_put((i["a"],), s, accumulate=True), (17, 5), (),
              rows),
        write("index_put add None", lambda d, s, i: aten.index_put(d, [None, i["a"]], s, True), (3, 17), (3, N), rows),
        write("index_put add mask", lambda d, s, i: d.index_put((i["m"], i["b"]), s, accumulate=True), (12, 3, 4),
              (6, 4), lambda g: {"m": torch.arange(12) % 2 == 0, "b": torch.tensor([0, 2, 2, 1, 0, 2])}, grad=False),
        write("index_put add masks of one", lambda d, s, i: d.index_put((i["m"],), s, accumulate=True), (12, 3), (6, 3),
              lambda g: {"m": torch.arange(12) % 2 == 0}, grad=False, treatments=frozenset({"safe"})),
        write("index_put add 0-d", lambda d, s, i: d.index_put((i["a"],), s, accumulate=True), (17, 5), (5,),
              lambda g: {"a": torch.tensor(3)}, treatments=frozenset({"closed_form"})),
        write("index_add 0", lambda d, s, i: d.index_add(0, i["a"], s), (17, 5), (N, 5), rows),
        write("index_add 1 alpha", lambda d, s, i: d.index_add(1, i["a"], s, alpha=-0.3), (5, 17), (5, N), rows),
        write("index_add middle", lambda d, s, i: d.index_add(1, i["a"], s), (3, 17, 4), (3, N, 4), rows),
        write("scatter_add 0", lambda d, s, i: d.scatter_add(0, i["a"], s), (17, 5), (600, 5),
              lambda g: {"a": ints(g, 17, 600, 5)}),
        write("scatter_add 1", lambda d, s, i: d.scatter_add(1, i["a"], s), (5, 17), (5, 600),
              lambda g: {"a": ints(g, 17, 5, 600)}),
        write("scatter_add larger src", lambda d, s, i: d.scatter_add(0, i["a"], s), (17, 5), (700, 6),
              lambda g: {"a": ints(g, 17, 600, 4)}, grad=False),
        write("scatter_add expanded", lambda d, s, i: d.scatter_add(0, i["a"][:, None].expand(-1, 5), s), (17, 5),
              (600, 5), lambda g: {"a": ints(g, 17, 600)}),
        write("scatter reduce=add", lambda d, s, i: d.scatter(0, i["a"], s, reduce="add"), (17, 5), (600, 5),
              lambda g: {"a": ints(g, 17, 600, 5)}, grad=False),
        write("scatter reduce=multiply", lambda d, s, i: d.scatter(0, i["a"], s, reduce="multiply"), (17, 5), (40, 5),
              small, grad=False),
        write("put accumulate", lambda d, s, i: d.put(i["a"], s, accumulate=True), (17, 5), (N,),
              lambda g: {"a": ints(g, 85, N, low=-85)}),
        write("put", lambda d, s, i: d.put(i["a"], s), (17, 5), (N,), lambda g: {"a": ints(g, 85, N)}, grad=False,
              expected=lambda x, i: _last_write("a")({"d": x["d"].reshape(-1), "s": x["s"]}, i).reshape(17, 5)),
        write("index_put", lambda d, s, i: d.index_put((i["a"],), s), (17, 5), (N, 5), rows, grad=False,
              expected=_last_write("a")),
        write("index_put two indices", lambda d, s, i: d.index_put((i["a"], i["b"]), s), (7, 6, 5), (N, 5),
              lambda g: {"a": ints(g, 7, N), "b": ints(g, 6, N)}, grad=False,
              expected=_last_write("a", "b")),
        write("index_put apart", lambda d, s, i: aten.index_put(d, [i["a"], None, i["b"]], s), (7, 5, 6), (N, 5),
              lambda g: {"a": ints(g, 7, N), "b": ints(g, 6, N)}, grad=False, expected=_last_write("a", None, "b")),
        write("setitem", _setitem, (17, 5), (N, 5), rows, grad=False, expected=_last_write("a")),
        write("index_copy", lambda d, s, i: d.index_copy(0, i["a"], s), (17, 5), (N, 5), rows, grad=False),
        write("index_copy 1", lambda d, s, i: d.index_copy(1, i["a"], s), (5, 17), (5, N), rows, grad=False),
        write("scatter src", lambda d, s, i: d.scatter(0, i["a"], s), (17, 5), (600, 5),
              lambda g: {"a": ints(g, 17, 600, 5)}, grad=False),
    ]  # fmt: skip
    for reduce in ("sum", "mean", "prod", "amax", "amin"):
        for include_self in (True, False):
            cases.append(
                write(
                    f"scatter_reduce {reduce} include_self={include_self}",
                    lambda d, s, i, r=reduce, k=include_self: d.scatter_reduce(0, i["a"], s, r, include_self=k),  # type: ignore[misc]
                    (17, 5),
                    (40, 5),
                    small,
                )
            )
    for reduce in ("mean", "prod", "amax", "amin"):
        for include_self in (True, False):
            cases.append(
                write(
                    f"index_reduce {reduce} include_self={include_self}",
                    lambda d, s, i, r=reduce, k=include_self: d.index_reduce(0, i["a"], s, r, include_self=k),  # type: ignore[misc]
                    (17, 5),
                    (40, 5),
                    lambda g: {"a": ints(g, 17, 40)},
                )
            )
    return cases


def _setitem(d: Tensor, s: Tensor, i: dict[str, Tensor]) -> Tensor:
    d = d.clone()
    d[i["a"]] = s
    return d


CASES: tuple[Case, ...] = (*_indexing(), *_bags(), *_writes())
