"""Rules between keys that hold on every machine. `batching` has the rules that involve devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import get_args

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import number_text, value_text
from maxtext_lite.config.kernels import unknown_to_kernel
from maxtext_lite.config.keys import (
    LOCAL_KINDS,
    REMAT_TENSORS,
    Config,
    MlpKind,
    ModelConfig,
    SourceList,
    layer_kinds,
    listed,
    mixer_of,
    objective_kind,
    objective_name,
    source_kind,
    source_names,
)
from maxtext_lite.config.registry import installed_names, load_installed, names
from maxtext_lite.config.violation import Violation, around, divisors, divisors_around, unused, violates
from maxtext_lite.config.weights import model_shape, stacks_of


def _kv_heads(config: Config) -> Violation | None:
    key, heads, kv_heads = "base_num_kv_heads", config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads == 0:
        return None
    return violates(config, key, f"does not divide base_num_query_heads={heads}", *divisors_around(heads, kv_heads))


def _head_dim(config: Config) -> Violation | None:
    width, mla = config.head_dim, config.mla
    if mla is not None:
        whole = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if width == whole:
            return None
        return violates(config, "head_dim", f"is not the {whole} of mla's qk_nope_head_dim + qk_rope_head_dim", whole)
    if width % 2 == 0 or config.trainable_position_size:
        return None
    near = (even for even in (width - 1, width + 1) if even > 0)
    return violates(config, "head_dim", "must be even for rotary positions", *near)


def _rotary_share(config: Config) -> Violation | None:
    key, dims, width = "partial_rotary_factor", config.rotary_dim, config.head_dim
    if config.partial_rotary_factor == 1:
        return None
    if config.mla is not None or config.trainable_position_size:
        other = "trainable_position_size" if config.mla is None else "mla"
        return violates(config, key, f"has no effect with {other}", 1)
    if dims and dims % 2 == 0:
        return None
    near = (even / width for even in (dims - 1, dims + 1) if 0 < even <= width)
    return violates(config, key, f"x head_dim={width} rotates {dims} dims, not an even number", *near)


def _layer_pattern(config: Config) -> Violation | None:
    if unknown := _unknown_kind(config, "layer_pattern", config.pattern, layer_kinds(), "global", names("layer")):
        return unknown
    other = "mla" if config.mla is not None else "trainable_position_size" if config.trainable_position_size else ""
    if not other or not {"nope", "local_nope"} & {*config.pattern}:
        return None
    rotated = config.layer_pattern.replace("local_nope", "local").replace("nope", "global")
    return violates(config, "layer_pattern", f"has layers without rotation beside {other}", rotated)


def _unknown_kind(
    config: Config, key: str, kinds: Sequence[str], known: Sequence[str], usual: str, added: Sequence[str] = ()
) -> Violation | None:
    """The violation of a pattern that has an unknown kind, with an alike one of `added`, or the usual one, instead."""

    def nearest(kind: str) -> str:
        return kind if kind in known else next(iter(get_close_matches(kind, added, n=1)), usual)

    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is None:
        return None
    rule = f"names '{value_text(unknown, 40)}', which is none of {', '.join(known)}"
    return violates(config, key, rule, ",".join(map(nearest, kinds)))


def _window(config: Config) -> Violation | None:
    """Local layers need a window, and a window needs local layers."""
    broken = _reach(config, "sliding_window_size", LOCAL_KINDS)
    if broken or {*LOCAL_KINDS} & {*config.pattern}:
        return broken
    reason = f"has no effect with layer_pattern={value_text(config.layer_pattern)}"
    return unused(config, {"rope_local_max_timescale": 0}, reason)


def _chunk(config: Config) -> Violation | None:
    """Chunked layers need a chunk size, and a chunk size needs chunked layers."""
    return _reach(config, "chunk_attn_window_size", ("chunked",))


def _reach(config: Config, key: str, kinds: Sequence[str]) -> Violation | None:
    """A key of the tokens that layers of these kinds see: needed by them, and without effect elsewhere."""
    pattern, kind = f"layer_pattern={value_text(config.layer_pattern)}", kinds[0]
    if not {*kinds} & {*config.pattern}:
        return unused(config, {key: 0}, f"has no effect with {pattern}", {"layer_pattern": kind})
    if getattr(config, key):
        return None
    return violates(config, key, f"with {pattern}: {kind} layers see no token", config.max_target_length)


def _mlp_pattern(config: Config) -> Violation | None:
    """mlp_pattern names known kinds, both kinds occur among the layers, and no other key says which are dense."""
    key, kinds, layers = "mlp_pattern", config.mlp_kinds, config.base_num_decoder_layers
    if unknown := _unknown_kind(config, key, kinds, get_args(MlpKind), "moe"):
        return unknown
    if config.num_experts == 1 or set(kinds) == {"moe"}:  # the first is refused by `_without_experts`
        return None
    if "moe" not in kinds[:layers]:
        return violates(config, key, f"leaves none of base_num_decoder_layers={layers} for experts", "moe")
    if len({*kinds[:layers]}) == 1:
        return violates(config, key, f"has no dense layer among base_num_decoder_layers={layers}", "moe")
    if first := config.first_num_dense_layers:
        both = ",".join(["dense"] * first + [kinds[layer % len(kinds)] for layer in range(first, layers)])
        rule = f"beside {key}={value_text(config.mlp_pattern)}, which counts all layers"
        change = {key: both, "first_num_dense_layers": 0}
        return violates(config, "first_num_dense_layers", rule, 0, change)
    return None


def _mixers(config: Config) -> Violation | None:
    """Layers of other packages occur among the layers, and beside attention go without what assumes one stack."""
    key, pattern, layers = "layer_pattern", config.pattern, config.base_num_decoder_layers
    mixers = [mixer_of(kind) for kind in pattern]
    if len({*mixers}) == 1:
        return None
    if {*mixers[:layers]} != {*mixers}:
        rule = f"has kinds that are not among base_num_decoder_layers={layers}"
        return violates(config, key, rule, ",".join(pattern[:layers]))
    beside = f"beside layer_pattern={value_text(config.layer_pattern)}"
    if config.routed_bias:
        return violates(config, "routed_bias", f"{beside}, whose experts are in several stacks", False)
    if first := config.first_num_dense_layers:
        both = ",".join(["dense"] * first + ["moe"] * (layers - first))
        change = {"mlp_pattern": both, "first_num_dense_layers": 0}
        return violates(config, "first_num_dense_layers", f"{beside}, which counts all layers", 0, change)
    return None


def _shared_expert(config: Config) -> Violation | None:
    plain = {"base_shared_mlp_dim": -1, "shared_expert_gate": False}
    reason = "has no effect with shared_experts=0"
    return None if config.shared_experts else unused(config, plain, reason, {"shared_experts": 1})


def _sparse_mixer(config: Config) -> Violation | None:
    plain = {"norm_topk_prob": False, "routed_bias": False, "n_routing_groups": 1}
    reason = "has no effect with routed_score_func=sparsemixer, which takes a separate softmax for each choice"
    return unused(config, plain, reason) if config.routed_score_func == "sparsemixer" else None


def _learned_positions(config: Config) -> Violation | None:
    """The table of learned positions covers an example, and leaves nothing to rotate."""
    key, tokens = "trainable_position_size", config.max_target_length
    if config.trainable_position_size == 0:
        return None
    if config.trainable_position_size < tokens:
        return violates(config, key, f"is less than max_target_length={tokens}", tokens)
    for other, plain in (("rope_scaling", None), ("rope_local_max_timescale", 0.0), ("mla", None)):
        if (value := getattr(config, other)) != plain:
            return violates(config, key, f"contradicts {other}={value_text(value)}, which is about rotation", 0)
    return None


def _latent_attention(config: Config) -> Violation | None:
    """Keys of ordinary attention, beside mla."""
    heads = {"base_num_kv_heads": config.base_num_query_heads}
    plain = {
        **heads, "attention_bias": "none", "qk_norm": "none", "attention_sinks": False, "clip_qkv": 0,
        "inverse_layer_scaling": False, "position_temperature": None,
    }  # fmt: skip
    return unused(config, plain, f"with mla={config.mla}: latent attention has its own") if config.mla else None


def _parallel_block(config: Config) -> Violation | None:
    if config.parallel_block == "none" or config.norm_placement == "pre":
        return None
    message = f"parallel_block={config.parallel_block} contradicts norm_placement={config.norm_placement}."
    return Violation("norm_placement", message, ("pre",))


def _longrope(config: Config) -> Violation | None:
    scaling, planes = config.rope_scaling, config.rotary_dim // 2
    if scaling is None or scaling.rope_type != "longrope":
        return None
    for name in ("short_factor", "long_factor"):
        if (count := len(getattr(scaling, name))) != planes:
            message = f"rope_scaling has {count} numbers in {name}, not one for each of {planes} pairs of rotated dims."
            return Violation("rope_scaling", message, (None,))
    return None


def _yarn(config: Config) -> Violation | None:
    """It counts the planes between two wavelengths, of which there must be more than one."""
    if config.rope_scaling is None or config.rope_scaling.rope_type != "yarn" or config.rope_max_timescale != 1:
        return None
    return violates(config, "rope_max_timescale", "with rope_type=yarn: all wavelengths are the same", 10_000.0)


def _temperature(config: Config) -> Violation | None:
    tuning = config.position_temperature
    if tuning is None or any(tuning.of(kind) for kind in config.pattern):
        return None
    reason = f"has no effect with layer_pattern={value_text(config.layer_pattern)}"
    return violates(config, "position_temperature", reason, None)


def _inverse_layers(config: Config) -> Violation | None:
    """A pipeline stage does not know the numbers of its layers."""
    keys = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism")
    if not config.inverse_layer_scaling or config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism == 1:
        return None
    key = next(key for key in keys if getattr(config, key) != 1)
    rule = "contradicts inverse_layer_scaling=true: a stage does not know the numbers of its layers"
    return violates(config, key, rule, 1)


def _gated_activation(config: Config) -> Violation | None:
    activation, has_experts = config.mlp_activation, config.num_experts > 1
    if activation == "xielu" and has_experts:
        return violates(config, "mlp_activation", "does not work in experts", "silu")
    if activation == "xielu" and config.gated_mlp:
        return violates(config, "gated_mlp", "with mlp_activation=xielu, which has no gate", False)
    if config.gated_mlp or not (has_experts or activation == "clamped_silu"):
        return None
    if has_experts:
        return violates(config, "gated_mlp", "with num_experts > 1: experts have gates", True)
    return violates(config, "gated_mlp", f"with mlp_activation={activation}: it clamps the gate too", True)


def _dense_layers(config: Config) -> Violation | None:
    layers = config.base_num_decoder_layers
    if config.first_num_dense_layers < layers:
        return None
    rule = f"leaves none of base_num_decoder_layers={layers} for experts"
    return violates(config, "first_num_dense_layers", rule, layers - 1)


def _experts_per_token(config: Config) -> Violation | None:
    experts = config.num_experts
    if config.num_experts_per_tok <= experts:
        return None
    return violates(config, "num_experts_per_tok", f"is more than num_experts={experts}", experts)


def _routing_groups(config: Config) -> Violation | None:
    key, groups, experts = "n_routing_groups", config.n_routing_groups, config.num_experts
    if groups == 1 or (experts % groups == 0 and experts // groups >= 2):
        return None
    legal = [number for number in divisors(experts) if 2 * number <= experts] or [1]
    rule = f"does not split num_experts={experts} into equal groups of at least 2"
    return violates(config, key, rule, *around(legal, groups))


def _chosen_groups(config: Config) -> Violation | None:
    key, groups, chosen = "topk_routing_group", config.n_routing_groups, config.topk_routing_group
    experts, per_token = config.num_experts, config.num_experts_per_tok
    if chosen > groups:
        return violates(config, key, f"is more than n_routing_groups={groups}", groups)
    if experts % groups or chosen * experts // groups >= per_token:
        return None
    enough = -(-per_token * groups // experts)
    if enough > groups:  # num_experts_per_tok is more than num_experts, which `_experts_per_token` refuses
        return None
    rule = f"x {experts // groups} experts of a group are fewer than num_experts_per_tok={per_token}"
    return violates(config, key, rule, enough)


def _without_experts(config: Config) -> Violation | None:
    """Keys about experts, in a model without any."""
    plain = {
        "base_moe_mlp_dim": -1,
        "shared_experts": 0,
        "capacity_factor": -1,
        "routed_bias": False,
        "expert_bias": False,
        "first_num_dense_layers": 0,
        "mlp_pattern": "moe",
        "apply_router_weight_on_input": False,
        "router_z_loss_multiplier": 0,
    }
    reason = "has no effect with num_experts=1, a model without experts"
    return None if config.num_experts > 1 else unused(config, plain, reason)


ALL_TARGETS = "all"
"""The value of lora_targets that names every weight with a name."""


def adaptable_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that may have adapters: every matrix of the layers except routers and shared experts' gates.

    A weight's path in the parameters ends in its name, which experts, shared experts and dense layers have in common.
    """
    tables = [table for stack, (_, table) in stacks_of(model_shape(config)).items() if stack]
    matrices = [path.rpartition("/")[2] for table in tables for path, weight in table.items() if weight.is_normal]
    return tuple(dict.fromkeys(name for name in matrices if name not in ("router", "shared_gate")))


