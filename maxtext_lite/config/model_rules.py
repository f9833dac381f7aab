"""Rules between the keys of the architecture."""

from collections.abc import Callable
from typing import get_args

from maxtext_lite.config.adapted import unknown_targets
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.model_parts import LayerKind, MlpKind
from maxtext_lite.config.schema import Config
from maxtext_lite.config.violation import Violation, divisors, divisors_of, one_of, unused


def _kv_heads(config: Config) -> Violation | None:
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads == 0:
        return None
    return Violation(
        "base_num_kv_heads",
        f"base_num_kv_heads={kv_heads} does not divide base_num_query_heads={heads}.",
        (divisors_of("base_num_kv_heads", heads, kv_heads),),
    )


def _head_dim(config: Config) -> Violation | None:
    width, mla = config.head_dim, config.mla
    if mla is not None:
        whole = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        message = f"head_dim={width} is not the {whole} of mla's qk_nope_head_dim + qk_rope_head_dim."
        return None if width == whole else Violation("head_dim", message, (whole,))
    if width % 2 == 0 or config.trainable_position_size:
        return None
    near = tuple(even for even in (width - 1, width + 1) if even > 0)
    return Violation("head_dim", f"head_dim={width} must be even for rotary positions.", near)


def _rotary_share(config: Config) -> Violation | None:
    share, width = config.partial_rotary_factor, config.head_dim
    if share == 1:
        return None
    if config.mla is not None or config.trainable_position_size:
        other = "trainable_position_size" if config.mla is None else "mla"
        return Violation("partial_rotary_factor", f"partial_rotary_factor={share:g} has no use with {other}.", (1,))
    if config.rotary_dim % 2 == 0 and config.rotary_dim:
        return None
    near = [even / width for even in (config.rotary_dim - 1, config.rotary_dim + 1) if 0 < even <= width]
    return Violation(
        "partial_rotary_factor",
        f"partial_rotary_factor={share:g} x head_dim={width} rotates {config.rotary_dim} dims, not an even number.",
        tuple(near),
    )


_LAYER_KINDS = get_args(LayerKind)
_MLP_KINDS = get_args(MlpKind)


def _layer_pattern(config: Config) -> Violation | None:
    unknown = [kind for kind in config.pattern if kind not in _LAYER_KINDS]
    if unknown:
        legal = ",".join("global" if kind in unknown else kind for kind in config.pattern)
        message = (
            f"layer_pattern={value_text(config.layer_pattern)} names '{value_text(unknown[0], 40)}', which is none of "
            "global, local, nope, local_nope, chunked."
        )
        return Violation("layer_pattern", message, (legal,))
    if any(kind.endswith("nope") for kind in config.pattern) and (
        config.trainable_position_size or config.mla is not None
    ):
        return Violation(
            "layer_pattern",
            f"layer_pattern={value_text(config.layer_pattern)} has layers without rotation beside "
            f"{'mla' if config.mla is not None else 'trainable_position_size'}.",
            (config.layer_pattern.replace("local_nope", "local").replace("nope", "global"),),
        )
    return None


def _window(config: Config) -> Violation | None:
    """A window and layers that have one ask for each other."""
    pattern = f"layer_pattern={value_text(config.layer_pattern)}"
    if not {"local", "local_nope"} & {*config.pattern}:
        reason = f"has no use with {pattern}"
        window = unused(config, {"sliding_window_size": 0}, reason, {"layer_pattern": "local"})
        return window or unused(config, {"rope_local_max_timescale": 0}, reason)
    if config.sliding_window_size:
        return None
    message = f"sliding_window_size=0 with {pattern}: local layers see no token."
    return Violation("sliding_window_size", message, (config.max_target_length,))


def _chunk(config: Config) -> Violation | None:
    """Chunks and layers that keep to them ask for each other."""
    size, pattern = config.chunk_attn_window_size, f"layer_pattern={value_text(config.layer_pattern)}"
    if "chunked" not in config.pattern:
        reason = f"has no use with {pattern}"
        return unused(config, {"chunk_attn_window_size": 0}, reason, {"layer_pattern": "chunked"})
    if size:
        return None
    message = f"chunk_attn_window_size=0 with {pattern}: chunked layers see no token."
    return Violation("chunk_attn_window_size", message, (config.max_target_length,))


def _mlp_pattern(config: Config) -> Violation | None:
    """Which layers have experts: known kinds, both of them among the layers, and nothing that says it another way."""
    key, kinds, layers = "mlp_pattern", config.mlp_kinds, config.base_num_decoder_layers
    shown = f"{key}={value_text(config.mlp_pattern)}"
    unknown = [kind for kind in kinds if kind not in _MLP_KINDS]
    if unknown:
        legal = ",".join("moe" if kind in unknown else kind for kind in kinds)
        return Violation(key, f"{shown} names '{value_text(unknown[0], 40)}', which is none of moe, dense.", (legal,))
    if config.num_experts == 1 or set(kinds) == {"moe"}:  # which `_experts_that_are_not` knows of
        return None
    if "moe" not in kinds[:layers]:
        message = f"{shown} leaves none of base_num_decoder_layers={layers} for experts."
        return Violation(key, message, ("moe",))
    if len({*kinds[:layers]}) == 1:
        return Violation(key, f"{shown} has no dense layer among base_num_decoder_layers={layers}.", ("moe",))
    if first := config.first_num_dense_layers:
        both = ",".join(["dense"] * first + [kinds[layer % len(kinds)] for layer in range(first, layers)])
        message = f"first_num_dense_layers={first} beside {shown}, which counts all layers."
        return Violation("first_num_dense_layers", message, (0, {key: both, "first_num_dense_layers": 0}))
    return None


