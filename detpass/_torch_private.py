"""Every private name of torch that detpass uses, and nothing else.

One function or alias for each need, so that a new torch release is met in one place. Tested on torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import fx


def inductor_config() -> Any:
    """Inductor's configuration module."""
    import torch._inductor.config as config

    return config


def inductor_settings() -> dict[str, Any]:
    """Inductor's current settings by name."""
    settings: dict[str, Any] = inductor_config().get_config_copy()
    return settings


def inductor_setting_type(name: str) -> Any:
    """The type of one of Inductor's settings, or None where it has a generic type that cannot be checked."""
    import typing

    kind = inductor_config().get_type(name)
    return kind if typing.get_origin(kind) is None else None


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for a ``torch.compile`` mode. Raises RuntimeError, as torch does, for an unknown one."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compile_fx(graph_module: fx.GraphModule, example_inputs: Any, config_patches: Mapping[str, Any]) -> Any:
    """Inductor's compiler with settings for this graph alone."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    return inductor_compile_fx(graph_module, example_inputs, config_patches=dict(config_patches))


def aoti_compile_and_package(exported_program: Any, package_path: Any, config_patches: Mapping[str, Any]) -> str:
    """AOTInductor's package of an exported program: its path."""
    from torch._inductor import aoti_compile_and_package as inductors

    path = None if package_path is None else str(package_path)
    return str(inductors(exported_program, package_path=path, inductor_configs=dict(config_patches)))


def custom_graph_pass_class() -> type:
    """The base class of graph passes whose ``uuid`` takes part in the cache keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def custom_scheduler_pass_class() -> type:
    """The base class of scheduler passes whose ``uuid`` takes part in the cache keys: that of graph passes in 2.11."""
    from torch._inductor import custom_graph_pass

    found: type = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
    return found


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Inductor's live decomposition table: the very dictionary that the next compile reads."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """torch's own form reads the value of a 0-d index, which no graph can."""
    flat = table.reshape(-1)
    return flat[index] if index.dim() else flat[index.reshape(1)].reshape(())


REPLACED_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {torch.ops.aten.take.default: _take}
"""Where torch's own decomposition fails."""


@contextlib.contextmanager
def without_decompositions(targets: Iterable[Any]) -> Iterator[None]:
    """Keep ``targets`` whole in graphs traced inside: drop them from the live decomposition table, then restore it.

    Faulty decompositions are replaced meanwhile.
    """
    table = decomposition_table()
    missing = object()
    saved: dict[Any, Any] = {target: table.pop(target, missing) for target in targets}
    for target, replacement in REPLACED_DECOMPOSITIONS.items():
        if target in table:
            saved[target] = table[target]
            table[target] = replacement
    try:
        yield
    finally:
        for target, function in saved.items():
            if function is not missing:
                table[target] = function


def reset_cudagraphs() -> None:
    """Forget recorded CUDA graphs, as ``torch._dynamo.reset`` expects of a backend."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def register_inplace_variant(functional: Any, inplace: Any, mutated: int) -> None:
    """Let Inductor turn ``functional`` into ``inplace`` where nobody reads the old value.

    ``mutated`` is the position of the argument that ``inplace`` writes.
    """
    from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops

    inplaceable_ops[functional] = InplaceableOp(inplace, mutated)


def order_nodes(graph: fx.Graph) -> None:
    """Move each node after its arguments, the rest of the order kept.

    Inductor's patterns leave their replacements where the last matched node stood (attention's may then read a later
    ``clone``) and sort the graph only after the custom passes.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def trace_subgraph(function: Callable[..., Any], arguments: list[Any]) -> fx.GraphModule:
    """Trace ``function`` over fake tensors and symbolic sizes into a flat graph with Inductor's decompositions."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fx.traceback.preserve_node_meta(False):
        graph_module: fx.GraphModule = make_fx(
            function, decomposition_table=decomposition_table(), tracing_mode="real", _allow_non_fake_inputs=True
        )(*arguments)
    return graph_module


def rebind_unbacked_sizes(node: fx.Node, values: Any) -> str | None:
    """Make the sizes that ``node`` bound (``meta["unbacked_bindings"]``) names of those at their places in ``values``.

    Returns None, or what is wrong: a size there that is known or is composed of others.
    """
    import sympy  # type: ignore[import-untyped]  # it has no stubs
    from torch.fx.experimental.symbolic_shapes import rebind_unbacked, resolve_unbacked_bindings
    from torch.utils._pytree import key_get

    shape_env = fake_mode_of(node.graph).shape_env
    for path in (resolve_unbacked_bindings(shape_env, node.meta["unbacked_bindings"]) or {}).values():
        size = key_get(values, path)
        if not isinstance(size, torch.SymInt) or not isinstance(size.node._expr, sympy.Symbol):
            return f"result has the size {size}, the node finds that size from data"
    rebind_unbacked(shape_env, node, values)
    return None


def fake_mode_of(graph: fx.Graph) -> Any:
    """The FakeTensorMode of a graph's values, or None for a graph with no fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    for node in graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def cache_directory() -> str:
    """The directory where Inductor keeps compiled artifacts."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def current_compile_id() -> str | None:
    """Dynamo's id of the compile in progress, such as ``0/0``."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def suppress_errors() -> bool:
    """Whether Dynamo falls back to eager code when a compile fails."""
    import torch._dynamo.config as config

    return bool(config.suppress_errors)


