"""Rules between the keys of reinforcement learning, and between them and those of base.yml."""

import functools
import math
import re
import urllib.parse
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import number_text, value_text
from maxtext_lite.config.remat import listed
from maxtext_lite.config.rl_sections import RewardConfig
from maxtext_lite.config.schema import Config, RLRunConfig
from maxtext_lite.config.violation import Violation, divisors, one_of, unused

RL_DATASETS = ("prompts", "arithmetic")
"""Values of dataset_type that reinforcement learning has, and nothing else."""
SHIPPED_REWARDS = ("exact_answer", "numeric_answer", "format", "math_verify")
"""Reward functions that need no module of the user's."""
ANSWER_REWARDS = ("exact_answer", "numeric_answer", "math_verify")
"""Those of them that compare a response with the line's answer."""
_OPERATIONS = "+-*"
_FRACTIONS = ("trainer_devices_fraction", "sampler_devices_fraction")
_DRAWN = ("temperature", "top_k", "nucleus_p")  # decode_sampling_
_MOST_HELD_OUT = 100_000
_MOST_PROBLEMS = 2**62  # a number of an example is a 64-bit integer, of which the order needs one more than there are


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """The names in `reward_functions`."""
    return listed(config.reward_functions)


def reward_weights(config: RewardConfig) -> tuple[float, ...]:
    """What each of `reward_names` counts in the sum.

    Raises:
      ValueError: `reward_weights` holds something that is not a number; a loaded config does not.
    """
    if not config.reward_weights.strip():
        return (1.0,) * len(reward_names(config))
    return tuple(float(text) for text in config.reward_weights.split(","))


def unused_arithmetic(config: RLRunConfig, defaults: Config) -> Violation | None:
    """Refuses keys that say something about generated problems where prompts are read from files."""
    if config.dataset_type != "prompts":
        return None
    usual = {key: getattr(defaults, key) for key in ("arithmetic_operations", "arithmetic_largest")}
    reason = "has no use with dataset_type=prompts, which reads files"
    return unused(config, usual, reason, {"dataset_type": "arithmetic"})


def _micro_batch(config: RLRunConfig) -> Violation | None:
    if config.micro_batch_size == -1:
        return None
    prompts, group, pairs = config.batch_size, config.num_generations, config.micro_batch_size
    whole = prompts * group
    if pairs % group == 0 and whole % pairs == 0:
        return None
    wrong = (
        f"is not a multiple of num_generations={group}: a group of responses is judged together"
        if pairs % group
        else f"does not divide the {whole} pairs of batch_size={prompts} x num_generations={group}"
    )
    legal = [group * count for count in divisors(prompts)]
    key = "micro_batch_size"
    return Violation(key, f"{key}={pairs} {wrong}.", (one_of(key, legal, pairs),))


