"""The private names of torch that inspection needs: tracing without executing, lowering without compiling.

The second half of ``_torch_private.py``, under the same rule: private torch imports stand in these two files alone.
Tested on torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class StandInMode(FakeTensorMode):
    """Fake tensors that stand for the model's values between graphs: reading a scalar gives 1, never data."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a read of one element with 1 of its type; everything else as a fake tensor mode does."""
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return bool(1) if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return super().dispatch(func, types, args, kwargs or {})


DATA_ERRORS: tuple[type[Exception], ...]
"""What a fake tensor raises when a program asks for data that it does not have."""


def _data_errors() -> tuple[type[Exception], ...]:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


DATA_ERRORS = _data_errors()


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor: metadata with no data."""
    return isinstance(value, FakeTensor)


def compile_fx_standing_in(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config_patches: Mapping[str, Any],
    inner: Callable[..., Any],
) -> Any:
    """Inductor's pipeline up to lowering: ``inner(graph_module, inputs, **kwargs)`` gives what is called instead."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph_module, list(example_inputs), inner_compile=inner, config_patches=dict(config_patches))


def frame_code_in_dynamo() -> Any:
    """The code object of the frame that Dynamo is converting, or None outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().f_code
    except AttributeError:  # raised by Dynamo's thread-local where nothing is being converted
        return None


def graph_breaks_seen() -> list[tuple[str, str | None]]:
    """Reason and ``file:line`` of the graph breaks of this process since the last reset, oldest first."""
    from torch._dynamo.utils import graph_break_reasons

    found = []
    for item in graph_break_reasons:
        stack = list(item.user_stack or ())
        found.append((str(item.reason), f"{stack[-1].filename}:{stack[-1].lineno}" if stack else None))
    return found


@contextlib.contextmanager
def isolated_compile() -> Iterator[None]:
    """Compiles inside read and write no cache, do not fall back to eager on an error and have no recompile limit."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    dynamo_settings: dict[str, Any] = {
        "suppress_errors": False,
        "automatic_dynamic_local_pgo": False,
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
    }
    with (
        dynamo_config.patch(dynamo_settings),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


@contextlib.contextmanager
def quiet_compile() -> Iterator[None]:
    """Keep Dynamo's and Inductor's own warnings about graph breaks off the terminal: the report says them."""
    import logging

    names = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
    saved = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    filters = _ErrorsOnly()
    handlers = [handler for logger, _ in saved for handler in logger.handlers]
    for handler in handlers:
        handler.addFilter(filters)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(filters)


class _ErrorsOnly:
    def filter(self, record: Any) -> bool:
        return bool(record.levelno >= 40)


def lower(graph_module: fx.GraphModule, inputs: Sequence[Any], config_patches: Mapping[str, Any]) -> None:
    """Lower an ATen graph with fake inputs through Inductor, as one graph with no gradient.

    The caller's ``_pre_fusion_custom_pass`` in ``config_patches`` sees the scheduler's nodes and may leave by raising
    a BaseException: nothing is generated, compiled or run then.
    """
    import torch._inductor.config as inductor_config
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    fake_mode = detect_fake_mode(list(inputs))
    with (
        inductor_config.patch(**dict(config_patches)),
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        torch.no_grad(),
    ):
        compile_fx_inner(graph_module, list(inputs), is_inference=True)


def hint(value: Any) -> int:
    """A size as a plain number: itself, the example's value of a symbolic size, or 1 where none is known."""
    if isinstance(value, int):
        return value
    found = getattr(getattr(value, "node", None), "hint", None)
    return int(found) if found is not None else 1


def custom_partitioner_class() -> type:
    """The base class of a partitioner given as Inductor's ``custom_partitioner_fn``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def default_partition(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The partitioner that saves what the backward reads and recomputes nothing: linear in the number of nodes."""
    from torch._functorch.partitioners import default_partition as partition

    known = ("num_fwd_outputs", "static_lifetime_input_indices", "static_lifetime_input_nodes")
    return partition(graph_module, inputs, **{name: options[name] for name in known if name in options})


def lowering_errors() -> tuple[type[Exception], ...]:
    """What Inductor raises for a graph that it cannot lower."""
    from torch._inductor.exc import InductorError, LoweringException

    return (InductorError, LoweringException)


def plain_fake_mode() -> FakeTensorMode:
    """A mode whose fake tensors have fixed sizes; real constants are taken as fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def register_inductor_operators() -> None:
    """Register Inductor's own primitive operators (seeds, random numbers), which its graphs hold."""
    import torch._inductor.inductor_prims  # noqa: F401 - the import registers them


def is_operator_overload(value: Any) -> bool:
    """Whether ``value`` is an overload of a registered operator, such as ``torch.ops.aten.mm.default``."""
    from torch._ops import OpOverload

    return isinstance(value, OpOverload)


def export_enums() -> dict[str, dict[int, Any]]:
    """The numbers by which exported programs name dtypes, layouts and memory formats."""
    from torch._export.serde.serialize import (
        _SERIALIZE_TO_TORCH_DTYPE,
        _SERIALIZE_TO_TORCH_LAYOUT,
        _SERIALIZE_TO_TORCH_MEMORY_FORMAT,
    )

    return {
        "dtype": {int(key): value for key, value in _SERIALIZE_TO_TORCH_DTYPE.items()},
        "layout": {int(key): value for key, value in _SERIALIZE_TO_TORCH_LAYOUT.items()},
        "memory_format": {int(key): value for key, value in _SERIALIZE_TO_TORCH_MEMORY_FORMAT.items()},
    }
