"""Reading generated CUDA code: kernels, atomics by type, operators by name, in texts as torch and Triton write them."""

from __future__ import annotations

import pytest

from detpass.inspection.cuda_text import Atomic, KernelText, extern_calls, kernels, read_kernel
from detpass.inspection.extern_hazards import _CONDITIONS, base_name, hazard_of
from detpass.rule import Treatment
from detpass.rules import catalogue

MODULE = """
async_compile = AsyncCompile()
kernel_0 = async_compile.triton('kernel_body', '''
triton_meta={'signature': {'in_ptr0': '*i64', 'out_ptr0': '*fp32', 'out_ptr1': '*i32', 'xnumel': 'i32'}}
def kernel_body(in_ptr0, out_ptr0, out_ptr1, xnumel):
    tl.atomic_add(out_ptr0 + (x0), tmp0, xmask, sem='relaxed')
    tl.atomic_add(out_ptr1 + (x0), tmp1, xmask, sem='relaxed')
    tl.atomic_max(out_ptr1 + (x0), tmp1, xmask, sem='relaxed')
''', device_str='cuda')

def call(args):
    buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
    buf1 = empty_strided_cuda((8, ), (1, ), torch.int64)
    extern_kernels.mm(arg0, arg1, out=buf0)
    kernel_0.run(arg0, buf0, buf1, 8, stream=raw_stream0)
    aten.index_put_(buf0, [arg2], arg3, True)
    aten.index_put_(buf1, [arg2], arg3, True)
    aten.index_put_(buf0, [arg2], arg3, False)
    buf2 = torch.ops.aten.sort.stable(buf1, stable=True, dim=0, descending=False)
    torch.ops.aten.scatter_reduce_.two(buf0, 0, arg2, arg3, reduce='sum', include_self=True)
    buf3 = extern_kernels.convolution(arg0, arg1, transposed=True)
    return (buf0, )
"""

TTIR = """
  %1 = tt.atomic_rmw fadd, relaxed, gpu, %p, %v, %m : (tensor<64x!tt.ptr<f32>>, tensor<64xf32>) -> tensor<64xf32>
  %2 = tt.atomic_rmw add, relaxed, gpu, %p, %v, %m : (tensor<64x!tt.ptr<i32>>, tensor<64xi32>) -> tensor<64xi32>
  %3 = tt.atomic_cas acq_rel, gpu, %p, %a, %b : (!tt.ptr<i32>, i32, i32) -> i32
  %4 = tt.atomic_rmw fadd, relaxed, gpu, %p, %v, %m : (tensor<64x!tt.ptr<bf16>>, tensor<64xbf16>) -> tensor<64xbf16>
"""

PTX = """
\t@%p1 red.global.gpu.relaxed.add.f32 [ %rd1 + 0 ], %f1;
\t@!%p2 atom.global.gpu.relaxed.add.u32 %r1, [ %rd2 + 0 ], %r2;
\tatom.global.gpu.acq_rel.cas.b32 %r3, [ %rd3 + 0 ], %r4, %r5;
\t@%p1 atom.global.gpu.relaxed.add.noftz.bf16x2 %r1, [ %rd1 ], %r2;
\t@%p1 atom.global.gpu.relaxed.max.u32 %r1, [ %rd1 ], %r2;
\tst.global.f32 [ %rd1 ], %f1;
"""


def test_kernels_are_found_by_name() -> None:
    (kernel,) = kernels(MODULE)
    assert (kernel.name, kernel.function) == ("kernel_0", "kernel_body")
    assert "tl.atomic_add" in kernel.source


def test_source_alone_tells_floats_from_integers_by_the_signature() -> None:
    found = read_kernel("g", kernels(MODULE)[0]).atomics
    assert [(a.operation, a.dtype, a.found_in) for a in found] == [
        ("fadd", "f32", ("source",)),
        ("add", "i32", ("source",)),
        ("max", "i32", ("source",)),
    ]


def test_source_of_an_unknown_pointer_counts_as_the_worse() -> None:
    kernel = KernelText("k", "k", "tl.atomic_add(pointer + off, value)")
    assert [(a.operation, a.dtype) for a in read_kernel("g", kernel).atomics] == [("fadd", "?")]


def test_compiled_texts_tell_the_types() -> None:
    found = read_kernel("g", KernelText("k", "k", "tl.atomic_add(p, v)"), TTIR, PTX).atomics
    assert Atomic("g", "k", "fadd", "f32", 1, ("ttir", "ptx")) in found
    assert Atomic("g", "k", "fadd", "bf16", 1, ("ttir", "ptx")) in found
    assert Atomic("g", "k", "add", "i32", 1, ("ttir", "ptx")) in found
    assert Atomic("g", "k", "cas", "i32", 1, ("ttir", "ptx")) in found
    assert Atomic("g", "k", "umax", "i32", 1, ("ptx",)) in found
    assert len(found) == 5


