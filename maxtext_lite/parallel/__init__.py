"""The device mesh and the one table that says over which of its axes an array is laid out."""

from maxtext_lite.parallel.axes import (
    also_over_data,
    constrain,
    num_shards,
    over_all_devices,
    over_replicas,
    over_shards,
    over_stages,
    per_replica,
    sharding,
    tree_shardings,
    with_dims,
)
from maxtext_lite.parallel.collectives import gathered, scattered_sum, shard_index, summed
from maxtext_lite.parallel.context import (
    CHUNKS_PER_SHARD,
    context_order,
    context_shards,
    from_all_shards,
    in_context_order,
    in_token_order,
    own_shard,
    sum_to_shards,
    to_next_shard,
)
from maxtext_lite.parallel.distributed import (
    accelerator_of,
    end_soon,
    simulated_devices,
    start_devices,
    topology_devices,
)
from maxtext_lite.parallel.hosts import bytes_of_host, exchange, make_any_host, value_of_host
from maxtext_lite.parallel.mesh import MESH_AXES, make_mesh
from maxtext_lite.parallel.pipeline import Flight, Pipeline

__all__ = [
    "CHUNKS_PER_SHARD",
    "MESH_AXES",
    "Flight",
    "Pipeline",
    "accelerator_of",
    "also_over_data",
    "bytes_of_host",
    "constrain",
    "context_order",
    "context_shards",
    "end_soon",
    "exchange",
    "from_all_shards",
    "gathered",
    "in_context_order",
    "in_token_order",
    "make_any_host",
    "make_mesh",
    "num_shards",
    "over_all_devices",
    "over_replicas",
    "over_shards",
    "over_stages",
    "own_shard",
    "per_replica",
    "scattered_sum",
    "shard_index",
    "sharding",
    "simulated_devices",
    "start_devices",
    "sum_to_shards",
    "summed",
    "to_next_shard",
    "topology_devices",
    "tree_shardings",
    "value_of_host",
    "with_dims",
]
