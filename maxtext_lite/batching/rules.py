"""Rules between a config and the sizes of its mesh axes."""

import math
from collections.abc import Iterable, Mapping

from maxtext_lite.batching.topology import (
    CHUNKS,
    SPLIT_TOGETHER,
    MeshSizes,
    mesh_changes,
    mesh_key,
    model_dimensions,
)
from maxtext_lite.config import Config
from maxtext_lite.config.errors import Number, Refusal, any_of, divisors_around, multiples_around, refuse, value_text
from maxtext_lite.config.kernels import (
    kernel_named,
    token_multiple,
)
from maxtext_lite.config.keys import ATTENTION_KINDS

_WITHOUT_STAGES: Mapping[str, tuple[object, ...]] = {
    "num_pipeline_microbatches": (1, -1),
    "num_layers_per_pipeline_stage": (1,),
    "num_pipeline_repeats": (-1,),
    "pipeline_schedule": ("gpipe",),
}


def model_violations(config: Config, mesh: MeshSizes, num_devices: int) -> list[Refusal]:
    broken: list[Refusal] = []
    for axis, together in SPLIT_TOGETHER.items():
        shards = math.prod(mesh.total[each] for each in together)
        if shards == 1:
            continue
        chunks = CHUNKS[axis]
        parts = shards * chunks
        uneven = {key: size for key, size in model_dimensions(config, axis).items() if size % parts}
        if not uneven:
            continue
        sizes: dict[str, int] = {}
        for each in together:
            sizes[mesh_key("ici", each)] = mesh.ici[each]
            sizes[mesh_key("dcn", each)] = mesh.dcn[each]
        sizes = {name: part for name, part in sizes.items() if part > 1}
        key, size = next(iter(sizes.items()))
        how = " x ".join(
            f"{name}=-1, the remaining {part}," if getattr(config, name) == -1 else f"{name}={part}"
            for name, part in sizes.items()
        )
        if chunks > 1:
            how += f" x {chunks} chunks"
        if parts != size:
            how += f" = {parts}"
        named = any_of([f"{name}={dimension}" for name, dimension in uneven.items()])
        near: list[Mapping[str, Number]] = []
        if axis == "context":  # unlike the model's dims, the length is free to choose
            unit = shards * math.lcm(chunks, max(config.num_vocab_tiling, 1))
            near += _lengths(multiples_around(unit, config.max_target_length))
        for name, part in sizes.items():
            near += mesh_changes(config, num_devices, name, part)
        broken.append(Refusal(key, f"{how} does not divide {named}.", tuple(near)))
    return broken


def _lengths(tokens: Iterable[Number]) -> list[Mapping[str, Number]]:
    return [{"max_target_length": each} for each in tokens]


def context_violations(config: Config, num_shards: int) -> list[Refusal]:
    """Refuses what context shards cannot run."""
    if num_shards == 1:
        return []
    broken: list[Refusal] = []
    kernel = config.attention
    length = config.max_target_length
    unit = token_multiple("splash", num_shards)
    if kernel == "splash" and length % unit:
        rule = (
            f"needs max_target_length={length} to be a multiple of {unit}, "
            f"128 for each of 2 chunks on {num_shards} context shards"
        )
        broken.append(refuse(config, "attention", rule, *_lengths(multiples_around(unit, length)), "auto"))
    if kernel != "auto" and not kernel_named(kernel).context_shards:
        rule = f"does not work on {num_shards} context shards, whose tokens are laid out in chunks"
        broken.append(refuse(config, "attention", rule, "auto"))
    foreign = [kind for kind in config.pattern if kind not in ATTENTION_KINDS]
    if foreign:
        rule = f"has {foreign[0]}, which needs whole examples, not their parts on {num_shards} context shards"
        attention = ",".join("global" if kind in foreign else kind for kind in config.pattern)
        broken.append(refuse(config, "layer_pattern", rule, attention))
    pieces = config.num_vocab_tiling
    tokens, rest = divmod(length, num_shards)
    if not rest and tokens % pieces:
        rule = f"does not divide the {tokens} tokens of each of {num_shards} context shards"
        broken.append(refuse(config, "num_vocab_tiling", rule, *divisors_around(tokens, pieces)))
    return broken


