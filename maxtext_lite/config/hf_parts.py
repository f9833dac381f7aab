"""The parts of which families of config.json are made: each owns some fields and some keys, in both directions."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.hf_fields import Fields
from maxtext_lite.config.schema import ModelConfig


class Part(Protocol):
    """Some fields and what they mean."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """The keys that the fields decide; what is wrong with them is noted in `fields`."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The fields that say what the keys do."""
        ...


class Rename(Part):
    """Fields that must be there and are keys under another name."""

    def __init__(self, **keys: str) -> None:
        self._keys = keys

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        return {key: fields.need(name) for name, key in self._keys.items()}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {name: getattr(config, key) for name, key in self._keys.items()}


class Defaulted(Part):
    """A field that is a key under another name, and has a default."""

    def __init__(self, name: str, key: str, default: Any) -> None:
        self._name, self._key, self._default = name, key, default

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        return {self._key: fields.take(self._name, self._default)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {self._name: getattr(config, self._key)}


class Every(Part):
    """One key under several names; all that are there agree."""

    def __init__(self, *names: str, key: str) -> None:
        self._names, self._key = names, key

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        values = {name: fields.take(name) for name in self._names}
        there = {name: value for name, value in values.items() if value is not None}
        if not there:
            return {self._key: fields.need(self._names[0])}
        first = next(iter(there.values()))
        for name, value in there.items():
            if value != first:
                fields.refuse(name, value, f"contradicts {next(iter(there))}={value_text(first)}.")
        return {self._key: first}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {name: getattr(config, self._key) for name in self._names}


class Fixed(Part):
    """Keys that are the same for every model of the family."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        del fields
        return dict(self._values)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        del config
        return {}


class Only(Part):
    """A field whose one value is what maxtext_lite computes; where `key` is given, it is that key too."""

    def __init__(self, name: str, value: Any, *, key: str | None = None) -> None:
        self._name, self._value, self._key = name, value, key

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        value = fields.take(self._name, self._value)
        if value != self._value:
            fields.refuse(self._name, value, f"cannot be expressed: it must be {value_text(self._value)}.")
        return {} if self._key is None else {self._key: self._value}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        del config
        return {self._name: self._value}


class ExpertGroups(Part):
    """DeepSeek-V2's choice of experts: `greedy` among all of them whatever groups are named, or in the best groups."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        method = fields.take("topk_method", "greedy")
        groups, chosen = fields.take("n_group"), fields.take("topk_group")
        if method == "greedy":
            return {"n_routing_groups": 1, "topk_routing_group": 1}
        if method != "group_limited_greedy":
            fields.refuse("topk_method", method, "cannot be expressed: it must be greedy or group_limited_greedy.")
        return {"n_routing_groups": groups or 1, "topk_routing_group": chosen or 1}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        groups = {"n_group": config.n_routing_groups, "topk_group": config.topk_routing_group}
        return {"topk_method": "greedy" if config.n_routing_groups == 1 else "group_limited_greedy", **groups}


class Heads(Part):
    """The attention heads.

    Args:
      kv_heads: `num_key_value_heads` where it is not said; None: as many as of the queries.
      head_dim: the same of `head_dim`; None: the queries' share of the stream.
    """

    def __init__(self, *, kv_heads: int | None = None, head_dim: int | None = None) -> None:
        self._kv_heads, self._head_dim = kv_heads, head_dim

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        heads = fields.whole("num_attention_heads")
        width = fields.take("head_dim", self._head_dim)
        if width is None:
            width = fields.peek("hidden_size", heads) // heads
        unsaid = heads if self._kv_heads is None or fields.is_null("num_key_value_heads") else self._kv_heads
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": fields.take("num_key_value_heads", unsaid),
            "head_dim": width,
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {
            "num_attention_heads": config.base_num_query_heads,
            "num_key_value_heads": config.base_num_kv_heads,
            "head_dim": config.head_dim,
        }


class LearnedPositions(Part):
    """GPT-2's sizes: heads share the stream out, `n_positions` are learned, the mlp has `n_inner` or four times."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        heads, width = fields.whole("n_head"), fields.peek("n_embd", 0)
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": heads,
            "head_dim": width // heads,
            "base_mlp_dim": fields.take("n_inner", 4 * width),
            "trainable_position_size": fields.whole("n_positions", fields.take("n_ctx")),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {
            "n_head": config.base_num_query_heads,
            "n_inner": config.base_mlp_dim,
            "n_positions": max(config.trainable_position_size, 1),
        }


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
                "gelu_new": "gelu_tanh"}  # fmt: skip


class Activation(Part):
    """The mlp's activation. Gemma's first configs call it `hidden_act`, which transformers does not look at."""

    def __init__(self, name: str, default: str) -> None:
        self._name, self._default = name, default

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        value = fields.take(self._name, self._default)
        if self._name == "hidden_activation":
            fields.drop(["hidden_act"])
        if value not in _ACTIVATIONS:
            fields.refuse(self._name, value, f"is none of {any_of(list(_ACTIVATIONS))}.")
        return {"mlp_activation": _ACTIVATIONS.get(value, "silu")}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        if _ACTIVATIONS[self._default] == config.mlp_activation:
            return {self._name: self._default}
        names = [name for name, activation in _ACTIVATIONS.items() if activation == config.mlp_activation]
        return {self._name: names[0] if names else config.mlp_activation}


class Bias(Part):
    """Whether attention's projections have biases."""

    def __init__(self, name: str, which: str, *, default: bool = False) -> None:
        self._name, self._which, self._default = name, which, default

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        return {"attention_bias": self._which if fields.take(self._name, self._default) else "none"}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {self._name: config.attention_bias == self._which}


class SoftCaps(Part):
    """Gemma's soft caps, of scores and of logits; null is none.

    Args:
      scores, logits: what they are where the fields are not there.
    """

    _FIELDS = ("attn_logit_softcapping", "final_logit_softcapping")
    _KEYS = ("attn_logits_soft_cap", "final_logits_soft_cap")

    def __init__(self, scores: float, logits: float) -> None:
        self._defaults = (scores, logits)

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        return {
            key: fields.take(name, 0.0 if fields.is_null(name) else default)
            for name, key, default in zip(self._FIELDS, self._KEYS, self._defaults, strict=True)
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        return {name: getattr(config, key) or None for name, key in zip(self._FIELDS, self._KEYS, strict=True)}


class QueryScalar(Part):
    """What scores are divided by the root of, in Gemma."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        return {"query_pre_attn_scalar": fields.take("query_pre_attn_scalar", 256)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        scalar = config.query_pre_attn_scalar or config.head_dim
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


class Rope(Part):
    """Rotary positions: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of version 4.

    Args:
      theta: the base of wavelengths where none is named.
      partial: the family rotates a share of each head.
      scaling: what there is where neither field is there.
    """

    def __init__(self, theta: float, *, partial: bool = False, scaling: dict[str, Any] | None = None) -> None:
        self._theta, self._partial, self._scaling = theta, partial, scaling or {}

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
        theta = fields.take("rope_theta", self._theta)
        share = fields.take("partial_rotary_factor")
        parameters = dict(old or new or self._scaling)
        theta, share = parameters.pop("rope_theta", theta), parameters.pop("partial_rotary_factor", share)
        share = 1.0 if share is None else share
        if share != 1 and not self._partial:
            fields.refuse("partial_rotary_factor", share, "has no effect in this family in every version; remove it.")
        outside = fields.take("original_max_position_embeddings")
        if outside is not None and parameters:
            parameters["original_max_position_embeddings"] = outside
        scaling = _scaling("rope_scaling", parameters, fields)
        return {"rope_max_timescale": theta, "rope_scaling": scaling, "partial_rotary_factor": share}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        share = {"partial_rotary_factor": config.partial_rotary_factor} if self._partial else {}
        return _rope_fields(config.rope_max_timescale, config, share) | share


def _rope_fields(theta: float, config: ModelConfig, more: dict[str, Any]) -> dict[str, Any]:
    scaling = None if config.rope_scaling is None else config.rope_scaling.to_mapping()
    kind: dict[str, Any] = scaling or {"rope_type": "default"}
    length = {}
    if kind["rope_type"] == "dynamic":  # transformers takes the original length from here
        length = {"max_position_embeddings": kind["original_max_position_embeddings"]}
    new = {"rope_theta": theta, **kind, **more}
    return {"rope_parameters": new, "rope_theta": theta, "rope_scaling": None if scaling is None else new} | length


_SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def _scaling(name: str, parameters: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """A rope_scaling mapping from what is left of rotary parameters without their base."""
    given = {entry: value for entry, value in parameters.items() if value is not None}
    old_name = given.pop("type", None)
    kind = given.pop("rope_type", old_name or "default")
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
        if given:
            fields.refuse(name, parameters, f"has {any_of(list(given))}, which rope_type default does not.")
        return {}
    if kind not in _SCALINGS:
        fields.refuse(name, kind, f"cannot be expressed: a rope_type must be default, {any_of(list(_SCALINGS))}.")
        return {}
    length = fields.peek("max_position_embeddings", None)
    if "original_max_position_embeddings" in _SCALINGS[kind]:
        if kind == "dynamic" and length is not None:  # transformers looks nowhere else
            given["original_max_position_embeddings"] = length
        if given.setdefault("original_max_position_embeddings", length) is None:
            fields.refuse(name, parameters, "lacks original_max_position_embeddings.")
    if kind == "yarn" and given.get("attention_factor") is not None:
        # An attention_factor wins over these two in the rotation, but mscale_all_dim also acts on DeepSeek's scores.
        given.pop("mscale", None)
    for entry in given:
        if entry not in _SCALINGS[kind]:
            fields.refuse(name, parameters, f"has {entry}, which is not known of rope_type {kind}.")
    return {"rope_type": kind} | given


class RopeByLayerType(Part):
    """Gemma 3's rotary positions: local layers have a base of their own, without scaling."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        new, old = fields.take("rope_parameters", {}), fields.take("rope_scaling")
        whole, local = dict(new.get("full_attention") or {}), dict(new.get("sliding_attention") or {})
        if new and not (whole or local):
            fields.refuse("rope_parameters", new, "has neither full_attention nor sliding_attention.")
        whole |= old or {}
        theta = whole.pop("rope_theta", fields.take("rope_theta", 1_000_000.0))
        fields.drop(["rope_theta"])
        local_theta = local.pop("rope_theta", fields.take("rope_local_base_freq", 10_000.0))
        fields.drop(["rope_local_base_freq"])
        if _scaling("rope_parameters", local, fields):
            fields.refuse(
                "rope_parameters", local, "scales the rotation of sliding_attention; only that of the rest can be."
            )
        return {
            "rope_max_timescale": theta,
            "rope_local_max_timescale": local_theta if fields.has_local_layers else 0.0,
            "rope_scaling": _scaling("rope_scaling", whole, fields),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        whole = _rope_fields(config.rope_max_timescale, config, {})
        local = config.rope_local_max_timescale or config.rope_max_timescale
        by_type = {
            "full_attention": whole["rope_parameters"],
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
        return whole | {"rope_parameters": by_type, "rope_local_base_freq": local}


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KINDS = {_LOCAL: "local", _GLOBAL: "global", "nope": "nope"}


def _pattern(kinds: Sequence[str]) -> str:
    """The shortest beginning that the layers repeat."""
    for period in range(1, len(kinds) + 1):
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds)):
            return ",".join(_KINDS.get(kind, kind) for kind in kinds[:period])
    return "global"


def _layer_kinds(config: ModelConfig) -> list[str]:
    kinds = {kind: name for name, kind in _KINDS.items()}
    pattern = config.pattern
    return [kinds.get(pattern[layer % len(pattern)], "?") for layer in range(config.base_num_decoder_layers)]


class LayerTypes(Part):
    """Which layers have a sliding window.

    Args:
      style: how a config without `layer_types` says it. window: all, where `sliding_window` is there; switched: those
        from `max_window_layers` on, where `use_sliding_window` is true; "switched window": all, where it is;
        alternating: the first, third, ...; sixth: all but every `sliding_window_pattern`th.
      window: `sliding_window` where the field is not there; 0: none.
    """

    def __init__(
        self, style: Literal["window", "switched", "switched window", "alternating", "sixth"], window: int
    ) -> None:
        self._style, self._window = style, window

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        layers = fields.num_layers
        default = None if fields.is_null("sliding_window") else self._window
        window = fields.take("sliding_window", default) or 0
        on = fields.take("use_sliding_window", False) if self._style.startswith("switched") else True
        first = fields.take("max_window_layers", 28) if self._style == "switched" else 0
        fields.drop(["max_window_layers"] if self._style == "switched window" else [])
        every = fields.take("sliding_window_pattern", 6) if self._style == "sixth" else 2
        stated = fields.take("layer_types") if self._style not in ("window", "switched window") else None
        if not (on and window):
            kinds = [_GLOBAL] * layers
        elif self._style in ("alternating", "sixth"):
            kinds = [_LOCAL if (layer + 1) % every else _GLOBAL for layer in range(layers)]
        else:
            kinds = [_LOCAL if layer >= first else _GLOBAL for layer in range(layers)]
        kinds = kinds if stated is None else stated
        fields.check_layer_types(kinds, layers, window, (_LOCAL, _GLOBAL))
        fields.has_local_layers = _LOCAL in kinds
        return {
            "layer_pattern": _pattern(kinds),
            "sliding_window_size": window if fields.has_local_layers else 0,
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        window, kinds = config.sliding_window_size or None, _layer_kinds(config)
        if self._style in ("window", "switched window"):
            switch = {"use_sliding_window": bool(window)} if self._style == "switched window" else {}
            return {"sliding_window": window if _LOCAL in kinds else None} | switch
        if self._style == "switched":
            first = kinds.index(_LOCAL) if _LOCAL in kinds else len(kinds)
            return {
                "sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": first,
                "layer_types": kinds,
            }  # fmt: skip
        return {"sliding_window": window or self._window, "layer_types": kinds}


class WithoutRotation(Part):
    """SmolLM3's layers that are not rotated: every fourth, or as `no_rope_layers` says (1: rotated)."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        layers = fields.num_layers
        every = fields.take("no_rope_layer_interval", 4)
        rotated = fields.take("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])
        window, on = fields.take("sliding_window"), fields.take("use_sliding_window", False)
        fields.drop(["max_window_layers"])
        types = fields.take("layer_types", [_GLOBAL] * layers)
        if (on and window) or any(kind != _GLOBAL for kind in types):
            fields.refuse("use_sliding_window", on, "cannot be expressed: layers without rotation have no window.")
        kinds = [_GLOBAL if turned else "nope" for turned in rotated]
        fields.check_layer_types(kinds, layers, 0, (_GLOBAL, "nope"))
        return {"layer_pattern": _pattern(kinds)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        kinds = _layer_kinds(config)
        return {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": [_GLOBAL if kind == "nope" else kind for kind in kinds],
        }


class LatentAttention(Part):
    """DeepSeek's attention; a head is its dims that are not rotated and those that are."""

    _WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(self, fields: Fields) -> dict[str, Any]:
        """See Part."""
        heads = fields.whole("num_attention_heads")
        widths = {name: fields.whole(name) for name in self._WIDTHS}
        fields.drop(["head_dim", "qk_head_dim"])
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": fields.take("num_key_value_heads", heads),
            "head_dim": widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
            "mla": {"q_lora_rank": fields.take("q_lora_rank", 0 if fields.is_null("q_lora_rank") else 1536)} | widths,
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """See Part."""
        fields: dict[str, Any] = {
            "num_attention_heads": config.base_num_query_heads, "num_key_value_heads": config.base_num_kv_heads,
        }  # fmt: skip
        if config.mla is None:
            return fields
        widths = config.mla.to_mapping()
        return fields | widths | {"q_lora_rank": config.mla.q_lora_rank or None}
