"""Rules between keys that hold on every machine. `batching` has the rules that involve devices."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import (
    Refusal,
    around,
    divisors,
    divisors_around,
    number_text,
    refuse,
    refuse_unused,
    value_text,
)
from maxtext_lite.config.kernels import unknown_to_kernel
from maxtext_lite.config.keys import (
    ATTENTION_KINDS,
    LOCAL_KINDS,
    PRETRAIN,
    Config,
    SourceList,
    kinds_in,
    listed,
    objective_kind,
    objective_name,
    source_kind,
    source_names,
)
from maxtext_lite.config.registry import installed_names, load_installed
from maxtext_lite.config.weights import ALL_TARGETS, adaptable_weights, is_in_group, model_shape, trained_paths

_BYTE_TOKENS = 257  # 256 bytes and the end of text


def rule_violations(config: Config, defaults: Config) -> Iterator[Refusal]:
    """Every rule that the config breaks. `defaults` is the config of its `base_files`."""
    yield from filter(None, config.own_refusals())
    for rule in RULES:
        if refusal := rule(config):
            yield refusal
    for rule in (_warmup, _length):
        if refusal := rule(config, defaults):
            yield refusal
    yield from _conflicts(config)
    yield from _keys_without_effect(config, defaults)


# ---- Keys without effect --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Idle:
    """Keys that have no effect because of another key, and so must have their values of base.yml.

    Attributes:
      cause: the other key.
      instead: a value of it with which they have an effect, where one is obvious.
      when: whether they have none, from the value of `cause`.
    """

    cause: str
    keys: tuple[str, ...]
    instead: object = None
    when: Callable[[Any], object] = operator.not_


def _no_local(pattern: str) -> bool:
    return not {*LOCAL_KINDS} & {*kinds_in(pattern)}


_IDLE = (
    _Idle("lora_rank", ("lora_alpha", "lora_targets"), 8),
    _Idle("mtp_num_layers", ("mtp_loss_scaling_factor",), 1),
    _Idle("num_epochs", ("last_batch",)),
    _Idle("learning_rate_scaling", ("learning_rate_scaling_of",), when=lambda rule: rule == "none"),
    _Idle("batch_schedule", ("batch_schedule_unit",)),
    _Idle("ema_decay", ("eval_parameters",), 0.999),
    _Idle("max_loss_spike", ("loss_spike_action",)),
    _Idle("tokenizer_type", ("tokenizer_path",), "huggingface", lambda kind: kind == "byte"),
    _Idle("dtype", ("loss_scale",), "float16", lambda dtype: dtype != "float16"),
    _Idle("remat_policy", ("remat_save", "remat_offload"), "custom", lambda policy: policy != "custom"),
    _Idle("shared_experts", ("base_shared_mlp_dim", "shared_expert_gate"), 1),
    _Idle(
        "num_experts",
        (
            "base_moe_mlp_dim",
            "shared_experts",
            "capacity_factor",
            "routed_bias",
            "load_balance_over",
            "expert_bias",
            "first_num_dense_layers",
            "mlp_pattern",
            "apply_router_weight_on_input",
            "router_z_loss_multiplier",
        ),
        when=lambda experts: experts == 1,
    ),
    _Idle("routed_score_func", ("routed_bias", "n_routing_groups"), when=lambda name: name == "sparsemixer"),
    _Idle(
        "mla",
        (
            "attention_bias",
            "qk_norm",
            "attention_sinks",
            "clip_qkv",
            "global_attention",
            "shared_kv",
            "inverse_layer_scaling",
            "position_temperature",
        ),
        when=bool,
    ),
    _Idle("layer_pattern", ("sliding_window_size",), "local", _no_local),
    _Idle("layer_pattern", ("rope_local_max_timescale",), when=_no_local),
    _Idle("layer_pattern", ("global_attention",), when=lambda pattern: {*kinds_in(pattern)} <= {*LOCAL_KINDS}),
    _Idle("layer_pattern", ("chunk_attn_window_size",), "chunked", lambda pattern: "chunked" not in kinds_in(pattern)),
    _Idle("dataset_type", ("chat_template",), "sft", lambda kind: not source_kind(kind).has_turns),
    _Idle("dataset_type", ("z_loss_multiplier",), when=lambda kind: source_kind(kind).data == "pairs"),
    _Idle("dataset_type", ("balance_attention",), when=lambda kind: kind == "synthetic"),
)


def _keys_without_effect(config: Config, defaults: Config) -> Iterator[Refusal]:
    for idle in _IDLE:
        value = getattr(config, idle.cause)
        if not idle.when(value):
            continue
        usual = {key: getattr(defaults, key) for key in idle.keys}
        instead = () if idle.instead is None else ({idle.cause: idle.instead},)
        if refusal := refuse_unused(config, usual, f"has no effect with {idle.cause}={value_text(value)}", *instead):
            yield refusal


# ---- Keys beside others ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conflict:
    """Keys that must have certain values because of another key.

    Attributes:
      cause: the other key.
      plain: the value of each key.
      why: in words.
      when: whether they must, from the value of `cause`.
    """

    cause: str
    plain: Mapping[str, object]
    why: str
    when: Callable[[Any], object] = bool


_ONE_STAGE = {"ici_pipeline_parallelism": 1, "dcn_pipeline_parallelism": 1}
_ONE_STACK = {**_ONE_STAGE, "mtp_num_layers": 0}
_COMPLETE_P = ({"optimizer": "adamw", "lora_rank": 0}, "CompleteP is AdamW's, of all weights")
_CONFLICTS = (
    _Conflict("parallel_block", {"norm_placement": "pre"}, "it has one norm", lambda block: block != "none"),
    _Conflict("shared_kv", _ONE_STACK, "its layers need the keys of others"),
    _Conflict("hidden_size_per_layer_input", _ONE_STACK, "its layers need the tokens"),
    _Conflict("inverse_layer_scaling", _ONE_STAGE, "its layers need their numbers"),
    _Conflict("num_experts", {"gated_mlp": True}, "experts have gates", lambda experts: experts > 1),
    _Conflict("mlp_activation", {"gated_mlp": True}, "it clamps the gate too", lambda name: name == "clamped_silu"),
    _Conflict("routed_score_func", {"norm_topk_prob": False}, "it has no effect", lambda name: name == "sparsemixer"),
    _Conflict("routed_bias", {"load_balance_over": "example"}, "it balances the experts by itself"),
    _Conflict("lora_rank", {"load_balance_over": "example"}, "its routers are frozen"),
    _Conflict("lora_rank", {"mtp_num_layers": 0}, "it has no adapters of these layers"),
    _Conflict("mup_base_emb_dim", *_COMPLETE_P),
    _Conflict("mup_base_num_layers", *_COMPLETE_P),
    _Conflict("base_output_directory", {"overwrite": False}, "only local runs can be removed", is_bucket),
    _Conflict(
        "optimizer",
        {"optimizer_state_dtype": "float32"},
        "its moments are means over rows and columns",
        lambda name: name == "adafactor",
    ),
    _Conflict(
        "qk_clip_threshold",
        {"qk_norm": "none", "clip_qkv": 0, "lora_rank": 0, "shared_kv": None, "global_attention": None},
        "scaled weights must scale the logits",
    ),
    # Between synchronizations a replica knows only its own examples, parameters and optimizer state.
    _Conflict(
        "enable_diloco",
        {
            "schedule_unit": "steps",
            "shard_optimizer_over_data": False,
            "ema_decay": 0,
            "mtp_num_layers": 0,
            "load_balance_over": "example",
        },
        "replicas differ between synchronizations",
    ),
)


def _conflicts(config: Config) -> Iterator[Refusal]:
    for conflict in _CONFLICTS:
        value = getattr(config, conflict.cause)
        rule = f"with {conflict.cause}={value_text(value)}: {conflict.why}"
        if conflict.when(value) and (refusal := refuse_unused(config, conflict.plain, rule)):
            yield refusal


# ---- The architecture -----------------------------------------------------------------------------------------------


def _kv_heads(config: Config) -> Refusal | None:
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if config.mla is not None and kv_heads != heads:
        return refuse(config, "base_num_kv_heads", "with mla: latent attention has its own keys", heads)
    if heads % kv_heads:
        near = divisors_around(heads, kv_heads)
        return refuse(config, "base_num_kv_heads", f"does not divide base_num_query_heads={heads}", *near)
    return None


def _global_attention(config: Config) -> Refusal | None:
    key, own = "global_attention", config.global_attention
    if own is None:
        return None
    heads = own.global_num_query_heads or config.base_num_query_heads
    if heads % own.global_num_kv_heads:
        legal = divisors_around(heads, own.global_num_kv_heads)
        near = [dataclasses.replace(own, global_num_kv_heads=each) for each in legal]
        return refuse(config, key, f"has kv heads that do not divide the {heads} query heads", *near)
    if own.rotary_dim % 2 or not own.rotary_dim:
        near = dataclasses.replace(own, global_partial_rotary_factor=None)
        return refuse(config, key, f"rotates {own.rotary_dim} dims, not an even number", near)
    return None


def _head_dim(config: Config) -> Refusal | None:
    width = config.head_dim
    if config.mla is not None:
        whole = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
        if width != whole:
            return refuse(config, "head_dim", f"is not the {whole} of mla's qk_nope_head_dim + qk_rope_head_dim", whole)
    elif width % 2 and not config.trainable_position_size:
        near = around([width - 1 or 2, width + 1], width)
        return refuse(config, "head_dim", "must be even for rotary positions", *near)
    return None


def _rotary_share(config: Config) -> Refusal | None:
    key, dims, width = "partial_rotary_factor", config.rotary_dim, config.head_dim
    if config.partial_rotary_factor == 1:
        return None
    for other in ("mla", "trainable_position_size"):
        if getattr(config, other):
            return refuse(config, key, f"does not work with {other}", 1)
    if dims == 0 or dims % 2:
        near = [even / width for even in (dims - 1, dims + 1) if 0 < even <= width]
        return refuse(config, key, f"x head_dim={width} rotates {dims} dims, not an even number", *near)
    return None


def _layer_pattern(config: Config) -> Refusal | None:
    if not {"nope", "local_nope"} & {*config.pattern}:
        return None
    rotated = config.layer_pattern.replace("local_nope", "local").replace("nope", "global")
    for other in ("mla", "trainable_position_size"):
        if getattr(config, other):
            return refuse(config, "layer_pattern", f"has layers without rotation beside {other}", rotated)
    return None


def _reach(config: Config) -> Refusal | None:
    """Local and chunked layers need a key that says how far they see."""
    for key, kinds in (("sliding_window_size", LOCAL_KINDS), ("chunk_attn_window_size", ("chunked",))):
        if getattr(config, key) == 0 and {*kinds} & {*config.pattern}:
            rule = f"with layer_pattern={value_text(config.layer_pattern)}: {kinds[0]} layers see no token"
            return refuse(config, key, rule, config.max_target_length)
    return None


def _mlp_pattern(config: Config) -> Refusal | None:
    """Both kinds of mlp_pattern occur among the layers, and no other key says which are dense."""
    key, kinds, layers = "mlp_pattern", config.mlp_kinds, config.base_num_decoder_layers
    if config.num_experts == 1 or set(kinds) == {"moe"}:
        return None
    if "moe" not in kinds[:layers]:
        return refuse(config, key, f"leaves none of base_num_decoder_layers={layers} for experts", "moe")
    if "dense" not in kinds[:layers]:
        return refuse(config, key, f"has no dense layer among base_num_decoder_layers={layers}", "moe")
    return _first_dense(config, f"beside {key}={value_text(config.mlp_pattern)}")


def _first_dense(config: Config, beside: str) -> Refusal | None:
    """Refuses first_num_dense_layers where a pattern counts all layers: nearest says the same by mlp_pattern."""
    first, kinds = config.first_num_dense_layers, config.mlp_kinds
    if first == 0:
        return None
    rest = [kinds[layer % len(kinds)] for layer in range(first, config.base_num_decoder_layers)]
    same = {"mlp_pattern": ",".join(["dense"] * first + rest), "first_num_dense_layers": 0}
    return refuse(config, "first_num_dense_layers", f"{beside}, which counts all layers", 0, same)


def _mixers(config: Config) -> Refusal | None:
    """Kinds of layers in stacks of their own all occur, and a pattern says which have experts."""
    pattern, layers = config.pattern, config.base_num_decoder_layers
    mixers = model_shape(config).mixers
    if len({*mixers}) == 1 and config.shared_kv is None:
        return None
    if {*mixers[:layers]} != {*mixers}:
        rule = f"has kinds that are not among base_num_decoder_layers={layers}"
        return refuse(config, "layer_pattern", rule, ",".join(pattern[:layers]))
    beside = f"beside layer_pattern={value_text(config.layer_pattern)}"
    return _first_dense(config, beside)


def _learned_positions(config: Config) -> Refusal | None:
    """The table of learned positions covers an example, and leaves nothing to rotate."""
    key, tokens = "trainable_position_size", config.max_target_length
    if config.trainable_position_size == 0:
        return None
    if config.trainable_position_size < tokens:
        return refuse(config, key, f"is less than max_target_length={tokens}", tokens)
    for other in ("rope_scaling", "rope_local_max_timescale", "mla"):
        if value := getattr(config, other):
            return refuse(config, key, f"contradicts {other}={value_text(value)}, which is about rotation", 0)
    return None


def _rope_scaling(config: Config) -> Refusal | None:
    """longrope has a number for each plane; yarn counts the planes between two wavelengths, which must differ."""
    own = config.global_attention
    scaling, planes = config.rope_scaling, (config.rotary_dim if own is None else own.rotary_dim) // 2
    if scaling is None:
        return None
    if scaling.rope_type == "yarn" and config.rope_max_timescale == 1:
        return refuse(config, "rope_max_timescale", "with rope_type=yarn: all wavelengths are the same", 10_000.0)
    for name in ("short_factor", "long_factor") if scaling.rope_type == "longrope" else ():
        count = len(getattr(scaling, name))
        if count != planes:
            message = f"rope_scaling has {count} numbers in {name}, not one for each of {planes} pairs of rotated dims."
            return Refusal("rope_scaling", message, (None,))
    return None


def _temperature(config: Config) -> Refusal | None:
    tuning = config.position_temperature
    if tuning is None or any(tuning.of(kind) for kind in config.pattern):
        return None
    reason = f"has no effect with layer_pattern={value_text(config.layer_pattern)}"
    return refuse(config, "position_temperature", reason, None)


def _own_norms(config: Config) -> Refusal | None:
    """Norms of the parts of experts need a shared expert, whose width layers that share keys do not change."""
    if config.norm_placement != "each":
        return None
    if config.num_experts == 1 or not config.shared_experts:
        return refuse(config, "norm_placement", "needs experts and a shared expert", "both")
    return None


def _shared_kv(config: Config) -> Refusal | None:
    """Layers without keys have an earlier layer of their kind that has some."""
    key, shared, kinds = "shared_kv", config.shared_kv, config.layer_kinds
    if shared is None:
        return None
    most = len(kinds) - 1 - max(kinds.index(kind) for kind in kinds)
    if shared.num_kv_shared_layers > most:
        near = dataclasses.replace(shared, num_kv_shared_layers=most) if most else None
        return refuse(config, key, "leaves a kind of layer without one that has keys", near)
    if not {*kinds} <= {*ATTENTION_KINDS}:
        return refuse(config, key, "needs layers with attention", None)
    if shared.use_double_wide_mlp and config.num_experts > 1:
        near = dataclasses.replace(shared, use_double_wide_mlp=False)
        return refuse(config, key, f"does not widen the experts of num_experts={config.num_experts}", near)
    return None


def _gated_activation(config: Config) -> Refusal | None:
    activation, has_experts = config.mlp_activation, config.num_experts > 1
    if activation == "xielu" and has_experts:
        return refuse(config, "mlp_activation", "does not work in experts", "silu")
    if activation == "xielu" and config.gated_mlp:
        return refuse(config, "gated_mlp", "with mlp_activation=xielu, which has no gate", False)
    return None


def _dense_layers(config: Config) -> Refusal | None:
    layers = config.base_num_decoder_layers
    if config.first_num_dense_layers < layers:
        return None
    rule = f"leaves none of base_num_decoder_layers={layers} for experts"
    return refuse(config, "first_num_dense_layers", rule, layers - 1)


def _experts_per_token(config: Config) -> Refusal | None:
    experts = config.num_experts
    if config.num_experts_per_tok <= experts:
        return None
    return refuse(config, "num_experts_per_tok", f"is more than num_experts={experts}", experts)


def _routing_groups(config: Config) -> Refusal | None:
    groups, experts = config.n_routing_groups, config.num_experts
    if groups == 1 or (experts % groups == 0 and experts // groups >= 2):
        return None
    legal = [number for number in divisors(experts) if 2 * number <= experts] or [1]
    rule = f"does not split num_experts={experts} into equal groups of at least 2"
    return refuse(config, "n_routing_groups", rule, *around(legal, groups))


def _chosen_groups(config: Config) -> Refusal | None:
    key, groups, chosen = "topk_routing_group", config.n_routing_groups, config.topk_routing_group
    experts, per_token = config.num_experts, config.num_experts_per_tok
    if chosen > groups:
        return refuse(config, key, f"is more than n_routing_groups={groups}", groups)
    if experts % groups or chosen * experts // groups >= per_token or per_token > experts:
        return None
    rule = f"x {experts // groups} experts of a group are fewer than num_experts_per_tok={per_token}"
    return refuse(config, key, rule, -(-per_token * groups // experts))


def _mtp(config: Config) -> Refusal | None:
    """Multi-token prediction is a part of next-token prediction."""
    layers, tokens = config.mtp_num_layers, config.max_target_length
    if layers and config.objective_kind.makes != PRETRAIN.makes:
        return refuse(config, "mtp_num_layers", "with an objective that is not next-token prediction", 0)
    if layers >= tokens:
        return refuse(config, "mtp_num_layers", f"predicts beyond max_target_length={tokens}", tokens - 1)
    return None


def _lora_targets(config: Config) -> Refusal | None:
    named = listed(config.lora_targets)
    if config.lora_rank == 0 or named == (ALL_TARGETS,):
        return None
    known = adaptable_weights(config)
    wrong = [name for name in named if name not in known]
    if not wrong:
        return None
    alike = [name for name in known if wrong[0] in name] or get_close_matches(wrong[0], known, n=1, cutoff=0.8)
    nearest = dict.fromkeys([name for name in named if name in known] + alike[:1])
    rule = f"names '{value_text(wrong[0], 40)}'; this model has {', '.join(known)}, or all"
    return refuse(config, "lora_targets", rule, ",".join(nearest) or ALL_TARGETS)


def _learning_rate_groups(config: Config) -> Refusal | None:
    groups = config.learning_rate_groups
    paths = trained_paths(config) if groups else ()
    for group in groups:
        if not any(is_in_group(path, group) for path in paths):
            names = dict.fromkeys(name for path in paths for name in (*path.split("/"), path))
            nearest = {name: rate for name, rate in groups.items() if name != group}
            nearest |= dict.fromkeys(get_close_matches(group, names, n=1), groups[group])
            rule = f"names '{value_text(group, 40)}', which is in no path of a trained parameter"
            return refuse(config, "learning_rate_groups", rule, {"learning_rate_groups": nearest})
    return None


# ---- The run, its numbers and its data -------------------------------------------------------------------------------


def _warmup(config: Config, defaults: Config) -> Refusal | None:
    """A warm-up longer than the run, unless it is the default one: a short run may end within it."""
    warmup, steps = config.warmup_steps, config.steps
    if config.num_epochs or steps == -1 or warmup <= steps or warmup == defaults.warmup_steps:
        return None
    return refuse(config, "warmup_steps", f"is more than steps={steps}", steps)


def _length(config: Config, defaults: Config) -> Refusal | None:
    """A length that no key states, or that two keys state; beside num_epochs, the default `steps` does not count."""
    steps, epochs = config.steps, config.num_epochs
    if not epochs and steps == -1:
        nearest = max(defaults.steps, config.warmup_steps)
        return refuse(config, "steps", "follows from num_epochs, which is 0: nothing states the length", nearest)
    if not epochs or steps in (-1, defaults.steps):
        return None
    return refuse(config, "steps", f"contradicts num_epochs={number_text(epochs)}, from which steps follows", -1)


def _batch_schedule(config: Config) -> Refusal | None:
    """A schedule is the one key that states batches."""
    if not config.batch_schedule:
        return None
    if config.enable_rampup_batch_size:
        rule = "is beside enable_rampup_batch_size=true, which states a schedule too"
        return refuse(config, "batch_schedule", rule, {"enable_rampup_batch_size": False}, [])
    last = config.batch_schedule[-1][1]
    for key, same in (("global_batch_size", last), ("global_batch_tokens", last * config.tokens_per_example)):
        if getattr(config, key) not in (0, same):
            return refuse(config, key, f"contradicts the last stage of batch_schedule, {last} examples", same, 0)
    return None


def _run_name(config: Config) -> Refusal | None:
    if "/" not in config.run_name and config.run_name not in (".", ".."):
        return None
    return refuse(config, "run_name", "is not the name of a directory", "default")


def _scaled_adam(config: Config) -> Refusal | None:
    if not config.scale_adam_with_batch or (config.learning_rate_scaling, config.optimizer) == ("sqrt", "adamw"):
        return None
    return refuse(config, "scale_adam_with_batch", "needs learning_rate_scaling=sqrt and optimizer=adamw", False)


def _scaled_by_stage(config: Config) -> Refusal | None:
    if not config.scale_adam_with_batch:
        return None
    rule = "with scale_adam_with_batch=true: Adam's averages keep their decay from stage to stage"
    return refuse_unused(config, {"learning_rate_scaling_of": "target"}, rule, {"scale_adam_with_batch": False})


def _state_dtype(config: Config) -> Refusal | None:
    if config.optimizer_state_dtype in ("float32", *installed_names("moments")):
        return None
    return refuse(config, "optimizer_state_dtype", "is not installed", "float32")


def _qk_clip(config: Config) -> Refusal | None:
    if not (config.qk_clip_threshold and config.first_num_dense_layers):
        return None
    rule = "with qk_clip_threshold: that schedule has no logits of first_num_dense_layers"
    return refuse_unused(config, {"pipeline_schedule": "gpipe"}, rule, {"qk_clip_threshold": 0})


def _diloco(config: Config) -> Refusal | None:
    if not (config.enable_diloco and config.max_loss_spike):
        return None
    rule = "with enable_diloco=true: replicas differ between synchronizations"
    return refuse_unused(config, {"loss_spike_action": "stop"}, rule, {"max_loss_spike": 0})


def _remat_lists(config: Config) -> Refusal | None:
    saved, offloaded = listed(config.remat_save), listed(config.remat_offload)
    both = [name for name in offloaded if name in saved]
    if not both:
        return None
    legal = [name for name in offloaded if name not in saved]
    return refuse(config, "remat_offload", f"names {both[0]}, as remat_save does", ",".join(legal))


def _number_format(config: Config) -> Refusal | None:
    if config.quantization in ("none", *installed_names("quantization")):
        return None
    return refuse(config, "quantization", "is not installed", "none")


def _vocab_tiling(config: Config) -> Refusal | None:
    tiles, tokens = config.num_vocab_tiling, config.max_target_length
    if tokens % tiles == 0:
        return None
    near = divisors_around(tokens, tiles)
    return refuse(config, "num_vocab_tiling", f"does not divide max_target_length={tokens}", *near)


def _byte_vocabulary(config: Config) -> Refusal | None:
    if config.tokenizer_type != "byte" or config.vocab_size >= _BYTE_TOKENS or config.dataset_type == "synthetic":
        return None
    rule = f"is less than the {_BYTE_TOKENS} tokens of tokenizer_type=byte"
    return refuse(config, "vocab_size", rule, _BYTE_TOKENS)


def _tokenizer_path(config: Config) -> Refusal | None:
    if config.tokenizer_type == "byte" or config.tokenizer_path:
        return None
    message = f"tokenizer_path is empty, but tokenizer_type={config.tokenizer_type} reads a file: name it."
    return Refusal("tokenizer_path", message, ({"tokenizer_type": "byte"},))


def _dataset(config: Config) -> Refusal | None:
    """Data that only another kind of run trains on."""
    needed = source_kind(config.dataset_type).run_kind
    if needed == config.run_kind:
        return None
    for kind in load_installed("run"):
        if kind.run_kind == needed:
            rule = f"is for another kind of run: give {kind.base_files[-1]}, or a file whose base it is"
            return refuse(config, "dataset_type", rule, {"dataset_type": "sft", "objective": "auto"})
    return None


def _objective(config: Config) -> Refusal | None:
    """An objective that the data are not for."""
    if config.objective == "auto":
        return None
    asked = objective_kind(config.objective).data
    if asked == source_kind(config.dataset_type).data:
        return None
    suitable = [{"dataset_type": name} for name in source_names(config.run_kind) if source_kind(name).data == asked]
    due = objective_name("auto", config.dataset_type)
    return refuse(config, "objective", f"does not suit dataset_type={config.dataset_type}", due, *suitable[:1])


def _dataset_path(config: Config) -> Refusal | None:
    kind = config.dataset_type
    if not source_kind(kind).reads_files or config.dataset_path:
        return None
    message = f"dataset_path is empty, but dataset_type={kind} reads a file, directory or glob: name it."
    generated = [{"dataset_type": name} for name in source_names(config.run_kind) if not source_kind(name).reads_files]
    return Refusal("dataset_path", message, tuple(generated[:1]))


def _data_in_bucket(config: Config) -> Refusal | None:
    kind = source_kind(config.dataset_type)
    if kind.reads_buckets or not kind.reads_files:
        return None
    for key in ("eval_dataset_path", "dataset_path"):
        value = getattr(config, key)
        paths = [entry.path for entry in value.entries] if isinstance(value, SourceList) else [value]
        for path in filter(is_bucket, paths):
            readers = [name for name in source_names(config.run_kind) if source_kind(name).reads_buckets]
            message = (
                f"{key}={value_text(path)} is in a bucket, and dataset_type={config.dataset_type} reads local files."
            )
            return Refusal(key, message, tuple({"dataset_type": name} for name in readers))
    return None


def _mixture(config: Config) -> Refusal | None:
    """A list of sources where none can be, or keys about a mixture where there is none."""
    value, plain = config.dataset_path, {"mixture_exhausted": "error"}
    if not isinstance(value, SourceList):
        return refuse_unused(config, plain, "has no effect without a list of sources in dataset_path")
    if not source_kind(config.dataset_type).is_mixable:
        kinds = [{"dataset_type": name} for name in source_names(config.run_kind) if source_kind(name).is_mixable]
        rule = f"lists sources, which dataset_type={config.dataset_type} does not mix"
        return refuse(config, "dataset_path", rule, value.entries[0].path, *kinds)
    if len(value.entries) > 1 and config.num_epochs:
        rule = f"has no meaning with {len(value.entries)} sources of dataset_path: state steps"
        return refuse(config, "num_epochs", rule, {"num_epochs": 0})
    if all(entry.max_epochs == -1 for entry in value.entries):
        return refuse_unused(config, plain, "has no effect where no source has max_epochs")
    return None


def _part_of_epoch(config: Config) -> Refusal | None:
    """A period that is a part of an epoch where there are none."""
    sources = config.dataset_path
    if config.dataset_type == "synthetic":
        why = "no epoch of synthetic data ends"
    elif isinstance(sources, SourceList) and len(sources.entries) > 1:
        why = "each source of dataset_path has its own epochs"
    else:
        return None
    for key in ("log_period", "checkpoint_period", "eval_interval"):
        if 0 < getattr(config, key) < 1:
            return refuse(config, key, f"is a part of an epoch, and {why}: state steps", 1)
    return None


def _eval_data(config: Config) -> Refusal | None:
    every = config.eval_interval
    if every == -1 or config.dataset_type == "synthetic" or config.eval_dataset_path or config.eval_fraction > 0:
        return None
    rule = f"and an empty eval_dataset_path leave nothing to evaluate with eval_interval={number_text(every)}"
    return refuse(config, "eval_fraction", rule, {"eval_interval": -1})


RULES: tuple[Callable[[Config], Refusal | None], ...] = (
    _kv_heads,
    _head_dim,
    _global_attention,
    _rotary_share,
    _layer_pattern,
    _mixers,
    _reach,
    _learned_positions,
    _rope_scaling,
    _temperature,
    _own_norms,
    _shared_kv,
    _gated_activation,
    _dense_layers,
    _mlp_pattern,
    _mtp,
    _lora_targets,
    _learning_rate_groups,
    _experts_per_token,
    _routing_groups,
    _chosen_groups,
    unknown_to_kernel,
    _run_name,
    _batch_schedule,
    _scaled_adam,
    _scaled_by_stage,
    _state_dtype,
    _qk_clip,
    _diloco,
    _remat_lists,
    _number_format,
    _vocab_tiling,
    _byte_vocabulary,
    _tokenizer_path,
    _dataset,
    _objective,
    _dataset_path,
    _data_in_bucket,
    _mixture,
    _part_of_epoch,
    _eval_data,
)
"""The rules about every kind of config."""
