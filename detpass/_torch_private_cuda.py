"""The private names of torch and Triton that generating CUDA code without a GPU needs, and the globals it has to patch.

A third part of ``_torch_private.py``, under the same rule. Tested on torch 2.11 to 2.14, the CPU wheel included.

Inductor generates Triton source for CUDA from metadata alone, but asks the machine on the way: how many
multiprocessors, which capability, which Triton driver. :func:`offline_cuda` answers for a GPU that is not here.
Graphs are traced on the CPU, whose kernels are there, and moved by :func:`retargeted`, which rewrites metadata only.
Inductor's own passes dispatch operators on the fake CUDA tensors that this makes: see ``_torch_private_guard.py``.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from detpass import _torch_private
from detpass._torch_private_guard import cuda_guard

_DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Gpu:
    """What ``torch.cuda.get_device_properties`` says of the GPU that code is generated for (an H200's sizes)."""

    major: int
    minor: int
    name: str = "offline CUDA device"
    multi_processor_count: int = 132
    total_memory: int = 150_000_000_000
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    L2_cache_size: int = 60 << 20
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    gcnArchName: str = ""
    is_integrated: int = 0
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 3_201_000
    memory_bus_width: int = 6144
    uuid: str = "offline"
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


@contextlib.contextmanager
def flex_attention_as_on_cuda() -> Iterator[None]:
    """Inside, flex_attention does not refuse tensors on a CPU that need a gradient: they stand for a GPU's."""
    import torch.nn.attention.flex_attention as frontend

    checked = frontend._validate_device
    frontend._validate_device = lambda *_: None
    try:
        yield
    finally:
        frontend._validate_device = checked


@contextlib.contextmanager
def associative_scan_as_on_cuda() -> Iterator[None]:
    """Inside, associative_scan does not refuse tensors on a CPU (before torch 2.14): they stand for a GPU's.

    The devices that it accepts are a constant in its code, and callers may have imported the function by name.
    """
    from torch._higher_order_ops.associative_scan import associative_scan as frontend

    checked = frontend.__code__
    frontend.__code__ = _with_constant(checked, ("cuda", "xpu"), ("cuda", "xpu", "cpu"))
    try:
        yield
    finally:
        frontend.__code__ = checked


def _with_constant(code: types.CodeType, before: Any, after: Any) -> types.CodeType:
    """``code`` with another constant in the place of one, in the functions inside it too."""

    def changed(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _with_constant(constant, before, after)
        return after if constant == before else constant

    return code.replace(co_consts=tuple(map(changed, code.co_consts)))


class _OfflineDriver:
    """A Triton driver that names its target: enough to hash and compile kernels, never to launch one."""

    def __init__(self, gpu: Gpu) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size)
        limits = {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: dict(limits))

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(int(self._target.arch), 10)

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def _memoised() -> Iterator[Any]:
    """Functions that remember an answer about the machine."""
    names = ("torch._inductor.utils", "torch._inductor.runtime.hints", "torch.utils._triton")
    for name in names:
        module = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else ():
            if callable(getattr(value, "cache_clear", None)) and getattr(value, "__module__", "") == name:
                yield value
    from torch._inductor.runtime.hints import DeviceProperties

    yield DeviceProperties.create


def _forget() -> None:
    for function in _memoised():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _patches(gpu: Gpu) -> Iterator[Any]:
    import torch._inductor.runtime.triton_helpers as triton_helpers
    from torch._dynamo.device_interface import CudaInterface

    def properties(*_: Any, **__: Any) -> Gpu:
        return gpu

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    cuda: dict[str, Any] = {
        "get_device_properties": properties,
        "get_device_capability": answer((gpu.major, gpu.minor)),
        "current_device": answer(0),
        "device_count": answer(1),
        "get_device_name": answer(gpu.name),
        "is_bf16_supported": answer(True),
    }
    for name, value in cuda.items():
        yield mock.patch.object(torch.cuda, name, value)
    yield mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0")
    # Inductor joins equal constants by their address, which a fake tensor does not have.
    yield mock.patch("torch._inductor.graph.is_same_tensor", lambda data, value: data is value)
    interface: dict[str, Any] = {
        "is_bf16_supported": answer(True),
        "get_device_properties": properties,
        "get_compute_capability": answer(10 * gpu.major + gpu.minor),
        "is_available": answer(True),
        "device_count": answer(1),
        "current_device": answer(0),
        "get_raw_stream": answer(0),
    }
    for name, value in interface.items():
        yield mock.patch.object(CudaInterface, name, staticmethod(value))
    yield mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(properties))
    yield mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(answer(0)))
    # Generated kernels call it when they are loaded; the offline driver is active already.
    yield mock.patch.object(triton_helpers, "set_driver_to_gpu", answer(None))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and callable(vars(module).get("has_triton")):
            yield mock.patch.object(module, "has_triton", answer(True))


@contextlib.contextmanager
def _active_driver(gpu: Gpu) -> Iterator[None]:
    from triton.runtime import driver

    former = driver._active
    driver.set_active(_OfflineDriver(gpu))
    try:
        yield
    finally:
        driver._active = former


