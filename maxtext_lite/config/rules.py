"""Rules between keys that hold on every machine. Those that need devices are `batching`'s."""

from collections.abc import Iterator
from difflib import get_close_matches

from maxtext_lite.config.adapted import unused_problem
from maxtext_lite.config.errors import Refusal, number_text, value_text
from maxtext_lite.config.kernels import kernel_problem
from maxtext_lite.config.model_rules import MODEL_RULES
from maxtext_lite.config.problem import Problem, divisors, next_to
from maxtext_lite.config.remat import REMAT_TENSORS, listed
from maxtext_lite.config.rl_rules import RL_DATASETS, RL_RULES, unused_arithmetic
from maxtext_lite.config.rule import Rule, RuleOfDefaults
from maxtext_lite.config.schema import Config, RLRunConfig

_BYTE_TOKENS = 257  # 256 bytes and the end of text

NOTHING_STATES_THE_LENGTH = "steps=-1 follows from num_epochs, which is 0: nothing states the length of the run."
"""Refusal of a config that leaves the number of steps open; without what would work."""


def rule_problems(config: Config, defaults: Config) -> Iterator[Problem]:
    """Every rule that the config breaks. `defaults` is what base.yml (and post_train/rl.yml) has."""
    return (problem for rule in RULES if (problem := rule.problem(config, defaults)))


def _warmup(config: Config, defaults: Config) -> Refusal | None:
    """A warm-up that is longer than the run, unless it is the default one, which a short run may cut off."""
    warmup, steps = config.warmup_steps, config.steps
    if config.num_epochs or steps == -1 or warmup <= steps or warmup == defaults.warmup_steps:
        return None
    return Refusal("warmup_steps", f"warmup_steps={warmup} is more than steps={steps}.", (steps,))


def _length(config: Config, defaults: Config) -> Refusal | None:
    """A length that nothing states, or that is stated twice; the default `steps` states none beside epochs."""
    steps, epochs = config.steps, config.num_epochs
    if not epochs and steps == -1:
        return Refusal("steps", NOTHING_STATES_THE_LENGTH, (max(defaults.steps, config.warmup_steps),))
    if not epochs or steps in (-1, defaults.steps):
        return None
    return Refusal(
        "steps",
        f"steps={steps} contradicts num_epochs={number_text(epochs)}, from which steps follows.",
        (-1,),
    )


def _last_batch(config: Config) -> Refusal | None:
    if config.last_batch == "drop" or config.num_epochs:
        return None
    return Refusal(
        "last_batch",
        "last_batch=train has no use with num_epochs=0: a run of stated steps has whole batches only.",
        ("drop",),
    )


def _scaled_adam(config: Config) -> Refusal | None:
    if not config.scale_adam_with_batch:
        return None
    wrong = [
        f"{key}={value}"
        for key, value, right in (
            ("learning_rate_scaling", config.learning_rate_scaling, "sqrt"),
            ("optimizer", config.optimizer, "adamw"),
        )
        if value != right
    ]
    if not wrong:
        return None
    return Refusal(
        "scale_adam_with_batch",
        "scale_adam_with_batch=true belongs to learning_rate_scaling=sqrt and optimizer=adamw, not to "
        f"{' and '.join(wrong)}.",
        (False,),
    )


def _vocab_tiling(config: Config) -> Refusal | None:
    pieces, tokens = config.num_vocab_tiling, config.max_target_length
    if tokens % pieces == 0:
        return None
    return Refusal(
        "num_vocab_tiling",
        f"num_vocab_tiling={pieces} does not divide max_target_length={tokens}.",
        next_to(pieces, divisors(tokens)),
    )


def _byte_vocabulary(config: Config) -> Refusal | None:
    if config.tokenizer_type != "byte" or config.vocab_size >= _BYTE_TOKENS or config.dataset_type == "synthetic":
        return None
    return Refusal(
        "vocab_size",
        f"vocab_size={config.vocab_size} is less than the {_BYTE_TOKENS} tokens of tokenizer_type=byte.",
        (_BYTE_TOKENS,),
    )


