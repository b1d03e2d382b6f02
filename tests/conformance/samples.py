"""One OpInfo sample as a function of flat tensors, in its own dtype and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Sample:
    """A call of an operator over a tree of arguments, of which the tensors are inputs."""

    function: Callable[..., Sequence[Any]]
    """``function(*tensors)`` returns the flat results."""
    tensors: tuple[Tensor, ...]
    description: str
    """The arguments, for messages."""
    call: Callable[..., Any]
    """The operator."""
    leaves: tuple[Any, ...]
    spec: Any
    process: Callable[[Any], Any]
    """What OpInfo applies to the result, such as taking the part that has a gradient."""

    def widened(self) -> Sample:
        """Floating tensors and dtype arguments become float64; everything else stays."""
        return _sample(self.call, [_wide(leaf) for leaf in self.leaves], self.spec, self.process)

    def instead(self, call: Callable[..., Any]) -> Sample:
        """The same arguments for another function."""
        return _sample(call, self.leaves, self.spec, self.process)

    def arguments(self) -> Mapping[str, Any]:
        """The keyword arguments."""
        kwargs: Mapping[str, Any] = pytree.tree_unflatten(list(self.leaves), self.spec)[2]
        return kwargs


def samples_of(info: Any, dtype: torch.dtype, device: str = "cpu") -> Iterator[Sample]:
    """The samples of one OpInfo, inputs requiring gradients where the operator supports them."""
    differentiable = (
        info.supports_autograd and dtype in info.backward_dtypes and (dtype.is_floating_point or dtype.is_complex)
    )
    for given in info.sample_inputs(device, dtype, requires_grad=differentiable):
        leaves, spec = pytree.tree_flatten((given.input, given.args, given.kwargs))
        yield _sample(info.op, leaves, spec, given.output_process_fn_grad)


def _sample(call: Callable[..., Any], leaves: Sequence[Any], spec: Any, process: Callable[[Any], Any]) -> Sample:
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # Fresh leaves of the same memory layout, so that gradients are asked of them and not of what they were made from.
    tensors = tuple(leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in places)

    def function(*inputs: Tensor) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, inputs, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        return pytree.tree_leaves(process(call(first, *args, **kwargs)))

    described = [_described(leaf) for leaf in leaves]
    description = repr(pytree.tree_unflatten(described, spec))
    return Sample(function, tensors, description, call, tuple(leaves), spec, process)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype in WIDE:
        return leaf.detach().to(WIDE[leaf.dtype]).requires_grad_(leaf.requires_grad)
    return WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


class _Described(str):
    """Text that repr shows without quotes."""

    __repr__ = str.__str__


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = str(leaf.dtype).removeprefix("torch.")
    return _Described(f"{dtype}{list(leaf.shape)}")