def pipeline_violations(config: Config, num_stages: int, context: int) -> list[Refusal]:
    broken: list[Refusal] = []
    if num_stages == 1:
        no_effect = "has no effect with 1 pipeline stage (ici_pipeline_parallelism x dcn_pipeline_parallelism)"
        for key, plain in _WITHOUT_STAGES.items():
            if getattr(config, key) not in plain:
                broken.append(refuse(config, key, no_effect, plain[0]))
        return broken
    pieces = config.num_pipeline_microbatches
    if pieces != -1 and pieces % num_stages:
        rule = f"is not a multiple of the {num_stages} pipeline stages"
        broken.append(refuse(config, "num_pipeline_microbatches", rule, *multiples_around(num_stages, pieces)))
    if config.num_stacked_layers > 0:  # otherwise first_num_dense_layers is refused
        broken.extend(_layer_violations(config, num_stages))
    if config.pipeline_schedule == "1f1b":
        broken.extend(_schedule_violations(config, num_stages, context))
    return broken


def _schedule_violations(config: Config, num_stages: int, context: int) -> list[Refusal]:
    """What pipeline_schedule=1f1b requires: a micro-batch passes the stages once, and they can share its tokens."""
    broken: list[Refusal] = []
    layers = config.num_stacked_layers
    at_once = config.num_layers_per_pipeline_stage
    rounds, rest = divmod(layers, num_stages * at_once)
    if rounds > 1 and not rest:
        once = {"num_layers_per_pipeline_stage": layers // num_stages}
        if config.num_pipeline_repeats not in (-1, 1):
            once["num_pipeline_repeats"] = 1
        rule = (
            f"passes the stages once, but {layers} layers on {num_stages} stages with "
            f"num_layers_per_pipeline_stage={at_once} go round {rounds} times"
        )
        broken.append(refuse(config, "pipeline_schedule", rule, once, "gpipe"))
    tokens = config.max_target_length
    parts = num_stages * context * max(config.num_vocab_tiling, 1)
    if tokens % parts:
        tiles = f" x num_vocab_tiling={config.num_vocab_tiling}" if config.num_vocab_tiling > 1 else ""
        shards = f" x {context} context shards" if context > 1 else ""
        rule = (
            f"is not a multiple of {num_stages} pipeline stages{shards}{tiles}, between which pipeline_schedule=1f1b "
            "splits the tokens of a microbatch for the loss"
        )
        broken.append(refuse(config, "max_target_length", rule, *multiples_around(parts, tokens)))
    return broken


def _layer_violations(config: Config, num_stages: int) -> list[Refusal]:
    """Refuses layers that do not divide equally over the stages, each with whole periods of the layer patterns."""
    layers = config.num_stacked_layers
    at_once = config.num_layers_per_pipeline_stage
    key = "num_layers_per_pipeline_stage"
    repeats = config.num_pipeline_repeats
    first = config.first_num_dense_layers  # these run before the pipeline
    rounds, rest = divmod(layers, num_stages * at_once)
    named = f"base_num_decoder_layers={layers + first}" + (f" - first_num_dense_layers={first}" if first else "")
    if rest:
        near = divisors_around(layers // num_stages, at_once)
        if layers % num_stages:
            unit = num_stages * at_once * max(repeats, 1)
            key = "base_num_decoder_layers"
            near = multiples_around(unit, layers, offset=first)
        product = f"{num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once}"
        message = f"{named} is not a multiple of {product}."
        return [Refusal(key, message, tuple(near))]
    if repeats not in (-1, rounds):
        rule = (
            f"x {num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once} = "
            f"{repeats * num_stages * at_once} layers, but {named}"
        )
        return [refuse(config, "num_pipeline_repeats", rule, rounds)]
    patterns = {"layer_pattern": config.pattern, "mlp_pattern": config.mlp_kinds}
    for name, pattern in patterns.items():
        period = len(pattern)
        if at_once % period and len(set(pattern)) > 1:
            rule = (
                f"is not a multiple of the {period} layers of {name}={value_text(getattr(config, name))}, "
                "which every pipeline stage has in this order"
            )
            unit = math.lcm(*(len(pattern) for pattern in patterns.values() if len(set(pattern)) > 1))
            return [refuse(config, key, rule, *multiples_around(unit, at_once))]
    return []
