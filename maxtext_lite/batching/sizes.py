"""The arithmetic of batch sizes: what follows from a config and a machine, and every rule that may be broken."""

from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.batch import Batch, derive_batch, not_whole, stated_batch
from maxtext_lite.batching.hosts import Loading, loading_hosts
from maxtext_lite.batching.length import RunLength, derive_length, epochs_problem
from maxtext_lite.batching.problem import Edit, Problem, divisors, multiples, single_edits
from maxtext_lite.batching.rampup import RampupBatchManager, make_rampup, only_stage
from maxtext_lite.batching.scaling import OptimizerScaling, scale_optimizer, scaling_problems
from maxtext_lite.batching.topology import (
    MeshSizes,
    Topology,
    mesh_edits,
    mesh_key,
    resolve_mesh,
    stated_axes,
    topology_problems,
)
from maxtext_lite.config import BatchConfig, Config
from maxtext_lite.config.errors import any_of


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
    if min(topology.num_devices, topology.num_hosts) < 1:
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
    problems.extend(_pipeline_problems(config, axes.total["stage"], num_devices))
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
        num_pipeline_repeats=config.base_num_decoder_layers // (stages * config.num_layers_per_pipeline_stage)
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


# Each mesh axis that splits the model, and the dimensions that it splits; an expert's width where there are experts.
_SPLIT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fsdp", ("base_emb_dim",)),
    ("tensor", ("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_moe_mlp_dim", "vocab_size")),
    ("context", ("max_target_length",)),
    ("expert", ("num_experts",)),
)


def _dimensions(config: Config, keys: tuple[str, ...]) -> dict[str, int]:
    """The dimensions that the model has, by key: of the mlp's width and the experts', the one that is used."""
    unused = "base_mlp_dim" if config.num_experts > 1 and config.base_moe_mlp_dim != -1 else "base_moe_mlp_dim"
    return {key: int(getattr(config, key)) for key in keys if key != unused}


def _model_problems(config: Config, mesh: MeshSizes, num_devices: int) -> list[Problem]:
    problems: list[Problem] = []
    for axis, dimension_keys in _SPLIT:
        parts = mesh.total[axis]
        uneven = {key: size for key, size in _dimensions(config, dimension_keys).items() if size % parts}
        if not uneven:
            continue
        in_slice = mesh.ici[axis] > 1
        key = mesh_key("ici" if in_slice else "dcn", axis)
        size = mesh.ici[axis] if in_slice else mesh.dcn[axis]
        how = f"{key}=-1, the remaining {size}," if getattr(config, key) == -1 else f"{key}={size}"
        if parts != size:
            how += f" x {mesh_key('dcn', axis)}={mesh.dcn[axis]} = {parts}"
        named = any_of([f"{name}={dimension}" for name, dimension in uneven.items()])
        below, above = single_edits(key, divisors(num_devices), size)
        wider = [
            edit
            for name, dimension in uneven.items()
            for group in reversed(multiples(name, parts, dimension))
            for edit in group
        ]
        problems.append(
            Problem(
                key,
                f"{how} does not divide {named}.",
                below,
                above,
                (*mesh_edits(key, size, num_devices), *wider),
                rule=f"{axis} divides the model",
            )
        )
    return problems


def _pipeline_problems(config: Config, num_stages: int, num_devices: int) -> list[Problem]:
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
    return problems


def _layer_problems(config: Config, num_stages: int, num_devices: int) -> list[Problem]:
    layers, at_once, repeats = (
        config.base_num_decoder_layers,
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
    fewer, more = multiples("base_num_decoder_layers", num_stages * at_once * max(repeats, 1), layers)
    mend_layers = (derived_repeats, *more, *fewer, *mesh_edits(stage_key, num_stages, num_devices))
    if layers % (num_stages * at_once):
        whole = layers % num_stages == 0
        key = "num_layers_per_pipeline_stage" if whole else "base_num_decoder_layers"
        below, above = single_edits(key, divisors(layers // num_stages), at_once) if whole else (fewer, more)
        return [
            Problem(
                key,
                f"base_num_decoder_layers={layers} is not a multiple of {num_stages} pipeline stages x "
                f"num_layers_per_pipeline_stage={at_once}.",
                below,
                above,
                mend_layers,
                rule="layers",
            )
        ]
    if repeats in (-1, layers // (num_stages * at_once)):
        return []
    below, above = single_edits("num_pipeline_repeats", [layers // (num_stages * at_once)], repeats)
    return [
        Problem(
            "num_pipeline_repeats",
            f"num_pipeline_repeats={repeats} x {num_stages} pipeline stages x "
            f"num_layers_per_pipeline_stage={at_once} = {repeats * num_stages * at_once} layers, but "
            f"base_num_decoder_layers={layers}.",
            below,
            above,
            mend_layers,
            rule="layers",
        )
    ]
