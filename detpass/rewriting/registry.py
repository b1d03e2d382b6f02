"""The rules of a compile, in the order in which they are asked.

Rules given to one compile come first, then registered ones (newest last), then the built-in tuple. A name occurs once.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import fx

from detpass import _torch_private, _torch_private_triton
from detpass.errors import RuleError
from detpass.rule import Rule

_registered: list[Rule] = []
_lock = threading.Lock()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def register_rule(rule: Rule) -> Rule:
    """Add ``rule`` to every later compile of this process and return it.

    Raises RuleError when ``rule`` is no :class:`detpass.Rule` instance, lacks a name or targets, or repeats the name
    of a registered rule. Compiled code that exists already is not changed; caches notice (the rule's source is part
    of the key).
    """
    _check(rule)
    with _lock:
        if any(other.name == rule.name for other in _registered):
            raise RuleError(
                f"a rule named {rule.name!r} is registered already; unregister_rule({rule.name!r}) removes it"
            )
        _registered.append(rule)
    return rule


def unregister_rule(name: str) -> None:
    """Remove a registered rule. Raises RuleError, listing the registered names, for an unknown one."""
    with _lock:
        for rule in _registered:
            if rule.name == name:
                _registered.remove(rule)
                return
        known = ", ".join(repr(r.name) for r in _registered) or "none"
    raise RuleError(f"no rule named {name!r} is registered; registered: {known}")


def registered_rules() -> tuple[Rule, ...]:
    """The rules added by :func:`register_rule`, oldest first."""
    with _lock:
        return tuple(_registered)


class RuleSet:
    """An ordered set of rules with unique names, looked up by a node's target."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._by_target: dict[Any, list[Rule]] = defaultdict(list)
        names: set[str] = set()
        for rule in self.rules:
            _check(rule)
            if rule.name in names:
                raise RuleError(f"two rules are named {rule.name!r}; each rule of a compile needs a name of its own")
            names.add(rule.name)
            for target in rule.targets:
                self._by_target[_resolved(target)].append(rule)

    def for_target(self, target: Any) -> tuple[Rule, ...]:
        """The rules to ask about a node of ``target``, in order."""
        return tuple(self._by_target.get(target, ()))

    def for_node(self, node: fx.Node) -> tuple[Rule, ...]:
        """The rules to ask about ``node``: those of its target and, where it launches a Triton kernel, the kernel's."""
        found = self.for_target(node.target)
        kernel = _torch_private_triton.launched_kernel(node)
        if kernel is None:
            return found
        own = self.for_target(_resolved(kernel))
        return tuple(rule for rule in self.rules if rule in own or rule in found)

    def kept_whole(self) -> frozenset[Any]:
        """Operators that some rule wants to meet undecomposed (the rule's ``kept_whole``)."""
        return frozenset(target for rule in self.rules for target in getattr(rule, "kept_whole", ()))

    def differentiated_whole(self) -> frozenset[Any]:
        """Operators that some rule wants autograd to meet undecomposed (the rule's ``differentiated_whole``)."""
        return frozenset(target for rule in self.rules for target in getattr(rule, "differentiated_whole", ()))

    @contextlib.contextmanager
    def operators_kept_whole(self) -> Iterator[None]:
        """Graphs traced inside hold what the rules want to meet undecomposed, by torch and by autograd."""
        with (
            _torch_private.without_decompositions(self.kept_whole()),
            _torch_private.differentiated_whole(self.differentiated_whole()),
        ):
            yield

    def fingerprint(self) -> str:
        """A hash of the rules' names, order and whole source files."""
        digest = hashlib.sha256()
        for rule in self.rules:
            digest.update(f"{type(rule).__module__}.{type(rule).__qualname__}:{rule.name}:".encode())
            digest.update(_ADDRESS.sub("", f"{vars(rule)!r}\n").encode())
            digest.update(_source_of(type(rule)))
        return digest.hexdigest()


def _check(rule: Any) -> None:
    if not isinstance(rule, Rule):
        hint = "; pass an instance, not the class" if isinstance(rule, type) and issubclass(rule, Rule) else ""
        raise RuleError(f"expected an instance of detpass.Rule, found {rule!r}{hint}")
    if not isinstance(getattr(rule, "name", None), str) or not rule.name:
        raise RuleError(f"{type(rule).__qualname__} has no name; set the class attribute `name` to a string")
    if not getattr(rule, "targets", ()):
        raise RuleError(f"rule {rule.name!r} has no targets; set `targets` to a tuple of operator overloads")
    for target in rule.targets:
        overloads = _torch_private_triton.overloads_of(target)
        if overloads is not None:
            raise RuleError(
                f"rule {rule.name!r} has the target {target}, which graphs do not hold: name its overload, one of "
                f"{', '.join(f'{target}.{name}' for name in overloads)}"
            )


def _resolved(target: Any) -> Any:
    """What nodes are compared with: the overload behind a custom operator, the function under a kernel's decorators."""
    return _torch_private_triton.kernel_function(target) or _torch_private_triton.overload_of(target)


def _source_of(cls: type) -> bytes:
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:  # a class of __main__ or of an interactive session
        path = None
    if path is not None and Path(path).is_file():
        return Path(path).read_bytes()
    return b"".join(
        function.__code__.co_code + repr(function.__code__.co_consts).encode()
        for function in vars(cls).values()
        if inspect.isfunction(function)
    )