def graph_break_reason(graph_module: Any) -> tuple[str, str | None] | None:
    """Why Dynamo ended ``graph_module`` early and where (``file:line``), or None when it did not break the graph."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(reason.user_stack or ())
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else None
    return str(reason.reason), place


CONVERT_FRAME_LOGGER = "torch._dynamo.convert_frame"
RECOMPILE_LIMIT_MESSAGE = "torch._dynamo hit config."
SUPPRESSED_MESSAGE = "WON'T CONVERT"


def aot_interpreter_backend(run_graph: Callable[[fx.GraphModule, str], Callable[..., Any]]) -> Callable[..., Any]:
    """A ``torch.compile`` backend that hands each AOTAutograd graph to ``run_graph(graph, "forward" | "backward")``.

    The graphs are those that Inductor would get: functional, with Inductor's decompositions, after the default
    partitioner. ``run_graph`` returns the callable that computes the graph from flat arguments.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def compiler(phase: str) -> Callable[[fx.GraphModule, Any], Any]:
        return lambda graph, example_inputs: make_boxed_func(run_graph(graph, phase))

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), decompositions=select_decomp_table
    )
    return backend


def compiling_backend() -> tuple[Any, dict[str, Any]] | None:
    """The backend for which Dynamo converts the current frame and its keyword arguments; None outside of Dynamo."""
    import sys

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        backend = getattr(holder, "_torchdynamo_orig_backend", None) if holder is not None else None
        if backend is not None:
            return unwrapped_backend(backend)
        frame = frame.f_back
    return None


def unwrapped_backend(backend: Any) -> tuple[Any, dict[str, Any]]:
    """A backend and its keyword arguments, out of Dynamo's wrappers and DDPOptimizer's."""
    while True:
        optimizer: Any = getattr(backend, "__self__", None)
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif hasattr(optimizer, "backend_compile_fn"):
            backend = optimizer.backend_compile_fn
        else:
            return getattr(backend, "compiler_fn", backend), dict(getattr(backend, "kwargs", {}))


def lowered_device(lowered: Any) -> torch.device | None:
    """The device of a lowered node, or None when it has none."""
    device = getattr(lowered, "get_device", lambda: None)()
    return device if isinstance(device, torch.device) else None


def lowered_kind(scheduled: Any, lowered: Any) -> str | None:
    """What could be nondeterministic about a lowered node of Inductor's scheduler, or None.

    ``"float atomic_add into NAME"``, ``"plain scatter into NAME"``, ``"split scan NAME"`` or ``"extern:OVERLOAD"``.
    """
    from torch._inductor import ir

    name = lowered.get_name()
    if isinstance(lowered, ir.ComputedBuffer):
        floating = lowered.dtype.is_floating_point or lowered.dtype.is_complex
        atomic = getattr(scheduled, "_get_atomic_add_buffers", lambda: ())()
        if atomic:
            return f"float atomic_add into {name}" if floating else None
        if isinstance(lowered.data, ir.Scatter):
            return f"plain scatter into {name}"
        if isinstance(lowered.data, ir.SplitScan) and floating:
            return f"split scan {name}"
        return None
    if isinstance(lowered, ir.ExternKernel):
        overload = getattr(lowered, "op_overload", None)
        return None if overload is None else f"extern:{overload}"
    return None


