"""The keys of reinforcement learning, which configs/post_train/rl.yml adds, and the rules between them and others."""

import functools
import math
import re
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar, Literal

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import Refusal, around, divisors, number_text, refuse, refuse_unused, value_text
from maxtext_lite.config.keys import Config, SourceList, listed
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.types import (
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

RL_DATASETS = ("prompts", "arithmetic")
"""The values of dataset_type that are for reinforcement learning, and only for it."""
SHIPPED_REWARDS = ("exact_answer", "numeric_answer", "format", "math_verify")
"""Reward functions that ship with maxtext_lite."""
ANSWER_REWARDS = ("exact_answer", "numeric_answer", "math_verify")
"""The shipped reward functions that compare a response with the answer in the data."""
_OPERATIONS = "+-*"
FRACTIONS = ("trainer_devices_fraction", "sampler_devices_fraction")
_UNKNOWN_TOKENS = "is impossible in RL: the number of tokens in the responses is not known in advance"
_MOST_HELD_OUT = 100_000
_LARGEST_WEIGHT = 1e6
_ITS_BATCH = "where batch_size, num_generations and micro_batch_size determine the batch"
_MOST_PROBLEMS = 2**62  # an example's number is a 64-bit integer, and the order needs one more than there are


class RLConfig(Section):
    """The batches of reinforcement learning."""

    batch_size: Count
    num_generations: AtLeastTwo
    dynamic_sampling: Count
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
    rollout_engine: Literal["local", "vllm", "sglang"]
    rollout_url: Text
    rollout_correction: Literal["none", "truncated"]
    rollout_correction_cap: AtLeastOne
    record_rollouts: Text


class RLRunConfig(Config, RLConfig, TaskConfig, RewardConfig, PolicyConfig, RolloutConfig):
    """Every key of a run of reinforcement learning, from a file whose `base` is post_train/rl.yml."""

    run_kind: ClassVar[str] = "rl"
    base_files: ClassVar[tuple[str, ...]] = (*Config.base_files, "post_train/rl.yml")
    sections: ClassVar[tuple[tuple[str, type[Section]], ...]] = (
        *Config.sections,
        ("RL batch size", RLConfig),
        ("Tasks", TaskConfig),
        ("Rewards", RewardConfig),
        ("Policy", PolicyConfig),
        ("Rollout", RolloutConfig),
    )
    unused_keys: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "per_device_batch_size": _ITS_BATCH,
            "gradient_accumulation_steps": _ITS_BATCH,
            "global_batch_size": _ITS_BATCH,
            "global_batch_tokens": _ITS_BATCH,
            "rampup_mode": _ITS_BATCH,
            "enable_rampup_batch_size": _ITS_BATCH,
            "on_resume_batch": _ITS_BATCH,
            "expansion_factor_real_data": _ITS_BATCH,
            "enable_diloco": _ITS_BATCH,
            "num_epochs": "where steps is the length of the run",
            "eval_per_device_batch_size": "where rollout_slots is the number of responses sampled at once",
            "eval_parameters": "where the policy is evaluated",
            "grain_worker_count": "where the training process reads the prompts",
        }
    )
    shown_keys: ClassVar[tuple[str, ...]] = ("batch_size", "num_generations", "micro_batch_size", "reward_functions")
    fingerprint_keys: ClassVar[tuple[str, ...]] = ("num_generations", "num_iterations")
    """They divide pairs into prompts and steps into batches."""

    def own_refusals(self) -> Iterator[Refusal | None]:
        """The rules between its keys, and between them and base.yml's."""
        for rules in (_batches, _tasks, _rewards, _responses, _rollout, _unused):
            yield from rules(self)


def records_step(config: RolloutConfig, step: int) -> bool:
    """Whether the batch of a step is recorded."""
    asked = listed(config.record_rollouts)
    return "all" in asked or str(step) in asked


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """The names in `reward_functions`."""
    return listed(config.reward_functions)


def reward_weights(config: RewardConfig) -> tuple[float, ...]:
    """The weight of each of `reward_names` in the sum.

    Raises:
      ValueError: `reward_weights` has something that is not a number, which a loaded config never has.
    """
    if not config.reward_weights.strip():
        return (1.0,) * len(reward_names(config))
    return tuple(float(text) for text in config.reward_weights.split(","))


def num_problems(config: TaskConfig) -> int:
    """All problems of dataset_type=arithmetic, including held-out ones."""
    return len(config.arithmetic_operations) * (config.arithmetic_largest + 1) ** 2


def prompt_stages(config: RLRunConfig) -> tuple[tuple[int, int], ...]:
    """(threshold, batch) of each stage, both in prompts."""
    return config.batch_schedule or ((0, config.batch_size),)


