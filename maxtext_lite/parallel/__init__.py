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
)
from maxtext_lite.parallel.collectives import gathered, scattered_sum, shard_index, summed
from maxtext_lite.parallel.distributed import end_soon, start_devices
from maxtext_lite.parallel.hosts import exchange, make_any_host
from maxtext_lite.parallel.mesh import MESH_AXES, make_mesh
from maxtext_lite.parallel.pipeline import Pipeline

__all__ = [
    "MESH_AXES",
    "Pipeline",
    "also_over_data",
    "constrain",
    "end_soon",
    "exchange",
    "gathered",
    "make_any_host",
    "make_mesh",
    "num_shards",
    "over_all_devices",
    "over_replicas",
    "over_shards",
    "over_stages",
    "per_replica",
    "scattered_sum",
    "shard_index",
    "sharding",
    "start_devices",
    "summed",
    "tree_shardings",
]
