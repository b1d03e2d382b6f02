"""The private names of torch and Triton that reading users' Triton kernels needs.

Another part of ``_torch_private.py``, under the same rule. Tested on torch 2.11 to 2.14 with their Tritons, 3.6 to 3.8.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from detpass import _torch_private


def launch_operators() -> tuple[Any, Any]:
    """The higher-order operators by which a graph launches a Triton kernel: functional and in place."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )

    return triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation


def launched_kernel(node: fx.Node) -> Any | None:
    """The Triton kernel that a node launches, decorators included, or None for any other node."""
    if node.target not in launch_operators():
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    number: Any = node.kwargs["kernel_idx"]
    return kernel_side_table.get_kernel(number)


def launch_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a launch by the kernel's names for them: nodes, and constants."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    given: Any = node.kwargs["kwargs"]
    number: Any = node.kwargs["constant_args_idx"]
    return {**given, **kernel_side_table.get_constant_args(number)}


def kernel_function(value: Any) -> Callable[..., Any] | None:
    """The Python function of a Triton kernel under all its decorators; None for what is no Triton kernel.

    Dynamo wraps kernels anew (for ``num_warps=`` in a launch, say): the function is what stays the same.
    """
    if not type(value).__module__.startswith("triton."):
        return None
    while type(value).__module__.startswith("triton.") and hasattr(value, "fn"):
        value = value.fn
    return value if callable(value) else None


def kernel_key(kernel: Any) -> str:
    """A hash of a kernel's source and of the functions and constants that it uses, with its configurations in order."""
    chosen_from = configurations(kernel)
    while not hasattr(kernel, "cache_key"):
        kernel = kernel.fn
    return f"{kernel.cache_key}{chosen_from if chosen_from else ''}"


def configurations(kernel: Any) -> tuple[str, ...]:
    """The distinct configurations of a kernel's autotuner in order, such as ``BLOCK=64, num_warps=4``.

    Empty for a kernel that has no autotuner.
    """
    from triton.runtime.autotuner import Autotuner

    while not isinstance(kernel, Autotuner) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    found = getattr(kernel, "configs", ())
    each = (", ".join(f"{name}={value}" for name, value in one.all_kwargs().items()) for one in found)
    return tuple(dict.fromkeys(each))


@functools.cache
def with_first_configuration(kernel: Any) -> Any:
    """The autotuner ``kernel`` with its first configuration alone; the same object for each call."""
    pinned = copy.copy(kernel)
    pinned.configs = kernel.configs[:1]
    return pinned


def launch_first_configuration(launch: Mapping[str, Any]) -> Any:
    """Call the functional launch operator with a node's keyword arguments, its kernel with one configuration."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = with_first_configuration(kernel_side_table.get_kernel(launch["kernel_idx"]))
    functional, _ = launch_operators()
    return functional(**{**launch, "kernel_idx": kernel_side_table.add_kernel(kernel), "grid": launch["grid"][:1]})


def kernel_texts(kernel: Any, arguments: Mapping[str, Any], descriptors: Mapping[str, Any]) -> list[str]:
    """The TTIR of a kernel for ``arguments``, one text for each of its autotuner's configurations.

    ``descriptors`` is what the launch says of its TMA descriptors. Raises what torch and Triton raise for a kernel that
    they cannot compile (:func:`kernel_errors`). Needs an active driver to name the target (:func:`offline_triton`).
    """
    from torch._higher_order_ops.triton_kernel_wrap import generate_ttir
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    while not isinstance(kernel, (Autotuner, JITFunction)):
        kernel = kernel.fn
    configurations: list[dict[str, Any]] = [{}]
    if isinstance(kernel, Autotuner):
        configurations = [dict(configuration.kwargs) for configuration in kernel.configs] or [{}]
        kernel = kernel.fn
    with _torch_private.outside_tracing():
        return [str(generate_ttir(kernel, {**arguments, **each}, dict(descriptors))[0]) for each in configurations]


def kernel_errors() -> tuple[type[Exception], ...]:
    """What :func:`kernel_texts` raises for a kernel that cannot be compiled here."""
    builtin = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return builtin
    return (*builtin, TritonError)


def kernels_of_operator(target: Any) -> list[Any]:
    """The Triton kernels that ``torch.library.triton_op`` found in an operator's function; empty for other targets."""
    from torch._library.triton import get_triton_kernels_for_op

    name = getattr(target, "name", None)
    return list(get_triton_kernels_for_op(name())) if callable(name) and hasattr(target, "_schema") else []


def overload_of(target: Any) -> Any:
    """The operator overload of a function made by ``torch.library.custom_op``; anything else as it is."""
    return getattr(target, "_opoverload", target)


def overloads_of(target: Any) -> list[str] | None:
    """The names of the overloads of ``torch.ops.library.name``, or None for what is no such packet."""
    return list(target.overloads()) if isinstance(target, torch._ops.OpOverloadPacket) else None


@contextlib.contextmanager
def offline_triton(capability: int) -> Iterator[None]:
    """Let Dynamo trace users' Triton kernels and Triton make their intermediate code for a CUDA GPU that is not here.

    Changes nothing where Triton is missing or has a GPU.
    """
    from torch.utils import _triton as torch_triton_module

    torch_triton: Any = torch_triton_module

    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
    except ImportError:
        yield
        return
    if torch.cuda.is_available():
        yield
        return

    class Offline:
        """A driver that names its target and launches nothing."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

    former, has_triton = driver._active, torch_triton.has_triton

    def yes() -> bool:
        return True

    driver.set_active(Offline())
    torch_triton.has_triton = yes  # Dynamo asks it whether a kernel is a kernel
    try:
        yield
    finally:
        driver._active = former
        # Modules that were imported meanwhile took the answer along.
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.") and vars(module).get("has_triton") is yes:
                module.has_triton = has_triton  # type: ignore[attr-defined]  # found there a line ago
