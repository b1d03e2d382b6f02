"""Lists PyTorch's OpInfo operators whose joint graphs hold a node that some rule or catalogue row names.

``python -m tests.conformance.survey`` prints the names that belong in ``operations.OPERATIONS``. Run it when torch adds
operators or detpass adds rules; it takes a few minutes.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func

from detpass import _torch_private, rules
from tests.conformance.capture import RULES
from tests.conformance.samples import Sample, samples_of

NAMED = {str(t) for rule in RULES.rules for t in rule.targets} | {op for e in rules.entries() for op in e.ops}


def targets_met(sample: Sample) -> set[str]:
    """The named operators in the joint graph of a sample."""
    met: set[str] = set()

    def look(graph_module: Any) -> None:
        met.update({str(n.target) for n in graph_module.graph.nodes} & NAMED)

    def partition(joint: Any, inputs: Any, **sizes: Any) -> Any:
        look(joint)
        return default_partition(joint, inputs, **sizes)

    def compiler(graph_module: Any, _: Any) -> Any:
        look(graph_module)
        return make_boxed_func(graph_module.forward)

    with RULES.operators_kept_whole():
        aot_function(
            sample.function, compiler, compiler, partition, _torch_private.decomposition_table(), dynamic=True
        )(*sample.tensors)
    return met


def main(limit: int = 6) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        met: set[str] = set()
        error = ""
        dtype = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in info.dtypes), None)
        if dtype is None:
            continue
        for sample in islice(samples_of(info, dtype), limit):
            try:
                met |= targets_met(sample)
            except Exception as found:  # noqa: BLE001 - a survey: what cannot be traced is printed
                error = f"{type(found).__name__}: {str(found).splitlines()[0][:100] if str(found) else ''}"
        if met or error:
            print(f"{info.name}|{info.variant_test_name}|{dtype}|{' '.join(sorted(met))}|{error}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
