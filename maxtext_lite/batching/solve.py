"""Legal plans near an illegal one: what `make_plan` and `load_plan` suggest when they refuse."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Self, cast

from maxtext_lite.batching.batch import Batch, SmallerBatch, derive_batch, stated_batch
from maxtext_lite.batching.rl import RLBatch, rl_batch
from maxtext_lite.batching.sizes import Sizes, derive_sizes
from maxtext_lite.batching.topology import MESH_KEYS, Topology, mesh_key, topology_violations
from maxtext_lite.config import Config, Refusal, RLRunConfig
from maxtext_lite.config.load import UNUSED_IN_RL, defaults_of
from maxtext_lite.config.suggest import ConfigRequest, suggest
from maxtext_lite.config.violation import Change, Violation, divisors, divisors_of

_DATA_PARALLEL: Change = dict.fromkeys(MESH_KEYS, 1) | {mesh_key("ici", "data"): -1}
"""The mesh that suits every machine and model: copies of the model, one per device."""
_ONE_STAGE: Change = {
    **_DATA_PARALLEL,
    "pipeline_schedule": "gpipe",
    "num_pipeline_microbatches": -1,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_repeats": -1,
}
_PLAIN_BATCH: Change = {
    "per_device_batch_size": Fraction(1),
    "gradient_accumulation_steps": 1,
    "global_batch_size": 0,
    "enable_rampup_batch_size": False,
}
_PLAINEST: Change = {
    **_ONE_STAGE,
    **_PLAIN_BATCH,
    "eval_per_device_batch_size": Fraction(0),
    "expansion_factor_real_data": Fraction(-1),
    "diloco_num_replicas": -1,
    "scale_adam_with_batch": False,
}
"""A plan that suits every machine and model."""
_PER, _STEPS = "per_device_batch_size", "gradient_accumulation_steps"
_MACHINE: tuple[str, ...] = ("num_devices", "num_hosts")
_REST = ("ici_data_parallelism", "ici_fsdp_parallelism")  # axes that may take up the remaining devices
_MOST_SIZES = 6
_MOST_BATCHES = 16


@dataclass(frozen=True)
class PlanRequest(ConfigRequest):
    """A config on a machine, both of which may be changed.

    Attributes:
      num_examples: training examples in the data, where known.
    """

    topology: Topology
    num_examples: int | None

    def changed(self, change: Change) -> Self:
        """The same request with new values of some keys, which may include num_devices and num_hosts."""
        machine = cast("Mapping[str, int]", {key: change[key] for key in _MACHINE if key in change})
        unused = {*machine, *(UNUSED_IN_RL if isinstance(self.config, RLRunConfig) else ())}
        keys = {key: value for key, value in change.items() if key not in unused}
        devices, hosts = (machine.get(key, getattr(self.topology, key)) for key in _MACHINE)
        topology = replace(self.topology, num_devices=devices, num_hosts=hosts)
        return replace(self, config=self.config.model_copy(update=keys), topology=topology)

    def value(self, key: str) -> object:
        """The value of a key, or the machine's num_devices or num_hosts."""
        return getattr(self.topology if key in _MACHINE else self.config, key)

    def violations(self) -> Iterator[Violation]:
        """Every broken rule: of the config alone, and of the config on this machine."""
        said: set[str] = set()
        for violation in super().violations():
            said.add(violation.message)
            yield violation
        outcome = resolve(self.config, self.topology, self.num_examples)
        if isinstance(outcome, list):
            yield from (violation for violation in outcome if violation.message not in said)

    def sides(self, violation: Violation) -> list[Iterable[Change]]:
        """The changes that the rule itself allows; for the batch of a whole step, the keys that make it up."""
        sides = super().sides(violation)
        first = violation.nearest[0] if violation.nearest else None
        return [self._batches(first.most), *sides[1:]] if isinstance(first, SmallerBatch) else sides

    def moves(self, violation: Violation) -> Iterator[Change]:
        """Other values of the keys that the violation names; for mesh and ramp keys, whole meshes and ramps."""
        yield from super().moves(violation)
        named = self.named(violation)
        yield from self._meshes([key for key in MESH_KEYS if key in named])
        if any(key in violation.message for key in _MACHINE):
            yield {"num_hosts": 1}
            yield {"num_devices": 1, "num_hosts": 1}
        if any("per_device_batch_size_" in key for key in named):
            yield from self._ramps()

    def resorts(self) -> Iterator[Change]:
        """The plainest mesh, batch, or both; then the defaults of all keys."""
        one = _MACHINE if topology_violations(replace(self.topology, num_hosts=1)) else ("num_hosts",)
        machine = dict.fromkeys(one if topology_violations(self.topology) else (), 1)
        for plain in (_DATA_PARALLEL, _ONE_STAGE, _PLAIN_BATCH, _PLAINEST, {**_PLAINEST, "last_batch": "train"}):
            yield {**plain, **machine}
        yield from ({**change, **_PLAINEST, **machine} for change in super().resorts())

    def present(self, key: str) -> object:
        """The value from which a change departs; for a mesh key of -1, the devices that remain for it."""
        value = self.value(key)
        if key not in MESH_KEYS or value != -1:
            return value
        stated = math.prod(size for other in MESH_KEYS if (size := getattr(self.config, other)) > 1)
        return max(self.topology.num_devices // stated, 1)

    def _meshes(self, keys: Sequence[str]) -> Iterator[Change]:
        """Meshes with one of the keys at a number of devices near its own, alone or with another taking the rest."""
        for key in dict.fromkeys((*keys, *_REST) if keys else ()):
            present = cast("int", self.present(key))
            for side in divisors_of(key, self.topology.num_devices, present)():
                for change in islice(side, _MOST_SIZES):
                    yield change
                    yield from ({**change, rest: -1} for rest in _REST if rest != key)
                yield from ({key: present, rest: -1} for rest in _REST if rest != key)

    def _batches(self, most: int) -> list[Change]:
        """Batches of at most `most` examples, the largest first, each made by as few keys as possible."""
        config, devices = self.config, self.topology.num_devices
        batch = derive_batch(config, devices)
        if not isinstance(batch, Batch):
            return []
        micro, steps = batch.micro_batch_to_train, batch.gradient_accumulation_steps
        if config.enable_rampup_batch_size:
            target, increment = batch.per_device_batch_size, config.per_device_batch_size_increment
            fewest = math.ceil((target - Fraction(most, devices * steps)) / increment)
            starts = (target - number * increment for number in range(fewest, fewest + 64))
            return [{"per_device_batch_size_start": start} for start in starts if start > 0]

        def down_from(largest: int) -> range:
            return range(largest, max(largest - _MOST_BATCHES, 0), -1)

        found: list[tuple[int, dict[str, object]]] = [
            *((rows * steps, {_PER: Fraction(rows, devices)}) for rows in down_from(most // steps)),
            *((micro * times, {_STEPS: times}) for times in down_from(most // micro)),
            *((rows, {_PER: Fraction(rows, devices), _STEPS: 1}) for rows in down_from(most)),
        ]
        if config.global_batch_size:  # keys of -1 follow from it
            derived = [key for key in (_PER, _STEPS) if self.value(key) == -1]
            for size, change in found:
                change["global_batch_size"] = size
                for key in derived:
                    change.pop(key, None)
        found.sort(key=lambda pair: (len(pair[1]), -pair[0]))
        return [change for _, change in found]

    def _ramps(self) -> Iterator[Change]:
        """No ramp, or one to the same target whose equal increments are whole examples."""
        yield {"enable_rampup_batch_size": False}
        if batch := stated_batch(self.config, self.topology.num_devices):
            for stages in divisors(batch.micro_batch_to_train)[1:_MOST_BATCHES]:
                first = batch.per_device_batch_size / stages
                yield {"per_device_batch_size_start": first, "per_device_batch_size_increment": first}


def resolve(
    config: Config, topology: Topology, num_examples: int | None = None
) -> tuple[Sizes, RLBatch | None] | list[Violation]:
    """The sizes of a run, with its batches if it is reinforcement learning; or every broken rule.

    Args:
      num_examples: training examples in the data, where known.
    """
    rl = None
    if isinstance(config, RLRunConfig):
        broken = topology_violations(topology)
        rl = broken or rl_batch(config, topology)
        if isinstance(rl, list):
            return rl
        num_examples = None  # reinforcement learning has no length in epochs
        hosts = topology.num_hosts if rl.takes_turns else 1
        topology = replace(topology, num_devices=rl.trainer_devices, num_hosts=hosts)
    sizes = derive_sizes(config, topology, num_examples, rl.trained if rl else None)
    return (sizes, rl) if isinstance(sizes, Sizes) else sizes


def refusals(
    config: Config, topology: Topology, num_examples: int | None = None, wrong: Sequence[Refusal] = ()
) -> list[Refusal]:
    """One refusal, with what would work, for each wrong value and each broken rule.

    Args:
      num_examples: training examples in the data, where known.
      wrong: wrong values, in place of which the config has the defaults.
    """
    return suggest(PlanRequest(config, defaults_of(type(config)), topology, num_examples), wrong)
