"""The sizes of a run on a machine, or what is wrong with its config there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

from maxtext_lite.batching.batch import SampledBatch
from maxtext_lite.batching.sizes import Sizes, derive_sizes
from maxtext_lite.batching.topology import Topology, topology_violations
from maxtext_lite.config import Config, Refusal, registry
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.suggest import ConfigRequest, suggest
from maxtext_lite.config.violation import Change, Violation

_MACHINE: tuple[str, ...] = ("num_devices", "num_hosts")


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
        unused = {*machine, *self.config.unused_keys}
        keys = {key: value for key, value in change.items() if key not in unused}
        return replace(self, config=self.config.model_copy(update=keys), topology=replace(self.topology, **machine))

    def violations(self) -> Iterator[Violation]:
        """Every broken rule: of the config alone, and of the config on this machine."""
        said: set[str] = set()
        for violation in super().violations():
            said.add(violation.message)
            yield violation
        outcome = resolve(self.config, self.topology, self.num_examples)
        if isinstance(outcome, list):
            yield from (violation for violation in outcome if violation.message not in said)


def resolve(config: Config, topology: Topology, num_examples: int | None = None) -> Sizes | list[Violation]:
    """The sizes of a run, or every broken rule.

    Args:
      num_examples: training examples in the data, where known.
    """
    if config.run_kind == "train":
        return derive_sizes(config, topology, num_examples)
    if broken := topology_violations(topology):
        return broken
    sampled: SampledBatch | list[Violation] = registry.load("batch", config.run_kind)(config, topology)
    if isinstance(sampled, list):
        return sampled
    return derive_sizes(config, sampled.training_part(topology), sampled=sampled)  # it has no length in epochs


def refusals(
    config: Config, topology: Topology, num_examples: int | None = None, wrong: Sequence[Refusal] = ()
) -> list[Refusal]:
    """One refusal, with what would work, for each wrong value and each broken rule.

    Args:
      num_examples: training examples in the data, where known.
      wrong: wrong values, in place of which the config has the defaults.
    """
    return suggest(PlanRequest(config, defaults_of(type(config)), topology, num_examples), wrong)
