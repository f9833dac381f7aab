"""How responses are generated: the mesh of the sampling devices, their slots, and the memory that these take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.batching.activations import BYTES
from maxtext_lite.batching.ledger import bytes_text
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.topology import mesh_text, model_dimensions
from maxtext_lite.config import RLRunConfig
from maxtext_lite.config.violation import Violation, divisors, multiples, one_of


@dataclass(frozen=True)
class Rollout:
    """The work of the devices that generate.

    Attributes:
      mesh: sizes of their axes data, fsdp and tensor; other axes have size 1.
      slots: responses generated at once, a multiple of data x fsdp.
      params, cache: bytes per device of the copy of the parameters, and of the keys and values of all slots.
    """

    mesh: Mapping[str, int]
    slots: int
    params: int
    cache: int

    def __str__(self) -> str:
        axes = mesh_text(self.mesh, "1 device")
        return (
            f"{self.slots} slots on {axes}; {bytes_text(self.params + self.cache)} per device = parameters "
            f"{bytes_text(self.params)} + keys and values {bytes_text(self.cache)}"
        )


def rollout_of(config: RLRunConfig, num_devices: int, pairs: int) -> Rollout | list[Violation]:
    """How the devices generate micro-batches of `pairs` pairs, or every broken rule."""
    if broken := _mesh_violations(config, num_devices):
        return broken
    tensor, fsdp = config.rollout_tensor_parallelism, config.rollout_fsdp_parallelism
    mesh = {"data": num_devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}
    shards = mesh["data"] * mesh["fsdp"]
    slots = config.rollout_slots
    if slots == -1:
        slots = -(-pairs // shards) * shards
    elif slots % shards:
        key = "rollout_slots"
        message = f"{key}={slots} is not a multiple of the {shards} parts into which the generating devices split them."
        return [Violation(key, message, (multiples(key, shards, slots), -1))]
    width = config.base_num_kv_heads * (config.head_dim + config.value_dim) // mesh["tensor"]
    if config.mla is not None:  # keys of one head, which contain its values, on every device of a tensor group
        width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    cache = slots // shards * config.max_target_length * config.base_num_decoder_layers * width
    bytes_each = BYTES[config.dtype]
    params = -(-count_parameters(config).total // (mesh["fsdp"] * mesh["tensor"]))
    return Rollout(mesh, slots, bytes_each * params, bytes_each * cache)


def _mesh_violations(config: RLRunConfig, devices: int) -> list[Violation]:
    stated = {"rollout_tensor_parallelism": "tensor", "rollout_fsdp_parallelism": "fsdp"}
    split = {"tensor": "heads, mlp and vocabulary", "fsdp": "embedding"}
    works = {axis: divisors(math.gcd(*model_dimensions(config, axis).values(), devices)) for axis in split}
    tensor, fsdp = config.rollout_tensor_parallelism, config.rollout_fsdp_parallelism
    broken = [
        Violation(
            key,
            f"{key}={value} does not divide both the model's {split[axis]} and the {devices} generating devices.",
            (one_of(key, works[axis], value),),
        )
        for key, axis in stated.items()
        if (value := getattr(config, key)) not in works[axis]
    ]
    if broken or devices % (tensor * fsdp) == 0:
        return broken
    message = (
        f"rollout_tensor_parallelism={tensor} x rollout_fsdp_parallelism={fsdp} does not divide the {devices} "
        "generating devices."
    )
    near = one_of("rollout_tensor_parallelism", works["tensor"], tensor)
    return [Violation("rollout_fsdp_parallelism", message, (near,), rule="rollout mesh")]
