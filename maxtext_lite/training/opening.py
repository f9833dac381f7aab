"""The opening of a run: its data, its plan and its parts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import jax

from maxtext_lite.batching import BatchPlan, Topology, has_same_batch_keys, keep_batches, make_plan, plan_batch
from maxtext_lite.batching.devices import device_of_kind
from maxtext_lite.config import Config, UserError, registry
from maxtext_lite.config.errors import Refusal, counted, settings_of
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.config.keys import GLOBAL_BATCH_KEYS
from maxtext_lite.data import Examples, ExampleSource, example_shape
from maxtext_lite.data.history import steps_left
from maxtext_lite.data.sources import with_history
from maxtext_lite.data.sources_on_hosts import open_sources_on_hosts
from maxtext_lite.parallel import accelerator_of, start_devices
from maxtext_lite.training.arrays import Device
from maxtext_lite.training.checkpoint import newest_start
from maxtext_lite.training.objective import Loss, Objective
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import has_checkpoints, run_directory
from maxtext_lite.training.state import CONFIGURED, Overrides

Sources: TypeAlias = tuple[ExampleSource, ExampleSource | None]
"""The training examples, and the held-out ones or None."""

_ANY_STEPS = 1_000_000
"""Stands in for the unknown number of steps of a run in epochs, which does not affect the split of its batch."""


def open_run(
    config: Config,
    sources: Sources | None = None,
    own: Overrides = CONFIGURED,
    *,
    stated: Mapping[str, str] | None = None,
    device_memory_gb: float | None = None,
) -> TrainingRun:
    """The run of a config, with its data opened and its batches planned.

    Args:
      sources: None: those of the config.
      stated: as in `TrainingRun`.
      device_memory_gb: memory of a device that a step may use, in units of 1e9 bytes; None: all of it.
    Raises:
      UserError: the config cannot be trained on these devices or this data, or contradicts the run directory.
    """
    plan, (source, eval_source) = open_data(config, sources, device_memory_gb)
    run = TrainingRun(config, plan, source=source, eval_source=eval_source, own=own, stated=stated)
    if not run.resumes:  # otherwise the restored history tells what the sources have left
        steps_left(config, plan, with_history(config, source)[0], step=0, examples_seen=0)
    return run


def start_run(config: Config) -> list[Any]:
    """All devices of a run, once its processes have agreed that they have the same run and can start it.

    Raises:
      UserError: they have different configs, versions of libraries, or kinds of devices, or load_parameters_path names
        no parameters.
    """
    devices = start_devices()
    if jax.process_count() > 1:
        from maxtext_lite.training.one_config import require_one_config

        require_one_config(config)
    if config.load_parameters_path:
        from maxtext_lite.training.parameter_files import check_start

        check_start(config, resumes=has_checkpoints(run_directory(config)) and not config.starts_over)
    return devices


def keep_batch(config: Config, stated: Mapping[str, str]) -> Config:
    """The config with the global batches of the run that it resumes, unless a batch key has changed since.

    Args:
      stated: the user's `batch_settings`.
    Raises:
      UserError: these devices cannot have them.
    """
    if config.on_resume_batch == "config" or config.starts_over or not has_checkpoints(run_directory(config)):
        return config
    start = newest_start(run_directory(config))
    if start is None or not has_same_batch_keys(start, stated):
        return config
    batches = [(threshold, examples) for threshold, examples in start["batches"]]
    kept = keep_batches(config, batches, len(start_devices()))
    changed = (key for key in GLOBAL_BATCH_KEYS if getattr(kept, key) != getattr(config, key))
    return kept.with_origins({**config.origins, **dict.fromkeys(changed, "on_resume_batch")})


def own_sources(config: Config, source: Examples | None, eval_source: Examples | None) -> Sources | None:
    """The caller's own examples; None: the config's.

    Raises:
      UserError: the config is about other data.
    """
    if source is None:
        if eval_source is not None:
            raise UserError("eval_source without source: pass both, or eval_dataset_path in the config.")
        return None
    from maxtext_lite.data.own_examples import own_examples

    _refuse_pairs(config, "source")
    if config.balance_attention:
        raise UserError(
            "balance_attention=true has no effect with source, whose documents are not known before its examples are "
            "read. Nearest that works: false."
        )
    sizes = {"num_tokens": config.max_target_length, "vocab_size": config.vocab_size}
    held_out = None if eval_source is None else own_examples(eval_source, key="eval_source", **sizes)
    return own_examples(source, key="source", **sizes), held_out


def own_objective(config: Config, loss: Loss, sources: Sources | None) -> Objective:
    """The objective that minimises the caller's own loss; tries it first on rows like the sources'.

    Raises:
      UserError: the config is about pairs of rows, or the loss breaks a promise of `Loss`.
    """
    from maxtext_lite.training.custom_loss import custom_loss

    _refuse_pairs(config, "objective")
    if config.mtp_num_layers:
        key = f"mtp_num_layers={config.mtp_num_layers}"
        raise UserError(f"{key} does not apply to a custom objective. Nearest that works: mtp_num_layers=0.")
    start_devices()  # processes must join before any of them computes
    return custom_loss(
        loss,
        fields=sources[0].fields if sources else example_shape(config)[1],
        vocab_size=config.vocab_size,
        emb_dim=config.base_emb_dim,
        z_loss_multiplier=config.z_loss_multiplier,
    )


def _refuse_pairs(config: Config, name: str) -> None:
    """Refuses an object for single rows where the config is about pairs."""
    if config.rows_per_example > 1:
        raise UserError(
            f"dataset_type={config.dataset_type} is about pairs of rows; {name} is about single ones. "
            "Nearest that work: dataset_type=text or sft."
        )


def open_data(
    config: Config, sources: Sources | None = None, device_memory_gb: float | None = None
) -> tuple[BatchPlan, Sources]:
    """The plan of a config's run, and its data; arguments and errors as for `open_run`."""
    machine = machine_of(start_devices())
    hosts = plan_batch(config, **machine).loading_hosts  # refuses what is wrong before the data are opened
    sources = sources or open_sources_on_hosts(config, vocab_size=config.vocab_size, loading_hosts=hosts)
    source = sources[0]
    try:
        plan = make_plan(config, **machine, num_examples=len(source), device_memory_gb=device_memory_gb)
    except UserError as error:
        if not source.packed_text:
            raise
        data = f"{counted(len(source), 'example')}{source.packed_text}"
        raise UserError(f"{data}: {problem}" for problem in error.problems) from None
    return plan, sources