def _tokenizer_path(config: Config) -> Refusal | None:
    if config.tokenizer_type == "byte" and config.tokenizer_path:
        return Refusal(
            "tokenizer_path",
            f"tokenizer_path={value_text(config.tokenizer_path)} has no use with tokenizer_type=byte.",
            ("", {"tokenizer_type": "huggingface"}),
        )
    if config.tokenizer_type != "byte" and not config.tokenizer_path:
        return Refusal(
            "tokenizer_path",
            f"tokenizer_path is empty, but tokenizer_type={config.tokenizer_type} reads a file: name it.",
            ({"tokenizer_type": "byte"},),
        )
    return None


_OBJECTIVE_OF = {
    "text": "pretrain",
    "synthetic": "pretrain",
    "sft": "sft",
    "dpo": "dpo",
    "prompts": "grpo",
    "arithmetic": "grpo",
}


def _objective(config: Config) -> Refusal | None:
    """What a run learns is what its data are for."""
    due = _OBJECTIVE_OF[config.dataset_type]
    if config.objective in ("auto", due):
        return None
    is_rl = isinstance(config, RLRunConfig)
    possible = [kind for kind in _OBJECTIVE_OF if (kind in RL_DATASETS) == is_rl]
    others = [{"dataset_type": kind} for kind in possible if _OBJECTIVE_OF[kind] == config.objective][:1]
    return Refusal(
        "objective",
        f"objective={config.objective} contradicts dataset_type={config.dataset_type}, whose data are for {due}.",
        (due, *others),
    )


def _z_loss_of_pairs(config: Config) -> Refusal | None:
    if config.dataset_type != "dpo" or config.z_loss_multiplier == 0:
        return None
    return Refusal(
        "z_loss_multiplier",
        f"z_loss_multiplier={config.z_loss_multiplier:g} has no use with dataset_type=dpo, whose loss is one of pairs, "
        "not of tokens.",
        (0,),
    )


def _conversations_only(config: Config) -> Refusal | None:
    """Keys about conversations, where there are none."""
    if config.dataset_type in ("sft", "dpo", "prompts", "arithmetic") or config.chat_template == "":
        return None
    return Refusal(
        "chat_template",
        f"chat_template={value_text(config.chat_template)} has no use with dataset_type={config.dataset_type}.",
        ("", {"dataset_type": "sft"}),
    )


def _dataset_path(config: Config) -> Refusal | None:
    if config.dataset_type in ("synthetic", "arithmetic") or config.dataset_path:
        return None
    generated = "arithmetic" if isinstance(config, RLRunConfig) else "synthetic"
    return Refusal(
        "dataset_path",
        f"dataset_path is empty, but dataset_type={config.dataset_type} reads a file, directory or glob: name it.",
        ({"dataset_type": generated},),
    )


def _eval_data(config: Config) -> Refusal | None:
    needs = config.eval_interval > 0 and config.dataset_type != "synthetic" and not config.eval_dataset_path
    if not needs or config.eval_fraction > 0:
        return None
    return Refusal(
        "eval_fraction",
        "eval_fraction=0 and an empty eval_dataset_path leave nothing to evaluate every "
        f"eval_interval={config.eval_interval} steps.",
        ({"eval_interval": -1},),
    )


def _eval_share(config: Config) -> Refusal | None:
    if config.eval_fraction < 1 or config.eval_dataset_path:
        return None
    return Refusal("eval_fraction", "eval_fraction=1 leaves nothing to train on.", (0.5,))


def _run_name(config: Config) -> Refusal | None:
    if "/" not in config.run_name and config.run_name not in (".", ".."):
        return None
    return Refusal("run_name", f"run_name={value_text(config.run_name)} is not the name of a directory.", ("default",))