def _shared_expert(config: Config) -> Violation | None:
    plain = {"base_shared_mlp_dim": -1, "shared_expert_gate": False}
    reason = "has no use with shared_experts=0"
    return None if config.shared_experts else unused(config, plain, reason, {"shared_experts": 1})


def _sparse_mixer(config: Config) -> Violation | None:
    plain = {"norm_topk_prob": False, "routed_bias": False, "n_routing_groups": 1}
    reason = "has no place with routed_score_func=sparsemixer, whose choices each have a softmax of their own"
    return unused(config, plain, reason) if config.routed_score_func == "sparsemixer" else None


def _learned_positions(config: Config) -> Violation | None:
    """A table of positions covers an example, and leaves nothing to rotate."""
    rows, tokens = config.trainable_position_size, config.max_target_length
    if rows == 0:
        return None
    if rows < tokens:
        message = f"trainable_position_size={rows} is less than max_target_length={tokens}."
        return Violation("trainable_position_size", message, (tokens,))
    for key, plain in (("rope_scaling", None), ("rope_local_max_timescale", 0.0), ("mla", None)):
        if (value := getattr(config, key)) != plain:
            message = f"trainable_position_size={rows} contradicts {key}={value_text(value)}, which is about rotation."
            return Violation("trainable_position_size", message, (0,))
    return None


def _latent_attention(config: Config) -> Violation | None:
    """What mla has no place for."""
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
            return Violation("rope_scaling", message, ({},))
    return None


def _temperature(config: Config) -> Violation | None:
    tuning = config.position_temperature
    if tuning is None or any(tuning.of(kind) for kind in config.pattern):
        return None
    message = f"position_temperature={tuning} has no use with layer_pattern={value_text(config.layer_pattern)}."
    return Violation("position_temperature", message, ({},))


def _inverse_layers(config: Config) -> Violation | None:
    """A stage of a pipeline does not know the numbers of its layers."""
    stages = config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism
    if not config.inverse_layer_scaling or stages == 1:
        return None
    key = "ici_pipeline_parallelism" if config.ici_pipeline_parallelism != 1 else "dcn_pipeline_parallelism"
    message = f"{key}={getattr(config, key)} contradicts inverse_layer_scaling=true: stages do not number their layers."
    return Violation(key, message, (1,))


def _gated_activation(config: Config) -> Violation | None:
    if config.mlp_activation == "xielu" and config.num_experts > 1:
        return Violation("mlp_activation", "mlp_activation=xielu has no place in experts.", ("silu",))
    if config.mlp_activation == "xielu" and config.gated_mlp:
        return Violation("gated_mlp", "gated_mlp=true with mlp_activation=xielu, which has no gate.", (False,))
    if config.gated_mlp or (config.mlp_activation != "clamped_silu" and config.num_experts == 1):
        return None
    reason = "it clamps the gate too" if config.num_experts == 1 else "experts have gates"
    subject = f"mlp_activation={config.mlp_activation}" if config.num_experts == 1 else "num_experts > 1"
    return Violation("gated_mlp", f"gated_mlp=false with {subject}: {reason}.", (True,))


def _dense_layers(config: Config) -> Violation | None:
    first, layers = config.first_num_dense_layers, config.base_num_decoder_layers
    if first < layers:
        return None
    message = f"first_num_dense_layers={first} leaves none of base_num_decoder_layers={layers} for experts."
    return Violation("first_num_dense_layers", message, (layers - 1,))


def _experts_per_token(config: Config) -> Violation | None:
    experts, chosen = config.num_experts, config.num_experts_per_tok
    if chosen <= experts:
        return None
    return Violation(
        "num_experts_per_tok", f"num_experts_per_tok={chosen} is more than num_experts={experts}.", (experts,)
    )


def _routing_groups(config: Config) -> Violation | None:
    groups, experts = config.n_routing_groups, config.num_experts
    if groups == 1 or (experts % groups == 0 and experts // groups >= 2):
        return None
    legal = [number for number in divisors(experts) if 2 * number <= experts] or [1]
    return Violation(
        "n_routing_groups",
        f"n_routing_groups={groups} does not cut num_experts={experts} into equal groups of at least 2.",
        (one_of("n_routing_groups", legal, groups),),
    )


def _chosen_groups(config: Config) -> Violation | None:
    groups, chosen, experts = config.n_routing_groups, config.topk_routing_group, config.num_experts
    if chosen > groups:
        return Violation(
            "topk_routing_group", f"topk_routing_group={chosen} is more than n_routing_groups={groups}.", (groups,)
        )
    if experts % groups or chosen * experts // groups >= config.num_experts_per_tok:
        return None
    enough = -(-config.num_experts_per_tok * groups // experts)
    if enough > groups:  # more experts a token than there are: another rule's
        return None
    return Violation(
        "topk_routing_group",
        f"topk_routing_group={chosen} x {experts // groups} experts of a group are fewer than "
        f"num_experts_per_tok={config.num_experts_per_tok}.",
        (enough,),
    )


def _experts_that_are_not(config: Config) -> Violation | None:
    """Of the keys that say something about experts, the first that does where there are none."""
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
    reason = "has no use with num_experts=1, a model without experts"
    return None if config.num_experts > 1 else unused(config, plain, reason)


MODEL_RULES: tuple[Callable[[Config], Violation | None], ...] = (
    _kv_heads,
    _head_dim,
    _rotary_share,
    _layer_pattern,
    _window,
    _chunk,
    _learned_positions,
    _latent_attention,
    _parallel_block,
    _longrope,
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
    _experts_that_are_not,
)
"""Every rule about the architecture."""
