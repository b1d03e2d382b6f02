"""Digests of bits: two results have the same digest exactly when no bit of them differs.

Neighbours: ``flattening.py`` (what a result holds), ``runs.py`` and ``ledger.py`` (who compare digests).
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from detpass.reproducibility.flattening import Plain, dense_bytes, walk

DIGEST_BYTES = 16
"""Length of a digest: 128 bits of BLAKE2b."""


def digest(obj: Any) -> str:
    """The digest of all bits of ``obj``, 32 hexadecimal characters.

    ``obj`` is a tensor, a module, an optimizer, a state dict, a plain value, or any nesting of them (see
    :func:`detpass.reproducibility.flattening.walk`). Dtype, shape, paths and every bit count: -0.0 is not 0.0, and two
    NaNs with different payloads differ. Strides, devices and the insertion order of dicts do not count.

    Raises ConfigurationError for an object whose bits cannot be read.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path, value in walk(obj):
        _update(state, path, value)
    return state.hexdigest()


def digests(obj: Any) -> dict[str, str]:
    """The digest of each tensor and plain value of ``obj`` by path, in a fixed order. Container sizes are left out."""
    result = {}
    for path, value in walk(obj):
        if path.endswith("#"):
            continue
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        _update(state, "", value)
        result[path] = state.hexdigest()
    return result


def _update(state: hashlib.blake2b, path: str, value: torch.Tensor | Plain) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{path}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        data = dense_bytes(value)
        if data.numel():
            state.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
    else:
        text = value.hex() if isinstance(value, float) else repr(value)
        state.update(f"{path}\0{type(value).__name__}\0{text}\0".encode())
