"""torchvision for tests: imported where it is installed and fits this torch, otherwise a module's tests are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def torchvision_ops() -> Any:
    """``torchvision.ops``. Skips the calling module with the reason where its operators cannot be loaded."""
    try:
        import torchvision
    except ImportError:
        pytest.skip("torchvision is not installed", allow_module_level=True)
    except RuntimeError as error:  # its library could not be loaded, and its Python code finds no operators
        pytest.skip(f"torchvision does not fit torch {torch.__version__}: {error}", allow_module_level=True)
    if not torchvision.extension._has_ops():
        pytest.skip(f"torchvision {torchvision.__version__} has no operators here", allow_module_level=True)
    return torchvision.ops
