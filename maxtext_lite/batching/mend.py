"""Every rule that a config breaks on a machine, and larger changes that mend what no small one does."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from maxtext_lite.batching.batch import PLAINEST_BATCH
from maxtext_lite.batching.rl import RLBatch, rl_batch, trained_config
from maxtext_lite.batching.sizes import Sizes, work_out
from maxtext_lite.batching.topology import DATA_PARALLEL, Topology, topology_problems
from maxtext_lite.config import Config, Refusal, RLRunConfig
from maxtext_lite.config.load import OF_NO_USE_IN_RL, defaults_of
from maxtext_lite.config.mend import WrongValue, mend
from maxtext_lite.config.problem import Edit, Problem
from maxtext_lite.config.rules import rule_problems

_PLAIN_PIPELINE: Edit = {
    "pipeline_schedule": "gpipe",
    "num_pipeline_microbatches": -1,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_repeats": -1,
}
_NO_RAMP: Edit = {"enable_rampup_batch_size": False}
_LAST_RESORTS: tuple[Edit, ...] = (
    {},
    DATA_PARALLEL,
    {**DATA_PARALLEL, **_PLAIN_PIPELINE},
    PLAINEST_BATCH,
    _NO_RAMP,
    {**PLAINEST_BATCH, **_NO_RAMP},
    {**PLAINEST_BATCH, **DATA_PARALLEL},
    {
        **PLAINEST_BATCH,
        **DATA_PARALLEL,
        **_PLAIN_PIPELINE,
        **_NO_RAMP,
        "eval_per_device_batch_size": Fraction(0),
        "expansion_factor_real_data": Fraction(-1),
        "diloco_num_replicas": -1,
        "scale_adam_with_batch": False,
    },
)
"""Ever larger changes for a problem that no small one mends; the largest suits any machine and any model."""
_ANY_EPOCHS: Edit = {"last_batch": "train"}
"""Makes the largest of them suit any number of epochs too."""


@dataclass(frozen=True)
class ConfigOnMachine:
    """A config to be mended, on a machine that can be changed too.

    Attributes:
      num_examples: training examples in the data, where known.
    """

    config: Config
    topology: Topology
    num_examples: int | None

    def edited(self, edit: Edit) -> "ConfigOnMachine":
        """The same with new values of some keys, num_devices and num_hosts among them."""
        machine = {key: value for key, value in edit.items() if key in _MACHINE}
        keys = {key: value for key, value in edit.items() if key not in machine}
        if isinstance(self.config, RLRunConfig):
            keys = {key: value for key, value in keys.items() if key not in OF_NO_USE_IN_RL}
        devices = machine.get("num_devices", self.topology.num_devices)
        hosts = machine.get("num_hosts", self.topology.num_hosts)
        assert isinstance(devices, int)
        assert isinstance(hosts, int)
        return ConfigOnMachine(
            self.config.model_copy(update=keys),
            replace(self.topology, num_devices=devices, num_hosts=hosts),
            self.num_examples,
        )

    def value(self, key: str) -> object:
        """The value of a key; of num_devices and num_hosts the machine's."""
        return getattr(self.topology if key in _MACHINE else self.config, key)

    def problems(self) -> Iterator[Problem]:
        """Every rule that is broken: of the config alone, and of it on this machine."""
        said: set[str] = set()
        for problem in rule_problems(self.config, defaults_of(type(self.config))):
            said.add(problem.message)
            yield problem
        outcome = resolve(self.config, self.topology, self.num_examples)
        if isinstance(outcome, list):
            yield from (problem for problem in outcome if problem.message not in said)


_MACHINE = ("num_devices", "num_hosts")


def resolve(
    config: Config, topology: Topology, num_examples: int | None = None
) -> tuple[Sizes, RLBatch | None] | list[Problem]:
    """The sizes of a run, and its batches where it is one of reinforcement learning; or every rule that is broken.

    Args:
      num_examples: training examples in the data, where known.
    """
    batch = None
    if isinstance(config, RLRunConfig):
        problems = topology_problems(topology)
        batch = rl_batch(config, topology) if not problems else None
        if not isinstance(batch, RLBatch):
            return [*problems, *(batch or [])]
        config, num_examples = trained_config(config, batch), None  # a length in epochs has no use there
        hosts = topology.num_hosts if batch.takes_turns else 1
        topology = replace(topology, num_devices=batch.trainer_devices, num_hosts=hosts)
    sizes = work_out(config, topology, num_examples)
    return (sizes, batch) if isinstance(sizes, Sizes) else sizes


def refusals(
    config: Config, topology: Topology, num_examples: int | None = None, wrong: Sequence[WrongValue] = ()
) -> list[Refusal]:
    """One refusal for each wrong value and each broken rule, with values that work.

    Args:
      num_examples: training examples in the data, where known.
      wrong: values in whose place the config has the defaults.
    """
    resorts: Iterable[Edit] = _LAST_RESORTS
    if config.num_epochs or any(each.key == "num_epochs" for each in wrong):
        resorts = (*resorts, *({**resort, **_ANY_EPOCHS} for resort in resorts))
    return mend(ConfigOnMachine(config, topology, num_examples), wrong, tuple(resorts))[0]
