"""The built-in rules, one file per node family, in the order in which they are asked.

Each uses only what a user's own rule may use: ``detpass.rule``, ``detpass.graph_query`` and ``detpass.segment``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from detpass.rule import Rule
from detpass.rules.adaptive_pooling import (
    AdaptiveAvgPoolBackward,
    AdaptiveMaxPoolBackward,
    FractionalMaxPoolBackward,
)
from detpass.rules.associative_scan import AssociativeScan
from detpass.rules.catalogue import entries, hazard, unknown
from detpass.rules.ctc import CtcLoss, CudnnCtcLoss
from detpass.rules.deformable import DeformConv2dBackward
from detpass.rules.embedding import EmbeddingBagBackward, EmbeddingDenseBackward
from detpass.rules.flex_attention import FlexAttentionBackward
from detpass.rules.folding import Col2Im, UnfoldBackward
from detpass.rules.grid_sample import GridSampleBackward
from detpass.rules.histogram import Histc, WeightedBincount, WeightedHistogram
from detpass.rules.index_add import IndexAdd
from detpass.rules.index_put import IndexPutAccumulate
from detpass.rules.last_write import IndexCopy, IndexFill, IndexPutLastWrite, ScatterLastWrite
from detpass.rules.masked_index_put import MaskedIndexPutAccumulate
from detpass.rules.max_pooling import MaxPoolBackward
from detpass.rules.native import DeterministicKernel
from detpass.rules.padding import ReplicationPadBackward
from detpass.rules.pooling import AvgPoolBackward
from detpass.rules.regions import PsRoiPoolBackward, RoiAlignBackward, RoiPoolBackward
from detpass.rules.resampling import ResamplingBackward
from detpass.rules.scan import FixedOrderScan
from detpass.rules.scatter import ScatterReduce
from detpass.rules.shared_plan import share_plans
from detpass.rules.ties import SmallestIndexAmongEquals
from detpass.rules.user_kernel import ExactKernel, FirstConfiguration
from detpass.rules.whole_tables import update_whole_tables

BUILTIN_RULES: tuple[Rule, ...] = (
    IndexPutAccumulate(),
    IndexPutLastWrite(),
    MaskedIndexPutAccumulate(),
    EmbeddingDenseBackward(),
    EmbeddingBagBackward(),
    IndexAdd(),
    IndexCopy(),
    IndexFill(),
    ScatterReduce(),
    ScatterLastWrite(),
    MaxPoolBackward(),
    AvgPoolBackward(),
    AdaptiveAvgPoolBackward(),
    AdaptiveMaxPoolBackward(),
    FractionalMaxPoolBackward(),
    ReplicationPadBackward(),
    Col2Im(),
    UnfoldBackward(),
    ResamplingBackward(),
    GridSampleBackward(),
    RoiAlignBackward(),
    RoiPoolBackward(),
    PsRoiPoolBackward(),
    DeformConv2dBackward(),
    FixedOrderScan(),
    AssociativeScan(),
    SmallestIndexAmongEquals(),
    Histc(),
    WeightedHistogram(),
    WeightedBincount(),
    CtcLoss(),
    CudnnCtcLoss(),
    FlexAttentionBackward(),
    DeterministicKernel(),
    FirstConfiguration(),
    ExactKernel(),
)
"""Every built-in rule, first match wins."""

FINISHERS: tuple[Callable[[fx.Graph], None], ...] = (share_plans, update_whole_tables)
"""Run over a rewritten graph: accumulations that share an index share its plan, updates in part write whole tables."""

__all__ = ["BUILTIN_RULES", "FINISHERS", "entries", "hazard", "unknown"]
