"""Atomics in Triton's intermediate code: which leave the same bits in any order. Text alone: no Triton is needed."""

from __future__ import annotations

import pytest

from detpass import ttir

KERNEL = """\
#loc = loc("/models/kernels.py":10:0)
module {{
  tt.func public @kernel(%x: !tt.ptr<f32> loc("x"(#loc)), %out: !tt.ptr<i32>, %n: i32 loc("n"(#loc))) {{
    %p = tt.addptr %out, %n : !tt.ptr<i32>, i32 loc(#loc1)
{body}
    tt.return loc(#loc1)
  }} loc(#loc)
{more}
}} loc(#loc)
#loc1 = loc("/models/kernels.py":12:4)
#loc2 = loc("/models/kernels.py":13:8)
#loc3 = loc("value"(#loc2))
"""


def kernel(*body: str, more: str = "") -> str:
    return KERNEL.format(body="\n".join(f"    {line}" for line in body), more=more)


ADD = "%old = tt.atomic_rmw add, acq_rel, gpu, %p, %n, %true : (!tt.ptr<i32>, i32, i1) -> i32 loc(#loc3)"


@pytest.mark.parametrize(
    ("line", "operation", "dtype", "why"),
    [
        ("%1 = tt.atomic_rmw fadd, acq_rel, gpu, %a, %b, %m : (tensor<128x!tt.ptr<f16>>) -> tensor<128xf16>",
         "fadd", "f16", ttir.NOTES["fadd"]),
        ("%1 = tt.atomic_rmw fadd, acq_rel, gpu, %a, %b, %m : (!tt.ptr<bf16>, bf16, i1) -> bf16",
         "fadd", "bf16", ttir.NOTES["fadd"]),
        ("%1 = tt.atomic_rmw add, acq_rel, gpu, %a, %b, %m : (tensor<8x!tt.ptr<i64>>) -> tensor<128xi64>",
         "add", "i64", None),
        ("%1 = tt.atomic_rmw max, relaxed, gpu, %a, %b, %m : (!tt.ptr<i32>, i32, i1) -> i32", "max", "i32", None),
        ("%1 = tt.atomic_rmw xor, relaxed, gpu, %a, %b, %m : (!tt.ptr<i32>, i32, i1) -> i32", "xor", "i32", None),
        ("%1 = tt.atomic_rmw exch, acq_rel, gpu, %a, %b, %m : (!tt.ptr<bf16>, bf16, i1) -> bf16",
         "exch", "bf16", ttir.NOTES["exch"]),
        ("%1 = tt.atomic_cas acq_rel, gpu, %a, %b, %c : (!tt.ptr<i32>, i32, i32) -> i32",
         "cas", "i32", ttir.NOTES["cas"]),
        ("%1 = tt.atomic_rmw add, acq_rel, gpu, %a, %b, %m : (!mystery) -> !mystery", "add", "?", ttir.UNKNOWN),
        ("%1 = tt.atomic_rmw wrap, acq_rel, gpu, %a, %b, %m : (!tt.ptr<i32>, i32, i1) -> i32",
         "wrap", "i32", ttir.UNKNOWN),
        ("tt.descriptor_reduce add, %d[%i], %v : !tt.tensordesc<tensor<128xf32>>, tensor<128xf32>",
         "fadd", "f32", ttir.NOTES["fadd"]),
        ("tt.descriptor_reduce add, %d[%i], %v : !tt.tensordesc<tensor<128xi32>>, tensor<128xi32>", "add", "i32", None),
    ],
)  # fmt: skip
def test_one_atomic(line: str, operation: str, dtype: str, why: str | None) -> None:
    (found,) = ttir.atomics(kernel(line))
    assert (found.operation, found.dtype, found.ordered) == (operation, dtype, why)


def test_an_addition_of_floats_that_is_none_by_atomics() -> None:
    assert ttir.atomics(kernel("%1 = arith.addf %a, %b : tensor<128xf32>")) == []


def test_the_place_in_the_source_is_found_through_names() -> None:
    (found,) = ttir.atomics(kernel(ADD))
    assert found.location == "kernels.py:13"
    assert str(found) == "add on i32: exact in any order (kernels.py:13)"


