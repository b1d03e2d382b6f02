"""CUDA code generated with no GPU: what is found in it, and that nothing of the process is left changed."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detpass import _torch_private_cuda, _torch_private_guard
from detpass.errors import ConfigurationError, InspectionError
from detpass.inspection.cuda_code import CudaSettings, cuda_code, cuda_code_with

triton = pytest.importorskip("triton")
tl = triton.language

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing", allow_module_level=True)

ROWS, SEGMENTS, COLUMNS = 1000, 50, 16


@triton.jit
def _add_rows(source, index, out, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = offset < rows
    _add(out + tl.load(index + offset, mask=here), tl.load(source + offset, mask=here), here)


@triton.jit
def _add(pointer, value, here):  # type: ignore[no-untyped-def]
    tl.atomic_add(pointer, value, mask=here)


class Model(nn.Module):
    """Embedding, gather, scatter_add and batch norm: three accumulations, and buffers that eager would change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, COLUMNS)
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.norm = nn.BatchNorm1d(COLUMNS)

    def forward(self, tokens: Tensor, index: Tensor, table: Tensor) -> Tensor:
        rows = table[index] * self.norm(self.linear(self.embedding(tokens)))
        return torch.zeros(SEGMENTS, COLUMNS).scatter_add(0, index[:, None].expand(-1, COLUMNS), rows).relu()


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    table = torch.randn(SEGMENTS, COLUMNS, requires_grad=True)
    return torch.randint(0, 100, (ROWS,)), torch.randint(0, SEGMENTS, (ROWS,)), table


def _world() -> dict[str, Any]:
    """Every global that generation patches, by name."""
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering
    from triton.runtime import driver

    cuda = ("get_device_properties", "get_device_capability", "current_device", "device_count", "get_device_name")
    found: dict[str, Any] = {name: getattr(torch.cuda, name) for name in (*cuda, "is_bf16_supported")}
    found |= {f"interface.{name}": value for name, value in vars(CudaInterface).items() if callable(value)}
    found |= {f"interface.{name}": str(value) for name, value in vars(CudaInterface).items() if not callable(value)}
    found |= {f"worker.{name}": value for name, value in vars(CudaInterface.Worker).items() if name[0] != "_"}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and "has_triton" in vars(module):
            found[f"{name}.has_triton"] = module.has_triton
    found |= {
        "version": torch.version.cuda,
        "driver": driver._active,
        "set_driver": triton_helpers.set_driver_to_gpu,
        "compile_to_module": GraphLowering.compile_to_module,
        "fake_tensor_prop": compile_fx.fake_tensor_prop,
        "config": [inductor_config.force_disable_caches, inductor_config.compile_threads],
        "rng": torch.get_rng_state().tolist(),
    }
    return found


def test_inductors_code_has_the_atomics_and_ours_has_none() -> None:
    model, inputs = Model(), _inputs()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cuda_code(model, *inputs)  # what torch imports on first use is imported
    before = _world()
    plain, ours = cuda_code(model, *inputs, backend="inductor"), cuda_code(model, *inputs)
    assert _world() == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    assert sorted(plain.sources) == ["backward0", "forward0"]
    assert sorted(atomic.graph for atomic in plain.float_atomics) == ["backward0", "backward0", "forward0"]
    assert {atomic.dtype for atomic in plain.float_atomics} == {"f32"}
    assert {atomic.found_in for atomic in plain.float_atomics} == {("ttir", "ptx")}
    assert not plain.deterministic
    assert plain.report is None

    assert ours.float_atomics == ours.locks == ours.float_scans == ours.nondeterministic_externs == ()
    assert ours.unread_kernels == {}
    assert ours.deterministic
    assert any("segment_level" in source for source in ours.sources.values())
    assert any(call.operator == "torch.ops.aten.sort.stable" for call in ours.extern_calls)
    assert ours.report is not None
    assert {record.op for record in ours.report.records} >= {"aten.scatter_add.default", "aten.index_put.default"}


def test_dynamic_sizes_make_symbolic_code() -> None:
    code = cuda_code(Model(), *_inputs(), dynamic=True)
    assert code.deterministic
    assert sorted(code.sources) == ["backward0", "forward0"]
    assert any("s" in line and "segment_level" in line for line in code.sources["forward0"].splitlines())


def test_inference_makes_one_graph() -> None:
    with torch.no_grad():
        code = cuda_code_with(CudaSettings("inductor", compile_kernels=False), Model(), _inputs())
    assert list(code.sources) == ["inference0"]
    assert [atomic.found_in for atomic in code.float_atomics] == [("source",)]


