"""Proof by repetition: run it again and compare every bit.

``digest`` (the bits of a result in 32 characters), ``compare_runs`` (repeat within a process), ``run_in_process`` and
``compare_processes`` (repeat in fresh ones), ``Ledger`` (fingerprints of a training, step by step), ``bisect`` (which
node of the graph is the first to differ).
"""

from detpass.reproducibility.bisect import BisectReport, NodeSource, bisect
from detpass.reproducibility.differences import Difference, all_differences, first_difference, ulp_distance
from detpass.reproducibility.digests import digest, digests
from detpass.reproducibility.ledger import Ledger, LedgerDifference
from detpass.reproducibility.processes import ProcessRun, compare_processes, run_in_process
from detpass.reproducibility.runs import Run, RunsReport, compare_runs

__all__ = [
    "BisectReport",
    "Difference",
    "Ledger",
    "LedgerDifference",
    "NodeSource",
    "ProcessRun",
    "Run",
    "RunsReport",
    "all_differences",
    "bisect",
    "compare_processes",
    "compare_runs",
    "digest",
    "digests",
    "first_difference",
    "run_in_process",
    "ulp_distance",
]
