"""Rules between keys that hold on every machine. Those that need devices are `batching`'s."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches

from maxtext_lite.config.adapted import unused_adapters
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import number_text, value_text
from maxtext_lite.config.kernels import unknown_to_kernel
from maxtext_lite.config.model_rules import MODEL_RULES
from maxtext_lite.config.remat import REMAT_TENSORS, listed
from maxtext_lite.config.rl_rules import RL_DATASETS, RL_RULES, dataset_of_objective, unused_arithmetic
from maxtext_lite.config.schema import Config, RLRunConfig
from maxtext_lite.config.source_list import MIXABLE, SourceList
from maxtext_lite.config.violation import Violation, divisors_of, unused

_BYTE_TOKENS = 257  # 256 bytes and the end of text

NOTHING_STATES_THE_LENGTH = "steps=-1 follows from num_epochs, which is 0: nothing states the length of the run."
"""Refusal of a config that leaves the number of steps open; without what would work."""


def rule_violations(config: Config, defaults: Config) -> Iterator[Violation]:
    """Every rule that the config breaks. `defaults` is what base.yml (and post_train/rl.yml) has."""

    def named(rule: str, broken: Violation | None) -> Iterator[Violation]:
        if broken:
            yield replace(broken, rule=f"{rule}: {broken.key}")

    if isinstance(config, RLRunConfig):
        for check in RL_RULES:
            yield from named(check.__name__, check(config))
        yield from named("unused_arithmetic", unused_arithmetic(config, defaults))
    for check in RULES:
        yield from named(check.__name__, check(config))
    for check in RULES_OF_DEFAULTS:
        yield from named(check.__name__, check(config, defaults))


def _warmup(config: Config, defaults: Config) -> Violation | None:
    """A warm-up that is longer than the run, unless it is the default one, which a short run may cut off."""
    warmup, steps = config.warmup_steps, config.steps
    if config.num_epochs or steps == -1 or warmup <= steps or warmup == defaults.warmup_steps:
        return None
    return Violation("warmup_steps", f"warmup_steps={warmup} is more than steps={steps}.", (steps,))


def _length(config: Config, defaults: Config) -> Violation | None:
    """A length that nothing states, or that is stated twice; the default `steps` states none beside epochs."""
    steps, epochs = config.steps, config.num_epochs
    if not epochs and steps == -1:
        return Violation("steps", NOTHING_STATES_THE_LENGTH, (max(defaults.steps, config.warmup_steps),))
    if not epochs or steps in (-1, defaults.steps):
        return None
    return Violation(
        "steps",
        f"steps={steps} contradicts num_epochs={number_text(epochs)}, from which steps follows.",
        (-1,),
    )


def _last_batch(config: Config) -> Violation | None:
    reason = "has no use with num_epochs=0: a run of stated steps has whole batches only"
    return None if config.num_epochs else unused(config, {"last_batch": "drop"}, reason)


def _scaled_adam(config: Config) -> Violation | None:
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
    return Violation(
        "scale_adam_with_batch",
        "scale_adam_with_batch=true belongs to learning_rate_scaling=sqrt and optimizer=adamw, not to "
        f"{' and '.join(wrong)}.",
        (False,),
    )


def _vocab_tiling(config: Config) -> Violation | None:
    pieces, tokens = config.num_vocab_tiling, config.max_target_length
    if tokens % pieces == 0:
        return None
    return Violation(
        "num_vocab_tiling",
        f"num_vocab_tiling={pieces} does not divide max_target_length={tokens}.",
        (divisors_of("num_vocab_tiling", tokens, pieces),),
    )


def _byte_vocabulary(config: Config) -> Violation | None:
    if config.tokenizer_type != "byte" or config.vocab_size >= _BYTE_TOKENS or config.dataset_type == "synthetic":
        return None
    return Violation(
        "vocab_size",
        f"vocab_size={config.vocab_size} is less than the {_BYTE_TOKENS} tokens of tokenizer_type=byte.",
        (_BYTE_TOKENS,),
    )


def _tokenizer_path(config: Config) -> Violation | None:
    if config.tokenizer_type == "byte" and config.tokenizer_path:
        return Violation(
            "tokenizer_path",
            f"tokenizer_path={value_text(config.tokenizer_path)} has no use with tokenizer_type=byte.",
            ("", {"tokenizer_type": "huggingface"}),
        )
    if config.tokenizer_type != "byte" and not config.tokenizer_path:
        return Violation(
            "tokenizer_path",
            f"tokenizer_path is empty, but tokenizer_type={config.tokenizer_type} reads a file: name it.",
            ({"tokenizer_type": "byte"},),
        )
    return None


_OBJECTIVE_OF = {
    "text": "pretrain",
    "array_record": "pretrain",
    "megatron": "pretrain",
    "synthetic": "pretrain",
    "sft": "sft",
    "dpo": "dpo",
    "prompts": "grpo",
    "arithmetic": "grpo",
}


def _objective(config: Config) -> Violation | None:
    """What a run learns is what its data are for."""
    due = _OBJECTIVE_OF[config.dataset_type]
    if config.objective in ("auto", due):
        return None
    is_rl = isinstance(config, RLRunConfig)
    possible = [kind for kind in _OBJECTIVE_OF if (kind in RL_DATASETS) == is_rl]
    others = [{"dataset_type": kind} for kind in possible if _OBJECTIVE_OF[kind] == config.objective][:1]
    return Violation(
        "objective",
        f"objective={config.objective} contradicts dataset_type={config.dataset_type}, whose data are for {due}.",
        (due, *others),
    )


def _z_loss_of_pairs(config: Config) -> Violation | None:
    reason = "has no use with dataset_type=dpo, whose loss is one of pairs, not of tokens"
    return unused(config, {"z_loss_multiplier": 0}, reason) if config.dataset_type == "dpo" else None


def _conversations_only(config: Config) -> Violation | None:
    """Keys about conversations, where there are none."""
    if config.dataset_type in ("sft", "dpo", "prompts", "arithmetic"):
        return None
    reason = f"has no use with dataset_type={config.dataset_type}"
    return unused(config, {"chat_template": ""}, reason, {"dataset_type": "sft"})


def _balance(config: Config) -> Violation | None:
    """Rows are dealt by their documents, which do not differ or are not known before they are written."""
    kind = config.dataset_type
    if kind not in ("synthetic", *RL_DATASETS):
        return None
    why = "whose rows are one document each" if kind == "synthetic" else "whose rows come while it trains"
    return unused(config, {"balance_attention": False}, f"has no use with dataset_type={kind}, {why}")


def _dataset_path(config: Config) -> Violation | None:
    if config.dataset_type in ("synthetic", "arithmetic") or config.dataset_path:
        return None
    generated = "arithmetic" if isinstance(config, RLRunConfig) else "synthetic"
    return Violation(
        "dataset_path",
        f"dataset_path is empty, but dataset_type={config.dataset_type} reads a file, directory or glob: name it.",
        ({"dataset_type": generated},),
    )


def _data_in_bucket(config: Config) -> Violation | None:
    kind, value = config.dataset_type, config.dataset_path
    if kind in ("array_record", "synthetic", "arithmetic"):
        return None
    paths = [entry.path for entry in value.entries] if isinstance(value, SourceList) else [value]
    for key, path in [("eval_dataset_path", config.eval_dataset_path), *(("dataset_path", path) for path in paths)]:
        if is_bucket(path):
            rule = (
                f"is in a bucket, and dataset_type={kind} reads local files: copy them, or let `prepare` write there."
            )
            nearest = () if isinstance(config, RLRunConfig) else ({"dataset_type": "array_record"},)
            return Violation(key, f"{key}={value_text(path)} {rule}", nearest)
    return None


def _mixture(config: Config) -> Violation | None:
    """A mixture where there can be none, and what is about one where there is none."""
    value = config.dataset_path
    if not isinstance(value, SourceList):
        reason = "has no use without a list of sources in dataset_path"
        return unused(config, {"mixture_exhausted": "error"}, reason)
    if config.dataset_type not in MIXABLE:
        kinds = [{"dataset_type": kind} for kind in MIXABLE if not isinstance(config, RLRunConfig)]
        rule = f"lists sources, which dataset_type={config.dataset_type} does not mix."
        return Violation("dataset_path", f"dataset_path={value_text(value)} {rule}", (value.entries[0].path, *kinds))
    if config.num_epochs and len(value.entries) > 1:
        return Violation(
            "num_epochs",
            f"num_epochs={number_text(config.num_epochs)} has no meaning with the {len(value.entries)} sources of "
            "dataset_path, each of which has epochs of its own: state steps.",
            ({"num_epochs": 0},),
        )
    if config.mixture_exhausted != "error" and all(entry.max_epochs == -1 for entry in value.entries):
        return unused(config, {"mixture_exhausted": "error"}, "has no use where no source has max_epochs")
    return None


def _eval_data(config: Config) -> Violation | None:
    needs = config.eval_interval > 0 and config.dataset_type != "synthetic" and not config.eval_dataset_path
    if not needs or config.eval_fraction > 0:
        return None
    return Violation(
        "eval_fraction",
        "eval_fraction=0 and an empty eval_dataset_path leave nothing to evaluate every "
        f"eval_interval={config.eval_interval} steps.",
        ({"eval_interval": -1},),
    )


def _eval_share(config: Config) -> Violation | None:
    if config.eval_fraction < 1 or config.eval_dataset_path:
        return None
    return Violation("eval_fraction", "eval_fraction=1 leaves nothing to train on.", (0.5,))


def _run_name(config: Config) -> Violation | None:
    if "/" not in config.run_name and config.run_name not in (".", ".."):
        return None
    message = f"run_name={value_text(config.run_name)} is not the name of a directory."
    return Violation("run_name", message, ("default",))


def _remat_lists(config: Config) -> Violation | None:
    names = {"remat_save": listed(config.remat_save), "remat_offload": listed(config.remat_offload)}
    for key, tensors in names.items():
        value = value_text(getattr(config, key))
        if tensors and config.remat_policy != "custom":
            return Violation(
                key,
                f"{key}={value} has no use with remat_policy={config.remat_policy}.",
                ("", {"remat_policy": "custom"}),
            )
        unknown = [name for name in tensors if name not in REMAT_TENSORS]
        if unknown:
            alike = get_close_matches(unknown[0], REMAT_TENSORS, n=1, cutoff=0)
            legal = dict.fromkeys(alike[0] if name == unknown[0] else name for name in tensors)
            message = f"{key}={value} names {value_text(unknown[0], 40)}, which is none of {', '.join(REMAT_TENSORS)}."
            return Violation(key, message, (",".join(legal),))
    saved, offloaded = names["remat_save"], names["remat_offload"]
    both = [name for name in offloaded if name in saved]
    if both:
        return Violation(
            "remat_offload",
            f"remat_offload={value_text(config.remat_offload)} names {both[0]}, as remat_save does.",
            (",".join(name for name in offloaded if name not in saved),),
        )
    return None


def _schedule_of_replicas(config: Config) -> Violation | None:
    reason = "with enable_diloco=true: between synchronisations a replica knows its own examples and tokens only"
    return unused(config, {"schedule_unit": "steps"}, reason) if config.enable_diloco else None


def _loss_spikes(config: Config) -> Violation | None:
    """Rows are found by the loss of each, by one set of parameters."""
    if config.dataset_type in RL_DATASETS:
        plain = {"max_loss_spike": 0, "loss_spike_action": "exclude", "excluded_rows": ""}
        return unused(
            config, plain, "has no use in reinforcement learning, whose loss is about 0 and whose rows are new"
        )
    if not config.max_loss_spike:
        return unused(config, {"loss_spike_action": "exclude"}, "has no use with max_loss_spike=0")
    reason = "with enable_diloco=true: replicas have parameters of their own, none by which to look for guilty rows"
    plain = {"loss_spike_action": "stop"}
    return unused(config, plain, reason, {"max_loss_spike": 0}) if config.enable_diloco else None


def _shared_optimizer(config: Config) -> Violation | None:
    reason = "with enable_diloco=true: replicas have an optimizer state each, none to share"
    return unused(config, {"shard_optimizer_over_data": False}, reason) if config.enable_diloco else None


def _loss_scale(config: Config) -> Violation | None:
    if config.dtype == "float16":
        return None
    reason = f"has no use with dtype={config.dtype}, whose range is that of float32"
    return unused(config, {"loss_scale": 0}, reason, {"dtype": "float16"})


RULES: tuple[Callable[[Config], Violation | None], ...] = (
    dataset_of_objective,
    _remat_lists,
    _schedule_of_replicas,
    _loss_scale,
    _loss_spikes,
    _shared_optimizer,
    *MODEL_RULES,
    _vocab_tiling,
    _byte_vocabulary,
    _tokenizer_path,
    _objective,
    _conversations_only,
    _z_loss_of_pairs,
    _balance,
    _dataset_path,
    _data_in_bucket,
    _mixture,
    _eval_data,
    _eval_share,
    unknown_to_kernel,
    _run_name,
    _last_batch,
    _scaled_adam,
)
"""Every rule about a config of any type."""

RULES_OF_DEFAULTS: tuple[Callable[[Config, Config], Violation | None], ...] = (_warmup, _length, unused_adapters)
"""Those that also take the config of the defaults, some of which suit whatever else is set."""
