"""From a config and a machine to a plan: every batch size, what follows from it, and everything that is wrong."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path

from maxtext_lite.batching.batch import SampledBatch
from maxtext_lite.batching.batch_plan import BatchPlan, ScheduleCost, layout_shards, row_slots
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.length import RunLength
from maxtext_lite.batching.parameters import count_parameters, flops_per_example, master_bytes
from maxtext_lite.batching.pipeline_shape import SCHEDULES, PipelineShape, Schedule
from maxtext_lite.batching.scaling import scaling_warnings
from maxtext_lite.batching.sizes import Sizes
from maxtext_lite.batching.solve import refusals, resolve
from maxtext_lite.batching.topology import Topology, splits_residual
from maxtext_lite.config import Config, Refusal, UserError, registry, remat_of
from maxtext_lite.config.errors import bytes_text, counted, nearest_clause, number_text, rounded_text, value_text
from maxtext_lite.config.kernels import KERNELS, Accelerator, Platform, planned_kernel
from maxtext_lite.config.load import read_config

_MOST_EXAMPLES = 2**62  # example ids are 64-bit integers
_MOST_GIGABYTES = 1_000_000


def make_plan(
    config: Config,
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | None = None,
    device_memory_gb: float | None = None,
    platform: Platform | Accelerator = "gpu",
) -> BatchPlan:
    """The plan of a config on a machine.

    Args:
      num_devices: every device of the mesh.
      num_hosts: hosts (processes), each with equally many devices.
      num_examples: training examples in the data; if unknown, `epochs` is None and num_epochs cannot be planned.
      device_memory_gb: memory of a device in GB (1e9 bytes), to compare the estimate with.
      platform: what the devices are, or an Accelerator where more is known; it decides the attention kernel and thereby
        the memory.
    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    if problems := _data_and_memory_refusals(config, num_examples, device_memory_gb):
        topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
        raise UserError(map(str, [*problems, *refusals(config, topology, _numbered(num_examples))]))
    sizes = batch_sizes(
        config, num_devices=num_devices, num_hosts=num_hosts, num_examples=num_examples, platform=platform
    )
    assert sizes.length is not None, "only num_epochs without examples has none"
    plan = _plan(config, sizes, sizes.length, num_examples, device_memory_gb)
    return dataclasses.replace(plan, warnings=tuple(_warnings(config, plan, sizes.topology.accelerator)))


def batch_sizes(
    config: Config,
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | None = None,
    platform: Platform | Accelerator = "gpu",
) -> Sizes:
    """The sizes that `make_plan` starts from, with all that it refuses; num_epochs may precede the opening of the data.

    Raises:
      UserError: with every broken rule, each naming values that work.
    """
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    resolved = resolve(config, topology, num_examples)
    if isinstance(resolved, list):
        raise UserError(str(refusal) for refusal in refusals(config, topology, num_examples))
    return resolved


def _numbered(num_examples: int | None) -> int | None:
    """A number of examples that can be planned with; None for any other."""
    return num_examples if num_examples is not None and 1 <= num_examples <= _MOST_EXAMPLES else None


def _data_and_memory_refusals(
    config: Config, num_examples: int | None, device_memory_gb: float | None
) -> list[Refusal]:
    problems: list[Refusal] = []
    if num_examples is None and config.num_epochs:
        message = (
            f"num_epochs={number_text(config.num_epochs)} gives no steps without the number of training examples. "
            "Give num_examples to make_plan, or --examples N to the command plan."
        )
        problems.append(Refusal("num_epochs", message))
    if num_examples is not None and num_examples < 1:
        problems.append(Refusal("", f"num_examples={value_text(num_examples)}: there is no training example."))
    if num_examples is not None and num_examples > _MOST_EXAMPLES:
        message = f"num_examples={value_text(num_examples)} is more than the {_MOST_EXAMPLES} that are numbered."
        problems.append(Refusal("", message, (_MOST_EXAMPLES,)))
    if device_memory_gb is not None and not 0 < device_memory_gb <= _MOST_GIGABYTES:
        message = f"device_memory_gb={value_text(device_memory_gb)} must be above 0 and at most {_MOST_GIGABYTES}."
        problems.append(Refusal("", message, (_MOST_GIGABYTES if device_memory_gb > 0 else 1,)))
    return problems