@pytest.mark.parametrize(("dtype", "floating"), [(torch.float32, True), (torch.int32, False)])
def test_atomics_of_users_kernels_are_read_through_their_helpers(dtype: torch.dtype, floating: bool) -> None:
    def fn(source: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(8, dtype=source.dtype, device=source.device)
        _add_rows[(1,)](source, index, out, source.shape[0], BLOCK=64)
        return out + 1

    source = torch.ones(64).to(dtype)
    code = cuda_code(fn, source, torch.zeros(64, dtype=torch.int64))
    assert [atomic.operation for atomic in code.float_atomics] == (["fadd"] if floating else [])
    assert [atomic.operation for atomic in code.other_atomics] == ([] if floating else ["add"])
    assert code.deterministic != floating


def test_operators_left_to_aten_are_found() -> None:
    def fn(dest: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return dest.index_add(0, index, source)

    inputs = (torch.zeros(9, 4, dtype=torch.bfloat16), torch.zeros(30, dtype=torch.int64))
    source = torch.ones(30, 4, dtype=torch.bfloat16)
    plain = cuda_code_with(CudaSettings("inductor", compile_kernels=False), fn, (*inputs, source))
    assert [call.operator for call in plain.nondeterministic_externs] == ["torch.ops.aten.index_add.default"]
    assert plain.float_atomics == ()
    ours = cuda_code_with(CudaSettings(compile_kernels=False), fn, (*inputs, source))
    assert ours.nondeterministic_externs == ()


def _written_through_a_slice(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:3] = x[:2] * 2
    return y.sin()


def _column(x: Tensor) -> Tensor:
    return torch.zeros(9).index_put((torch.arange(8) % 3,), x[:, 0], accumulate=True)


def _circular(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x[None, None], (1, 2, 1, 2), mode="circular").sin()


@pytest.mark.parametrize("function", [_written_through_a_slice, _column, _circular])
@pytest.mark.parametrize("backend", ["detpass", "inductor"])
def test_writes_through_views(function: Callable[[Tensor], Tensor], backend: str) -> None:
    """Inductor's passes copy into views of fake CUDA tensors, for which a CPU build of torch has no device guard."""
    settings = CudaSettings(backend, compile_kernels=False)
    code = cuda_code_with(settings, function, (torch.randn(8, 3, requires_grad=True),))
    assert sorted(code.sources) == ["backward0", "forward0"]
    assert code.deterministic == (backend == "detpass" or function is not _column)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 runs the kernels before it writes C++")
def test_kernels_survive_a_wrapper_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is Python text around C++ text around Python text: a docstring in a kernel would end the outer one."""

    def forward(x: Tensor, index: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(500, 16).index_add(0, index, x), table.index_add(0, index[:4], x[:4])

    in_cpp = functools.partial(_torch_private_cuda.generate, cpp_wrapper=True)
    monkeypatch.setattr(_torch_private_cuda, "generate", in_cpp)
    inputs = torch.randn(3000, 16), torch.randint(0, 500, (3000,)), torch.randn(50_000, 16)
    (source,) = cuda_code_with(CudaSettings(compile_kernels=False), forward, inputs).sources.values()
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    (cpp,) = (text for text in texts if isinstance(text, str) and "inductor_entry_impl" in text)
    kernels = re.findall(r"R\"TRITON\(\s*async_compile\.triton\('(\w+)', '''(.*?)'''", cpp, re.DOTALL)
    assert {"segment_level", "update_rows"} <= {name for name, _ in kernels}
    for name, text in kernels:
        functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert name in functions
        assert f"launchKernel({name}" in cpp


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has the guard itself")
def test_the_borrowed_guard_is_given_back() -> None:
    def copied() -> Tensor:
        with torch._subclasses.fake_tensor.FakeTensorMode():
            source = torch.empty(4, device="cuda")
            return torch.empty(4, device="cuda").copy_(source)

    with _torch_private_guard.cuda_guard():
        assert copied().device.type == "cuda"
    with pytest.raises(RuntimeError, match="not linked with support for cuda"):
        copied()


def test_other_capabilities() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(9).scatter_add(0, index, x)

    inputs = (torch.ones(30), torch.zeros(30, dtype=torch.int64))
    code = cuda_code_with(CudaSettings("inductor", capability=80), fn, inputs)
    assert code.capability == 80
    assert "cc=80" in code.sources["inference0"]
    assert len(code.float_atomics) == 1


def test_misuse_is_refused_and_the_world_restored() -> None:
    def fails(x: Tensor) -> Tensor:
        return torch.ones(3) @ torch.ones(4) + x

    with pytest.raises(ConfigurationError, match="'detpass', 'inductor'"):
        cuda_code(Model(), backend="eager")
    with pytest.raises(ConfigurationError, match="sm_80 or sm_90"):
        cuda_code_with(CudaSettings(capability=9), Model())
    with pytest.raises(ConfigurationError, match="cpp_wrapper=True"):
        cuda_code_with(CudaSettings(options={"cpp_wrapper": True}), Model())
    with pytest.raises(InspectionError, match="expected a function or a module"):
        cuda_code(3)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match="could not be traced"):
        cuda_code(fails, torch.ones(3))
    with pytest.raises(InspectionError, match="no graph was compiled"):
        cuda_code(torch.compiler.disable(lambda x: 3), torch.ones(3))
    before = _world()
    with pytest.raises(InspectionError):
        cuda_code(fails, torch.ones(3))
    world = _torch_private_cuda.offline_cuda(_torch_private_cuda.Gpu(9, 0))
    world.__enter__()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert not world.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert _world() == before


@torch.library.custom_op("detpass_tests::unknown_shape", mutates_args=())
def _unknown_shape(x: Tensor) -> Tensor:
    return x.clone()


def _unlowered(x: Tensor) -> Tensor:
    return torch.ops.detpass_tests.unknown_shape(x.sin())  # type: ignore[no-any-return]


def test_refusals_name_the_operator() -> None:
    with pytest.raises(InspectionError, match=r"at operator detpass_tests\.unknown_shape\.default: .*register_fake"):
        cuda_code(_unlowered, torch.ones(3))


def test_layers_that_dynamo_leaves_to_eager_code_are_named_with_the_remedy() -> None:
    inputs = (torch.randn(2, 3, 4),)
    with pytest.raises(
        InspectionError, match=r"no graph was compiled: .*\(GRU\(4, 4.*test_cuda_code.*allow_rnn = True"
    ):
        cuda_code(_Gated(), *inputs)
    with torch._dynamo.config.patch(allow_rnn=True):
        assert cuda_code_with(CudaSettings(compile_kernels=False), _Gated(), inputs).deterministic


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].sin()  # type: ignore[no-any-return]


def test_code_between_graphs_was_not_read() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    code = cuda_code_with(CudaSettings(compile_kernels=False), broken, (torch.ones(3),))
    assert sorted(code.sources) == ["inference0", "inference1"]
    assert len(code.graph_breaks) == 1
    assert f"at {__file__}:{broken.__code__.co_firstlineno + 2}" in code.graph_breaks[0]
    assert not code.deterministic


def test_a_graph_without_operations_has_no_code() -> None:
    """Its results are its inputs, and Inductor compiles nothing for it."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert _torch_private_cuda.generate(torch.fx.GraphModule({}, graph), []) == ""


# A kernel of the user's where only the backward pass launches it.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        out = gradient.new_zeros(ctx.size)
        _add_rows[(1,)](gradient.contiguous(), index, out, index.shape[0], BLOCK=64)
        return out, None


@torch.library.triton_op("detpass_tests::gather_back", mutates_args={})
def _gather_back(gradient: Tensor, index: Tensor, size: int) -> Tensor:
    out = gradient.new_zeros(size)
    torch.library.wrap_triton(_add_rows)[(1,)](gradient, index, out, index.shape[0], BLOCK=64)
    return out


@torch.library.triton_op("detpass_tests::gather", mutates_args={})
def _gather(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape[0]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _gather_back(gradient.contiguous(), ctx.saved_tensors[0], ctx.size), None


_gather.register_autograd(_differentiate, setup_context=_save)


@pytest.mark.parametrize("gather", [_Gather.apply, _gather], ids=["autograd.Function", "triton_op"])
@pytest.mark.parametrize("backend", ["detpass", "inductor"])
def test_users_kernels_in_a_backward_pass_are_read(gather: Callable[..., Tensor], backend: str) -> None:
    def function(table: Tensor, index: Tensor) -> Tensor:
        return gather(table, index).sin()

    inputs = (torch.ones(8, requires_grad=True), torch.zeros(64, dtype=torch.int64))
    code = cuda_code(function, *inputs, backend=backend)
    assert [(a.graph, a.operation, a.dtype) for a in code.float_atomics] == [("backward0", "fadd", "f32")]
    assert code.float_atomics[0].kernel.startswith("_add_rows")
    assert not code.deterministic
    if backend == "detpass":
        assert code.nondeterministic_externs == ()


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InspectionError, match=r"detpass\[triton\]"):
        cuda_code(Model(), *_inputs())