def _remat_lists(config: Config) -> Refusal | None:
    names = {"remat_save": listed(config.remat_save), "remat_offload": listed(config.remat_offload)}
    for key, tensors in names.items():
        value = value_text(getattr(config, key))
        if tensors and config.remat_policy != "custom":
            return Refusal(
                key,
                f"{key}={value} has no use with remat_policy={config.remat_policy}.",
                ("", {"remat_policy": "custom"}),
            )
        unknown = [name for name in tensors if name not in REMAT_TENSORS]
        if unknown:
            alike = get_close_matches(unknown[0], REMAT_TENSORS, n=1, cutoff=0)
            mended = dict.fromkeys(alike[0] if name == unknown[0] else name for name in tensors)
            message = f"{key}={value} names {value_text(unknown[0], 40)}, which is none of {', '.join(REMAT_TENSORS)}."
            return Refusal(key, message, (",".join(mended),))
    saved, offloaded = names["remat_save"], names["remat_offload"]
    both = [name for name in offloaded if name in saved]
    if both:
        return Refusal(
            "remat_offload",
            f"remat_offload={value_text(config.remat_offload)} names {both[0]}, as remat_save does.",
            (",".join(name for name in offloaded if name not in saved),),
        )
    return None


def _schedule_of_replicas(config: Config) -> Refusal | None:
    if not config.enable_diloco or config.schedule_unit == "steps":
        return None
    return Refusal(
        "schedule_unit",
        f"schedule_unit={config.schedule_unit} with enable_diloco=true: between synchronisations a replica knows "
        "its own examples and tokens only.",
        ("steps",),
    )


def _shared_optimizer(config: Config) -> Refusal | None:
    if not (config.shard_optimizer_over_data and config.enable_diloco):
        return None
    return Refusal(
        "shard_optimizer_over_data",
        "shard_optimizer_over_data=true with enable_diloco=true: replicas have an optimizer state each, none to share.",
        (False,),
    )


def _loss_scale(config: Config) -> Refusal | None:
    if config.loss_scale == 0 or config.dtype == "float16":
        return None
    return Refusal(
        "loss_scale",
        f"loss_scale={config.loss_scale:g} has no use with dtype={config.dtype}, whose range is that of float32.",
        (0, {"dtype": "float16"}),
    )


RULES: tuple[Rule, ...] = (
    *RL_RULES,
    Rule(("remat_policy", "remat_save", "remat_offload"), _remat_lists),
    Rule(("schedule_unit", "enable_diloco"), _schedule_of_replicas),
    Rule(("loss_scale", "dtype"), _loss_scale),
    Rule(("shard_optimizer_over_data", "enable_diloco"), _shared_optimizer),
    *MODEL_RULES,
    Rule(("num_vocab_tiling", "max_target_length"), _vocab_tiling),
    Rule(("vocab_size", "tokenizer_type", "dataset_type"), _byte_vocabulary),
    Rule(("tokenizer_path", "tokenizer_type"), _tokenizer_path),
    Rule(("objective", "dataset_type"), _objective),
    Rule(("chat_template", "dataset_type"), _conversations_only),
    Rule(("z_loss_multiplier", "dataset_type"), _z_loss_of_pairs),
    Rule(("dataset_path", "dataset_type"), _dataset_path),
    Rule(("eval_fraction", "eval_dataset_path", "eval_interval", "dataset_type"), _eval_data),
    Rule(("eval_fraction", "eval_dataset_path"), _eval_share),
    Rule(("attention", "dtype"), kernel_problem),
    Rule(("run_name",), _run_name),
    Rule(("last_batch", "num_epochs"), _last_batch),
    Rule(("scale_adam_with_batch", "learning_rate_scaling", "optimizer"), _scaled_adam),
    RuleOfDefaults(("warmup_steps",), _warmup),
    RuleOfDefaults(("steps",), _length),
    RuleOfDefaults(("lora_alpha", "lora_targets"), unused_problem),
    RuleOfDefaults(("arithmetic_operations", "arithmetic_largest"), unused_arithmetic),
)
"""Every rule."""
