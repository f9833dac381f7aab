"""A run opened: its data, its batches, and what it is made of."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# jax, optax and orbax declare some of their functions in part.

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import jax

from maxtext_lite.batching import BatchPlan, Topology, batch_sizes, choose, make_plan
from maxtext_lite.batching.devices import device_of_kind
from maxtext_lite.config import Config
from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.hf.config import hf_directory
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.data import ExampleSource, open_sources_on_hosts
from maxtext_lite.data.mixture_of_run import in_run, steps_left
from maxtext_lite.parallel import accelerator_of, start_devices
from maxtext_lite.training.arrays import Device
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import has_checkpoints
from maxtext_lite.training.state import CONFIGURED, OwnParts

Sources: TypeAlias = tuple[ExampleSource, ExampleSource | None]
"""The training examples, and the held-out ones."""

_ANY_STEPS = 1_000_000
"""Of a run in epochs: how many there are changes nothing in how its batch is split."""


def open_run(
    config: Config,
    sources: Sources | None = None,
    own: OwnParts = CONFIGURED,
    *,
    device_memory_gb: float | None = None,
) -> TrainingRun[ExampleSource]:
    """The run of a config that `train` takes: its data opened, its batches planned.

    Args:
      sources: None: those of the config.
      device_memory_gb: that a step may hold on a device, in units of 1e9 bytes; None: what the device has.
    Raises:
      UserError: the config cannot be trained on these devices or this data, or contradicts the run directory.
    """
    plan, (source, eval_source) = open_data(config, sources, device_memory_gb)
    run = TrainingRun(config, plan, source=source, eval_source=eval_source, own=own)
    if not has_checkpoints(run.directory):  # of others, their history says what sources have given
        steps_left(config, plan, in_run(config, source)[0], step=0, examples_seen=0)
    return run


def open_data(
    config: Config, sources: Sources | None = None, device_memory_gb: float | None = None
) -> tuple[BatchPlan, Sources]:
    """The batches of a config's run, and the data that it reads; arguments and errors as of `open_run`."""
    machine = machine_of(start_devices())
    sizes, _ = batch_sizes(config, **machine)  # so that what is wrong is refused before data are opened
    sources = sources or open_sources_on_hosts(
        config,
        vocab_size=config.vocab_size,
        loading_hosts=sizes.loading.loading_hosts,
        begins_as_elsewhere=comes_from_elsewhere(config),
    )
    return make_plan(config, **machine, num_examples=len(sources[0]), device_memory_gb=device_memory_gb), sources


def chosen_split(config: Config, device_memory_gb: float | None = None) -> dict[str, Any]:
    """The keys of a split of the global batch for the devices: see `batching.choose`.

    Args:
      device_memory_gb: as in `open_run`, but None: what the table of devices says.
    Raises:
      UserError: nothing is legal, or nothing fits.
    """
    devices = start_devices()
    kind, machine = devices[0].device_kind, machine_of(devices)
    device = device_of_kind(kind)
    if device and device_memory_gb is None:
        device_memory_gb = device.memory_bytes / 1e9
    if config.num_epochs:
        config = config.model_copy(update={"num_epochs": Fraction(0), "steps": _ANY_STEPS})
    topology = Topology(machine["num_devices"], machine["num_hosts"], Accelerator.planned(machine["platform"]))
    plan_of = functools.partial(make_plan, **machine, device_memory_gb=device_memory_gb)
    keys = choose(config, topology, device, plan_of)
    if jax.process_index() == 0:
        said = " ".join(f"{key}={setting_text(value)}" for key, value in keys.items())
        how = "predicted to be the fastest" if device else "the fewest micro-batches"
        print(f"global_batch_size={config.global_batch_size} on {len(devices)} x {kind}: {said}, {how} that fit")
    return keys


def machine_of(devices: Sequence[Device]) -> dict[str, Any]:
    """What `make_plan` is to know of the machine that has these devices."""
    return {"num_devices": len(devices), "num_hosts": jax.process_count(), "platform": accelerator_of(devices[0])}


def comes_from_elsewhere(config: Config) -> bool:
    """Whether the run begins with a model that was imported, or that began with one."""
    return bool(config.load_parameters_path) and hf_directory(config.load_parameters_path) is not None


def plan_on_devices(plan: BatchPlan) -> Callable[[Config], BatchPlan]:
    """Plans other configs for the devices, the data and the memory that a plan is for."""
    limit = None if plan.memory.limit is None else plan.memory.limit / 1e9
    machine = machine_of(jax.devices())
    return lambda config: make_plan(config, **machine, num_examples=plan.num_examples, device_memory_gb=limit)
