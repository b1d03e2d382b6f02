"""Users' own Triton kernels: atomics whose order decides the result, read from Triton's intermediate code (TTIR).

A floating-point addition by atomics depends on the order in which programs arrive. A compare-and-swap or an exchange
is a lock or a hand-made atomic: the order that it gives is unknown. Minimum, maximum and integer atomics do not depend
on order (Triton writes a floating-point maximum as one of integers).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

from detpass import _torch_private_capture
from detpass.graph_query import source_location
from detpass.inspection.records import TritonKernel

_ATOMIC = re.compile(r"tt\.atomic_(?P<kind>rmw|cas)\s*(?P<operation>\w+)?[^\n]*->\s*(?P<result>[^\n]+)")
_ELEMENT = re.compile(r"(?:x|^)\s*(f\d+|bf16|i\d+)\b")
_NOTES = {
    "fadd": "floating-point addition by atomics",
    "exch": "an atomic exchange: the order of programs decides",
    "cas": "a compare-and-swap: a lock or an atomic made by hand, in unknown order",
}


def user_kernels(launches: Iterable[fx.Node], capability: int) -> list[TritonKernel]:
    """Read the kernel of each launch, once for each kernel and place. ``capability`` is the GPU's, such as 90."""
    found: dict[tuple[str, str | None], TritonKernel] = {}
    with _torch_private_capture.offline_triton(capability):
        for node in launches:
            launch = _torch_private_capture.user_triton_kernel(node)
            if launch is None:
                continue
            kernel, arguments = launch
            place = source_location(node)
            name = str(getattr(getattr(kernel, "fn", kernel), "__name__", kernel))
            if (name, place) not in found:
                found[name, place] = _read(name, place, kernel, arguments)
    return list(found.values())


def _read(name: str, place: str | None, kernel: object, arguments: dict[str, object]) -> TritonKernel:
    try:
        text = _torch_private_capture.triton_kernel_ir(kernel, arguments)
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return TritonKernel(name, (), place, f"its TTIR could not be made ({type(error).__name__}: {error})")
    return TritonKernel(name, atomics(text), place)


def atomics(ttir: str) -> tuple[str, ...]:
    """The order-dependent atomics in a TTIR text, such as ``fadd on f32: floating-point addition by atomics``."""
    found: list[str] = []
    for match in _ATOMIC.finditer(ttir):
        operation = "cas" if match["kind"] == "cas" else match["operation"] or "?"
        if operation not in _NOTES:
            continue
        element = _ELEMENT.search(match["result"].replace("tensor<", "x"))
        found.append(f"{operation}{f' on {element[1]}' if element else ''}: {_NOTES[operation]}")
    return tuple(dict.fromkeys(found))