def chosen_split(config: Config, device_memory_gb: float | None) -> dict[str, Any]:
    """The keys of the chosen split of the global batch for the devices: by the registry's `choose`.

    Args:
      device_memory_gb: as in `open_run`; None: the value in the table of devices.
    Raises:
      UserError: no split is legal, or none fits; or nothing that chooses one is installed.
    """
    devices = start_devices()
    if not registry.is_installed("choose", "split"):
        rule = "per_device_batch_size=-1 (auto) is chosen by maxtext_lite.analysis, which is not installed."
        per_device = Fraction(config.stated_global_batch, len(devices))
        raise UserError(str(Refusal("per_device_batch_size", rule, (per_device,))))
    kind = devices[0].device_kind
    machine = machine_of(devices)
    device = device_of_kind(kind)
    if device and device_memory_gb is None:
        device_memory_gb = device.memory_bytes / 1e9
    if config.num_epochs:
        config = config.model_copy(update={"num_epochs": Fraction(0), "steps": _ANY_STEPS})
    topology = Topology(machine["num_devices"], machine["num_hosts"], Accelerator.planned(machine["platform"]))
    plan_of = functools.partial(make_plan, **machine, device_memory_gb=device_memory_gb)
    keys, how = registry.load("choose", "split")(config, topology, device, plan_of)
    if jax.process_index() == 0:
        said = " ".join(settings_of(keys))
        print(f"global_batch_size={config.stated_global_batch} on {len(devices)} x {kind}: {said}, {how} that fit")
    return keys


def machine_of(devices: Sequence[Device]) -> dict[str, Any]:
    """The arguments of `make_plan` that describe the machine with these devices."""
    return {"num_devices": len(devices), "num_hosts": jax.process_count(), "platform": accelerator_of(devices[0])}


def plan_on_devices(plan: BatchPlan) -> Callable[[Config], BatchPlan]:
    """A function that plans other configs for the devices, data and memory of this plan."""
    limit = None if plan.memory.limit is None else plan.memory.limit / 1e9
    machine = machine_of(jax.devices())
    return lambda config: make_plan(config, **machine, num_examples=plan.num_examples, device_memory_gb=limit)
