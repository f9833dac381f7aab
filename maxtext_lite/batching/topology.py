"""The machine, and how the six mesh axes divide it; the ticks of its pipeline."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from maxtext_lite.config import Config, MeshConfig
from maxtext_lite.config.errors import Number, Refusal, around, counted, divisors, divisors_around, value_text
from maxtext_lite.config.kernels import Accelerator

MOST_DEVICES = 1_000_000
"""The largest number of devices or hosts of a machine."""
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Names of the mesh axes, slowest first: devices next to each other in the machine differ in `tensor`."""

_WORD = {"stage": "pipeline"}  # the only axis whose keys do not carry its name
Scope = Literal["ici", "dcn"]


@dataclass(frozen=True)
class Topology:
    """A machine, which need not exist: its devices, and hosts with equally many of them.

    Attributes:
      accelerator: what the devices are; it decides the attention kernel and thereby the memory of a step.
    """

    num_devices: int
    num_hosts: int = 1
    accelerator: Accelerator = field(default_factory=lambda: Accelerator.planned("gpu"))


@dataclass(frozen=True)
class MeshSizes:
    """The size of each axis of MESH_AXES within a slice (`ici`), across slices (`dcn`) and in all (`total`)."""

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    @functools.cached_property
    def total(self) -> dict[str, int]:
        """The product ici x dcn, by axis."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in MESH_AXES}


def mesh_key(scope: Scope, axis: str) -> str:
    """The config key of an axis: ici_pipeline_parallelism for `stage`."""
    return f"{scope}_{_WORD.get(axis, axis)}_parallelism"


_ICI_KEYS = {mesh_key("ici", axis): axis for axis in MESH_AXES}
_DCN_KEYS = {mesh_key("dcn", axis): axis for axis in MESH_AXES}
_AXIS_OF_KEY = _ICI_KEYS | _DCN_KEYS
MESH_KEYS = tuple(_AXIS_OF_KEY)
"""The twelve keys whose product is num_devices."""
_DATA = mesh_key("ici", "data")
_FSDP = mesh_key("ici", "fsdp")


def topology_violations(topology: Topology) -> list[Refusal]:
    """The rule that the machine itself breaks, if any."""
    devices = topology.num_devices
    hosts = topology.num_hosts
    for key, number in (("num_devices", devices), ("num_hosts", hosts)):
        if not 1 <= number <= MOST_DEVICES:
            return [Refusal(key, f"{key}={value_text(number)} must be from 1 to {MOST_DEVICES}.", (1,))]
    if devices % hosts:
        message = f"num_hosts={hosts} does not divide num_devices={devices}: every host has equally many devices."
        return [Refusal("num_hosts", message, tuple(divisors_around(devices, hosts)))]
    return []


def resolve_mesh(config: Config, num_devices: int) -> MeshSizes | Refusal:
    """The axis sizes with -1 filled in, or the rule that they break."""
    sizes = {key: int(getattr(config, key)) for key in MESH_KEYS}
    open_keys = [key for key, size in sizes.items() if size == -1]
    fixed = {key: size for key, size in sizes.items() if size > 1}
    product = math.prod(fixed.values())
    product_text = " x ".join(f"{key}={size}" for key, size in fixed.items())
    if len(open_keys) > 1:
        named = " and ".join(f"{key}=-1" for key in open_keys)
        message = f"{named}: only one of the mesh axes may be -1."
        return Refusal(open_keys[-1], message, tuple(divisors_around(num_devices, 0)))
    if open_keys and num_devices % product:
        key = max(fixed, key=lambda key: num_devices % fixed[key] != 0)
        message = f"{product_text} does not divide the {counted(num_devices, 'device')}, which {open_keys[0]}=-1 fills."
        return Refusal(key, message, tuple(mesh_changes(config, num_devices, key, fixed[key])))
    if not open_keys and product != num_devices:
        key = list(fixed)[-1] if fixed else _FSDP
        message = f"{product_text or f'{key}=1'} covers {product} of {num_devices} devices."
        return Refusal(key, message, tuple(mesh_changes(config, num_devices, key, fixed.get(key, 1))))
    for key in open_keys:
        sizes[key] = num_devices // product
    return _mesh_sizes(sizes)


def stated_axes(config: MeshConfig) -> MeshSizes:
    """The axes as far as the config states them, for checking other rules; -1 counts as 1."""
    return _mesh_sizes({key: max(int(getattr(config, key)), 1) for key in MESH_KEYS})


def _mesh_sizes(sizes: Mapping[str, int]) -> MeshSizes:
    ici = {axis: sizes[key] for key, axis in _ICI_KEYS.items()}
    dcn = {axis: sizes[key] for key, axis in _DCN_KEYS.items()}
    return MeshSizes(ici, dcn)


_SPLIT = {
    "fsdp": ("base_emb_dim",),
    "tensor": ("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_moe_mlp_dim", "vocab_size"),
    "context": ("max_target_length",),
    "expert": ("num_experts",),
}


def model_dimensions(config: Config, axis: str) -> dict[str, int]:
    """The model dims that a mesh axis splits, by key, with the widths of mlp or experts only if used."""
    unused = "base_moe_mlp_dim"
    if config.num_experts > 1 and config.base_moe_mlp_dim != -1:
        unused = "" if config.first_num_dense_layers or "dense" in config.mlp_kinds else "base_mlp_dim"
    dims = {key: int(getattr(config, key)) for key in _SPLIT[axis] if key != unused}
    if axis == "tensor" and config.global_attention is not None:
        dims["global_num_kv_heads"] = config.global_attention.global_num_kv_heads
        if config.global_attention.global_num_query_heads is not None:
            dims["global_num_query_heads"] = config.global_attention.global_num_query_heads
    return dims


def mesh_text(mesh: Mapping[str, int], otherwise: str = "one device") -> str:
    """`fsdp 4 x tensor 2`: the axes that split something; `otherwise` where none does."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or otherwise