def endless_evaluation(config: RLRunConfig, held_out: int) -> Refusal | None:
    """Refuses an evaluation of every held-out prompt, where there are as many as generated problems may be."""
    if config.eval_steps != -1 or config.eval_interval == -1 or held_out <= _MOST_HELD_OUT:
        return None
    rule = (
        f"would ask for responses to all {held_out:,} held-out prompts at each evaluation, more than {_MOST_HELD_OUT:,}"
    )
    return refuse(config, "eval_steps", rule, max(1, 1000 // config.batch_size))


def _batches(config: RLRunConfig) -> Iterator[Refusal | None]:
    # Micro-batches are whole groups of responses, and divide the pairs of every stage.
    key = "micro_batch_size"
    pairs = config.micro_batch_size
    group = config.num_generations
    batches = {prompts for _, prompts in prompt_stages(config)}
    common = math.gcd(*batches)
    legal = around([group * count for count in divisors(common)], pairs)
    if pairs == -1:
        if len(batches) > 1:
            yield refuse(config, key, "splits no batch, and batch_schedule has several sizes", common * group)
    elif pairs % group:
        rule = f"is not a multiple of num_generations={group}: a group of responses is judged together"
        yield refuse(config, key, rule, *legal)
    elif common * group % pairs:
        prompts = next(prompts for prompts in batches if prompts * group % pairs)
        rule = f"does not divide the {prompts * group} pairs of {prompts} prompts x num_generations={group}"
        yield refuse(config, key, rule, *legal)

    if config.batch_schedule:
        last = config.batch_schedule[-1][1]
        if config.batch_size != last:
            yield refuse(config, "batch_size", "contradicts the last stage of batch_schedule", last)
        elif config.batch_schedule_unit == "tokens":
            yield refuse(config, "batch_schedule_unit", _UNKNOWN_TOKENS, "examples")
    if config.schedule_unit == "tokens":
        yield refuse(config, "schedule_unit", _UNKNOWN_TOKENS, "steps", "examples")

    tokens = config.max_target_length
    of_prompt = config.max_prefill_predict_length
    if of_prompt >= tokens:
        rule = f"leaves no token of max_target_length={tokens} for a response"
        near = [tokens - 1] if tokens > 1 else []
        yield refuse(config, "max_prefill_predict_length", rule, *near, {"max_target_length": of_prompt + 1})

    steps = config.steps
    each = config.num_iterations
    if steps % each:
        near = [count * each for count in (steps // each, steps // each + 1) if count]
        yield refuse(config, "steps", f"ends in the middle of the num_iterations={each} steps on a batch", *near)

    # Either all devices both train and sample, in turn, or each does one of the two.
    trainer = config.trainer_devices_fraction
    sampler = config.sampler_devices_fraction
    parts = [key for key in FRACTIONS if getattr(config, key) != 1]
    if parts and config.rollout_engine != "local":
        rule = f"leaves devices without work: with rollout_engine={config.rollout_engine} a server samples"
        yield refuse(config, parts[0], rule, dict.fromkeys(parts, Fraction(1)))
    elif parts and trainer + sampler > 1:
        near = [{"sampler_devices_fraction": 1 - trainer}]
        if trainer >= 1:
            near = [dict.fromkeys(FRACTIONS, Fraction(1))]
        elif trainer.denominator not in (2, 4, 8):  # few machines have such a share of their devices
            quarters = Fraction(min(max(round(4 * trainer), 1), 3), 4)
            near.insert(0, dict(zip(FRACTIONS, (quarters, 1 - quarters), strict=True)))
        rule = f"and sampler_devices_fraction={value_text(sampler)} are more than all devices, and not both 1"
        yield refuse(config, "trainer_devices_fraction", rule, *near)


def _tasks(config: RLRunConfig) -> Iterator[Refusal | None]:
    if config.long_examples == "truncate":
        rule = "has no effect in RL: a question that is cut short has another answer"
        yield refuse(config, "long_examples", rule, "drop", "refuse")
    if isinstance(config.eval_dataset_path, SourceList):
        rule = "lists held-out sets, which have a loss each: RL evaluates rewards, of one file"
        yield refuse(config, "eval_dataset_path", rule, config.eval_dataset_path.entries[0].path)

    template = config.prompt_template
    count = template.count("{prompt}")
    if count != 1:
        before, _, after = template.partition("{prompt}")
        times = "nowhere" if count == 0 else f"{count} times"
        near = before + "{prompt}" + after.replace("{prompt}", "")
        yield refuse(config, "prompt_template", f"has {{prompt}} {times}: it must have it once", near)

    operations = config.arithmetic_operations
    known = "".join(dict.fromkeys(each for each in operations if each in _OPERATIONS))
    if known != operations:
        unknown = [each for each in operations if each not in _OPERATIONS]
        rule = f"has '{unknown[0]}', which is none of +, - and *" if unknown else "has an operation twice"
        yield refuse(config, "arithmetic_operations", rule, known or "+-")

    # Of generated problems, some must remain to train on, and not too many may be held out.
    total = num_problems(config)
    if total > _MOST_PROBLEMS:
        most = math.isqrt(_MOST_PROBLEMS // len(operations)) - 1
        rule = "gives more than 2**62 problems, which is more than can be numbered"
        yield refuse(config, "arithmetic_largest", rule, most)
    elif config.dataset_type == "arithmetic" and not config.eval_dataset_path and 0 < config.eval_fraction < 1:
        held_out = max(1, int(Fraction(repr(config.eval_fraction)) * total))
        if held_out < total:
            yield endless_evaluation(config, held_out)
        else:
            yield refuse(config, "eval_fraction", f"holds out {held_out} of {total} problems and leaves none", 0.5)


def _rewards(config: RLRunConfig) -> Iterator[Refusal | None]:
    key = "reward_functions"
    names = reward_names(config)
    unknown = next((name for name in names if ":" not in name and name not in SHIPPED_REWARDS), None)
    again = next((name for name in names if names.count(name) > 1), None)
    if not names:
        yield refuse(config, key, "names no function", "exact_answer")
    elif unknown is not None:
        alike = get_close_matches(unknown, SHIPPED_REWARDS, n=1, cutoff=0)[0]
        legal = dict.fromkeys(alike if name == unknown else name for name in names)
        rule = (
            f"names '{value_text(unknown, 40)}', which is none of {', '.join(SHIPPED_REWARDS)}, nor of the form "
            "module:function"
        )
        yield refuse(config, key, rule, ",".join(legal))
    elif again is not None:
        yield refuse(config, key, f"names {value_text(again, 40)} twice", ",".join(dict.fromkeys(names)))

    key = "reward_weights"
    functions = value_text(config.reward_functions)
    try:
        weights = (math.nan,) if "_" in config.reward_weights else reward_weights(config)  # float reads 1_0 as 10
    except ValueError:
        weights = (math.nan,)
    bounded = [min(max(weight, -_LARGEST_WEIGHT), _LARGEST_WEIGHT) for weight in weights]
    if not all(map(math.isfinite, weights)):
        yield refuse(config, key, "has something that is not a finite number", ",".join(["1"] * len(names)))
    elif [*weights] != bounded:
        rule = f"has a weight beyond {number_text(_LARGEST_WEIGHT)}, the largest in size"
        yield refuse(config, key, rule, ",".join(map(number_text, bounded)))
    elif len(weights) != len(names):
        near = ",".join(number_text(weight) for weight in (*weights, *[1.0] * len(names))[: len(names)])
        rule = f"has {len(weights)} for the {len(names)} of reward_functions={functions}"
        yield refuse(config, key, rule, near, "")

    key = "reward_format"
    pattern = config.reward_format
    is_used = "format" in names
    if is_used and not pattern:
        message = "reward_format is empty, but reward_functions names format, which compares responses with it."
        yield Refusal(key, message, (".*",))
    elif pattern and not is_used:
        used = {"reward_functions": ",".join((*names, "format"))}
        yield refuse(config, key, f"has no effect with reward_functions={functions}", "", used)
    elif wrong := _wrong_pattern(pattern):
        yield refuse(config, key, f"is not a regular expression ({wrong})", re.escape(pattern))


@functools.lru_cache(maxsize=16)
def _wrong_pattern(pattern: str) -> str | None:
    """What is wrong with a regular expression, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        return value_text(str(error))
    return None


def _responses(config: RLRunConfig) -> Iterator[Refusal | None]:
    # Sampling that gives the same response every time: a group of equal responses teaches nothing.
    top_k = config.decode_sampling_top_k
    top_p = config.decode_sampling_nucleus_p
    vocabulary = config.vocab_size
    rule = (
        f"always samples the likeliest token: the num_generations={config.num_generations} responses to a prompt would "
        "all be the same"
    )
    if config.decode_sampling_temperature == 0:
        yield refuse(config, "decode_sampling_temperature", rule, 1)
    elif top_k == 1:
        yield refuse(config, "decode_sampling_top_k", rule, 0, 2)
    # Of the tokens that top_k leaves, the likeliest has at least this probability.
    elif top_p <= 1 / min(top_k or vocabulary, vocabulary):
        yield refuse(config, "decode_sampling_nucleus_p", rule, 1)
    elif top_k > vocabulary:
        yield refuse(config, "decode_sampling_top_k", f"is more than vocab_size={vocabulary}", vocabulary, 0)

    if config.eval_sampling_temperature == 0 and config.eval_num_generations > 1:
        rule = "with eval_sampling_temperature=0: all responses to a prompt would be the same"
        yield refuse(config, "eval_num_generations", rule, 1, {"eval_sampling_temperature": 1.0})

    # vLLM reports log-probabilities of the model's own distribution, or of that after temperature, top-k and top-p.
    if config.rollout_engine == "vllm" and config.decode_sampling_temperature != 1 and (top_k or top_p != 1):
        rule = (
            f"with decode_sampling_top_k={top_k} and decode_sampling_nucleus_p={number_text(top_p)}: "
            "rollout_engine=vllm does not report log-probabilities of softmax(logits / temperature) over the whole "
            "vocabulary then"
        )
        whole = {"decode_sampling_top_k": 0, "decode_sampling_nucleus_p": 1.0}
        yield refuse(config, "decode_sampling_temperature", rule, 1.0, whole)


def _is_server_address(url: str) -> bool:
    if not (url.isascii() and url.isprintable() and " " not in url):  # urlsplit drops some control characters
        return False
    try:
        parts = urllib.parse.urlsplit(url)
        is_named = bool(parts.hostname) and parts.port != 0  # an invalid port is a ValueError
    except ValueError:
        return False
    return is_named and parts.scheme in ("http", "https") and not (parts.query or parts.fragment)


def _rollout(config: RLRunConfig) -> Iterator[Refusal | None]:
    engine = config.rollout_engine
    url = config.rollout_url
    example = {"rollout_url": "http://127.0.0.1:8000"}
    if engine == "local":
        reason = "has no effect with rollout_engine=local, which samples in this process"
        yield refuse_unused(config, {"rollout_url": ""}, reason)
    elif not url:
        message = f"rollout_url is empty, but rollout_engine={engine} asks a server."
        yield Refusal("rollout_url", message, (example, {"rollout_engine": "local"}))
    elif not _is_server_address(url):
        rule = "is not http:// or https:// and a host, perhaps with a port and a path"
        yield refuse(config, "rollout_url", rule, example)
    elif is_bucket(config.base_output_directory):
        message = (
            f"base_output_directory={config.base_output_directory}: with rollout_engine={engine} the weights for the "
            "server are written into the run directory, which must be a directory that the server can read."
        )
        yield Refusal("base_output_directory", message, ({"rollout_engine": "local", "rollout_url": ""},))
    else:
        reason = f"has no effect with rollout_engine={engine}, whose server has its own devices"
        usual = {"rollout_slots": -1, "rollout_tensor_parallelism": 1, "rollout_fsdp_parallelism": 1}
        yield refuse_unused(config, usual, reason)
    if not all(re.fullmatch(r"all|[1-9][0-9]*", step) for step in listed(config.record_rollouts)):
        yield refuse(config, "record_rollouts", "is neither all nor steps separated by commas", "all", "1", "")


def _unused(config: RLRunConfig) -> Iterator[Refusal | None]:
    kind = config.dataset_type
    if kind not in RL_DATASETS:
        yield refuse(config, "dataset_type", "has no prompts for RL", *RL_DATASETS)
    else:
        reason = f"has no effect with dataset_type={kind}, whose rows are sampled during training"
        yield refuse_unused(config, {"balance_attention": False}, reason)
    if kind == "prompts":
        defaults = defaults_of(RLRunConfig)
        usual = {key: getattr(defaults, key) for key in ("arithmetic_operations", "arithmetic_largest")}
        reason = "has no effect with dataset_type=prompts, which reads files"
        yield refuse_unused(config, usual, reason, {"dataset_type": "arithmetic"})
    if config.rollout_correction == "none":
        reason = "has no effect with rollout_correction=none"
        yield refuse_unused(config, {"rollout_correction_cap": 2.0}, reason, {"rollout_correction": "truncated"})
    yield refuse_unused(config, {"packing": False}, "has no effect in RL: each prompt with its response is one row")
    yield refuse_unused(config, {"z_loss_multiplier": 0}, "has no effect in RL, whose loss has ratios, no logits")
    usual = {"max_loss_spike": 0, "loss_spike_action": "exclude", "excluded_rows": ""}
    reason = "has no effect in reinforcement learning, whose loss is about 0 and whose rows are new"
    yield refuse_unused(config, usual, reason)
