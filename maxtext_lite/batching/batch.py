"""The batch of one optimizer step, stated or derived from global_batch_size."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import BatchConfig, Config
from maxtext_lite.config.errors import (
    Refusal,
    around,
    counted,
    divisors,
    divisors_around,
    multiples_around,
    number_text,
    refuse,
)


@dataclass(frozen=True)
class Batch:
    """The examples of one optimizer step: per device, per micro-batch and in total."""

    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    micro_batch_to_train: int

    @property
    def global_batch_to_train(self) -> int:
        """Examples per optimizer step."""
        return self.micro_batch_to_train * self.gradient_accumulation_steps


class SampledBatch(ABC):
    """The batch of a run that samples its examples instead of reading them, and its part of the plan.

    A run kind other than "train" registers a function (config, topology) -> SampledBatch, or the rules that are broken,
    under its name in the registry's kind `batch`.
    """

    @property
    @abstractmethod
    def trained(self) -> Batch:
        """The batch of the devices that train."""

    @property
    @abstractmethod
    def stages(self) -> list[tuple[int, Batch]]:
        """The threshold of each stage, in examples, and its batch."""

    @property
    @abstractmethod
    def examples_per_entry(self) -> int:
        """Examples that an entry of the data becomes, over all steps made with it."""

    @abstractmethod
    def training_part(self, topology: Topology) -> Topology:
        """The devices of the machine that train."""

    @abstractmethod
    def with_sampling(self, memory: MemoryEstimate, config: Config, mesh: Mapping[str, int]) -> MemoryEstimate:
        """The memory of a device that trains: `memory` (a step's) and what sampling holds on it besides."""

    @abstractmethod
    def memory_warnings(self, memory: MemoryEstimate) -> list[str]:
        """Warnings of devices that have less memory than the run needs."""

    @abstractmethod
    def warnings(self, config: Config, num_entries: int | None) -> list[str]:
        """What works but is probably a mistake; `num_entries` of the data, None where unknown."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Its rows of the plan's table."""

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Its part of plan.json."""


def wants_solving(config: Config) -> bool:
    """Whether both keys that split a global batch must be solved for."""
    is_open = config.per_device_batch_size == -1 == config.gradient_accumulation_steps
    return is_open and config.stated_global_batch > 0 and not config.batch_schedule


def split_stage(config: BatchConfig, examples: int, num_devices: int) -> Batch | Refusal:
    """The split of a batch of batch_schedule, or the rule that it breaks.

    A device has per_device_batch_size examples, or with rampup_mode=per_device_batch_size the most up to that with
    which micro-batches divide the batch.
    """
    per_device = config.per_device_batch_size
    common = math.gcd(*(stage for _, stage in config.batch_schedule))
    if per_device == -1:
        nearest = 1 if config.rampup_mode == "per_device_batch_size" else Fraction(common, num_devices)
        return refuse(config, "per_device_batch_size", "gives batch_schedule no largest micro-batch", nearest)
    most = per_device * num_devices
    micro = int(most)
    factors = f"per_device_batch_size={number_text(per_device)} x {counted(num_devices, 'device')}"
    if config.rampup_mode == "per_device_batch_size":
        if not micro:
            return not_whole("per_device_batch_size", per_device, num_devices, common)
        micro = max(size for size in divisors(examples) if size <= most)
    elif most.denominator != 1:
        return not_whole("per_device_batch_size", per_device, num_devices, common)
    elif examples % micro:
        rule = f"has a stage of {counted(examples, 'example')}, not a multiple of {factors} = {micro}"
        below = [[threshold, max(stage // micro, 1) * micro] for threshold, stage in config.batch_schedule]
        above = [[threshold, -(-stage // micro) * micro] for threshold, stage in config.batch_schedule]
        return refuse(config, "batch_schedule", rule, below, above)
    return Batch(Fraction(micro, num_devices), examples // micro, micro)


def derive_batch(config: Config, num_devices: int) -> Batch | Refusal:
    """The batch that the config states, or that follows from a stated global batch, or the rule that it breaks."""
    per_device = config.per_device_batch_size
    accumulation = config.gradient_accumulation_steps
    stated = config.stated_global_batch
    if config.batch_schedule:
        target = split_stage(config, stated, num_devices)
        if isinstance(target, Batch) and accumulation not in (-1, 1, target.gradient_accumulation_steps):
            rule = f"contradicts the last stage of batch_schedule, of {stated} examples"
            return refuse(config, "gradient_accumulation_steps", rule, target.gradient_accumulation_steps, -1)
        return target
    key = "global_batch_size"
    unit = 1
    what = ""
    if config.global_batch_tokens:
        key = "global_batch_tokens"
        unit = config.tokens_per_example
        what = f"of {counted(stated, 'example')} "
        if broken := _token_violation(config, num_devices):
            return broken
    derived = [key for key in ("per_device_batch_size", "gradient_accumulation_steps") if getattr(config, key) == -1]
    if derived and stated == 0:
        nearest = dict.fromkeys(derived, 1)
        return refuse(config, derived[0], "follows from global_batch_size, which is 0: not stated", nearest)
    if len(derived) == 2:
        rule = (
            f"and per_device_batch_size=-1 cannot both follow from global_batch_size={stated}; "
            "train chooses both for its devices, and plan for those of --device"
        )
        return refuse(config, "gradient_accumulation_steps", rule, *divisors_around(stated, 0))
    if per_device == -1:
        if stated % accumulation:
            micro_text = number_text(Fraction(stated, accumulation))
            rule = f"of global_batch_size={stated} makes {micro_text} examples per micro-batch, not a whole number"
            return refuse(config, "gradient_accumulation_steps", rule, *divisors_around(stated, accumulation))
        micro = stated // accumulation
        return Batch(Fraction(micro, num_devices), accumulation, micro)
    micro = per_device * num_devices
    if micro.denominator != 1:
        return not_whole("per_device_batch_size", per_device, num_devices, stated if accumulation == -1 else 0)
    factors = f"per_device_batch_size={number_text(per_device)} x {counted(num_devices, 'device')}"
    if accumulation == -1:
        if stated % micro:
            rule = f"{what}is not a multiple of {factors} = {micro} examples"
            sizes = [Fraction(examples, num_devices) for examples in divisors(stated)]
            split = {"per_device_batch_size": around(sizes, per_device)[0]}
            return refuse(config, key, rule, multiples_around(int(micro), stated)[0] * unit, split)
        return Batch(per_device, int(stated / micro), int(micro))
    total = int(micro * accumulation)
    if stated not in (0, total):
        rule = f"{what}contradicts {factors} x gradient_accumulation_steps={accumulation} = {total}"
        others = [] if stated % accumulation else [{"per_device_batch_size": Fraction(-1)}]
        return refuse(config, key, rule, total * unit, *others)
    return Batch(per_device, accumulation, int(micro))


def _token_violation(config: Config, num_devices: int) -> Refusal | None:
    """Refuses global_batch_tokens that are not a whole number of examples, or not global_batch_size."""
    key = "global_batch_tokens"
    unit = config.tokens_per_example
    stated = config.global_batch_tokens
    rows = "" if config.rows_per_example == 1 else f"{config.rows_per_example} rows x "
    if stated % unit:
        rule = f"is not a multiple of {rows}max_target_length={config.max_target_length}"
        per_device = config.per_device_batch_size
        accumulation = config.gradient_accumulation_steps
        factors = (per_device * num_devices, accumulation)
        whole = unit * math.prod(int(each) for each in factors if each.denominator == 1 and each > 0)
        near = multiples_around(whole, stated) if -1 in (per_device, accumulation) else [whole]
        return refuse(config, key, rule, *near)
    if config.global_batch_size not in (0, stated // unit):
        rule = f"is {stated // unit} examples, not global_batch_size={config.global_batch_size}"
        return refuse(config, key, rule, config.global_batch_size * unit, 0)
    return None


def stated_batch(config: BatchConfig, num_devices: int) -> Batch | None:
    """The batch as far as the config states it, for rules that can still be checked."""
    per_device = config.per_device_batch_size
    if per_device == -1 or (per_device * num_devices).denominator != 1:
        return None
    return Batch(per_device, max(config.gradient_accumulation_steps, 1), int(per_device * num_devices))


def not_whole(key: str, per_device: Fraction, num_devices: int, whole: int = 0) -> Refusal:
    """Refuses a per-device size that is not a whole number of examples over all devices.

    Args:
      whole: the global batch that they must divide; 0: none is stated.
    """
    near = multiples_around(Fraction(1, num_devices), per_device)
    if whole:
        near = around([Fraction(examples, num_devices) for examples in divisors(whole)], per_device)
    return Refusal(
        key,
        f"{key}={number_text(per_device)} x {counted(num_devices, 'device')} = "
        f"{number_text(per_device * num_devices)} examples, not a whole number.",
        tuple(near),
    )
