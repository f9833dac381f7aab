"""The arithmetic of batch sizes: what follows from a config and a machine, and every rule that may be broken."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from maxtext_lite.batching.batch import Batch, derive_batch, not_whole, stated_batch
from maxtext_lite.batching.length import RunLength, derive_length, epochs_problem
from maxtext_lite.batching.loading import Loading, loading_hosts
from maxtext_lite.batching.rampup import RampupBatchManager, make_rampup, only_stage
from maxtext_lite.batching.scaling import OptimizerScaling, scale_optimizer, scaling_problems
from maxtext_lite.batching.topology import (
    MeshSizes,
    Scope,
    Topology,
    mesh_edits,
    mesh_key,
    model_dimensions,
    resolve_mesh,
    stated_axes,
    topology_problems,
)
from maxtext_lite.config import BatchConfig, Config
from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.kernels import KERNELS, token_multiple
from maxtext_lite.config.problem import Edit, Later, Problem, divisors, multiples, single_edits


@dataclass(frozen=True)
class Sizes:
    """Everything that follows from a config, a machine and the data without a broken rule.

    Attributes:
      diloco_num_replicas: None where local updates are off.
      length: None where num_epochs states it and the number of examples is not known.
    """

    topology: Topology
    mesh: MeshSizes
    batch: Batch
    eval_per_device_batch_size: Fraction
    eval_batch_examples: int
    num_pipeline_stages: int
    num_pipeline_microbatches: int
    num_pipeline_repeats: int
    loading: Loading
    rampup: RampupBatchManager | None
    scaling: OptimizerScaling
    diloco_num_replicas: int | None
    length: RunLength | None


def work_out(config: Config, topology: Topology, num_examples: int | None = None) -> Sizes | list[Problem]:
    """The sizes, or every rule that is broken.

    Args:
      num_examples: training examples in the data, where known.
    """
    problems = topology_problems(topology)
    if any(problem.identity.endswith(" of a machine") for problem in problems):
        return problems
    num_devices = topology.num_devices
    mesh = resolve_mesh(config, num_devices)
    batch = derive_batch(config, num_devices)
    eval_size = _eval_size(config, num_devices)
    loading = loading_hosts(config, topology.num_hosts)
    rampup = make_rampup(config, batch if isinstance(batch, Batch) else stated_batch(config, num_devices), num_devices)
    for part in (mesh, batch, eval_size, loading):
        if isinstance(part, Problem):
            problems.append(part)
    if isinstance(rampup, list):
        problems.extend(rampup)
    axes = stated_axes(config) if isinstance(mesh, Problem) else mesh
    replicas = _diloco_replicas(config, axes.total["data"])
    epochs = epochs_problem(config, num_examples)
    length = None
    if isinstance(batch, Batch) and not isinstance(rampup, list) and not epochs:
        stages = rampup.all_stages if rampup else (only_stage(batch),)
        length = derive_length(config, batch, stages, num_devices, num_examples)
    for part in (replicas, epochs, length):
        if isinstance(part, Problem):
            problems.append(part)
    problems.extend(scaling_problems(config, batch if isinstance(batch, Batch) else None, num_devices))
    problems.extend(_model_problems(config, axes, num_devices))
    problems.extend(_context_problems(config, axes.total["context"]))
    problems.extend(_pipeline_problems(config, axes.total["stage"], axes.total["context"], num_devices))
    if (
        problems
        or isinstance(mesh, Problem)
        or isinstance(batch, Problem)
        or isinstance(eval_size, Problem)
        or isinstance(loading, Problem)
        or isinstance(rampup, list)
        or isinstance(replicas, Problem)
        or isinstance(length, Problem)
    ):
        return problems
    stages, pieces = mesh.total["stage"], config.num_pipeline_microbatches
    per_eval = eval_size if eval_size else batch.per_device_batch_size
    return Sizes(
        topology,
        mesh,
        batch,
        eval_per_device_batch_size=per_eval,
        eval_batch_examples=int(per_eval * num_devices),
        num_pipeline_stages=stages,
        num_pipeline_microbatches=stages if pieces == -1 else pieces,
        num_pipeline_repeats=config.num_stacked_layers // (stages * config.num_layers_per_pipeline_stage)
        if stages > 1
        else 1,
        loading=loading,
        rampup=rampup,
        scaling=scale_optimizer(config, batch.global_batch_to_train),
        diloco_num_replicas=replicas,
        length=length,
    )


def _eval_size(config: BatchConfig, num_devices: int) -> Fraction | Problem:
    per_device = config.eval_per_device_batch_size
    if (per_device * num_devices).denominator != 1:
        return not_whole("eval_per_device_batch_size", per_device, num_devices)
    return per_device


def _diloco_replicas(config: Config, data_axis: int) -> int | Problem | None:
    """The copies that local updates keep; None where they are off."""
    key, replicas = "diloco_num_replicas", config.diloco_num_replicas
    if not config.enable_diloco:
        return None
    if replicas == -1:
        return data_axis
    if replicas % data_axis == 0:
        return replicas
    below, above = multiples(key, data_axis, replicas)
    message = f"{key}={replicas} is not a multiple of the data axis, {data_axis}: its devices hold as many replicas."
    return Problem(key, message, below, above, ({key: -1},))


def _model_problems(config: Config, mesh: MeshSizes, num_devices: int) -> list[Problem]:
    problems: list[Problem] = []
    for axis in ("fsdp", "tensor", "context", "expert"):
        # What fsdp splits of a weight, context and expert split further.
        together = ("fsdp", "context", "expert") if axis == "fsdp" else (axis,)
        shards = math.prod(mesh.total[each] for each in together)
        chunks = 2 if axis == "context" else 1  # an early and a late one, so that causal attention is equal work
        parts = shards * chunks if shards > 1 else 1
        uneven = {key: size for key, size in model_dimensions(config, axis).items() if size % parts}
        if not uneven:
            continue
        scopes: tuple[tuple[Scope, Mapping[str, int]], ...] = (("ici", mesh.ici), ("dcn", mesh.dcn))
        sizes = {mesh_key(name, each): scope[each] for each in together for name, scope in scopes if scope[each] > 1}
        key, size = next(iter(sizes.items()))
        how = " x ".join(
            f"{name}=-1, the remaining {parts}," if getattr(config, name) == -1 else f"{name}={parts}"
            for name, parts in sizes.items()
        )
        if chunks > 1:
            how += f" x {chunks} chunks"
        if parts != size:
            how += f" = {parts}"
        named = any_of([f"{name}={dimension}" for name, dimension in uneven.items()])
        fewer, more = single_edits(key, divisors(num_devices), size)
        below, above, otherwise = fewer, more, Later(partial(_wider, uneven, parts, key, size, num_devices))
        if "max_target_length" in uneven:  # which is the run's to choose, as the dimensions of a model are not
            below, above = multiples("max_target_length", parts, config.max_target_length)
            otherwise = (*fewer, *more, *mesh_edits(key, size, num_devices))
        problems.append(
            Problem(
                key,
                f"{how} does not divide {named}.",
                below,
                above,
                otherwise,
                rule=f"{axis} divides the model",
            )
        )
    return problems


def _wider(uneven: Mapping[str, int], parts: int, key: str, size: int, num_devices: int) -> Iterator[Edit]:
    """Other meshes, and then dimensions that `parts` divides."""
    yield from mesh_edits(key, size, num_devices)
    for name, dimension in uneven.items():
        for group in reversed(multiples(name, parts, dimension)):
            yield from group


def _context_problems(config: Config, num_shards: int) -> list[Problem]:
    """What does not work on shards of the tokens."""
    if num_shards == 1:
        return []
    problems: list[Problem] = []
    key, kernel = "attention", config.attention
    unit = token_multiple("splash", num_shards)
    if kernel == "splash" and config.max_target_length % unit:
        length = "max_target_length"
        message = (
            f"{key}={kernel} needs {length}={config.max_target_length} to be a multiple of {unit}, "
            f"128 for each of 2 chunks on {num_shards} context shards."
        )
        below, above = multiples(length, unit, config.max_target_length)
        problems.append(Problem(key, message, below, above, otherwise=({key: "auto"},), rule="a kernel for shards"))
    if kernel != "auto" and not KERNELS[kernel].context_shards:
        message = f"{key}={kernel} does not work on {num_shards} context shards, whose tokens are dealt in chunks."
        problems.append(Problem(key, message, otherwise=({key: "auto"},), rule="a kernel for shards"))
    key, pieces = "num_vocab_tiling", config.num_vocab_tiling
    tokens, rest = divmod(config.max_target_length, num_shards)
    if not rest and tokens % pieces:
        message = f"{key}={pieces} does not divide the {tokens} tokens of each of {num_shards} context shards."
        below, above = single_edits(key, divisors(tokens), pieces)
        problems.append(Problem(key, message, below, above, rule="tiles of a shard"))
    return problems


def _pipeline_problems(config: Config, num_stages: int, context: int, num_devices: int) -> list[Problem]:
    problems: list[Problem] = []
    key, pieces = "num_pipeline_microbatches", config.num_pipeline_microbatches
    if num_stages == 1 and pieces > 1:
        problems.append(
            Problem(
                key,
                f"{key}={pieces} has no use with 1 pipeline stage "
                "(ici_pipeline_parallelism x dcn_pipeline_parallelism).",
                below=[{key: 1}],
            )
        )
    elif pieces != -1 and pieces % num_stages:
        below, above = multiples(key, num_stages, pieces)
        problems.append(
            Problem(key, f"{key}={pieces} is not a multiple of the {num_stages} pipeline stages.", below, above)
        )
    problems.extend(_layer_problems(config, num_stages, num_devices))
    problems.extend(_schedule_problems(config, num_stages, context))
    return problems


def _schedule_problems(config: Config, num_stages: int, context: int) -> list[Problem]:
    """What pipeline_schedule=1f1b asks for: several stages, passed once, and tokens that they can share out."""
    key = "pipeline_schedule"
    problems: list[Problem] = []
    if config.pipeline_schedule == "gpipe":
        return problems
    gpipe: Edit = {key: "gpipe"}
    if num_stages == 1:
        message = f"{key}=1f1b has no use with 1 pipeline stage (ici_pipeline_parallelism x dcn_pipeline_parallelism)."
        return [Problem(key, message, below=[gpipe])]
    layers, at_once = config.num_stacked_layers, config.num_layers_per_pipeline_stage
    if layers > num_stages * at_once and layers % (num_stages * at_once) == 0:
        once: Edit = {"num_layers_per_pipeline_stage": layers // num_stages}
        if config.num_pipeline_repeats not in (-1, 1):
            once = {**once, "num_pipeline_repeats": 1}
        problems.append(
            Problem(
                key,
                f"{key}=1f1b passes the stages once, but {layers} layers on {num_stages} stages with "
                f"num_layers_per_pipeline_stage={at_once} go round {layers // (num_stages * at_once)} times.",
                below=[once],
                above=[gpipe],
                rule="1f1b rounds",
            )
        )
    tokens, parts = config.max_target_length, num_stages * context * max(config.num_vocab_tiling, 1)
    if tokens % parts:
        tiles = f" x num_vocab_tiling={config.num_vocab_tiling}" if config.num_vocab_tiling > 1 else ""
        shards = f" x {context} context shards" if context > 1 else ""
        below, above = multiples("max_target_length", parts, tokens)
        problems.append(
            Problem(
                "max_target_length",
                f"max_target_length={tokens} is not a multiple of {num_stages} pipeline stages{shards}{tiles}, between "
                f"which {key}=1f1b cuts the tokens of a microbatch for the loss.",
                below,
                above,
                (gpipe,),
                rule="1f1b tokens",
            )
        )
    return problems


def _layer_problems(config: Config, num_stages: int, num_devices: int) -> list[Problem]:
    layers, at_once, repeats = (
        config.num_stacked_layers,
        config.num_layers_per_pipeline_stage,
        config.num_pipeline_repeats,
    )
    derived_repeats: Edit = {"num_layers_per_pipeline_stage": 1, "num_pipeline_repeats": -1}
    stage_key = "ici_pipeline_parallelism"
    if num_stages == 1:
        if at_once == 1 and repeats == -1:
            return []
        key = "num_layers_per_pipeline_stage" if at_once != 1 else "num_pipeline_repeats"
        value = at_once if at_once != 1 else repeats
        plain = 1 if at_once != 1 else -1
        return [
            Problem(
                key,
                f"{key}={value} has no use with 1 pipeline stage "
                "(ici_pipeline_parallelism x dcn_pipeline_parallelism).",
                below=[{key: plain}],
                otherwise=(derived_repeats,),
                rule="layers",
            )
        ]
    if layers < 1:  # which is first_num_dense_layers' fault, and refused as that
        return []
    first = config.first_num_dense_layers  # before the pipeline
    unit = num_stages * at_once * max(repeats, 1)
    fewer, more = multiples("base_num_decoder_layers", unit, layers, offset=first)
    named = f"base_num_decoder_layers={layers + first}" + (f" - first_num_dense_layers={first}" if first else "")
    mend_layers = (derived_repeats, *more, *fewer, *mesh_edits(stage_key, num_stages, num_devices))
    if layers % (num_stages * at_once):
        whole = layers % num_stages == 0
        key = "num_layers_per_pipeline_stage" if whole else "base_num_decoder_layers"
        below, above = single_edits(key, divisors(layers // num_stages), at_once) if whole else (fewer, more)
        return [
            Problem(
                key,
                f"{named} is not a multiple of {num_stages} pipeline stages x num_layers_per_pipeline_stage={at_once}.",
                below,
                above,
                mend_layers,
                rule="layers",
            )
        ]
    if repeats in (-1, layers // (num_stages * at_once)):
        return _pattern_problems(config, num_stages, num_devices)
    below, above = single_edits("num_pipeline_repeats", [layers // (num_stages * at_once)], repeats)
    return [
        Problem(
            "num_pipeline_repeats",
            f"num_pipeline_repeats={repeats} x {num_stages} pipeline stages x "
            f"num_layers_per_pipeline_stage={at_once} = {repeats * num_stages * at_once} layers, but {named}.",
            below,
            above,
            mend_layers,
            rule="layers",
        )
    ]


def _pattern_problems(config: Config, num_stages: int, num_devices: int) -> list[Problem]:
    """Stages run one program: what each has at once begins and ends with the pattern of kinds."""
    period, at_once = len(config.pattern), config.num_layers_per_pipeline_stage
    if at_once % period == 0 or len(set(config.pattern)) == 1:
        return []
    key = "num_layers_per_pipeline_stage"
    whole = [count for count in divisors(config.num_stacked_layers // num_stages) if count % period == 0]
    below, above = single_edits(key, whole, at_once)
    return [
        Problem(
            key,
            f"{key}={at_once} is not a multiple of the {period} layers of "
            f"layer_pattern={value_text(config.layer_pattern)}, which every pipeline stage has in this order.",
            below,
            above,
            tuple(mesh_edits("ici_pipeline_parallelism", num_stages, num_devices)),
            rule="layers",
        )
    ]