def adapted_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that have adapters, in the model's order; none without LoRA."""
    if config.lora_rank == 0:
        return ()
    named = _named_targets(config)
    return tuple(name for name in adaptable_weights(config) if named == [ALL_TARGETS] or name in named)


def _named_targets(config: ModelConfig) -> list[str]:
    return [name.strip() for name in config.lora_targets.split(",")]


def unknown_targets(config: Config) -> Violation | None:
    """Names in lora_targets that are not of weights that may have adapters."""
    if config.lora_rank == 0 or _named_targets(config) == [ALL_TARGETS]:
        return None
    named, known = _named_targets(config), adaptable_weights(config)
    wrong = next((name for name in named if name not in known), None)
    if wrong is None:
        return None
    kept = list(dict.fromkeys(name for name in named if name in known))
    alike = [name for name in known if wrong and wrong in name] or get_close_matches(wrong, known, n=1, cutoff=0.8)
    near = [name for name in alike[:1] if name not in kept]
    rule = f"names '{value_text(wrong, 40)}'; this model has {', '.join(known)}, or all"
    return violates(config, "lora_targets", rule, ",".join(kept + near) or ALL_TARGETS)


def unused_adapters(config: Config, defaults: Config) -> Violation | None:
    """Keys about adapters, in a run without any."""
    usual = {key: getattr(defaults, key) for key in ("lora_alpha", "lora_targets")}
    reason = "has no effect with lora_rank=0, which trains all weights"
    return None if config.lora_rank else unused(config, usual, reason, {"lora_rank": 8})


MODEL_RULES: tuple[Callable[[Config], Violation | None], ...] = (
    _kv_heads,
    _head_dim,
    _rotary_share,
    _layer_pattern,
    _mixers,
    _window,
    _chunk,
    _learned_positions,
    _latent_attention,
    _parallel_block,
    _longrope,
    _yarn,
    _temperature,
    _inverse_layers,
    _gated_activation,
    _dense_layers,
    _mlp_pattern,
    unknown_targets,
    _experts_per_token,
    _routing_groups,
    _chosen_groups,
    _shared_expert,
    _sparse_mixer,
    _without_experts,
)
"""Every rule about the architecture."""


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
    return violates(config, key, f"does not divide max_target_length={tokens}", *divisors_around(tokens, tiles))


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
    if needed == config.run_kind:
        return None
    other = next((kind for kind in load_installed("run") if kind.run_kind == needed), None)
    if other is None:
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


def _number_format(config: Config) -> Violation | None:
    if config.quantization in ("none", *installed_names("quantization")):
        return None
    return violates(config, "quantization", "is not installed", "none")


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
    _number_format,
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
