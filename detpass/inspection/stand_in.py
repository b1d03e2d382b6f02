"""Stand-ins for a model's tensors: fake ones of the same sizes, so that nothing is computed, allocated or changed.

:func:`standing_in` swaps the parameters, buffers and tensor attributes of a model's modules for the time of an
inspection and puts the modules' state back afterwards, whatever the model's code did to it meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from detpass import _torch_private_capture
from detpass._torch_private_capture import StandInMode


class StandIns:
    """Makes one fake tensor for each real one, on the device that is traced for."""

    def __init__(self, device: torch.device) -> None:
        self.mode = StandInMode()
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of ``tensor``: same size, strides, dtype and requires_grad; always the same one."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._make(tensor))
        return self._made[id(tensor)][1]

    def tree(self, value: Any) -> Any:
        """``value`` with every tensor inside replaced by its stand-in."""
        return pytree.tree_map_only(torch.Tensor, self.of, value)

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new stand-in for a graph's result, with sizes as the example had them."""
        with self.mode, torch.no_grad():
            return _empty_like(tensor, tensor.device)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or _torch_private_capture.is_fake(tensor)
        if not plain or tensor.layout is not torch.strided:
            return tensor
        with self.mode, torch.no_grad():
            made = _empty_like(tensor, self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        if not isinstance(tensor, nn.Parameter):
            made.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name.startswith("_dynamo_"):  # mark_dynamic and its kin
                setattr(made, name, value)
        return made


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    size = [_torch_private_capture.hint(s) for s in tensor.size()]
    stride = [_torch_private_capture.hint(s) for s in tensor.stride()]
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def standing_in(modules: list[nn.Module], stand_ins: StandIns) -> Iterator[None]:
    """Put stand-ins into all submodules of ``modules``; restore every attribute afterwards."""
    every = list({id(m): m for module in modules for m in module.modules()}.values())
    saved = [
        (m, {name: dict(value) if name in _REGISTRIES else value for name, value in vars(m).items()}) for m in every
    ]
    try:
        for module in every:
            for name, value in list(vars(module).items()):
                if name in ("_parameters", "_buffers"):
                    for key, tensor in value.items():
                        value[key] = None if tensor is None else stand_ins.of(tensor)
                elif isinstance(value, torch.Tensor):
                    vars(module)[name] = stand_ins.of(value)
        yield
    finally:
        for module, state in saved:
            for name in _REGISTRIES:
                current = vars(module).get(name)
                if isinstance(current, dict) and name in state:
                    current.clear()
                    current.update(state[name])
                    state[name] = current
            vars(module).clear()
            vars(module).update(state)


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def modules_of(target: Any) -> list[nn.Module]:
    """The modules that a function reaches by itself, its closure, its defaults, ``partial`` or the globals it names."""
    found: list[nn.Module] = []
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> None:
        if id(value) in seen or depth > 4:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, depth + 1)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item, depth + 1)
        elif isinstance(value, functools.partial):
            walk([value.func, value.args, value.keywords], depth)
        elif isinstance(value, types.MethodType):
            walk([value.__self__, value.__func__], depth)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a cell that was never filled
                    walk(cell.cell_contents, depth + 1)
            walk([value.__defaults__, value.__kwdefaults__], depth + 1)
            for name in value.__code__.co_names:
                walk(value.__globals__.get(name), depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, torch.Tensor)) and depth < 2:
            walk(list(vars(value).values()), depth + 1)

    walk(target, 0)
    return found


def uncompiled(target: Callable[..., Any]) -> Callable[..., Any]:
    """The model behind ``torch.compile``'s wrapper, or ``target`` itself (a disabled function stays disabled)."""
    if getattr(target, "_torchdynamo_disable", False):
        return target
    return getattr(target, "_orig_mod", None) or getattr(target, "_torchdynamo_orig_callable", None) or target
