"""A device guard for CUDA in a build of torch that has none, so that fake CUDA tensors can be dispatched on.

A fourth part of ``_torch_private.py``, under the same rule. Before many operators (``copy_``, slicing, ``as_strided``)
torch asks the guard of a tensor's device to make it current. A CPU build has no guard for CUDA: it raises, or aborts
the process where it asks in a destructor. A CUDA build that finds no GPU takes a guard that does nothing
(``torch._C._ensureCUDADeviceGuardSet``); a CPU build borrows here the meta device's, which does nothing either.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``, exported by libc10: a pointer for each ``c10::DeviceType``, by number."""
_CPU, _CUDA, _META = 0, 1, 14
_SLOTS = _META + 1


@contextlib.contextmanager
def cuda_guard() -> Iterator[None]:
    """Inside, operators on fake CUDA tensors can be dispatched in a CPU build too; the slot is empty again afterwards.

    Changes nothing in a build that has CUDA's guard, and none where torch's library does not look as expected (then
    such operators raise "PyTorch is not linked with support for cuda devices", as they do without this).
    """
    slots = _slots()
    if slots is None or slots[_CUDA] or not (slots[_CPU] and slots[_META]):
        yield
        return
    slots[_CUDA] = slots[_META]
    try:
        yield
    finally:
        slots[_CUDA] = None


def _slots() -> ctypes.Array[ctypes.c_void_p] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libc10.so"))
        return (ctypes.c_void_p * _SLOTS).in_dll(library, _REGISTRY)
    except (OSError, ValueError):  # another layout of the package, or no such name in the library
        return None