SPLIT_TOGETHER = {
    "fsdp": ("fsdp", "context", "expert"),
    "tensor": ("tensor",),
    "context": ("context",),
    "expert": ("expert",),
}
"""The axes over which the dims of `model_dimensions` are split."""
CHUNKS = {"fsdp": 1, "tensor": 1, "context": 2, "expert": 1}
"""Parts of a shard: an early and a late one for context, which balances causal attention."""


def _parts_of_model(config: Config, key: str) -> int:
    """What a mesh axis's size must divide for the model; 0, which all sizes divide, if it splits nothing."""
    axis = _AXIS_OF_KEY[key]
    if axis not in SPLIT_TOGETHER:
        return 0
    keys = [other for other, each in _AXIS_OF_KEY.items() if each in SPLIT_TOGETHER[axis] and other != key]
    others = math.prod(max(getattr(config, other), 1) for other in keys)
    return math.gcd(*model_dimensions(config, axis).values()) // (others * CHUNKS[axis])


def mesh_changes(config: Config, num_devices: int, key: str, size: int) -> list[Mapping[str, Number]]:
    """Changes of a mesh axis to the nearest sizes that the model and the other axes leave room for.

    The devices that it no longer covers go to an axis that is -1, or to that of data, or for data to that of fsdp. If
    the other axes already need more devices than there are, fsdp covers all that they leave, or all.

    Args:
      size: of the axis; the devices that remain for it where the key is -1.
    """
    stated = {other: number for other in MESH_KEYS if other != key and (number := getattr(config, other)) != -1}
    room = num_devices // math.prod(stated.values())
    if not room:
        others = size * math.prod(stated.values()) // stated.get(_FSDP, 1)
        ones = {} if num_devices % others == 0 else dict.fromkeys((*stated, key), 1)
        return [ones | {_FSDP: -1}]
    rest = _FSDP if key == _DATA else _DATA
    alone: list[Mapping[str, Number]] = []
    with_rest: list[Mapping[str, Number]] = []
    common = _parts_of_model(config, key)
    for near in around([each for each in divisors(room) if common % each == 0], size):
        left = room // int(near)
        if len(stated) < len(MESH_KEYS) - 1 or left == 1:
            alone.append({key: near})
        if rest in stated and left > 1:
            with_rest.append({key: near, rest: stated[rest] * left})
    return [*alone, *with_rest]


def splits_residual(config: Config, mesh: Mapping[str, int]) -> bool:
    """Whether the tokens of a row divide over context x tensor."""
    return config.max_target_length % (mesh["context"] * mesh["tensor"]) == 0


Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Orders of the work of a train step on a pipeline, described in `parallel.pipeline`."""


def num_repeats(config: Config, num_stages: int) -> int:
    """The rounds of a micro-batch through the stages; 1 without a pipeline."""
    return config.num_stacked_layers // (num_stages * config.num_layers_per_pipeline_stage) if num_stages > 1 else 1


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline and the work of one step.

    Attributes:
      num_stages: S.
      num_microbatches: M, microbatches of one micro-batch.
      num_repeats: R, rounds through the stages.
      gradient_accumulation_steps: A, micro-batches of a step.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    gradient_accumulation_steps: int

    def bubble_fraction(self, schedule: Schedule) -> Fraction:
        """The share of a stage's ticks without work; `1f1b` needs one round.

        With gpipe it is (S - 1) / (R M + S - 1) of each micro-batch, in the forward and in the backward pass. With
        1f1b, where a tick runs one microbatch forward and one backward, it is 2 (S - 1) / (A M + 2 (S - 1)) of a step.
        """
        idle = (self.num_stages - 1) * (1 if schedule == "gpipe" else 2)
        return Fraction(idle, self.num_ticks(schedule))

    def num_ticks(self, schedule: Schedule) -> int:
        """Times that all stages run: with gpipe for a micro-batch, forward or backward; with 1f1b for a step."""
        idle = self.num_stages - 1
        if schedule == "gpipe":
            return self.num_repeats * self.num_microbatches + idle
        return self.gradient_accumulation_steps * self.num_microbatches + 2 * idle
