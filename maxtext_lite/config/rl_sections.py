"""The keys that configs/post_train/rl.yml adds, and their types, in sections."""

from typing import Literal

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
    reward_error: Literal["zero", "stop"]
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