def traces_functional_graph() -> bool:
    """Whether operations are being recorded by ``make_fx`` with no functionalization in between, as in a graph pass."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = _get_current_dispatch_mode_stack()
    return get_proxy_mode() is not None and not any(isinstance(mode, FunctionalTensorMode) for mode in modes)


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its mutations (Triton launches) made functional, for tracing into a functional graph."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    return dispatch_functionalize(function, FunctionalTensorMode())


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call, or None when it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


@contextlib.contextmanager
def differentiated_whole(targets: Iterable[Any]) -> Iterator[None]:
    """Let autograd meet ``targets`` whole in graphs traced inside, and decompose them below it.

    torch registers some decompositions above autograd, so that the backward is that of the pieces. Inside, those are
    out of use, autograd records its own formula (``upsample_bilinear2d_backward``), and the forward is decomposed by
    the table all the same. What takes no symbolic sizes in torch's C++ (``upsample_*.vec`` and the shapes of the
    backward) has a form in Python meanwhile.
    """
    from torch._C import DispatchKey
    from torch._decomp import decomposition_table as every_decomposition

    table = decomposition_table()
    removed: list[tuple[Any, Any, Any]] = []
    lent: list[tuple[Any, Any, Any]] = []
    added: list[Any] = []
    try:
        for target in targets:
            taken = [
                key for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd) if key in target.py_kernels
            ]
            removed.extend((target, key, target.py_kernels.pop(key)) for key in taken)
            if taken and target._overloadname == "vec":
                lent.append((target, DispatchKey.CompositeImplicitAutograd, _resized_by_default(target)))
                backward = getattr(torch.ops.aten, f"{target._opname}_backward", None)
                if backward is not None and DispatchKey.Meta not in backward.default.py_kernels:
                    lent.append((backward.default, DispatchKey.Meta, _of_input_size))
            if target not in table and target in every_decomposition:
                table[target] = every_decomposition[target]
                added.append(target)
        for target, key, function in lent:
            target.py_kernels[key] = function
        for target in {target for target, _, _ in (*removed, *lent)}:
            target._dispatch_cache.clear()
        yield
    finally:
        for target, key, _ in lent:
            target.py_kernels.pop(key, None)
        for target, key, function in removed:
            target.py_kernels[key] = function
        for target in {target for target, _, _ in (*removed, *lent)}:
            target._dispatch_cache.clear()
        for target in added:
            table.pop(target, None)


def _resized_by_default(vec: Any) -> Callable[..., torch.Tensor]:
    """``upsample_*.vec`` as a call of ``upsample_*.default``; for an empty image an error, which Inductor lacks."""
    from torch._decomp.decompositions import upsample_compute_output_size

    def resized(image: torch.Tensor, output_size: Any, *others: Any) -> torch.Tensor:
        extents: tuple[Any, ...] = tuple(image.shape[1:])
        if any(isinstance(extent, int) and extent == 0 for extent in extents):
            raise RuntimeError(
                f"{vec.name()}: input sizes should be greater than 0 in all dimensions but the batch, but got "
                f"{list(image.shape)}. Remedy: leave the resampling out where there is no image"
            )
        *corners, factors = others
        size = upsample_compute_output_size(image.size(), output_size, factors)
        result: torch.Tensor = vec.overloadpacket.default(image, size, *corners, *(factors or [None] * len(size)))
        return result

    return resized


def _of_input_size(grad_output: torch.Tensor, output_size: Any, input_size: Any, *_: Any, **__: Any) -> torch.Tensor:
    """The result of ``upsample_*_backward``, without values."""
    from torch._prims_common import suggest_memory_format

    return grad_output.new_empty(input_size).to(memory_format=suggest_memory_format(grad_output))


def outside_tracing() -> contextlib.AbstractContextManager[Any]:
    """Inside, operations run on real tensors: no fake tensor mode, no tracing, no functionalization is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def register_fake_result(overload: Any, function: Callable[..., Any]) -> None:
    """Compute ``overload`` on fake tensors by ``function(fake_mode, overload, *args, **kwargs)``.

    Where ``function`` returns NotImplemented, torch's own way is taken.
    """
    from torch._subclasses.fake_impls import register_op_impl

    register_op_impl(overload)(function)


def correct_fake_result(overload: Any, function: Callable[..., Any]) -> None:
    """Compute ``overload`` on fake tensors by ``function(own, fake_mode, overload, *args, **kwargs)``.

    ``own(fake_mode, overload, *args, **kwargs)`` is what torch computes.
    """
    from torch._subclasses.fake_impls import op_implementations_dict

    op_implementations_dict[overload] = functools.partial(function, op_implementations_dict[overload])


def register_composite(overload: Any, function: Callable[..., Any]) -> None:
    """Decompose ``overload``, which torch's C++ code composes of others, by ``function`` while graphs are traced."""
    from torch._C import DispatchKey

    overload.py_impl(DispatchKey.CompositeImplicitAutograd)(function)


def guard_cpu_loop_split(active: Callable[[], bool]) -> None:
    """Where ``active()``, keep Inductor's C++ code from splitting a loop by a divisor not known to divide its length.

    ``CppScheduling.try_loop_split`` turns a loop over ``n`` whose index holds ``i // d`` into ``n // d`` loops over
    ``d`` without asking whether ``d`` divides ``n``: the rest of the loop is never run.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    original = CppScheduling.try_loop_split

    def try_loop_split(self: Any, nodes: list[Any]) -> list[Any]:
        if active() and any(_leaves_a_rest(node) for node in nodes):
            return nodes
        split: list[Any] = original(self, nodes)
        return split

    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]  # the guard is the point


def _leaves_a_rest(scheduled: Any) -> bool:
    """Whether an index of a scheduled CPU loop divides a loop variable by a number not known to divide its range."""
    import sympy
    from torch._inductor import ir
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(scheduled.node, ir.ComputedBuffer):
        return False
    _, body, _ = scheduled.node.get_default_sizes_body()
    size_of = body.var_ranges
    return any(
        division.args[0] in size_of and sympy.sympify(size_of[division.args[0]]) % division.args[1] != 0
        for expression in body.indexing_exprs.values()
        if isinstance(expression, sympy.Expr)
        for division in expression.find(FloorDiv)
    )
