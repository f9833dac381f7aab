"""Batch sizes in exact arithmetic, which plans 4,096 chips on a laptop. Imports no jax.

No other package multiplies or divides batch sizes.
"""

from maxtext_lite.batching.batch import SampledBatch, wants_solving
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.parameters import (
    active_parameters,
    attended_pairs,
    count_parameters,
    flops_of_documents,
    flops_per_example,
    vocab_tiles,
)
from maxtext_lite.batching.plan import (
    BatchPlan,
    load_plan,
    make_plan,
    plan_batch,
    resumed,
    row_slots,
    scaled_optimizer,
)
from maxtext_lite.batching.schedule import (
    BatchStage,
    RampupBatchManager,
    RunLength,
    batch_settings,
    has_same_batch_keys,
    keep_batches,
)
from maxtext_lite.batching.table import format_plan
from maxtext_lite.batching.topology import MESH_AXES, Topology

__all__ = [
    "MESH_AXES",
    "BatchPlan",
    "BatchStage",
    "MemoryEstimate",
    "RampupBatchManager",
    "RunLength",
    "SampledBatch",
    "Topology",
    "active_parameters",
    "attended_pairs",
    "batch_settings",
    "count_parameters",
    "flops_of_documents",
    "flops_per_example",
    "format_plan",
    "has_same_batch_keys",
    "keep_batches",
    "load_plan",
    "make_plan",
    "plan_batch",
    "resumed",
    "row_slots",
    "scaled_optimizer",
    "vocab_tiles",
    "wants_solving",
]
