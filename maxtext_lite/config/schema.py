"""A config: all sections together, their order, and all keys."""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import PrivateAttr

from maxtext_lite.config.field_types import Section
from maxtext_lite.config.rl_sections import PolicyConfig, RewardConfig, RLConfig, RolloutConfig, TaskConfig
from maxtext_lite.config.sections import (
    BatchConfig,
    DataConfig,
    LocalUpdatesConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
)


class Config(
    RunConfig,
    BatchConfig,
    OptimizerConfig,
    LocalUpdatesConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    DataConfig,
    PreferenceConfig,
):
    """Every key of a run, as `load_config` returns it. Configs with equal values are equal, whatever their origins."""

    _origins: Mapping[str, str] = PrivateAttr(default_factory=lambda: MappingProxyType({}))

    @property
    def origins(self) -> Mapping[str, str]:
        """For each key, the file that its value came from, or `command line`."""
        return self._origins

    def with_origins(self, origins: Mapping[str, str]) -> "Config":
        """The same values with these origins."""
        copy = self.model_copy()
        copy._origins = MappingProxyType(dict(origins))  # safe: only this function has the copy
        return copy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        return _restore, (type(self), dict(self.__dict__), dict(self._origins))


def _restore(kind: type[Config], values: dict[str, object], origins: dict[str, str]) -> Config:
    return kind.model_construct(**values).with_origins(origins)  # type: ignore[arg-type]


class RLRunConfig(Config, RLConfig, TaskConfig, RewardConfig, PolicyConfig, RolloutConfig):
    """Every key of a run of reinforcement learning, from a file whose `base` is post_train/rl.yml."""


SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("Run", RunConfig),
    ("Batch size", BatchConfig),
    ("Optimizer", OptimizerConfig),
    ("Local updates", LocalUpdatesConfig),
    ("Mesh", MeshConfig),
    ("Model", ModelConfig),
    ("Numerics", NumericsConfig),
    ("Data", DataConfig),
    ("Post-training", PreferenceConfig),
)
"""The sections in the order of configs/base.yml, with their headings."""

KEYS: tuple[str, ...] = tuple(key for _, section in SECTIONS for key in section.model_fields)
"""Every key, in the order of configs/base.yml."""

RL_SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("RL batch size", RLConfig),
    ("Tasks", TaskConfig),
    ("Rewards", RewardConfig),
    ("Policy", PolicyConfig),
    ("Rollout", RolloutConfig),
)
"""The sections that configs/post_train/rl.yml adds, in its order, with their headings."""

RL_KEYS: tuple[str, ...] = tuple(key for _, section in RL_SECTIONS for key in section.model_fields)
"""The keys that configs/post_train/rl.yml adds."""


def keys_of(kind: type[Config]) -> tuple[str, ...]:
    """Every key of a kind of config, in the order of its files."""
    return (*KEYS, *RL_KEYS) if issubclass(kind, RLRunConfig) else KEYS


def sections_of(config: Config) -> tuple[tuple[str, type[Section]], ...]:
    """The sections of a config, with their headings."""
    return (*SECTIONS, *RL_SECTIONS) if isinstance(config, RLRunConfig) else SECTIONS
