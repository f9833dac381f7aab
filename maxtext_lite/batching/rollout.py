"""How responses are generated: the mesh of the devices that do it, the slots, and the memory that they take there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.batching.memory import bytes_text
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.config import RLRunConfig, UserError
from maxtext_lite.config.errors import nearest_clause

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Rollout:
    """What the devices that generate do.

    Attributes:
      mesh: sizes of their axes data, fsdp and tensor; the others have 1.
      slots: responses under way at once, a multiple of data x fsdp.
      params, cache: bytes per device of their copy of the parameters, and of the keys and values of all slots.
    """

    mesh: Mapping[str, int]
    slots: int
    params: int
    cache: int

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "1 device"
        return (
            f"{self.slots} slots on {axes}; {bytes_text(self.params + self.cache)} per device = parameters "
            f"{bytes_text(self.params)} + keys and values {bytes_text(self.cache)}"
        )


def rollout_of(config: RLRunConfig, num_devices: int, pairs: int) -> Rollout:
    """How so many devices generate chunks of so many pairs.

    Raises:
      UserError: the model or the devices cannot be divided as the keys say; names the nearest numbers that work.
    """
    mesh = _mesh(config, num_devices)
    shards = mesh["data"] * mesh["fsdp"]
    slots = config.rollout_slots
    if slots == -1:
        slots = -(-pairs // shards) * shards
    elif slots % shards:
        near = _next_to(slots, [shards * (slots // shards + more) for more in (0, 1) if slots // shards + more])
        raise UserError(
            f"rollout_slots={slots} is not a multiple of the {shards} parts that the devices that generate cut them "
            f"into.{nearest_clause(near)}"
        )
    width = config.head_dim + config.value_dim
    positions = slots // shards * config.max_target_length
    cache = positions * config.base_num_decoder_layers * config.base_num_kv_heads * width // mesh["tensor"]
    bytes_each = _BYTES[config.dtype]
    params = -(-count_parameters(config).total // (mesh["fsdp"] * mesh["tensor"]))
    return Rollout(mesh, slots, bytes_each * params, bytes_each * cache)


def _mesh(config: RLRunConfig, devices: int) -> dict[str, int]:
    width = config.base_mlp_dim if config.num_experts == 1 else config.moe_mlp_dim
    heads = math.gcd(config.base_num_query_heads, config.base_num_kv_heads)
    tensor, fsdp = config.rollout_tensor_parallelism, config.rollout_fsdp_parallelism
    tensor_works = _divisors(math.gcd(heads, width, config.vocab_size, devices))
    fsdp_works = _divisors(math.gcd(config.base_emb_dim, devices))
    problems: list[str] = []
    for key, value, other, works, others, what in (
        ("rollout_tensor_parallelism", tensor, fsdp, tensor_works, fsdp_works, "heads, mlp and vocabulary"),
        ("rollout_fsdp_parallelism", fsdp, tensor, fsdp_works, tensor_works, "embedding"),
    ):
        if value not in works:
            # Beside what the other key says, where that can stay.
            beside = [size for size in works if other not in others or devices % (size * other) == 0]
            problems.append(
                f"{key}={value} does not divide both the model's {what} and the {devices} devices that generate."
                f"{nearest_clause(_next_to(value, beside))}"
            )
    if not problems and devices % (tensor * fsdp):
        beside = [size for size in tensor_works if devices % (size * fsdp) == 0]
        near = [f"rollout_tensor_parallelism={size}" for size in _next_to(tensor, beside)]
        problems.append(
            f"rollout_tensor_parallelism={tensor} x rollout_fsdp_parallelism={fsdp} does not divide the {devices} "
            f"devices that generate.{nearest_clause(near)}"
        )
    if problems:
        raise UserError(problems)
    return {"data": devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}


def _divisors(whole: int) -> list[int]:
    return [number for number in range(1, whole + 1) if whole % number == 0]


def _next_to(value: int, numbers: list[int]) -> list[int]:
    """The largest of the increasing numbers below the value, and the smallest above it."""
    below = [number for number in numbers if number < value]
    return below[-1:] + [number for number in numbers if number > value][:1]