@contextlib.contextmanager
def offline_cuda(gpu: Gpu) -> Iterator[None]:
    """Inside, torch, Inductor and Triton believe in ``gpu``; every global is as before afterwards, whatever happens.

    The patched globals belong to the process: no other thread may use CUDA or compile meanwhile.
    """
    import torch._inductor.compile_fx
    import torch._inductor.config as config
    import torch._inductor.utils  # noqa: F401 - what it remembers is forgotten below

    settings = {
        "force_disable_caches": True,
        "compile_threads": 1,
        "triton.autotune_at_compile_time": False,
        "use_static_cuda_launcher": False,
        "use_static_triton_launcher": False,
        "always_keep_tensor_constants": True,  # small ones would be read, and a constant on this device has no values
    }
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        stack.enter_context(cuda_guard())
        stack.enter_context(_active_driver(gpu))
        for patch in _patches(gpu):
            stack.enter_context(patch)
        stack.enter_context(config.patch({name: value for name, value in settings.items() if hasattr(config, name)}))
        _forget()
        yield


def retargeted(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a CPU graph of ATen operators, and its inputs, as fake tensors on CUDA.

    Device arguments are rewritten; each fake value keeps its dtype, sizes, strides and offset, and values that shared
    a storage share one (Inductor's in-place decisions read that). Values that are not on the CPU stay where they are.
    """
    from torch._guards import detect_fake_mode

    with _torch_private.outside_tracing():  # constants are real tensors
        moved = copy.deepcopy(graph_module)
    placeholders = [node for node in moved.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val", given) for node, given in zip(placeholders, inputs, strict=True)]
    mode = detect_fake_mode([*values, *inputs]) or FakeTensorMode(allow_non_fake_inputs=True)
    storages: dict[int, tuple[torch.Tensor, Any]] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return value
        with mode:
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in storages:
                length = storage.nbytes() // value.element_size()
                whole = torch.empty_strided((length,), (1,), dtype=value.dtype, device=_DEVICE)
                storages[key] = (whole, storage)  # the storage is kept alive: its address is the key
            base = storages[key][0]
            if base.dtype != value.dtype:
                base = torch.ops.aten.view.dtype(base, value.dtype)
            return torch.ops.aten.as_strided.default(base, value.shape, value.stride(), value.storage_offset())

    def rewrite(argument: Any) -> Any:
        return _DEVICE if isinstance(argument, torch.device) and argument.type == "cpu" else argument

    for module in moved.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.args = fx.node.map_aggregate(node.args, rewrite)
                node.kwargs = fx.node.map_aggregate(node.kwargs, rewrite)
            if "val" in node.meta:
                node.meta["val"] = torch.utils._pytree.tree_map(move, node.meta["val"])
            for stale in ("tensor_meta", "eager_input_vals"):
                node.meta.pop(stale, None)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, move(value))
        for name, value in list(module.named_buffers(recurse=False)):
            module._buffers[name] = move(value)
        module.recompile()
    return moved, [
        node.meta["val"] if "val" in node.meta else move(given)
        for node, given in zip(placeholders, inputs, strict=True)
    ]


class _Generated(BaseException):
    """Leaves Inductor, which catches every Exception, with the source that it was about to load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source


def generate(graph_module: fx.GraphModule, inputs: Sequence[Any], *, cpp_wrapper: bool = False, **options: Any) -> str:
    """The source that Inductor generates for one graph with fake CUDA inputs (inside :func:`offline_cuda`).

    Empty for a graph without operations, which Inductor does not compile. With ``cpp_wrapper`` the module holds C++
    that launches the kernels (torch 2.11 runs them first: not here).
    """
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as config
    from torch._guards import detect_fake_mode
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool

    def capture(self: Any) -> Any:
        code, _ = self.codegen()
        raise _Generated(code if isinstance(code, str) else code.value)

    def keep(graph: fx.GraphModule, given: Any, *_: Any, **__: Any) -> Any:
        return detect_fake_mode(given)  # the metadata is complete; propagating it would dispatch on CUDA

    if all(node.op in ("placeholder", "get_attr", "output") for node in graph_module.graph.nodes):
        return ""
    known = ("is_backward", "is_inference", "static_input_idxs", "graph_id")
    kept = {name: value for name, value in options.items() if name in known}
    in_cpp = compile_fx.get_cpp_wrapper_config() | {"triton.autotune_at_compile_time": False} if cpp_wrapper else {}
    with (
        config.patch(in_cpp),
        mock.patch.object(GraphLowering, "compile_to_module", capture),
        mock.patch.object(compile_fx, "fake_tensor_prop", keep),
    ):
        try:
            compile_fx.compile_fx_inner(
                graph_module, list(inputs), cudagraphs=BoxedBool(False), cpp_wrapper=cpp_wrapper, **kept
            )
        except _Generated as generated:
            return generated.source
    raise RuntimeError("Inductor returned without generating code")


@contextlib.contextmanager
def backward_lowered_at_once() -> Iterator[None]:
    """AOTAutograd hands the backward graph to the compiler together with the forward one, not at the first backward."""
    import torch._functorch.config as config

    with config.patch(force_non_lazy_backward_lowering=True):
        yield


def compiled_texts(kernel_name: str, module_source: str) -> tuple[str, str]:
    """TTIR and PTX of one kernel of generated code, given as the text of its module (inside :func:`offline_cuda`)."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(module_source), kernel_name)
    compiled = kernel._precompile_config(kernel.configs[0]).kernel
    return str(compiled.asm["ttir"]), str(compiled.asm["ptx"])


def triton_errors() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that it cannot compile."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    return (CompilationError, PTXASError)
