"""Rules between keys that hold on every machine. Those that need devices are `batching`'s."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import get_args

from maxtext_lite.config.errors import Refusal, number_text, value_text
from maxtext_lite.config.lora import targets_problem
from maxtext_lite.config.model_parts import LayerKind
from maxtext_lite.config.remat import REMAT_TENSORS, listed
from maxtext_lite.config.rl_rules import RL_DATASETS, RL_RULES
from maxtext_lite.config.rule import Rule
from maxtext_lite.config.schema import Config, RLRunConfig

_BYTE_TOKENS = 257  # 256 bytes and the end of text

NOTHING_STATES_THE_LENGTH = "steps=-1 follows from num_epochs, which is 0: nothing states the length of the run."
"""Refusal of a config that leaves the number of steps open; without what would work."""


def nearest_divisors(value: int, whole: int) -> tuple[int, ...]:
    """The divisors of `whole` next to `value`, below and above; `value` itself where it divides."""
    if whole % value == 0:
        return (value,)
    below = next((number for number in range(min(value, whole), 0, -1) if whole % number == 0), None)
    above = next((number for number in range(value, whole + 1) if whole % number == 0), None)
    return tuple(number for number in (below, above) if number is not None)


def rule_problems(config: Config, known: Collection[str]) -> list[Refusal]:
    """The refusals of all rules whose keys are all in `known`."""
    problems = [rule.refusal(config, known) for rule in RULES]
    return [problem for problem in problems if problem is not None]


def warmup_problem(config: Config, default_warmup_steps: object) -> Refusal | None:
    """Refuses a warm-up that is longer than the run, unless it is the default one, which a short run may cut off."""
    warmup, steps = config.warmup_steps, config.steps
    if config.num_epochs or steps == -1 or warmup <= steps or warmup == default_warmup_steps:
        return None
    return Refusal("warmup_steps", f"warmup_steps={warmup} is more than steps={steps}.", (steps,))


def length_problem(config: Config, default_steps: object) -> Refusal | None:
    """Refuses a length that nothing states, or that is stated twice; the default `steps` states none beside epochs."""
    steps, epochs = config.steps, config.num_epochs
    if not epochs and steps == -1:
        assert isinstance(default_steps, int)
        return Refusal("steps", NOTHING_STATES_THE_LENGTH, (max(default_steps, config.warmup_steps),))
    if not epochs or steps in (-1, default_steps):
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


def _kv_heads(config: Config) -> Refusal | None:
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads == 0:
        return None
    return Refusal(
        "base_num_kv_heads",
        f"base_num_kv_heads={kv_heads} does not divide base_num_query_heads={heads}.",
        nearest_divisors(kv_heads, heads),
    )


def _head_dim(config: Config) -> Refusal | None:
    width, mla = config.head_dim, config.mla
    if mla is not None:
        whole = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        message = f"head_dim={width} is not the {whole} of mla's qk_nope_head_dim + qk_rope_head_dim."
        return None if width == whole else Refusal("head_dim", message, (whole,))
    if width % 2 == 0 or config.trainable_position_size:
        return None
    near = tuple(even for even in (width - 1, width + 1) if even > 0)
    return Refusal("head_dim", f"head_dim={width} must be even for rotary positions.", near)


def _rotary_share(config: Config) -> Refusal | None:
    share, width = config.partial_rotary_factor, config.head_dim
    if share == 1:
        return None
    if config.mla is not None or config.trainable_position_size:
        other = "trainable_position_size" if config.mla is None else "mla"
        return Refusal("partial_rotary_factor", f"partial_rotary_factor={share:g} has no use with {other}.", (1,))
    if config.rotary_dim % 2 == 0 and config.rotary_dim:
        return None
    near = [even / width for even in (config.rotary_dim - 1, config.rotary_dim + 1) if 0 < even <= width]
    return Refusal(
        "partial_rotary_factor",
        f"partial_rotary_factor={share:g} x head_dim={width} rotates {config.rotary_dim} dims, not an even number.",
        tuple(near),
    )


_LAYER_KINDS = get_args(LayerKind)


def _layer_pattern(config: Config) -> Refusal | None:
    unknown = [kind for kind in config.pattern if kind not in _LAYER_KINDS]
    if unknown:
        mended = ",".join("global" if kind in unknown else kind for kind in config.pattern)
        message = f"layer_pattern={config.layer_pattern} names '{unknown[0]}', which is none of global, local, nope."
        return Refusal("layer_pattern", message, (mended,))
    if "nope" in config.pattern and (config.trainable_position_size or config.mla is not None):
        return Refusal(
            "layer_pattern",
            f"layer_pattern={config.layer_pattern} has layers without rotation beside "
            f"{'mla' if config.mla is not None else 'trainable_position_size'}.",
            (config.layer_pattern.replace("nope", "global"),),
        )
    return None


def _window(config: Config) -> Refusal | None:
    """A window and layers that have one ask for each other."""
    window, is_local = config.sliding_window_size, "local" in config.pattern
    if is_local and window == 0:
        return Refusal(
            "sliding_window_size",
            f"sliding_window_size=0 with layer_pattern={config.layer_pattern}: local layers see no token.",
            (f"sliding_window_size={config.max_target_length}",),
        )
    if window and not is_local:
        return Refusal(
            "sliding_window_size",
            f"sliding_window_size={window} has no use with layer_pattern={config.layer_pattern}.",
            (0, "layer_pattern=local"),
        )
    if config.rope_local_max_timescale and not is_local:
        return Refusal(
            "rope_local_max_timescale",
            f"rope_local_max_timescale={config.rope_local_max_timescale:g} has no use with "
            f"layer_pattern={config.layer_pattern}.",
            (0,),
        )
    return None


def _learned_positions(config: Config) -> Refusal | None:
    """A table of positions covers an example, and leaves nothing to rotate."""
    rows, tokens = config.trainable_position_size, config.max_target_length
    if rows == 0:
        return None
    if rows < tokens:
        message = f"trainable_position_size={rows} is less than max_target_length={tokens}."
        return Refusal("trainable_position_size", message, (tokens,))
    for key, unused in (("rope_scaling", None), ("rope_local_max_timescale", 0.0), ("mla", None)):
        if getattr(config, key) != unused:
            value = value_text(getattr(config, key))
            message = f"trainable_position_size={rows} contradicts {key}={value}, which is about rotation."
            return Refusal("trainable_position_size", message, (0,))
    return None


def _latent_attention(config: Config) -> Refusal | None:
    """What mla has no place for."""
    if config.mla is None:
        return None
    heads = config.base_num_query_heads
    for key, value, needed in (
        ("base_num_kv_heads", config.base_num_kv_heads, heads),
        ("attention_bias", config.attention_bias, "none"),
        ("qk_norm", config.qk_norm, "none"),
        ("attention_sinks", config.attention_sinks, False),
    ):
        if value != needed:
            return Refusal(
                key, f"{key}={value_text(value)} with mla={config.mla}: latent attention has its own.", (needed,)
            )
    return None


def _gated_activation(config: Config) -> Refusal | None:
    if config.gated_mlp or (config.mlp_activation != "clamped_silu" and config.num_experts == 1):
        return None
    reason = "it clamps the gate too" if config.num_experts == 1 else "experts have gates"
    subject = f"mlp_activation={config.mlp_activation}" if config.num_experts == 1 else "num_experts > 1"
    return Refusal("gated_mlp", f"gated_mlp=false with {subject}: {reason}.", (True,))


def _dense_layers(config: Config) -> Refusal | None:
    first, layers = config.first_num_dense_layers, config.base_num_decoder_layers
    if first < layers:
        return None
    message = f"first_num_dense_layers={first} leaves none of base_num_decoder_layers={layers} for experts."
    return Refusal("first_num_dense_layers", message, (layers - 1,))


def _vocab_tiling(config: Config) -> Refusal | None:
    pieces, tokens = config.num_vocab_tiling, config.max_target_length
    if tokens % pieces == 0:
        return None
    return Refusal(
        "num_vocab_tiling",
        f"num_vocab_tiling={pieces} does not divide max_target_length={tokens}.",
        nearest_divisors(pieces, tokens),
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
            f"tokenizer_path={config.tokenizer_path} has no use with tokenizer_type=byte. "
            "Set tokenizer_path= (nothing), or tokenizer_type=huggingface or sentencepiece.",
        )
    if config.tokenizer_type != "byte" and not config.tokenizer_path:
        return Refusal(
            "tokenizer_path",
            f"tokenizer_path is empty, but tokenizer_type={config.tokenizer_type} reads a "
            "file. Set tokenizer_path to it, or tokenizer_type=byte.",
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
    others = [f"dataset_type={kind}" for kind in possible if _OBJECTIVE_OF[kind] == config.objective][:1]
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
        f"chat_template={config.chat_template} has no use with dataset_type={config.dataset_type}. Set chat_template= "
        "(nothing), or dataset_type=sft or dpo.",
    )


def _dataset_path(config: Config) -> Refusal | None:
    if config.dataset_type in ("synthetic", "arithmetic") or config.dataset_path:
        return None
    generated = "arithmetic" if isinstance(config, RLRunConfig) else "synthetic"
    return Refusal(
        "dataset_path",
        f"dataset_path is empty, but dataset_type={config.dataset_type} reads files. Set dataset_path to a "
        f"file, directory or glob, or dataset_type={generated}.",
    )


def _eval_data(config: Config) -> Refusal | None:
    needs = config.eval_interval > 0 and config.dataset_type != "synthetic" and not config.eval_dataset_path
    if not needs or config.eval_fraction > 0:
        return None
    return Refusal(
        "eval_fraction",
        "eval_fraction=0 and an empty eval_dataset_path leave nothing to evaluate every "
        f"eval_interval={config.eval_interval} steps.",
        ("eval_interval=-1",),
    )


def _eval_share(config: Config) -> Refusal | None:
    if config.eval_fraction < 1 or config.eval_dataset_path:
        return None
    return Refusal("eval_fraction", "eval_fraction=1 leaves nothing to train on.", (0.5,))


def _run_name(config: Config) -> Refusal | None:
    if "/" not in config.run_name and config.run_name not in (".", ".."):
        return None
    return Refusal("run_name", f"run_name={config.run_name} is not the name of a directory.", ("default",))


def _cudnn_dtype(config: Config) -> Refusal | None:
    if config.attention != "cudnn_flash" or config.dtype != "float32":
        return None
    return Refusal(
        "attention",
        f"attention=cudnn_flash does not compute in dtype={config.dtype}.",
        ("dtype=bfloat16", "attention=dot_product"),
    )


def _remat_lists(config: Config) -> Refusal | None:
    names = {"remat_save": listed(config.remat_save), "remat_offload": listed(config.remat_offload)}
    for key, tensors in names.items():
        value = getattr(config, key)
        if tensors and config.remat_policy != "custom":
            return Refusal(
                key,
                f"{key}={value} has no use with remat_policy={config.remat_policy}.",
                (f"{key}=", "remat_policy=custom"),
            )
        unknown = [name for name in tensors if name not in REMAT_TENSORS]
        if unknown:
            alike = get_close_matches(unknown[0], REMAT_TENSORS, n=1, cutoff=0)
            mended = dict.fromkeys(alike[0] if name == unknown[0] else name for name in tensors)
            message = f"{key}={value} names {unknown[0]}, which is none of {', '.join(REMAT_TENSORS)}."
            return Refusal(key, message, (",".join(mended),))
    saved, offloaded = names["remat_save"], names["remat_offload"]
    both = [name for name in offloaded if name in saved]
    if both:
        return Refusal(
            "remat_offload",
            f"remat_offload={config.remat_offload} names {both[0]}, as remat_save does.",
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
        (0, "dtype=float16"),
    )


def _experts_per_token(config: Config) -> Refusal | None:
    experts, chosen = config.num_experts, config.num_experts_per_tok
    if chosen <= experts:
        return None
    return Refusal(
        "num_experts_per_tok", f"num_experts_per_tok={chosen} is more than num_experts={experts}.", (experts,)
    )


def _routing_groups(config: Config) -> Refusal | None:
    groups, experts = config.n_routing_groups, config.num_experts
    if groups == 1 or (experts % groups == 0 and experts // groups >= 2):
        return None
    legal = [number for number in range(1, experts // 2 + 1) if experts % number == 0] or [1]
    near = [
        max((number for number in legal if number < groups), default=None),
        min((number for number in legal if number > groups), default=None),
    ]
    return Refusal(
        "n_routing_groups",
        f"n_routing_groups={groups} does not cut num_experts={experts} into equal groups of at least 2.",
        tuple(number for number in near if number is not None),
    )


def _chosen_groups(config: Config) -> Refusal | None:
    groups, chosen, experts = config.n_routing_groups, config.topk_routing_group, config.num_experts
    if chosen > groups:
        return Refusal(
            "topk_routing_group", f"topk_routing_group={chosen} is more than n_routing_groups={groups}.", (groups,)
        )
    if experts % groups or chosen * experts // groups >= config.num_experts_per_tok:
        return None
    enough = -(-config.num_experts_per_tok * groups // experts)
    if enough > groups:  # more experts a token than there are: another rule's
        return None
    return Refusal(
        "topk_routing_group",
        f"topk_routing_group={chosen} x {experts // groups} experts of a group are fewer than "
        f"num_experts_per_tok={config.num_experts_per_tok}.",
        (enough,),
    )


def _experts_that_are_not(config: Config) -> Refusal | None:
    """Of the keys that say something about experts, the first that does where there are none."""
    if config.num_experts > 1:
        return None
    for key, value, unused in (
        ("base_moe_mlp_dim", config.base_moe_mlp_dim, -1),
        ("shared_experts", config.shared_experts, 0),
        ("capacity_factor", config.capacity_factor, -1),
        ("routed_bias", config.routed_bias, False),
        ("expert_bias", config.expert_bias, False),
        ("first_num_dense_layers", config.first_num_dense_layers, 0),
        ("router_z_loss_multiplier", config.router_z_loss_multiplier, 0),
    ):
        if value != unused:
            return Refusal(
                key,
                f"{key}={value_text(value)} has no use with num_experts=1, a model without experts.",
                (unused,),
            )
    return None


RULES: tuple[Rule, ...] = (
    *RL_RULES,
    Rule(("remat_policy", "remat_save", "remat_offload"), _remat_lists),
    Rule(("schedule_unit", "enable_diloco"), _schedule_of_replicas),
    Rule(("loss_scale", "dtype"), _loss_scale),
    Rule(("shard_optimizer_over_data", "enable_diloco"), _shared_optimizer),
    Rule(("base_num_kv_heads", "base_num_query_heads"), _kv_heads),
    Rule(("head_dim", "mla", "trainable_position_size"), _head_dim),
    Rule(("partial_rotary_factor", "head_dim", "mla", "trainable_position_size"), _rotary_share),
    Rule(("layer_pattern", "mla", "trainable_position_size"), _layer_pattern),
    Rule(("sliding_window_size", "layer_pattern", "rope_local_max_timescale", "max_target_length"), _window),
    Rule(
        ("trainable_position_size", "max_target_length", "rope_scaling", "rope_local_max_timescale", "mla"),
        _learned_positions,
    ),
    Rule(
        ("mla", "base_num_query_heads", "base_num_kv_heads", "attention_bias", "qk_norm", "attention_sinks"),
        _latent_attention,
    ),
    Rule(("gated_mlp", "mlp_activation", "num_experts"), _gated_activation),
    Rule(("first_num_dense_layers", "base_num_decoder_layers"), _dense_layers),
    Rule(("lora_rank", "lora_targets", "mla", "gated_mlp"), targets_problem),
    Rule(("num_experts_per_tok", "num_experts"), _experts_per_token),
    Rule(("n_routing_groups", "num_experts"), _routing_groups),
    Rule(("topk_routing_group", "n_routing_groups", "num_experts", "num_experts_per_tok"), _chosen_groups),
    Rule(
        (
            "num_experts",
            "base_moe_mlp_dim",
            "shared_experts",
            "capacity_factor",
            "routed_bias",
            "expert_bias",
            "first_num_dense_layers",
            "router_z_loss_multiplier",
        ),
        _experts_that_are_not,
    ),
    Rule(("num_vocab_tiling", "max_target_length"), _vocab_tiling),
    Rule(("vocab_size", "tokenizer_type", "dataset_type"), _byte_vocabulary),
    Rule(("tokenizer_path", "tokenizer_type"), _tokenizer_path),
    Rule(("objective", "dataset_type"), _objective),
    Rule(("chat_template", "dataset_type"), _conversations_only),
    Rule(("z_loss_multiplier", "dataset_type"), _z_loss_of_pairs),
    Rule(("dataset_path", "dataset_type"), _dataset_path),
    Rule(("eval_fraction", "eval_dataset_path", "eval_interval", "dataset_type"), _eval_data),
    Rule(("eval_fraction", "eval_dataset_path"), _eval_share),
    Rule(("attention", "dtype"), _cudnn_dtype),
    Rule(("run_name",), _run_name),
    Rule(("last_batch", "num_epochs"), _last_batch),
    Rule(("scale_adam_with_batch", "learning_rate_scaling", "optimizer"), _scaled_adam),
)
"""Every rule. One about a key of the wrong kind is tried with the legal value that is named in its place."""
