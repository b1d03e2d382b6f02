"""What a rule is: a pure ``match`` over one node and a replacement written as a torch function.

A rule recognises one family of nodes in a joint graph and says how to compute the same value deterministically.
The built-in rules (``detpass/rules``) and a user's own rules use exactly this module and ``graph_query``.
The engine that applies rules is ``detpass/rewriting``.

::

    class MyRule(Rule):
        name = "my_scatter"
        targets = (torch.ops.mylib.my_scatter.default,)

        def match(self, node, context):
            dest, index, source = node.args
            return Match(operands=(dest, index, source), reason="index is data")

        def replacement(self, dest, index, source):
            return segment.segment_accumulate(...)
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx


class Treatment(str, enum.Enum):
    """What becomes of a node. The report names one for each nondeterministic node."""

    SEGMENT = "segment"
    """A stable sort of the index and a segment sum, or one operator that does both with the same bits."""
    CLOSED_FORM = "closed_form"
    """The index map is known at compile time: a gather, a small dense product or disjoint writes."""
    NATIVE = "native"
    """A kernel that is there and can repeat: torch's own, with torch's flag set for this call alone, or an autotuned
    Triton kernel of a user's in its first configuration."""
    SAFE = "safe"
    """Proved deterministic as it stands: injective index, exact arithmetic, order-free reduction."""
    UNCOVERED = "uncovered"
    """None of these."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RuleContext:
    """What a rule may know besides the node.

    ``device`` is the device whose code is generated: the node's own, or the ``target`` option's.
    """

    device: torch.device
    """The device that the generated code will run on."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options of the compile that rules may read."""


@dataclass(frozen=True)
class Match:
    """The rule applies. ``operands`` and ``parameters`` are all that the replacement gets."""

    operands: tuple[Any, ...]
    """Positional arguments of the replacement: nodes (passed as tensors or symbolic sizes), nested lists of them,
    constants."""
    reason: str
    """One clause for the report: why this node needs the rewrite, or what makes the form possible."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Keyword arguments of the replacement: constants only."""
    treatment: Treatment = Treatment.SEGMENT
    """The kind of form that the replacement has."""
    leaves: Mapping[Any, str] = field(default_factory=lambda: MappingProxyType({}))
    """Nondeterministic-looking operators that the replacement keeps on purpose, each with the reason why it is
    deterministic there (a plain write whose duplicates carry equal bits, say)."""
    advice: str = ""
    """What the user may want to decide otherwise, and how: a warning gives it, once a line, after ``reason``."""


@dataclass(frozen=True)
class Safe:
    """The node is deterministic as it stands, and this is the proof."""

    reason: str


class Inapplicable(enum.Enum):
    """Why a rule does not apply to a node of one of its targets."""

    DTYPE = "dtype"
    SHAPE = "shape"
    ARGUMENT = "argument"
    DEVICE = "device"
    INDEX_FORM = "index form"
    UNKNOWN_SIZE = "size unknown at compile time"
    KERNEL = "kernel"


@dataclass(frozen=True)
class NoMatch:
    """The rule does not apply; the next rule is asked."""

    why: Inapplicable
    node: fx.Node
    detail: str = ""


Verdict = Match | Safe | NoMatch


class Rule(ABC):
    """One family of nondeterministic nodes and its deterministic form.

    ``name`` is unique among the rules of a compile. ``targets`` are the operator overloads (or higher-order operators,
    or Triton kernels) whose nodes are offered to :meth:`match`. ``kept_whole`` are overloads that must not be
    decomposed while the graph is traced, so that the rule meets them in one piece; ``differentiated_whole`` are forward
    overloads whose backward autograd must record in one piece, and which are decomposed only after that.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[Any, ...]]
    kept_whole: ClassVar[tuple[Any, ...]] = ()
    differentiated_whole: ClassVar[tuple[Any, ...]] = ()

    @abstractmethod
    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        """Read ``node`` and decide. Must not change the graph nor keep anything on the rule or the node.

        A node's fake tensor (shape, dtype, device, strides) is ``node.meta["val"]``.
        """

    @abstractmethod
    def replacement(self, *operands: Any, **parameters: Any) -> Any:
        """The deterministic form in torch operations; traced with fake tensors, so data must not be read.

        Returns what the node returned: a tensor of the same shape and dtype, or a tuple for a node with several
        results (``None`` where the node's result has no users and is not needed).
        """


class Declared(Rule):
    """Says of an operator, or of a Triton kernel, that it repeats as it stands: the caller's word, kept in the report.

    ``target`` is an operator overload, what ``torch.library.custom_op`` returns, or a Triton kernel; ``reason`` is the
    proof. ``detpass.register_rule(Declared(kernel, "each program owns its rows"))``.
    """

    def __init__(self, target: Any, reason: str) -> None:
        self.targets = (target,)  # type: ignore[misc]  # a class attribute of other rules
        self.name = f"declared: {_name_of(target)}"  # type: ignore[misc]
        self.reason = reason

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        return Safe(self.reason)

    def replacement(self, *operands: Any, **parameters: Any) -> Any:
        raise AssertionError("what is declared safe has no replacement")


def _name_of(target: Any) -> str:
    while not hasattr(target, "__name__") and hasattr(target, "fn"):  # the decorators of a Triton kernel
        target = target.fn
    overload = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns holds one
    return str(overload if hasattr(overload, "_schema") else getattr(target, "__name__", target))
