"""What a replacement must keep, and what becomes of a node that stays nondeterministic.

The last check, over Inductor's lowered nodes, is in ``lowering_audit.py``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from detpass import _torch_private
from detpass.config import Options
from detpass.errors import RuleError, UncoveredError, UncoveredWarning
from detpass.graph_query import result_key, result_number, source_location
from detpass.rewriting.report import Record
from detpass.rule import Rule

log = logging.getLogger(__name__)


def check_result(node: fx.Node, output: Any, rule: Rule) -> None:
    """Refuse a replacement whose shape, dtype or device differs from the node's. Raises RuleError.

    A size that the node found from data is made the name of the one that the replacement found in its place.
    """
    old = node.meta.get("val")
    if isinstance(old, (list, tuple)):
        pairs = list(_used_results(node, old, output, rule, "result"))
    elif isinstance(old, Mapping):
        keys = list(dict.fromkeys(result_key(user) for user in node.users))
        if not isinstance(output, Mapping) or not output.keys() >= set(keys):
            found_keys = list(output) if isinstance(output, Mapping) else type(output).__name__
            raise _broken(node, rule, f"results are {found_keys}, the node's are a dictionary of {keys}")
        pairs = [(old[key], output[key], f"result {key!r}") for key in keys]
    else:
        pairs = [(old, output, "the result")]
    tensors: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    for expected, found, what in pairs:
        value = found.meta.get("val") if isinstance(found, fx.Node) else found
        if not isinstance(expected, torch.Tensor):
            continue
        if not isinstance(value, torch.Tensor):
            raise _broken(node, rule, f"{what} is {value!r}, expected a tensor")
        for attribute in ("dtype", "device"):
            before, after = getattr(expected, attribute), getattr(value, attribute)
            if before != after:
                raise _broken(node, rule, f"{what} has {attribute} {after}, the node has {before}")
        if expected.dim() != value.dim():
            raise _broken(node, rule, f"{what} has shape {tuple(value.shape)}, the node has {tuple(expected.shape)}")
        tensors.append((expected, value, what))
    _keep_sizes(node, output, rule)
    for expected, value, what in tensors:
        if not _same_shape(expected.shape, value.shape):
            raise _broken(node, rule, f"{what} has shape {tuple(value.shape)}, the node has {tuple(expected.shape)}")


def _keep_sizes(node: fx.Node, output: Any, rule: Rule) -> None:
    """Give the sizes that ``node`` computed from data, of which its users speak, to the results in its place.

    ``bincount(x, w)`` has the size ``u0``; a replacement that counts again has found one that torch calls ``u3``.
    """
    if node.meta.get("unbacked_bindings"):
        problem = _torch_private.rebind_unbacked_sizes(node, fx.node.map_arg(output, lambda part: part.meta["val"]))
        if problem is not None:
            raise _broken(node, rule, problem)


def _used_results(
    node: fx.Node, old: Sequence[Any], output: Any, rule: Rule, what: str
) -> Iterator[tuple[Any, Any, str]]:
    """The results of ``node`` that the graph uses, those in results that are tuples themselves among them."""
    if not isinstance(output, (list, tuple)) or len(output) != len(old):
        raise _broken(node, rule, f"{what} holds {_count(output)} results, the node's {len(old)}")
    for user in sorted(node.users, key=result_number):
        number = result_number(user)
        if isinstance(old[number], (list, tuple)):
            yield from _used_results(user, old[number], output[number], rule, f"{what} {number}")
        else:
            yield old[number], output[number], f"{what} {number}"


def _same_shape(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    for a, b in zip(expected, found, strict=True):
        if isinstance(a, int) and isinstance(b, int):
            if a != b:
                return False
        elif str(a) != str(b) and not _provably_equal(a, b):
            return False
    return True


def _provably_equal(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def _count(output: Any) -> int:
    return len(output) if isinstance(output, (list, tuple)) else 1


def _broken(node: fx.Node, rule: Rule, what: str) -> RuleError:
    place = source_location(node)
    return RuleError(
        f"rule {rule.name!r} changed {node.target}{f' at {place}' if place else ''}: its replacement's {what}. "
        "A replacement must return what the node returned."
    )


def handle_unfinished(node: fx.Node, rule: Rule, left: fx.Node) -> None:
    """Refuse a replacement that holds a nondeterministic node itself. Raises RuleError."""
    place = source_location(node)
    raise RuleError(
        f"the replacement of rule {rule.name!r} for {node.target}{f' at {place}' if place else ''} leaves a "
        f"nondeterministic {left.target} in the graph; use detpass.segment in the replacement, or name the operator in "
        "Match.leaves with the reason why it is deterministic there"
    )


def handle_uncovered(record: Record, options: Options) -> None:
    """Apply ``on_uncovered`` to a node that no rule covers. Raises UncoveredError under ``"error"``."""
    if options.on_uncovered == "ignore":
        return
    place = f" at {record.location}" if record.location else ""
    module = f" (module {record.module})" if record.module else ""
    message = (
        f"{record.op}{place}{module}, in the {record.phase} graph on {record.device}, is nondeterministic and no rule "
        f"covers it: {record.reason}. Remedy: register a rule for it (detpass.register_rule), replace the operation in "
        'the model, or accept it with options={"on_uncovered": "warn"}.'
    )
    if options.on_uncovered == "error":
        raise UncoveredError(message)
    warnings.warn(message, UncoveredWarning, stacklevel=2)
