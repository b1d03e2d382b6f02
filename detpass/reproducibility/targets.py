"""Names of functions as a user types them: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detpass.errors import ConfigurationError

LISTED = 12
"""How many names of a module an error lists; of more, those nearest to the one asked for."""


def load_target(target: str) -> Callable[..., Any]:
    """The callable that ``target`` names; its module or file is imported, that is, executed.

    The current directory is searched for modules, as ``python -m`` does. Raises ConfigurationError when the form is
    wrong, the module or file is missing, or the name is not a callable in it.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise ConfigurationError(f"target {target!r}: expected package.module:function or path/to/file.py:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        listed = known if len(known) <= LISTED else difflib.get_close_matches(name, known, LISTED) or known[:LISTED]
        more = f" and {len(known) - len(listed)} more" if len(listed) < len(known) else ""
        raise ConfigurationError(f"target {target!r}: {place} has no callable {name!r}; it has {listed}{more}")
    loaded: Callable[..., Any] = found
    return loaded


def _load_module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"module {name!r} cannot be imported: {error}") from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigurationError(f"file {str(path)!r} not found")
    name = f"_detpass_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"file {str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
