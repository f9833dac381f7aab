"""A config: all sections together, those of reinforcement learning, their order, and all keys."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import PrivateAttr

from maxtext_lite.config.field_types import (
    AtLeastOne,
    AtLeastTwo,
    Count,
    CountOrMinusOne,
    CountOrZero,
    Exact,
    Flag,
    Lines,
    Name,
    NotNegative,
    PositiveShare,
    Seconds,
    Section,
    Temperature,
    Text,
)
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

    run_kind: ClassVar[str] = "train"
    """What the run does: its name in the registry's kinds that each kind of run implements."""

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


# ---- Reinforcement learning: what configs/post_train/rl.yml adds ----------------------------------------------------


class RLConfig(Section):
    """The batches of reinforcement learning."""

    batch_size: Count
    num_generations: AtLeastTwo
    micro_batch_size: CountOrMinusOne
    num_iterations: Count
    max_prefill_predict_length: Count
    trainer_devices_fraction: Exact
    sampler_devices_fraction: Exact


class TaskConfig(Section):
    """The prompts that the model responds to."""

    prompt_template: Lines
    apply_chat_template: Flag
    arithmetic_operations: Name
    arithmetic_largest: Count


class RewardConfig(Section):
    """The rewards of responses."""

    reward_functions: Name
    reward_weights: Text
    reward_format: Text
    reward_skip_special_tokens: Flag
    reward_error: Literal["unscored", "zero", "stop"]
    reward_timeout_seconds: Seconds


class PolicyConfig(Section):
    """The loss of reinforcement learning."""

    loss_algo: Literal["grpo", "gspo"]
    grpo_beta: NotNegative
    grpo_epsilon: PositiveShare
    grpo_epsilon_high: NotNegative
    loss_aggregation: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]
    scale_rewards: Literal["group", "none"]


class RolloutConfig(Section):
    """How responses are sampled."""

    decode_sampling_temperature: Temperature
    decode_sampling_top_k: CountOrZero
    decode_sampling_nucleus_p: PositiveShare
    eval_num_generations: Count
    eval_sampling_temperature: Temperature
    rollout_slots: CountOrMinusOne
    rollout_tensor_parallelism: Count
    rollout_fsdp_parallelism: Count
    rollout_engine: Literal["local", "vllm", "sglang", "http"]
    rollout_url: Text
    rollout_correction: Literal["none", "truncated"]
    rollout_correction_cap: AtLeastOne


class RLRunConfig(Config, RLConfig, TaskConfig, RewardConfig, PolicyConfig, RolloutConfig):
    """Every key of a run of reinforcement learning, from a file whose `base` is post_train/rl.yml."""

    run_kind: ClassVar[str] = "rl"


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
