"""Rules between keys that hold on every machine. `batching` has the rules that involve devices."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import number_text, value_text
from maxtext_lite.config.kernels import unknown_to_kernel
from maxtext_lite.config.kinds import objective_kind, objective_name, source_kind, source_names
from maxtext_lite.config.model_rules import MODEL_RULES, unused_adapters
from maxtext_lite.config.registry import load_installed
from maxtext_lite.config.schema import Config
from maxtext_lite.config.sections import REMAT_TENSORS, listed
from maxtext_lite.config.source_list import SourceList
from maxtext_lite.config.violation import Violation, divisors_of, unused, violates

_BYTE_TOKENS = 257  # 256 bytes and the end of text

NOTHING_STATES_THE_LENGTH = "steps=-1 follows from num_epochs, which is 0: nothing states the length of the run."
"""Refusal of a config that leaves the number of steps open, without the values that would work."""


def rule_violations(config: Config, defaults: Config) -> Iterator[Violation]:
    """Every rule that the config breaks. `defaults` is the config of its `base_files`."""

    def broken(rules: Iterable[Callable[..., Violation | None]], *configs: Config) -> Iterator[Violation]:
        for rule in rules:
            if violation := rule(*configs):
                yield replace(violation, rule=f"{rule.__name__}: {violation.key}")

    yield from broken(config.rules(), config)
    yield from broken(RULES, config)
    yield from broken(RULES_OF_DEFAULTS, config, defaults)


def _warmup(config: Config, defaults: Config) -> Violation | None:
    """A warm-up longer than the run, unless it is the default one: a short run may end within it."""
    warmup, steps = config.warmup_steps, config.steps
    if config.num_epochs or steps == -1 or warmup <= steps or warmup == defaults.warmup_steps:
        return None
    return violates(config, "warmup_steps", f"is more than steps={steps}", steps)


def _length(config: Config, defaults: Config) -> Violation | None:
    """A length that no key states, or that two keys state; beside num_epochs, the default `steps` does not count."""
    steps, epochs = config.steps, config.num_epochs
    if not epochs and steps == -1:
        return Violation("steps", NOTHING_STATES_THE_LENGTH, (max(defaults.steps, config.warmup_steps),))
    if not epochs or steps in (-1, defaults.steps):
        return None
    return violates(config, "steps", f"contradicts num_epochs={number_text(epochs)}, from which steps follows", -1)


def _last_batch(config: Config) -> Violation | None:
    reason = "has no effect with num_epochs=0: a run of stated steps has whole batches only"
    return None if config.num_epochs else unused(config, {"last_batch": "drop"}, reason)


def _scaled_adam(config: Config) -> Violation | None:
    due = {"learning_rate_scaling": "sqrt", "optimizer": "adamw"}
    wrong = [f"{key}={getattr(config, key)}" for key, right in due.items() if getattr(config, key) != right]
    if not wrong or not config.scale_adam_with_batch:
        return None
    rule = f"belongs to learning_rate_scaling=sqrt and optimizer=adamw, not to {' and '.join(wrong)}"
    return violates(config, "scale_adam_with_batch", rule, False)


def _vocab_tiling(config: Config) -> Violation | None:
    key, tiles, tokens = "num_vocab_tiling", config.num_vocab_tiling, config.max_target_length
    if tokens % tiles == 0:
        return None
    return violates(config, key, f"does not divide max_target_length={tokens}", divisors_of(key, tokens, tiles))


def _byte_vocabulary(config: Config) -> Violation | None:
    if config.tokenizer_type != "byte" or config.vocab_size >= _BYTE_TOKENS or config.dataset_type == "synthetic":
        return None
    return violates(
        config, "vocab_size", f"is less than the {_BYTE_TOKENS} tokens of tokenizer_type=byte", _BYTE_TOKENS
    )


def _tokenizer_path(config: Config) -> Violation | None:
    kind = config.tokenizer_type
    if kind == "byte":
        reason = "has no effect with tokenizer_type=byte"
        return unused(config, {"tokenizer_path": ""}, reason, {"tokenizer_type": "huggingface"})
    if config.tokenizer_path:
        return None
    message = f"tokenizer_path is empty, but tokenizer_type={kind} reads a file: name it."
    return Violation("tokenizer_path", message, ({"tokenizer_type": "byte"},))


def _dataset(config: Config) -> Violation | None:
    """Data that only another kind of run trains on."""
    needed = source_kind(config.dataset_type).run_kind
    other = next((kind for kind in load_installed("run") if kind.run_kind == needed), None)
    if other is None or needed == config.run_kind:
        return None
    file = other.base_files[-1]
    near = "sft" if config.objective == "auto" else {"dataset_type": "sft", "objective": "auto"}
    rule = (
        f"is for another kind of run, and {file} is not among the files of this config: give that file, or one whose "
        "base it is"
    )
    return violates(config, "dataset_type", rule, near)


def _objective(config: Config) -> Violation | None:
    """An objective that the data are not for."""
    if config.objective == "auto":
        return None
    asked, data = objective_kind(config.objective).data, source_kind(config.dataset_type).data
    if asked == data:
        return None
    due = objective_name("auto", config.dataset_type)
    possible = source_names(config.run_kind)
    others = [{"dataset_type": name} for name in possible if source_kind(name).data == asked][:1]
    rule = f"contradicts dataset_type={config.dataset_type}, whose data are for {due}"
    return violates(config, "objective", rule, due, *others[:1])


def _z_loss_of_pairs(config: Config) -> Violation | None:
    kind = config.dataset_type
    reason = f"has no effect with dataset_type={kind}, whose loss is one of pairs, not of tokens"
    return unused(config, {"z_loss_multiplier": 0}, reason) if source_kind(kind).data == "pairs" else None


def _conversations_only(config: Config) -> Violation | None:
    """Keys about conversations, where the data have none."""
    if source_kind(config.dataset_type).has_turns:
        return None
    reason = f"has no effect with dataset_type={config.dataset_type}"
    return unused(config, {"chat_template": ""}, reason, {"dataset_type": "sft"})


def _balance(config: Config) -> Violation | None:
    """Rows are balanced by their documents, and here these are all alike."""
    if config.dataset_type != "synthetic":
        return None
    reason = "has no effect with dataset_type=synthetic, whose rows are one document each"
    return unused(config, {"balance_attention": False}, reason)


def _dataset_path(config: Config) -> Violation | None:
    kind = config.dataset_type
    if not source_kind(kind).reads_files or config.dataset_path:
        return None
    message = f"dataset_path is empty, but dataset_type={kind} reads a file, directory or glob: name it."
    generated = [{"dataset_type": name} for name in source_names(config.run_kind) if not source_kind(name).reads_files]
    return Violation("dataset_path", message, tuple(generated[:1]))


def _data_in_bucket(config: Config) -> Violation | None:
    kind, value = config.dataset_type, config.dataset_path
    if source_kind(kind).reads_buckets or not source_kind(kind).reads_files:
        return None
    for key, path in [*_paths("eval_dataset_path", config.eval_dataset_path), *_paths("dataset_path", value)]:
        if is_bucket(path):
            rule = (
                f"is in a bucket, and dataset_type={kind} reads local files: copy them, or let `prepare` write there."
            )
            readers = [name for name in source_names(config.run_kind) if source_kind(name).reads_buckets]
            nearest = tuple({"dataset_type": name} for name in readers)
            return Violation(key, f"{key}={value_text(path)} {rule}", nearest)
    return None


def _paths(key: str, value: str | SourceList) -> list[tuple[str, str]]:
    if isinstance(value, SourceList):
        return [(key, entry.path) for entry in value.entries]
    return [(key, value)]


def _mixture(config: Config) -> Violation | None:
    """A list of sources where none can be, or keys about a mixture where there is none."""
    value, plain = config.dataset_path, {"mixture_exhausted": "error"}
    if config.dataset_type == "synthetic" and (found := _part_of_epoch(config, "and no epoch of synthetic data ends")):
        return found
    if not isinstance(value, SourceList):
        return unused(config, plain, "has no effect without a list of sources in dataset_path")
    if not source_kind(config.dataset_type).is_mixable:
        kinds = [{"dataset_type": name} for name in source_names(config.run_kind) if source_kind(name).is_mixable]
        rule = f"lists sources, which dataset_type={config.dataset_type} does not mix"
        return violates(config, "dataset_path", rule, value.entries[0].path, *kinds)
    if len(value.entries) > 1:
        rule = f"has no meaning with the {len(value.entries)} sources of dataset_path, each with its own epochs"
        if config.num_epochs:
            return violates(config, "num_epochs", f"{rule}: state steps", {"num_epochs": 0})
        if found := _part_of_epoch(config, f"which {rule}"):
            return found
    if all(entry.max_epochs == -1 for entry in value.entries):
        return unused(config, plain, "has no effect where no source has max_epochs")
    return None


def _part_of_epoch(config: Config, why: str) -> Violation | None:
    """A period that is a part of an epoch where there are none."""
    for key in ("log_period", "checkpoint_period", "eval_interval"):
        if 0 < getattr(config, key) < 1:
            return violates(config, key, f"is a part of an epoch, {why}: state steps", 1)
    return None


def _eval_data(config: Config) -> Violation | None:
    every = config.eval_interval
    if every == -1 or config.dataset_type == "synthetic" or config.eval_dataset_path or config.eval_fraction > 0:
        return None
    rule = f"and an empty eval_dataset_path leave nothing to evaluate with eval_interval={number_text(every)}"
    return violates(config, "eval_fraction", rule, {"eval_interval": -1})


def _eval_share(config: Config) -> Violation | None:
    if config.eval_fraction < 1 or config.eval_dataset_path:
        return None
    return violates(config, "eval_fraction", "leaves nothing to train on", 0.5)


def _overwrite(config: Config) -> Violation | None:
    if not (config.overwrite and is_bucket(config.base_output_directory)):
        return None
    where = value_text(config.base_output_directory)
    return violates(config, "overwrite", f"removes local runs, and base_output_directory={where} is a bucket", False)


def _run_name(config: Config) -> Violation | None:
    if "/" not in config.run_name and config.run_name not in (".", ".."):
        return None
    return violates(config, "run_name", "is not the name of a directory", "default")


def _remat_lists(config: Config) -> Violation | None:
    names = {key: listed(getattr(config, key)) for key in ("remat_save", "remat_offload")}
    for key, tensors in names.items():
        if tensors and config.remat_policy != "custom":
            reason = f"has no effect with remat_policy={config.remat_policy}"
            return violates(config, key, reason, "", {"remat_policy": "custom"})
        unknown = next((name for name in tensors if name not in REMAT_TENSORS), None)
        if unknown is not None:
            alike = get_close_matches(unknown, REMAT_TENSORS, n=1, cutoff=0)
            legal = dict.fromkeys(alike[0] if name == unknown else name for name in tensors)
            rule = f"names {value_text(unknown, 40)}, which is none of {', '.join(REMAT_TENSORS)}"
            return violates(config, key, rule, ",".join(legal))
    saved, offloaded = names["remat_save"], names["remat_offload"]
    both = [name for name in offloaded if name in saved]
    if not both:
        return None
    legal = ",".join(name for name in offloaded if name not in saved)
    return violates(config, "remat_offload", f"names {both[0]}, as remat_save does", legal)


def _schedule_of_replicas(config: Config) -> Violation | None:
    reason = "with enable_diloco=true: between synchronizations a replica knows only its own examples and tokens"
    return unused(config, {"schedule_unit": "steps"}, reason) if config.enable_diloco else None


def _shared_optimizer(config: Config) -> Violation | None:
    reason = "with enable_diloco=true: each replica has its own optimizer state"
    return unused(config, {"shard_optimizer_over_data": False}, reason) if config.enable_diloco else None


def _loss_spikes(config: Config) -> Violation | None:
    """Guilty rows are found by the loss of each under one set of parameters."""
    if config.run_kind != "train":
        return None
    if not config.max_loss_spike:
        return unused(config, {"loss_spike_action": "exclude"}, "has no effect with max_loss_spike=0")
    reason = "with enable_diloco=true: each replica has its own parameters, so guilty rows cannot be found"
    plain = {"loss_spike_action": "stop"}
    return unused(config, plain, reason, {"max_loss_spike": 0}) if config.enable_diloco else None


def _loss_scale(config: Config) -> Violation | None:
    if config.dtype == "float16":
        return None
    reason = f"has no effect with dtype={config.dtype}, whose range is that of float32"
    return unused(config, {"loss_scale": 0}, reason, {"dtype": "float16"})


RULES: tuple[Callable[[Config], Violation | None], ...] = (
    _dataset,
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
    _overwrite,
    _last_batch,
    _scaled_adam,
)
"""The rules about every kind of config."""

RULES_OF_DEFAULTS: tuple[Callable[[Config, Config], Violation | None], ...] = (_warmup, _length, unused_adapters)
"""The rules that also take the config of the defaults, since some defaults suit whatever else is set."""