@pytest.mark.parametrize(
    "use",
    [
        ("tt.store %q, %old : !tt.ptr<i32>",),
        ("%q = tt.addptr %x, %old : !tt.ptr<f32>, i32", "tt.store %q, %v : !tt.ptr<f32>"),
        ("%done = arith.cmpi eq, %old, %n : i32", "scf.if %done {"),
        ("%sum = scf.for %i = %a to %b step %c iter_args(%acc = %old) -> (i32)  : i32 {",),
        ("cf.cond_br %old, ^bb1, ^bb2",),
        ('tt.print "old: " {hex = false, isSigned = array<i32: 1>} : %old : i32',),
        ("%again = tt.atomic_rmw add, acq_rel, gpu, %p, %old, %true : (!tt.ptr<i32>, i32, i1) -> i32",),
        ("%1 = tt.call @helper(%old) : (i32) -> i32",),
    ],
    ids=lambda use: use[-1].split()[0],
)
def test_a_result_that_is_used_is_told_from_one_that_is_not(use: tuple[str, ...]) -> None:
    assert ttir.atomics(kernel(ADD, *use))[0].ordered == ttir.USED
    dead = "%dead = arith.addi %old, %n : i32"
    assert ttir.atomics(kernel(ADD, dead, "%more = arith.muli %dead, %dead : i32"))[0].ordered is None


HELPER = """\
  tt.func private @helper(%p: !tt.ptr<i32>, %v: i32) -> i32 {
    %0 = tt.atomic_rmw add, acq_rel, gpu, %p, %v, %true : (!tt.ptr<i32>, i32, i1) -> i32 loc(#loc2)
    tt.return %0 : i32
  }
"""
CALL = "%got = tt.call @helper(%p, %n) : (!tt.ptr<i32>, i32) -> i32"


def test_what_a_helper_returns_counts_where_a_caller_uses_it() -> None:
    assert [a.ordered for a in ttir.atomics(kernel(CALL, more=HELPER))] == [None]
    used = kernel(CALL, "tt.store %p, %got : !tt.ptr<i32>", more=HELPER)
    assert [a.ordered for a in ttir.atomics(used)] == [ttir.USED]


def test_kinds_that_do_not_commute_are_refused_on_one_tensor() -> None:
    largest = ADD.replace("add,", "max,").replace("%old", "%other")
    assert [a.ordered for a in ttir.atomics(kernel(ADD, largest))] == [ttir.MIXED, ttir.MIXED]
    apart = largest.replace("%p", "%x")
    assert [a.ordered for a in ttir.atomics(kernel(ADD, apart))] == [None, None]
    in_helper = HELPER.replace("rmw add", "rmw max")
    assert [a.ordered for a in ttir.atomics(kernel(ADD, CALL, more=in_helper))] == [ttir.MIXED, ttir.MIXED]
    assert [a.ordered for a in ttir.atomics(kernel(ADD, CALL, more=HELPER))] == [None, None]


def test_a_floating_point_maximum_is_one_kind() -> None:
    """One line makes a signed maximum and an unsigned minimum, masked by the sign."""
    below = ADD.replace("add,", "umin,").replace("%old", "%other")
    both = kernel(ADD.replace("add,", "max,"), below)
    assert [a.ordered for a in ttir.atomics(both)] == [None, None]
    elsewhere = kernel(ADD.replace("add,", "max,"), below.replace("#loc3", "#loc1"))
    assert [a.ordered for a in ttir.atomics(elsewhere)] == [ttir.MIXED, ttir.MIXED]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('%1 = tt.elementwise_inline_asm "red.global.add.f32 [$1], 1.0;" {constraints = "=r,l"} %a : f32 -> i32',
         "red.global.add.f32"),
        ('%1 = tt.elementwise_inline_asm "{ atom.shared.cas.b32 $0, [$1], 0, 1; }" {pure = false} %a : i32 -> i32',
         "atom.shared.cas.b32"),
        ('%1 = tt.elementwise_inline_asm "cvt.rn.f16.f32 $0, $1;" {pure = true} %a : f32 -> f16', None),
        ('%1 = tt.extern_elementwise %a {libname = "mine", libpath = "", pure = false, symbol = "push"} : (f32) -> f32',
         "the external function push"),
        ('%1 = tt.extern_elementwise %a {libname = "", libpath = "", pure = true, symbol = "__nv_expf"} : (f32) -> f32',
         None),
    ],
)  # fmt: skip
def test_assembly_and_external_functions(line: str, found: str | None) -> None:
    said = ttir.opaque(kernel(line))
    assert len(said) == (found is not None)
    assert found is None or found in said[0]
