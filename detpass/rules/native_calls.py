"""Operators ``detpass::native_*``: an ATen operator that runs under torch's determinism flags for its one call.

ATen and cuDNN have deterministic kernels for convolution and attention behind process-wide flags. Each operator here
has the schema of the ATen operator it wraps, sets the flags, calls it and restores them, also when the call raises.

Setting process-wide flags around a call means that another thread which launches kernels during it sees them too:
it gets deterministic kernels, or torch's error for an operator without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_library = torch.library.Library("detpass", "FRAGMENT")
_defined: dict[Any, Any] = {}


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, ATen and cuDNN choose their deterministic kernels; every flag is restored on the way out."""
    mode = torch.get_deterministic_debug_mode()
    # After torch.backends.disable_global_flags cuDNN's cannot be set; torch's flag alone makes ATen ask cuDNN for a
    # deterministic algorithm.
    frozen = torch.backends.flags_frozen()
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    try:
        # Filling fresh memory with NaN is for finding bugs and costs a kernel for each allocation.
        memory.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        if not frozen:
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill
        if not frozen:
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def native(overload: Any) -> Any:
    """The operator that calls ``overload`` under the flags; defined at the first request for it."""
    if overload not in _defined:
        namespace, name = overload._schema.name.split("::")
        suffix = "" if overload._overloadname == "default" else f"_{overload._overloadname}"
        own = f"native_{namespace}_{name}{suffix}"
        arguments = str(overload._schema).split("(", 1)[1]
        _library.define(f"{own}({arguments}")
        _library.impl(own, _under_flags(overload), "CompositeExplicitAutograd")
        torch.library.register_fake(f"detpass::{own}", overload, lib=_library)
        _defined[overload] = getattr(torch.ops.detpass, own).default
    return _defined[overload]


def _under_flags(overload: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with deterministic_kernels():
            return overload(*args, **kwargs)

    return call
