"""Which kernels do the same to each element in every configuration, as text alone: no Triton is needed."""

from __future__ import annotations

import pytest

from detpass.ttir_configurations import difference

KERNEL = """\
module {{
  tt.func public @kernel(%x: !tt.ptr<f32> {{tt.divisibility = 16 : i32}} loc("x"(#loc)), %out: !tt.ptr<f32>, %n: i32) {{
    %p = tt.get_program_id x : i32 loc(#loc1)
    %c{block}_i32 = arith.constant {block} : i32 loc(#loc1)
    %all = arith.constant dense<{block}> : tensor<{block}xi32> loc(#loc1)
    %r = tt.make_range {{end = {block} : i32, start = 0 : i32}} : tensor<{block}xi32> loc(#loc1)
    %s = arith.muli %p, %c{block}_i32 : i32 loc(#loc1)
    %b = tt.splat %s : i32 -> tensor<{block}xi32> loc(#loc1)
    %at = arith.addi %b, %r : tensor<{block}xi32> loc(#loc1)
    %a = tt.splat %x : !tt.ptr<f32> -> tensor<{block}x!tt.ptr<f32>> loc(#loc1)
    %q = tt.addptr %a, %at : tensor<{block}x!tt.ptr<f32>>, tensor<{block}xi32> loc(#loc1)
    %v = tt.load %q : tensor<{block}x!tt.ptr<f32>> loc("v"(#loc1))
{body}
    tt.store %q, %v : tensor<{block}x!tt.ptr<f32>> loc(#loc1)
    tt.return loc(#loc1)
  }} loc(#loc)
{more}}} loc(#loc)
#loc = loc("/models/kernels.py":10:0)
#loc1 = loc("/models/kernels.py":{block}:4)
"""
HELPER = """\
  tt.func private @helper__S{block}S(%v: tensor<{block}xf32>) -> tensor<{block}xf32> attributes {{noinline = false}} {{
    %0 = math.exp %v : tensor<{block}xf32> loc(#loc1)
    tt.return %0 : tensor<{block}xf32> loc(#loc1)
  ^bb1:  // no predecessors
    %1 = ub.poison : tensor<{block}xf32> loc(#loc1)
    tt.return %1 : tensor<{block}xf32> loc(#loc1)
  }} loc(#loc)
"""


def kernel(body: str = "", block: int = 64, more: str = "") -> str:
    lines = "\n".join(f"    {line.format(block=block)}" for line in body.splitlines())
    return KERNEL.format(block=block, body=lines, more=more.format(block=block))


SAME = {
    "nothing more": "",
    "a factor": "%2 = arith.constant dense<2.0> : tensor<{block}xf32>\n%w = arith.mulf %v, %2 : tensor<{block}xf32>",
    "a call": "%w = tt.call @helper__S{block}S(%v) : (tensor<{block}xf32>) -> tensor<{block}xf32>",
    "a condition": "scf.if %c {{\n  tt.store %q, %v : tensor<{block}x!tt.ptr<f32>>\n}}",
    "an integer from memory": "%i = tt.load %q : tensor<{block}x!tt.ptr<i8>>\n"
    "%j = arith.extsi %i : tensor<{block}xi8> to tensor<{block}xi32>\n"
    "%w = arith.sitofp %j : tensor<{block}xi32> to tensor<{block}xf32>",
    "an integer argument": "%m = tt.splat %n : i32 -> tensor<{block}xi32>\n"
    "%w = arith.sitofp %m : tensor<{block}xi32> to tensor<{block}xf32>",
    "two dimensions": "%w = tt.expand_dims %v {{axis = 0 : i32}} : tensor<{block}xf32> -> tensor<1x{block}xf32>",
}


@pytest.mark.parametrize("case", SAME)
def test_sizes_alone_differ(case: str) -> None:
    texts = [kernel(SAME[case], block, HELPER) for block in (64, 128, 64)]
    assert difference(texts) is None


CALLED = "nothing says that {} does the same in every configuration"
LIKE = {
    "a reduction": ('%w = "tt.reduce"(%v) <{{axis = 0 : i32}}> ({{', "can set the order in a reduction"),
    "a scan": ('%w = "tt.scan"(%v) <{{axis = 0 : i32, reverse = false}}> ({{', "the order in a scan"),
    "a product": ("%w = tt.dot %v, %v, %v : tensor<{block}xf32> * tensor<{block}xf32>", "in a matrix product"),
    "a loop": ("%w = scf.for %i = %p to %n step %c iter_args(%k = %v) -> (tensor<{block}xf32>) : i32 {{", "in a loop"),
    "an order left open": ("%w = tt.reshape %v allow_reorder : tensor<{block}xf32> -> tensor<{block}xf32>",
                           CALLED.format("tt.reshape")),
    "an unknown operation": ("%w = tt.mystery %v : tensor<{block}xf32>", CALLED.format("tt.mystery")),
    "a program's number": ("%w = arith.sitofp %p : i32 to f32", "a number computed from positions"),
    "a position": ("%w = arith.uitofp %at : tensor<{block}xi32> to tensor<{block}xf32>", "computed from positions"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIKE)
def test_what_a_configuration_can_change(case: str) -> None:
    body, why = LIKE[case]
    assert why in str(difference([kernel(body), kernel(body)]))
    helper = HELPER.replace("    %0 = ", f"    {body}\n    %0 = ")
    if "%p" not in body and "%at" not in body:
        assert why in str(difference([kernel("", block, helper) for block in (64, 128)]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("%2 = arith.constant dense<2.0> : tensor<{block}xf32>", "%2 = arith.constant dense<4.> : tensor<{block}xf32>"),
        ("%w = arith.addf %v, %v : tensor<{block}xf32>", "%w = arith.subf %v, %v : tensor<{block}xf32>"),
        ("%w = arith.addf %v, %v : tensor<{block}xf32>", "%w = arith.addf %v, %v : tensor<{block}xf16>"),
        ("%w = arith.addf %v, %v : tensor<{block}xf32>", ""),
        ("%w = arith.cmpi slt, %at, %b : tensor<{block}xi32>", "%w = arith.cmpi sle, %at, %b : tensor<{block}xi32>"),
        ("%w = arith.addf %v, %v : tensor<{block}xf32>\n%z = arith.mulf %w, %v : tensor<{block}xf32>",
         "%w = arith.addf %v, %v : tensor<{block}xf32>\n%z = arith.mulf %w, %w : tensor<{block}xf32>"),
    ],
    ids=["constant", "operation", "dtype", "branch", "comparison", "operand"],
)  # fmt: skip
def test_code_that_differs(first: str, second: str) -> None:
    assert difference([kernel(first), kernel(second, 128)]) == "its operations differ from one configuration to another"
    assert difference([kernel(first), kernel(first, 128)]) is None