def _lengths(config: RLRunConfig) -> Violation | None:
    if config.max_prefill_predict_length < config.max_target_length:
        return None
    return Violation(
        "max_prefill_predict_length",
        f"max_prefill_predict_length={config.max_prefill_predict_length} leaves no token of "
        f"max_target_length={config.max_target_length} for a response.",
        (max(config.max_target_length // 2, 1),),
    )


def _steps(config: RLRunConfig) -> Violation | None:
    if config.steps % config.num_iterations == 0:
        return None
    steps, each = config.steps, config.num_iterations
    near = tuple(count * each for count in (steps // each, steps // each + 1) if count)
    message = f"steps={steps} ends in the middle of the num_iterations={each} steps on a batch."
    return Violation("steps", message, near)


def _devices(config: RLRunConfig) -> Violation | None:
    """Devices either take turns, all of them, or have one of the two tasks."""
    trainer, sampler = config.trainer_devices_fraction, config.sampler_devices_fraction
    if trainer == sampler == 1 or trainer + sampler <= 1:
        return None
    fraction = f"sampler_devices_fraction={value_text(sampler)}"
    rest = 1 - trainer
    near = {"sampler_devices_fraction": rest} if rest > 0 else dict.fromkeys(_FRACTIONS, Fraction(1))
    return Violation(
        "trainer_devices_fraction",
        f"trainer_devices_fraction={value_text(trainer)} and {fraction} are more than all devices, and not both 1.",
        (near,),
    )


def dataset_of_objective(config: Config) -> Violation | None:
    """Prompts are for reinforcement learning, and it has nothing else."""
    kind, is_rl = config.dataset_type, isinstance(config, RLRunConfig)
    if (kind in RL_DATASETS) == is_rl:
        return None
    if is_rl:
        message = f"dataset_type={kind} has no prompts for RL."
        return Violation("dataset_type", message, RL_DATASETS)
    near = "sft" if config.objective == "auto" else {"dataset_type": "sft", "objective": "auto"}
    message = (
        f"dataset_type={kind} is for RL, and post_train/rl.yml is not among the files of this config: give that file, "
        "or one whose base it is."
    )
    return Violation("dataset_type", message, (near,))


def _long_prompts(config: RLRunConfig) -> Violation | None:
    if config.long_examples != "truncate":
        return None
    message = "long_examples=truncate has no use in RL: a question that is cut short has another answer."
    return Violation("long_examples", message, ("drop", "refuse"))


def _packing(config: RLRunConfig) -> Violation | None:
    reason = "has no use in RL: a prompt with its response is a row by itself"
    return unused(config, {"packing": False}, reason)


def _z_loss(config: RLRunConfig) -> Violation | None:
    return unused(config, {"z_loss_multiplier": 0}, "has no use in RL, whose loss is of ratios, not of logits")


def _schedule_unit(config: RLRunConfig) -> Violation | None:
    if config.schedule_unit != "tokens":
        return None
    message = "schedule_unit=tokens cannot be in RL, where nobody knows how many tokens the responses will have."
    return Violation("schedule_unit", message, ("steps", "examples"))


def _template(config: RLRunConfig) -> Violation | None:
    template, count = config.prompt_template, config.prompt_template.count("{prompt}")
    if count == 1:
        return None
    near = template + "{prompt}"
    if count:
        before, _, after = template.partition("{prompt}")
        near = before + "{prompt}" + after.replace("{prompt}", "")
    times = "nowhere" if count == 0 else f"{count} times"
    message = f"prompt_template={value_text(template)} holds {{prompt}} {times}: each prompt stands in it once."
    return Violation("prompt_template", message, (near,))


def _operations(config: RLRunConfig) -> Violation | None:
    operations = config.arithmetic_operations
    known = "".join(dict.fromkeys(each for each in operations if each in _OPERATIONS))
    if known == operations:
        return None
    unknown = [each for each in operations if each not in _OPERATIONS]
    wrong = f"holds '{unknown[0]}', which is none of +, - and *" if unknown else "holds an operation twice"
    return Violation(
        "arithmetic_operations", f"arithmetic_operations={value_text(operations)} {wrong}.", (known or "+-",)
    )


def _problems(config: RLRunConfig) -> Violation | None:
    operations, largest = len(config.arithmetic_operations), config.arithmetic_largest
    most = math.isqrt(_MOST_PROBLEMS // operations) - 1
    if largest <= most:
        return None
    message = f"arithmetic_largest={largest} gives more than 2**62 problems, which have no numbers."
    return Violation("arithmetic_largest", message, (most,))


def endless_evaluation(config: RLRunConfig, held_out: int) -> Violation | None:
    """Refuses an evaluation of all held-out prompts where they are as many as problems that are made may be."""
    if config.eval_steps != -1 or config.eval_interval == -1 or held_out <= _MOST_HELD_OUT:
        return None
    message = (
        f"eval_steps=-1 would ask for responses to all {held_out:,} held-out prompts at each evaluation, more than "
        f"{_MOST_HELD_OUT:,}."
    )
    return Violation("eval_steps", message, (max(1, 1000 // config.batch_size),))


def _held_out_problems(config: RLRunConfig) -> Violation | None:
    """Of problems that are made, some are trained on, and not too many held out."""
    if config.dataset_type != "arithmetic":
        return None
    if config.eval_dataset_path or config.eval_fraction in (0, 1):  # 1 is refused of all data
        return None
    total = len(config.arithmetic_operations) * (config.arithmetic_largest + 1) ** 2
    if total > _MOST_PROBLEMS:  # which is another rule's
        return None
    held_out = max(1, int(Fraction(repr(config.eval_fraction)) * total))
    if held_out < total:
        return endless_evaluation(config, held_out)
    message = (
        f"eval_fraction={value_text(config.eval_fraction)} holds out {held_out} of {total} problems and leaves none."
    )
    return Violation("eval_fraction", message, (0.5,))


def _reward_names(config: RLRunConfig) -> Violation | None:
    text, names = value_text(config.reward_functions), reward_names(config)
    if not names:
        return Violation("reward_functions", f"reward_functions={text} names no function.", ("exact_answer",))
    unknown = [name for name in names if ":" not in name and name not in SHIPPED_REWARDS]
    if unknown:
        alike = get_close_matches(unknown[0], SHIPPED_REWARDS, n=1, cutoff=0)[0]
        legal = dict.fromkeys(alike if name == unknown[0] else name for name in names)
        message = (
            f"reward_functions={text} names '{value_text(unknown[0], 40)}', which is none of "
            f"{', '.join(SHIPPED_REWARDS)}, nor of the form module:function."
        )
        return Violation("reward_functions", message, (",".join(legal),))
    if len(set(names)) < len(names):
        again = next(name for name in names if names.count(name) > 1)
        message = f"reward_functions={text} names {value_text(again, 40)} twice."
        return Violation("reward_functions", message, (",".join(dict.fromkeys(names)),))
    return None


def _reward_weights(config: RLRunConfig) -> Violation | None:
    text, count = value_text(config.reward_weights), len(reward_names(config))
    try:
        weights = reward_weights(config)
    except ValueError:
        weights = (math.nan,)
    plain = ",".join(["1"] * count)
    if not all(math.isfinite(weight) for weight in weights):
        message = f"reward_weights={text} holds something that is not a finite number."
        return Violation("reward_weights", message, (plain,))
    if len(weights) == count:
        return None
    near = ",".join(number_text(weight) for weight in (*weights, *[1.0] * count)[:count])
    functions = value_text(config.reward_functions)
    message = f"reward_weights={text} are {len(weights)} for the {count} of reward_functions={functions}."
    return Violation("reward_weights", message, (near, ""))


def _reward_format(config: RLRunConfig) -> Violation | None:
    pattern, is_used = config.reward_format, "format" in reward_names(config)
    shown = value_text(pattern)
    if not pattern and is_used:
        message = "reward_format is empty, but reward_functions names format, which compares responses with it."
        return Violation("reward_format", message, (".*",))
    if pattern and not is_used:
        message = f"reward_format={shown} has no use with reward_functions={value_text(config.reward_functions)}."
        used = ",".join((*reward_names(config), "format"))
        return Violation("reward_format", message, ("", {"reward_functions": used}))
    if wrong := _wrong_pattern(pattern):
        return Violation(
            "reward_format", f"reward_format={shown} is not a regular expression ({wrong}).", (re.escape(pattern),)
        )
    return None


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


def _sampling(config: RLRunConfig) -> Violation | None:
    """Responses to one prompt that are all the same teach nothing."""
    reason = f"the num_generations={config.num_generations} responses to a prompt would all be the same"
    if config.decode_sampling_temperature == 0:
        message = f"decode_sampling_temperature=0 always draws the likeliest token: {reason}."
        return Violation("decode_sampling_temperature", message, (1,))
    if config.decode_sampling_top_k == 1:
        message = f"decode_sampling_top_k=1 always draws the likeliest token: {reason}."
        return Violation("decode_sampling_top_k", message, (0, 2))
    if config.decode_sampling_top_k > config.vocab_size:
        message = f"decode_sampling_top_k={config.decode_sampling_top_k} is more than vocab_size={config.vocab_size}."
        return Violation("decode_sampling_top_k", message, (config.vocab_size, 0))
    return None


def _eval_sampling(config: RLRunConfig) -> Violation | None:
    if config.eval_sampling_temperature or config.eval_num_generations == 1:
        return None
    return Violation(
        "eval_num_generations",
        f"eval_num_generations={config.eval_num_generations} with eval_sampling_temperature=0: all responses to a "
        "prompt would be the same.",
        (1, {"eval_sampling_temperature": 1.0}),
    )


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _rollout(config: RLRunConfig) -> Violation | None:
    """An engine and what it needs ask for each other."""
    engine, url = config.rollout_engine, config.rollout_url
    address = "http://127.0.0.1:8000/v1" if engine == "http" else "http://127.0.0.1:8000"
    example, shown = {"rollout_url": address}, value_text(url)
    if engine == "local":
        return unused(
            config, {"rollout_url": ""}, "has no use with rollout_engine=local, which samples in this process"
        )
    if not url:
        message = f"rollout_url is empty, but rollout_engine={engine} asks a server."
        return Violation("rollout_url", message, (example, {"rollout_engine": "local"}))
    if not re.match(r"https?://[^/\s]", url) or not _is_address(url):
        return Violation(
            "rollout_url", f"rollout_url={shown} does not begin with http:// or https:// and a host.", (example,)
        )
    if is_bucket(config.base_output_directory):
        message = f"base_output_directory={config.base_output_directory}: rollout_engine={engine} writes its server's "
        message += "weights into the run directory, which is to be a directory that the server can read."
        return Violation("base_output_directory", message, ({"rollout_engine": "local", "rollout_url": ""},))
    reason = f"has no use with rollout_engine={engine}, whose server has devices of its own"
    return unused(config, {"rollout_tensor_parallelism": 1, "rollout_fsdp_parallelism": 1}, reason)


def _reported(config: RLRunConfig) -> Violation | None:
    """vLLM reports log-probabilities of the model, or of what its temperature, top-k and top-p have made of it."""
    temperature, top_k, top_p = (getattr(config, f"decode_sampling_{key}") for key in _DRAWN)
    if config.rollout_engine != "vllm" or temperature == 1 or (top_k == 0 and top_p == 1):
        return None
    with_what = f"decode_sampling_top_k={top_k} and decode_sampling_nucleus_p={number_text(top_p)}"
    message = (
        f"decode_sampling_temperature={number_text(temperature)} with {with_what}: rollout_engine=vllm does not report "
        "log-probabilities of softmax(logits / temperature) over the whole vocabulary then."
    )
    whole = {"decode_sampling_top_k": 0, "decode_sampling_nucleus_p": 1.0}
    return Violation("decode_sampling_temperature", message, (1.0, whole))


def _correction(config: RLRunConfig) -> Violation | None:
    if config.rollout_correction == "truncated":
        return None
    reason = "has no use with rollout_correction=none"
    return unused(config, {"rollout_correction_cap": 2.0}, reason, {"rollout_correction": "truncated"})


RL_RULES: tuple[Callable[[RLRunConfig], Violation | None], ...] = (
    _micro_batch,
    _lengths,
    _steps,
    _devices,
    _long_prompts,
    _packing,
    _z_loss,
    _schedule_unit,
    _template,
    _operations,
    _problems,
    _held_out_problems,
    _reward_names,
    _reward_weights,
    _reward_format,
    _sampling,
    _eval_sampling,
    _rollout,
    _reported,
    _correction,
)
"""The rules of reinforcement learning alone; `unused_arithmetic` too."""