def _plan(
    config: Config,
    sizes: Sizes,
    length: RunLength,
    num_examples: int | None,
    memory_gb: float | None,
) -> BatchPlan:
    topology, batch, mesh, loading = sizes.topology, sizes.batch, sizes.mesh, sizes.loading
    pieces, replicas, rl = sizes.num_pipeline_microbatches, sizes.diloco_num_replicas, sizes.sampled
    slots = row_slots(batch.micro_batch_to_train, layout_shards(mesh.total, replicas), topology.num_hosts, pieces)
    rows, accelerator = slots * config.rows_per_example, topology.accelerator
    accumulation, total = batch.gradient_accumulation_steps, batch.global_batch_to_train
    memory = MemoryEstimate((), None if memory_gb is None else int(memory_gb * 1e9))
    if registry.is_installed("estimate", "memory"):
        estimate: Callable[..., MemoryEstimate] = registry.load("estimate", "memory")
        memory = estimate(config, mesh.total, rows, accumulation, pieces, memory_gb, replicas, accelerator)
        if rl is not None:
            memory = rl.with_sampling(memory, config, mesh.total)
    shape = PipelineShape(sizes.num_pipeline_stages, pieces, sizes.num_pipeline_repeats, accumulation)
    epochs: Fraction | None = None
    steps_per_epoch: Fraction | None = None
    if num_examples is not None:
        of_data = num_examples * _examples_per_entry(rl)
        epochs = Fraction(length.total_examples, of_data)
        steps_per_epoch = Fraction(of_data, total)
    return BatchPlan(
        num_devices=topology.num_devices,
        num_hosts=topology.num_hosts,
        mesh=mesh.total,
        ici_mesh=mesh.ici,
        dcn_mesh=mesh.dcn,
        per_device_batch_size=batch.per_device_batch_size,
        micro_batch_to_train=batch.micro_batch_to_train,
        empty_slots_per_micro_batch=slots - batch.micro_batch_to_train,
        gradient_accumulation_steps=accumulation,
        global_batch_to_train=total,
        global_batch_to_load=loading.global_batch_to_load(total),
        loads_per_step=loading.loads_per_step,
        loading_hosts=loading.loading_hosts,
        examples_per_loading_host=loading.examples_per_loading_host(total),
        tokens_per_step=total * config.rows_per_example * config.max_target_length,
        eval_per_device_batch_size=sizes.eval_per_device_batch_size,
        eval_batch_examples=sizes.eval_batch_examples,
        num_pipeline_stages=shape.num_stages,
        num_pipeline_microbatches=pieces,
        num_pipeline_repeats=shape.num_repeats,
        pipeline_schedule=config.pipeline_schedule,
        pipeline_microbatch_size=-(-batch.micro_batch_to_train // pieces),
        pipeline_bubble_fraction=shape.bubble_fraction(config.pipeline_schedule),
        pipeline_schedules=_schedule_costs(config, mesh.total, rows, shape, accelerator),
        steps=length.steps,
        num_examples=num_examples,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        length=length,
        scaling=sizes.scaling,
        diloco_num_replicas=replicas,
        diloco_sync_period=None if replicas is None else config.diloco_sync_period,
        max_target_length=config.max_target_length,
        rows_per_example=config.rows_per_example,
        flops_per_example=flops_per_example(config, config.max_target_length) * config.rows_per_example,
        expansion_factor_real_data=loading.factor,
        rampup=sizes.rampup,
        memory=memory,
        attention_kernel=planned_kernel(config, accelerator, mesh.total["context"]),
        warnings=(),
        rl=rl,
    )


def _examples_per_entry(rl: SampledBatch | None) -> int:
    """Examples of a run for each example in its data."""
    return 1 if rl is None else rl.examples_per_entry


def _schedule_costs(
    config: Config, mesh: Mapping[str, int], rows: int, shape: PipelineShape, accelerator: Accelerator
) -> dict[Schedule, ScheduleCost]:
    """The cost of each schedule that suits the pipeline; empty without a pipeline."""
    costs: dict[Schedule, ScheduleCost] = {}
    if shape.num_stages == 1:
        return costs
    for schedule in SCHEDULES:
        if schedule == "gpipe" or shape.num_repeats == 1:
            activations = None
            if registry.is_installed("estimate", "activations"):
                estimate: Callable[..., int] = registry.load("estimate", "activations")
                activations = estimate(config, mesh, rows, shape.num_microbatches, schedule, accelerator)
            costs[schedule] = ScheduleCost(shape.bubble_fraction(schedule), activations)
    return costs


def resumed(config: Config, plan: BatchPlan, *, step: int, examples_seen: int) -> BatchPlan:
    """The plan of a run's start after `step` steps that consumed `examples_seen` examples: its length is the run's.

    Args:
      plan: of the same config, machine and data.
    """
    length = dataclasses.replace(plan.length, done=(step, examples_seen))
    epochs = None
    if plan.num_examples is not None:
        epochs = Fraction(length.total_examples, plan.num_examples * _examples_per_entry(plan.rl))
    after = dataclasses.replace(plan, steps=length.steps, epochs=epochs, length=length)
    of_length = tuple(_length_warnings(config, plan))
    others = (warning for warning in plan.warnings if warning not in of_length)
    return dataclasses.replace(after, warnings=(*others, *_length_warnings(config, after)))


def load_plan(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    num_devices: int,
    num_hosts: int = 1,
    num_examples: int | Callable[[Config], int] | None = None,
    device_memory_gb: float | None = None,
    platform: Platform | Accelerator = "gpu",
) -> tuple[Config, BatchPlan]:
    """`load_config` and `make_plan` in one, so that the problems of both are reported together.

    Args:
      num_examples: training examples in the data, or a function that counts them. It is called only if num_epochs needs
        it and nothing else is wrong.
    Raises:
      UserError: with every problem of the config and of its plan.
    """
    topology = Topology(num_devices, num_hosts, Accelerator.planned(platform))
    reading = read_config(path, overrides)
    config = reading.config
    known = 1 if callable(num_examples) else num_examples  # it is counted once nothing else is wrong
    problems = _data_and_memory_refusals(config, known, device_memory_gb)
    numbered = None if callable(num_examples) else _numbered(num_examples)
    if refused := [*problems, *reading.refused(refusals(config, topology, numbered, reading.wrong))]:
        raise UserError(str(refusal) for refusal in refused)
    if callable(num_examples):
        num_examples = num_examples(config) if config.num_epochs else None
    plan = make_plan(
        config,
        num_devices=num_devices,
        num_hosts=num_hosts,
        num_examples=num_examples,
        device_memory_gb=device_memory_gb,
        platform=platform,
    )
    return config, plan


def scaled_optimizer(config: Config, plan: BatchPlan) -> Config:
    """The config with learning rate and Adam's settings as its plan scaled them, and scaling turned off."""
    unscaled = {"learning_rate_scaling": "none", "scale_adam_with_batch": False}
    return config.model_copy(update={**plan.scaling.scaled, **unscaled})


_LARGEST_TUNING_RATE, _LARGE_MODEL_RATE, _LARGE_MODEL = 1e-3, 3e-3, 10**9


def _warnings(config: Config, plan: BatchPlan, accelerator: Accelerator) -> Iterator[str]:
    """What works but is probably a mistake."""
    yield from scaling_warnings(config, plan.scaling)
    yield from _rate_warnings(config, plan)
    yield from _diloco_warnings(plan)
    if registry.is_installed("estimate", "evaluation"):
        yield from registry.load("estimate", "evaluation")(config, plan, accelerator)
    micro, pieces = plan.micro_batch_to_train, plan.num_pipeline_microbatches
    if micro % pieces:
        yield (
            f"num_pipeline_microbatches={pieces} does not divide the micro-batch of {micro} examples: "
            f"{plan.empty_slots_per_micro_batch} of {plan.micro_batch_slots} slots stay empty."
        )
    total = plan.global_batch_to_train
    if plan.loads_per_step > total:
        yield (
            f"expansion_factor_real_data={number_text(plan.expansion_factor_real_data)} reads the "
            f"{counted(total, 'example')} of a step in {plan.loads_per_step:,} loads; the others are empty."
            f"{nearest_clause([Fraction(1, total)])}"
        )
    if not splits_residual(config, plan.mesh):
        yield (
            f"max_target_length={config.max_target_length} is not a multiple of {plan.mesh['context']} context x "
            f"{plan.mesh['tensor']} tensor shards: every device of a tensor group holds all activations between blocks."
        )
    if not config.master_weights and (saved := master_bytes(config, plan.mesh, plan.diloco_num_replicas)):
        yield (
            f"master_weights=false with weight_dtype={config.weight_dtype}: an update smaller than 2^-9 of its weight "
            "is rounded away, and so is the sum of many such updates; this saves 4 bytes per parameter, "
            f"{bytes_text(saved)} per device."
        )
    if plan.rl is not None:
        yield from plan.rl.memory_warnings(plan.memory)
    else:
        works = "lower per_device_batch_size, raise gradient_accumulation_steps, or set remat_policy=full."
        yield from plan.memory.warnings(works)
    yield from _kernel_warnings(config, plan)
    if plan.rl is not None:
        yield from plan.rl.warnings(config, plan.num_examples)
    yield from _length_warnings(config, plan)


def _rate_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    """A warning of a learning rate that destroys a pretrained model, or at which a large one does not train."""
    rate = plan.scaling.scaled["learning_rate"]
    if config.optimizer not in ("adamw", "adafactor", "lion"):  # others have rates of another size
        return
    if config.load_parameters_path and rate > _LARGEST_TUNING_RATE:
        what = "a pretrained model: fine-tuning takes 1e-6 to 1e-4, with LoRA up to 1e-3"
    elif rate >= _LARGE_MODEL_RATE and (total := count_parameters(config).total) >= _LARGE_MODEL:
        what = f"{total / 1e9:.1f} billion parameters: most models of this size take 1e-4 to 1e-3"
    else:
        return
    yield f"learning_rate={rate:g} is high for {what}."


def _length_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    """The warnings that depend on where the run ends."""
    total, period = plan.global_batch_to_train, plan.diloco_sync_period
    # A schedule that counts examples or tokens counts them in steps of the target batch.
    schedule = Fraction(plan.steps) if config.schedule_unit == "steps" else Fraction(plan.total_examples, total)
    if config.warmup_steps > schedule:
        shown = f"steps={plan.steps}"
        if schedule != plan.steps:
            shown += f", which are {rounded_text(float(schedule))} at the target of {total} examples"
        yield f"warmup_steps={number_text(config.warmup_steps)} is more than {shown}: the run ends in the warm-up."
    ramp_steps = plan.length.stages_ahead[-1].first_step - 1
    if plan.rampup and ramp_steps > plan.steps:
        yield (
            f"the ramp takes {ramp_steps} steps, more than steps={plan.steps}: the target "
            f"per_device_batch_size={number_text(plan.per_device_batch_size)} is not reached."
        )
    if period is not None and (unsynchronised := plan.steps % period):
        yield (
            f"steps={plan.steps} is not a multiple of diloco_sync_period={period}: the last {unsynchronised} "
            f"step{'' if unsynchronised == 1 else 's'} are not in the synchronised parameters."
        )


def _diloco_warnings(plan: BatchPlan) -> Iterator[str]:
    replicas = plan.diloco_num_replicas
    if replicas is None:
        return
    smallest = min(stage.micro_batch_to_train for stage in plan.stages)
    slots = plan.slots_for(smallest)
    idle = replicas - -(-smallest * replicas // slots)  # examples fill the first slots, replica after replica
    if idle:
        yield (
            f"a micro-batch of {smallest} example{'' if smallest == 1 else 's'} in {slots} slots leaves {idle} of "
            f"{replicas} DiLoCo replicas without one: raise per_device_batch_size or lower diloco_num_replicas."
        )


def _kernel_warnings(config: Config, plan: BatchPlan) -> Iterator[str]:
    kernel, remat = plan.attention_kernel.name, remat_of(config)
    if config.balance_attention and plan.layout_shards == (plan.diloco_num_replicas or 1):
        yield "balance_attention=true changes nothing: no shard of the batch waits for another."
    elif config.balance_attention and not KERNELS[kernel].skips_documents:
        yield (
            f"balance_attention=true makes no step shorter with attention={kernel}, which takes equally long for every "
            "row, whatever documents it contains."
        )
    if kernel.startswith("cudnn") and remat and "context" in (*remat.saved, *remat.offloaded):
        yield (
            f"attention={kernel} keeps no context, because jax's call of cuDNN does not name it: with "
            f"remat_policy={config.remat_policy} the backward pass computes it again."
        )
