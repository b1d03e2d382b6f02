"""Users' own Triton kernels in a graph: which kernel a node launches, with what, and what its atomics do to the result.

The kernel is read as Triton's intermediate code (``ttir.py``), made for the dtypes and constants of the launch in every
configuration of its autotuner; helper functions and branches on constants are in it. No GPU is needed. A rule of a
user's own may use this module.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from detpass import _torch_private, _torch_private_triton, ttir, ttir_configurations

LAUNCHES = _torch_private_triton.launch_operators()
"""The higher-order operators by which a graph launches a Triton kernel."""
CAPABILITY = 90
"""The GPU that code is made for where there is none."""
_ACTS_ON_MEMORY = re.compile(r"atomic|inline_asm|extern_elementwise|make_tensor_descriptor")


@dataclass(frozen=True)
class Reading:
    """What the kernel of one launch holds."""

    name: str
    """The kernel's name."""
    atomics: tuple[ttir.Atomic, ...] = ()
    """Its atomics; each kind and line once."""
    opaque: tuple[str, ...] = ()
    """What may act on memory and was not understood (inline assembly, external functions), in words."""
    unread: str | None = None
    """Why its code could not be made, or None when it was read."""
    suspect: bool = False
    """Whether a kernel that was not read names atomics or assembly in its source, or has no source to look at."""
    configurations: tuple[str, ...] = ()
    """The distinct configurations of its autotuner, in order, such as ``BLOCK=64, num_warps=4``."""
    unlike: str | None = None
    """Why the choice of a configuration may decide bits; None where it does not, or where there is no choice."""

    @property
    def ordered(self) -> tuple[str, ...]:
        """Why the order in which programs run may decide the result; empty where nothing says that it does."""
        found = [*(str(atomic) for atomic in self.atomics if atomic.ordered), *self.opaque]
        if self.suspect:
            found.append(f"it names atomics or assembly and could not be read: {self.unread}")
        return tuple(found)


_readings: dict[Any, Reading] = {}


def read(node: fx.Node, capability: int = CAPABILITY) -> Reading | None:
    """What the Triton kernel that ``node`` launches holds; None for any other node.

    ``capability`` is that of the GPU to make code for where there is none, such as 90.
    """
    kernel = _torch_private_triton.launched_kernel(node)
    return None if kernel is None else _reading(kernel, node, capability)


def read_first_configuration(node: fx.Node, capability: int = CAPABILITY) -> Reading | None:
    """What the autotuned kernel that ``node`` launches holds in its first configuration; None for any other node."""
    kernel = _torch_private_triton.launched_kernel(node)
    if kernel is None or not _torch_private_triton.configurations(kernel):
        return None
    return _reading(_torch_private_triton.with_first_configuration(kernel), node, capability)


def launch_first_configuration(launch: dict[str, Any]) -> Any:
    """Call the functional launch operator with a node's keyword arguments, the kernel in its first configuration alone.

    ``launch`` holds values in place of the node's nodes. Returns what the operator does: tensors by argument.
    """
    return _torch_private_triton.launch_first_configuration(launch)


def _reading(kernel: Any, node: fx.Node, capability: int) -> Reading:
    specimens = {name: _specimen(value) for name, value in arguments(node).items()}
    descriptors: Any = node.kwargs.get("tma_descriptor_metadata") or {}
    key = (kernel, repr((specimens, descriptors)), capability)
    if key not in _readings:
        _readings[key] = _read(kernel, specimens, descriptors, capability)
    return _readings[key]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of the launch ``node`` by the kernel's names for them: nodes, and constants."""
    return _torch_private_triton.launch_arguments(node)


def function_of(node: fx.Node) -> Callable[..., Any] | None:
    """The Python function of the kernel that ``node`` launches, whatever decorators it has; None for other nodes."""
    kernel = _torch_private_triton.launched_kernel(node)
    return None if kernel is None else _torch_private_triton.kernel_function(kernel)


def source_keys(node: fx.Node) -> Iterator[str]:
    """A hash of the source of each kernel that ``node`` launches, itself or as a ``torch.library.triton_op``."""
    kernel = _torch_private_triton.launched_kernel(node)
    launched = [kernel] if kernel is not None else _torch_private_triton.kernels_of_operator(node.target)
    yield from (_torch_private_triton.kernel_key(kernel) for kernel in launched)


@dataclass(frozen=True)
class _Specimen:
    """A tensor argument: its dtype is all that a kernel's code depends on."""

    dtype: torch.dtype


def _specimen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _Specimen(value.dtype)
    return 2 if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _read(kernel: Any, specimens: dict[str, Any], descriptors: dict[str, Any], capability: int) -> Reading:
    function = _torch_private_triton.kernel_function(kernel)
    name = getattr(function, "__name__", str(kernel))
    choice = _torch_private_triton.configurations(kernel)
    with _torch_private.outside_tracing():
        given = {
            key: torch.empty(2, dtype=value.dtype) if isinstance(value, _Specimen) else value
            for key, value in specimens.items()
        }
    try:
        with _torch_private_triton.offline_triton(capability):
            texts = _torch_private_triton.kernel_texts(kernel, given, descriptors)
    except _torch_private_triton.kernel_errors() as error:
        first = " ".join(str(error).split())[:300]
        why = f"its TTIR could not be made ({type(error).__name__}: {first})"
        unlike = f"it could not be read: {why}" if len(choice) > 1 else None
        suspect = _names_atomics(function, set())
        return Reading(name, unread=why, suspect=suspect, configurations=choice, unlike=unlike)
    atomics = dict.fromkeys(atomic for text in texts for atomic in ttir.atomics(text))
    opaque = dict.fromkeys(part for text in texts for part in ttir.opaque(text))
    unlike = ttir_configurations.difference(texts) if len(choice) > 1 else None
    return Reading(name, tuple(atomics), tuple(opaque), configurations=choice, unlike=unlike)


def _names_atomics(function: Any, seen: set[Any]) -> bool:
    """Whether the source of a kernel, or of a kernel's function that it names, speaks of atomics or assembly."""
    if function in seen:
        return False
    seen.add(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if any(_ACTS_ON_MEMORY.search(name) for name in code.co_names):
        return True
    spaces = [function.__globals__]
    spaces += [vars(found) for name in code.co_names if isinstance(found := spaces[0].get(name), types.ModuleType)]
    named = [space[name] for space in spaces for name in code.co_names if name in space]
    helpers = [_torch_private_triton.kernel_function(value) for value in named]
    return any(_names_atomics(helper, seen) for helper in helpers if helper is not None)
