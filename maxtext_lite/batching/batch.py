"""The batch of one optimizer step, stated or derived from global_batch_size."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import BatchConfig, Config
from maxtext_lite.config.errors import Refusal, counted, number_text, refuse
from maxtext_lite.config.nearest import around, divisors, divisors_around, multiples_around


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
        """What the devices that train see."""

    @property
    @abstractmethod
    def examples_per_entry(self) -> int:
        """Examples that an entry of the data becomes, over all steps made with it."""

    @abstractmethod
    def training_part(self, topology: Topology) -> Topology:
        """The devices of the machine that train."""

    @abstractmethod
    def with_sampling(self, memory: MemoryEstimate, config: Config, mesh: Mapping[str, int]) -> MemoryEstimate:
        """The memory of a device that trains: `memory`, that of a step, and what sampling holds on it besides."""

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


def wants_solving(config: BatchConfig) -> bool:
    """Whether both keys that split a global batch are to be solved for."""
    return config.global_batch_size > 0 and config.per_device_batch_size == -1 == config.gradient_accumulation_steps


def derive_batch(config: BatchConfig, num_devices: int) -> Batch | Refusal:
    """The batch that the config states or that follows from global_batch_size, or the rule that it breaks."""
    per_device = config.per_device_batch_size
    accumulation = config.gradient_accumulation_steps
    stated = config.global_batch_size
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
            rule = f"is not a multiple of {factors} = {micro} examples"
            sizes = [Fraction(examples, num_devices) for examples in divisors(stated)]
            split = {"per_device_batch_size": around(sizes, per_device)[0]}
            return refuse(config, "global_batch_size", rule, multiples_around(int(micro), stated)[0], split)
        return Batch(per_device, int(stated / micro), int(micro))
    total = int(micro * accumulation)
    if stated not in (0, total):
        rule = f"contradicts {factors} x gradient_accumulation_steps={accumulation} = {total}"
        return refuse(config, "global_batch_size", rule, total, {"per_device_batch_size": Fraction(-1)})
    return Batch(per_device, accumulation, int(micro))


def stated_batch(config: BatchConfig, num_devices: int) -> Batch | None:
    """The batch as far as the config states it, so that the rules about it can still be checked."""
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