SCAN = """
def kernel(in_ptr0, in_ptr1, out_ptr1, ws_ptr):
    tmp0 = tl.load(in_ptr0 + (r0_0), r0_mask, other=0.0)
    tmp8 = tl.load(in_ptr1 + (r0_0), r0_mask, other=0.0)
    tmp1 = {conversion}
    tmp2 = tl.broadcast_to(tmp1, [R0_BLOCK])
    tmp3 = tl.reduce(tmp2, 0, _triton_helper_fn_add0)
    tmp4 = triton_helpers.exclusive_scan_decoupled_lookback_64(
        ws_ptr.to(tl.pointer_type(tl.uint64)), tmp3, tl.program_id(0), _triton_helper_fn_add0
    )
    tl.store(out_ptr1 + (r0_0), tmp8 * tmp4.to(tl.float32), r0_mask)
"""


@pytest.mark.parametrize(
    ("conversion", "floating"),
    [("tmp0.to(tl.float32)", True), ("tmp0.to(tl.int64)", False), ("tmp0.to(tl.int1).to(tl.int64)", False),
     ("tmp0 + 1", True)],
)  # fmt: skip
def test_look_back_scans_are_told_apart_by_what_they_scan(conversion: str, floating: bool) -> None:
    """Floats beside the scan, which a fused kernel multiplies by its result, do not make it one of floats."""
    (scan,) = read_kernel("g", KernelText("k", "k", SCAN.format(conversion=conversion))).scans
    assert scan.floating == floating


def test_operators_are_listed_in_program_order_with_their_hazard() -> None:
    calls = extern_calls("g", MODULE)
    assert [(call.operator, call.hazard is not None) for call in calls] == [
        ("extern_kernels.mm", False),
        ("aten.index_put_", True),
        ("aten.index_put_", False),
        ("aten.index_put_", True),
        ("torch.ops.aten.sort.stable", False),
        ("torch.ops.aten.scatter_reduce_.two", True),
        ("extern_kernels.convolution", True),
    ]
    reasons = [call.hazard for call in calls if call.operator == "aten.index_put_"]
    assert "add into shared places" in str(reasons[0])
    assert "several writers of one place" in str(reasons[2])


def test_what_was_proved_of_every_call_in_a_graph_is_no_hazard() -> None:
    hazards = {call.operator for call in extern_calls("g", MODULE, {"index_put", "mm"}) if call.hazard}
    assert hazards == {"torch.ops.aten.scatter_reduce_.two", "extern_kernels.convolution"}


def test_every_row_of_the_catalogue_for_cuda_is_known_by_its_operators() -> None:
    for entry in catalogue.entries():
        assert entry.applies in _CONDITIONS, f"{entry.what}: its condition has no form for text"
        for op in entry.ops if catalogue.CUDA in entry.devices else ():
            # Text does not tell a user's kernel with exact atomics from another: the worse row counts.
            rows = [other for other in catalogue.entries() if op in other.ops and catalogue.CUDA in other.devices]
            expected = any(row.treatment is not Treatment.SAFE for row in rows)
            weights = {"weights": "w", "transposed": "True", "accumulate": str(entry.applies is not catalogue.always)}
            assert (hazard_of(f"torch.ops.{op}", ["x"], weights) is not None) == expected, op


@pytest.mark.parametrize(
    ("operator", "keywords", "integers", "hazard"),
    [
        ("torch.ops.aten.sort.stable", {"stable": "True"}, False, False),
        ("torch.ops.aten.sort.stable", {"stable": "False"}, False, True),
        ("torch.ops.aten.sort.default", {}, False, True),
        ("torch.ops.aten.bincount.default", {}, True, False),
        ("torch.ops.aten.bincount.default", {"weights": "buf1"}, True, True),
        ("torch.ops.aten.cumsum.default", {}, True, False),
        ("torch.ops.aten.cumsum.default", {}, False, True),
        ("aten.index_put_", {"accumulate": "True"}, True, False),
        ("aten.index_put_", {"accumulate": "False"}, True, True),
        ("extern_kernels.convolution", {"transposed": "False"}, False, False),
        ("aten.embedding_backward", {}, False, True),
    ],
)
def test_conditions_of_rows_are_read_from_text(
    operator: str, keywords: dict[str, str], integers: bool, hazard: bool
) -> None:
    assert (hazard_of(operator, ["x"], keywords, integers) is not None) == hazard


def test_names_are_the_same_in_every_spelling() -> None:
    for spelling in ("aten.index_add_", "torch.ops.aten.index_add.default", "extern_kernels.index_add"):
        assert base_name(spelling) == "index_add"
        assert hazard_of(spelling) is not None
    assert hazard_of("torch.ops.detpass.index_add.default") is None
    assert hazard_of("aten.mm") is None


def test_counting_is_exact_and_weighted_counting_is_not() -> None:
    assert hazard_of("torch.ops.aten.bincount.default", ["arg0_1", "None", "4"]) is None
    assert hazard_of("torch.ops.aten.bincount.default", ["arg0_1"], {"minlength": "4"}) is None
    assert hazard_of("torch.ops.aten.bincount.default", ["arg0_1", "arg1_1"]) is not None
