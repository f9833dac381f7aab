"""Parts of config.json that families are made of; each translates some fields to keys and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.keys import ROPE_ENTRIES, ModelConfig
from maxtext_lite.hf.fields import DEFAULTS, Fields, JsonObject, Keys, is_whole


class Part:
    """Some fields of config.json and their meaning.

    Attributes:
      keys: for each field that is a key under another name, that key.
    """

    keys: Mapping[str, str] = MappingProxyType({})

    def read(self, fields: Fields) -> Keys:
        """The keys that the fields decide; `fields` notes which field decides which key, and every problem."""
        raise NotImplementedError

    def write(self, config: ModelConfig) -> JsonObject:
        """The fields that state the keys."""
        return {name: getattr(config, key) for name, key in self.keys.items()}

    def _note_names(self, fields: Fields) -> None:
        fields.names |= {key: name for name, key in self.keys.items()}


class Rename(Part):
    """Required fields that are keys under another name."""

    def __init__(self, **keys: str) -> None:
        self.keys = keys

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        self._note_names(fields)
        return {key: fields.need(name) for name, key in self.keys.items()}


class Defaulted(Part):
    """A field with a default that is a key under another name."""

    def __init__(self, name: str, key: str, default: object) -> None:
        self.keys, self._default = {name: key}, default

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        self._note_names(fields)
        return {key: fields.take(name, self._default) for name, key in self.keys.items()}


class Every(Part):
    """One key under several names, which must agree."""

    def __init__(self, *names: str, key: str) -> None:
        self.keys, self._key = dict.fromkeys(names, key), key

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        values = {name: fields.take(name) for name in self.keys}
        there = {name: value for name, value in values.items() if value is not None}
        name = fields.names[self._key] = next(iter(there), next(iter(self.keys)))
        if not there:
            return {self._key: fields.need(name)}
        first = next(iter(there.values()))
        for name, value in there.items():
            if value != first:
                fields.refuse(name, value, f"contradicts {next(iter(there))}={value_text(first)}.")
        return {self._key: first}


class Fixed(Part):
    """Keys with the same value in every model of the family."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        del fields
        return self._values


class Only(Part):
    """A field that must have one value, the one that maxtext_lite computes; with `key`, also that key's value."""

    def __init__(self, name: str, value: object, *, key: str | None = None) -> None:
        self._name, self._value, self._key = name, value, key

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value = fields.take(self._name, self._value)
        if value != self._value or isinstance(value, bool) != isinstance(self._value, bool):
            fields.refuse(self._name, value, f"cannot be expressed: it must be {value_text(self._value)}.")
        return {} if self._key is None else {self._key: self._value}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        del config
        return {self._name: self._value}


class Ignored(Part):
    """Fields of the family that transformers does not read."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        fields.drop(self._names)
        return {}


class ExpertGroups(Part):
    """DeepSeek-V2's choice of experts: `greedy` among all of them, even if groups are stated, or in the best groups."""

    keys = MappingProxyType({"n_group": "n_routing_groups", "topk_group": "topk_routing_group"})

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        method = fields.take("topk_method", "greedy")
        groups, chosen = fields.whole("n_group", 1), fields.whole("topk_group", 1)
        self._note_names(fields)
        if method == "greedy":
            return {"n_routing_groups": 1, "topk_routing_group": 1}
        if method != "group_limited_greedy":
            fields.refuse("topk_method", method, "cannot be expressed: it must be greedy or group_limited_greedy.")
        return {"n_routing_groups": groups, "topk_routing_group": chosen}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        method = "greedy" if config.n_routing_groups == 1 else "group_limited_greedy"
        return {"topk_method": method, **super().write(config)}


_HEADS = {"num_attention_heads": "base_num_query_heads", "num_key_value_heads": "base_num_kv_heads"}


class Heads(Part):
    """The attention heads.

    Args:
      kv_heads: the default of `num_key_value_heads`; None: one for each query head.
      head_dim: the default of `head_dim`; None, or null in config.json: hidden_size / num_attention_heads.
      shared_out: the width is hidden_size / num_attention_heads, and `head_dim` may not state another.
      grouped: query heads may share kv heads; False: each has its own, and `num_key_value_heads` is not read.
    """

    keys = MappingProxyType({**_HEADS, "head_dim": "head_dim"})

    def __init__(
        self,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        shared_out: bool = False,
        grouped: bool = True,
    ) -> None:
        self._kv_heads, self._head_dim, self._shared_out, self._grouped = kv_heads, head_dim, shared_out, grouped

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        heads = fields.whole("num_attention_heads")
        width = fields.take("head_dim", None if fields.is_null("head_dim") else self._head_dim)
        if width is None:
            stream = fields.size("hidden_size", heads)
            if stream < heads:
                fields.refuse("num_attention_heads", heads, f"is more than hidden_size={stream}.")
            width = max(stream // heads, 1)
        if self._shared_out and width != fields.size("hidden_size", heads) / heads:
            fields.refuse(
                "head_dim", width, f"is not hidden_size / num_attention_heads={heads}, as this family has it."
            )
        self._note_names(fields)
        if not self._grouped:
            fields.drop(["num_key_value_heads"])
            return {"base_num_query_heads": heads, "base_num_kv_heads": heads, "head_dim": width}
        unsaid = heads if self._kv_heads is None or fields.is_null("num_key_value_heads") else self._kv_heads
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": fields.take("num_key_value_heads", unsaid),
            "head_dim": width,
        }


class LearnedPositions(Part):
    """GPT-2's sizes: n_embd / n_head dims a head, `n_positions` learned positions, an mlp of `n_inner` or 4 n_embd."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        heads, width = fields.whole("n_head"), fields.size("n_embd", 0)
        fields.names |= {
            "base_num_query_heads": "n_head", "base_num_kv_heads": "n_head", "head_dim": "n_embd",
            "base_mlp_dim": "n_inner", "trainable_position_size": "n_positions",
        }  # fmt: skip
        if width % heads:
            fields.refuse("n_embd", width, f"is not a multiple of n_head={heads}.")
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": heads,
            "head_dim": width // heads,
            "base_mlp_dim": fields.take("n_inner", 4 * width),
            "trainable_position_size": fields.whole("n_positions", fields.take("n_ctx")),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {
            "n_head": config.base_num_query_heads,
            "n_inner": config.base_mlp_dim,
            "n_positions": max(config.trainable_position_size, 1),
        }


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
                "gelu_new": "gelu_tanh", "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
                "gelu_python_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu_squared", "xielu": "xielu"}  # fmt: skip


class Activation(Part):
    """The mlp's activation. Gemma's first configs call it `hidden_act`, which transformers does not read."""

    def __init__(self, name: str, default: str) -> None:
        self._name, self._default = name, default

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value = fields.take(self._name, self._default)
        if self._name == "hidden_activation":
            fields.drop(["hidden_act"])
        fields.names["mlp_activation"] = self._name
        if value not in list(_ACTIVATIONS):
            fields.refuse(self._name, value, f"is none of {any_of(list(_ACTIVATIONS))}.")
            value = self._default
        return {"mlp_activation": _ACTIVATIONS[value]}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        if _ACTIVATIONS[self._default] == config.mlp_activation:
            return {self._name: self._default}
        names = [name for name, activation in _ACTIVATIONS.items() if activation == config.mlp_activation]
        return {self._name: names[0] if names else config.mlp_activation}


class Bias(Part):
    """Whether attention's projections have biases."""

    def __init__(self, name: str, which: str, *, default: bool = False) -> None:
        self._name, self._which, self._default = name, which, default

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        return {"attention_bias": self._which if fields.flag(self._name, self._default) else "none"}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {self._name: config.attention_bias == self._which}


class OrNull(Defaulted):
    """A field that is a key under another name, null where the key is 0: off."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        self._note_names(fields)
        return {
            key: fields.take(name, 0.0 if fields.is_null(name) else self._default) for name, key in self.keys.items()
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {name: value or None for name, value in super().write(config).items()}


class QueryScalar(Part):
    """Gemma's number whose square root divides the scores."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        fields.names["query_pre_attn_scalar"] = "query_pre_attn_scalar"
        return {"query_pre_attn_scalar": fields.take("query_pre_attn_scalar", 256)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        scalar = config.query_pre_attn_scalar or config.head_dim
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


class LatentWidths(Part):
    """DeepSeek's attention; a head is its unrotated dims and then its rotated ones."""

    keys = MappingProxyType(_HEADS)
    _WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        heads = fields.whole("num_attention_heads")
        widths = {name: fields.whole(name) for name in self._WIDTHS}
        rotated, whole = widths["qk_rope_head_dim"], widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]
        for name, known in (("head_dim", (rotated, whole)), ("qk_head_dim", (whole,))):
            if (stated := fields.whole(name, whole)) not in known:
                fields.refuse(name, stated, f"contradicts the other widths of a head, by which it is {whole}.")
        self._note_names(fields)
        fields.names["mla"] = "qk_rope_head_dim"
        without = 0 if fields.is_null("q_lora_rank") else 1536
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": fields.take("num_key_value_heads", heads),
            "head_dim": whole,
            "mla": {"q_lora_rank": fields.whole("q_lora_rank", without, least=0)} | widths,
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        fields = super().write(config)
        if config.mla is None:
            return fields
        widths = config.mla.to_mapping()
        return fields | widths | {"q_lora_rank": config.mla.q_lora_rank or None}


_CAUSAL = Only("is_causal", True)  # of every family: with false, transformers lets each token see the later ones too


@dataclass(frozen=True)
class Family:
    """A model_type.

    Attributes:
      architecture: its class in transformers.
      parts: the fields of config.json and their meaning; a later part wins.
    """

    architecture: str
    parts: tuple[Part, ...]

    def read(self, fields: Fields) -> Keys:
        """Every key; those that no field decides have their DEFAULTS."""
        keys = dict(DEFAULTS)
        for part in (*self.parts, _CAUSAL):
            keys |= part.read(fields)
        return keys

    def write(self, config: ModelConfig) -> JsonObject:
        """The fields that state the keys."""
        fields: JsonObject = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields


SIZES = Rename(
    vocab_size="vocab_size", hidden_size="base_emb_dim", intermediate_size="base_mlp_dim",
    num_hidden_layers="base_num_decoder_layers",
)  # fmt: skip
RANGE = Defaulted("initializer_range", "initializer_range", 0.02)


def ties(default: bool) -> Part:
    """Whether the output projection is the embedding table."""
    return Defaulted("tie_word_embeddings", "logits_via_embedding", default)


def family(
    architecture: str, *parts: Part, epsilon: float = 1e-6, tied: bool = False, epsilon_name: str = "rms_norm_eps"
) -> Family:
    """A family with the usual sizes; `epsilon` and `tied` apply if config.json does not state them."""
    of_norms = Defaulted(epsilon_name, "normalization_layer_epsilon", epsilon)
    return Family(architecture, (SIZES, RANGE, of_norms, ties(tied), *parts))


class RopeFields(Part):
    """Rotary positions: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of version 4.

    Args:
      theta: the default base of wavelengths.
      partial: the default share of a head that is rotated; None: the family rotates whole heads.
      scaling: `rope_parameters` if a config.json has neither field.
      names: of the fields for the base and the share.
      original: the default of `original_max_position_embeddings`, for a family with that field.
      types: the only rope_types of this family, by the words for each; {}: all of them.
      alpha: a `dynamic` rotation may have the entry `alpha`, which makes it ntk. Other families do not read the entry.
    """

    def __init__(
        self,
        theta: float,
        *,
        partial: float | None = None,
        scaling: JsonObject | None = None,
        names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
        original: int = 0,
        types: JsonObject | None = None,
        alpha: bool = False,
    ) -> None:
        self._theta, self._partial, self._scaling = theta, partial, scaling or {}
        self._names, self._original, self._types, self._alpha = names, original, types or {}, alpha

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
        name = "rope_scaling" if old else "rope_parameters"
        for entry in old:
            if entry in new and old[entry] != new[entry]:
                fields.refuse("rope_scaling", old, f"contradicts rope_parameters in {value_text(entry)}.")
        unsaid = self._scaling if is_unsaid(fields) else {}
        parameters = dict(old or new or unsaid)
        theta = _stated(fields, "rope_theta", name, parameters, self._theta, self._names[0])
        share = _stated(fields, "partial_rotary_factor", name, parameters, self._partial or 1.0, self._names[1])
        fields.names |= {
            "rope_max_timescale": self._names[0], "rope_scaling": name, "partial_rotary_factor": self._names[1]
        }  # fmt: skip
        if share != 1 and not self._partial:
            fields.refuse("partial_rotary_factor", share, "has no effect in this family in every version; remove it.")
        for word in ("rope_type", "type"):
            parameters |= {word: self._types.get(str(parameters[word]), parameters[word])} if word in parameters else {}
        outside = fields.whole("original_max_position_embeddings", self._original, least=0)
        if outside and parameters:
            parameters["original_max_position_embeddings"] = outside
        scaling = _scaling(name, parameters, fields, alpha=self._alpha)
        if self._types and scaling and scaling["rope_type"] not in self._types.values():
            known = any_of(["default", *dict.fromkeys(self._types.values())])
            fields.refuse(name, scaling["rope_type"], f"is not of this family, whose rope_type must be {known}.")
        return {"rope_max_timescale": theta, "rope_scaling": scaling, "partial_rotary_factor": share}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        entry = {"partial_rotary_factor": config.partial_rotary_factor} if self._partial else {}
        fields = _rope_fields(config.rope_max_timescale, config, entry)
        share = {self._names[1]: config.partial_rotary_factor} if self._partial else {}
        base = {self._names[0]: fields.pop("rope_theta")}
        return fields | base | share


def is_unsaid(fields: Fields) -> bool:
    """Whether a config.json leaves the rotation to the family's defaults; an empty `rope_parameters` does not."""
    return fields.peek("rope_parameters", None) is None and not fields.peek("rope_scaling", None)


def _stated(
    fields: Fields, name: str, mapping: str, parameters: JsonObject, default: Any, field: str | None = None
) -> Any:
    """A field's value, or the entry of that name in a mapping; if both are stated, they must agree.

    Args:
      field: the field's name, if it differs from the entry's.
    """
    value, entry = fields.take(field or name), parameters.pop(name, None)
    if value is not None and entry is not None and value != entry:
        fields.refuse(field or name, value, f"contradicts {mapping}, in which it is {value_text(entry)}.")
    stated = value if entry is None else entry
    return default if stated is None else stated


def _rope_fields(theta: float, config: ModelConfig, more: JsonObject) -> JsonObject:
    scaling = None if config.rope_scaling is None else config.rope_scaling.to_mapping()
    kind: JsonObject = scaling or {"rope_type": "default"}
    length = {}
    if kind["rope_type"] == "dynamic":  # where transformers reads the original length
        length = {"max_position_embeddings": kind["original_max_position_embeddings"]}
    if kind["rope_type"] == "longrope":  # a family with this field reads no other
        length = {"original_max_position_embeddings": kind["original_max_position_embeddings"]}
    if kind["rope_type"] == "ntk":  # in Hunyuan's words
        kind = {"rope_type": "dynamic", "factor": 1.0, "alpha": kind["factor"]}
    new = {"rope_theta": theta, **kind, **more}
    return {"rope_parameters": new, "rope_theta": theta, "rope_scaling": None if scaling is None else new} | length


# In a config.json, ntk is called dynamic.
_SCALINGS = {kind: needed + optional for kind, (needed, optional) in ROPE_ENTRIES.items() if kind != "ntk"}


def _scaling(name: str, parameters: JsonObject, fields: Fields, *, alpha: bool = False) -> JsonObject:
    """A rope_scaling mapping from rotary parameters without their base; `alpha` as in RopeFields."""
    given = {entry: value for entry, value in parameters.items() if value is not None}
    old_name = given.pop("type", None)
    kind = given.pop("rope_type", old_name or "default")
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
        if given:
            fields.refuse(name, parameters, f"has {value_text(any_of(list(given)))}, which rope_type default does not.")
        return {}
    if old_name is not None and old_name != kind:
        fields.refuse(name, parameters, "names two types: rope_type and type.")
    if alpha and kind == "dynamic" and given.get("alpha"):  # nothing else is read then
        return {"rope_type": "ntk", "factor": given["alpha"]}
    if kind not in list(_SCALINGS):
        fields.refuse(name, kind, f"cannot be expressed: a rope_type must be default, {any_of(list(_SCALINGS))}.")
        return {}
    length = fields.peek("max_position_embeddings", None)
    if length is not None and not is_whole(length, 1):
        fields.refuse("max_position_embeddings", length, "is not an integer of at least 1.")
        length = 1
    if "original_max_position_embeddings" in _SCALINGS[kind]:
        if kind == "dynamic":  # transformers reads max_position_embeddings alone
            given.pop("original_max_position_embeddings", None)
        original = given.setdefault("original_max_position_embeddings", length)
        if original is None:
            where = "max_position_embeddings beside it" if kind == "dynamic" else "original_max_position_embeddings"
            fields.refuse(name, parameters, f"lacks {where}.")
        elif kind == "longrope" and "factor" not in given and length is not None and is_whole(original, 1):
            given["factor"] = max(length / original, 1.0)
    if kind == "yarn" and given.get("attention_factor") is not None:
        # An attention_factor overrides both in the rotation, but mscale_all_dim also scales DeepSeek's scores.
        given.pop("mscale", None)
    for entry in given:
        if entry not in _SCALINGS[kind]:
            fields.refuse(name, parameters, f"has {value_text(entry)}, which is not known of rope_type {kind}.")
    return {"rope_type": kind} | given


class RopeByLayerType(Part):
    """Rotary positions by the kind of layer: local layers have a base of their own and no scaling.

    Args:
      theta, local_theta: the default bases.
      has_field: the local base has a field, `rope_local_base_freq`.
    """

    def __init__(self, theta: float = 1_000_000.0, local_theta: float = 10_000.0, *, has_field: bool = True) -> None:
        self._theta, self._local_theta, self._has_field = theta, local_theta, has_field

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
        parts = {kind: new.pop(kind, {}) for kind in (GLOBAL, _LOCAL)}
        for name, value in [*new.items(), *(each for each in parts.items() if not isinstance(each[1], dict))]:
            fields.refuse(
                "rope_parameters", {name: value}, f"is not an object of the entries of {GLOBAL} and {_LOCAL}."
            )
            parts[name] = {}
        whole, local = dict(parts[GLOBAL]), dict(parts[_LOCAL])
        if "type" in old and "rope_type" not in old:
            fields.refuse("rope_scaling", old, "says type, which transformers does not read here: say rope_type.")
        whole |= old
        theta = _stated(fields, "rope_theta", "rope_parameters", whole, self._theta)
        base = fields.take("rope_local_base_freq") if self._has_field else None
        if base is not None and local.get("rope_theta", base) != base:
            fields.refuse("rope_local_base_freq", base, f"contradicts rope_parameters, whose {_LOCAL} has another.")
        local_theta = local.pop("rope_theta", self._local_theta if base is None else base)
        fields.names |= {
            "rope_max_timescale": "rope_theta", "rope_local_max_timescale": "rope_local_base_freq",
            "rope_scaling": "rope_scaling" if old else "rope_parameters",
        }  # fmt: skip
        if _scaling("rope_parameters", local, fields):
            fields.refuse(
                "rope_parameters", local, "scales the rotation of sliding_attention; only that of the rest can be."
            )
        return {
            "rope_max_timescale": theta,
            "rope_local_max_timescale": local_theta if fields.has_local_layers else 0.0,
            "rope_scaling": _scaling(fields.names["rope_scaling"], whole, fields),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        whole = _rope_fields(config.rope_max_timescale, config, {})
        whole.pop("original_max_position_embeddings", None)  # only rope_parameters is read for it
        local = config.rope_local_max_timescale or config.rope_max_timescale
        by_type = {
            "full_attention": whole["rope_parameters"],
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
        return whole | {"rope_parameters": by_type} | ({"rope_local_base_freq": local} if self._has_field else {})


_LOCAL, GLOBAL = "sliding_attention", "full_attention"
CHUNKED = "chunked_attention"
_KINDS = {_LOCAL: "local", GLOBAL: "global", "nope": "nope", CHUNKED: "chunked"}


def pattern_of(kinds: Sequence[str]) -> str:
    """The shortest pattern whose repetition gives the layers' kinds."""
    # borders[i]: the length of the longest proper prefix of the first i + 1 kinds that is also their suffix.
    borders = [0] * len(kinds)
    for layer in range(1, len(kinds)):
        length = borders[layer - 1]
        while length and kinds[layer] != kinds[length]:
            length = borders[length - 1]
        borders[layer] = length + (kinds[layer] == kinds[length])
    period = len(kinds) - borders[-1] if kinds else 0
    return ",".join(_KINDS.get(kind, kind) for kind in kinds[:period]) or "global"


def rotated_layers(fields: Fields, stated: Sequence[Any] | None) -> list[int]:
    """1 for each layer that is rotated, otherwise 0: as `no_rope_layers` states, or all but every fourth."""
    layers, every = fields.num_layers, fields.whole("no_rope_layer_interval", 4)
    if stated is not None and layers:
        if len(stated) == layers and all(is_whole(each, 0, 1) for each in stated):
            return [*stated]
        fields.refuse("no_rope_layers", stated, f"is not a list of 1 or 0 for each of the {layers} layers.")
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def layer_kinds(config: ModelConfig) -> list[str]:
    """Each layer's kind in the words of config.json, and nope for a layer that is not rotated."""
    kinds = {kind: name for name, kind in _KINDS.items()}
    return [kinds.get(kind, "?") for kind in config.layer_kinds]


def _window(fields: Fields, usual: int, *, switched: bool) -> int:
    """The width of a model's sliding windows; 0: none, which a config.json says with null, or with its switch.

    Args:
      usual: if `sliding_window` is missing.
      switched: the family has the switch, `use_sliding_window`, which is off if it is missing.
    """
    on, stated = fields.flag("use_sliding_window", False) if switched else True, fields.peek("sliding_window", None)
    if stated is None:
        return usual if on and not fields.is_null("sliding_window") else 0
    width = fields.whole("sliding_window", least=0)
    if on and is_whole(stated, 0, 0):
        fields.refuse("sliding_window", 0, "lets no token see even itself. Nearest that works: null, for no window.")
    return width if on else 0


class LayerTypes(Part):
    """Which layers have a sliding window.

    Args:
      style: which layers have one if config.json has no `layer_types`. window: all, and it never has `layer_types`;
        "window by layer": all; from: those from `max_window_layers` on; alternating: the first, third, ...; sixth,
        fourth: all but every `sliding_window_pattern`th; "fixed fourth": all but every fourth. If `use_sliding_window`
        is true, and otherwise none, switched: as from; "switched window": as window; "switched alternating": the
        first, third, ... before `max_window_layers`.
      window: the default of `sliding_window`; 0: none.
      rotated: layers without a window are rotated always, never, or alone: only in a model without any window. With
        never, a model must have one.
    """

    def __init__(
        self,
        style: Literal[
            "window",
            "window by layer",
            "switched",
            "from",
            "switched window",
            "switched alternating",
            "alternating",
            "sixth",
            "fourth",
            "fixed fourth",
        ],
        window: int,
        *,
        rotated: Literal["always", "alone", "never"] = "always",
    ) -> None:
        self._style, self._window, self._rotated = style, window, rotated
        self._every = {"alternating": 2, "sixth": 6, "fourth": 4, "fixed fourth": 4}.get(style, 0)

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers = fields.num_layers
        window = _window(fields, self._window, switched=self._style.startswith("switched"))
        since = {"switched": 28, "from": 62, "switched alternating": 28}.get(self._style)
        first = 0 if since is None else fields.whole("max_window_layers", since, least=0)
        fields.drop(["max_window_layers"] if self._style == "switched window" else [])
        stated = fields.listed("layer_types") if self._style not in ("window", "switched window") else None
        every = self._every
        if self._style in ("sixth", "fourth"):
            fields.drop(["sliding_window_pattern"] if stated is not None or not window else [])  # not read then
            every = fields.whole("sliding_window_pattern", every)
        fields.names |= {"layer_pattern": "layer_types", "sliding_window_size": "sliding_window"}
        if not window:
            kinds = [GLOBAL] * layers
        elif self._style == "switched alternating":
            kinds = [GLOBAL if layer % 2 or layer >= first else _LOCAL for layer in range(layers)]
        elif every:
            kinds = [_LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)]
        else:
            kinds = [_LOCAL if layer >= first else GLOBAL for layer in range(layers)]
        if stated is not None:
            fields.check_layer_types(stated, layers, window, (_LOCAL, GLOBAL))
            kinds = stated if len(stated) == layers and set(map(str, stated)) <= {_LOCAL, GLOBAL} else kinds
        fields.has_local_layers = _LOCAL in kinds
        if self._rotated == "never" and fields.is_null("sliding_window"):
            why = "is a model that transformers does not run. State one even if layer_types has no sliding_attention."
            fields.refuse("sliding_window", None, why)
        if window and self._rotated != "always":
            kinds = ["nope" if kind == GLOBAL else kind for kind in kinds]
        return {"layer_pattern": pattern_of(kinds), "sliding_window_size": window if fields.has_local_layers else 0}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        window, kinds = config.sliding_window_size or None, layer_kinds(config)
        if self._style in ("window", "switched window"):
            switch = {"use_sliding_window": bool(window)} if self._style == "switched window" else {}
            return {"sliding_window": window if _LOCAL in kinds else None} | switch
        if self._style in ("switched", "from", "switched alternating"):
            first = kinds.index(_LOCAL) if _LOCAL in kinds else len(kinds)
            return {
                "sliding_window": window, "max_window_layers": first, "layer_types": kinds,
            } | ({} if self._style == "from" else {"use_sliding_window": bool(window)})  # fmt: skip
        alone = self._rotated == "alone" and GLOBAL in kinds
        if self._rotated != "always":
            kinds = [GLOBAL if kind == "nope" else kind for kind in kinds]
        return {"sliding_window": None if alone else window or self._window, "layer_types": kinds}


class WithoutRotation(Part):
    """SmolLM3's layers that are not rotated: every fourth, or those with a 0 in `no_rope_layers`.

    With `use_sliding_window` these have a window, or else the layers that `layer_types` names.
    """

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers, rotated = fields.num_layers, rotated_layers(fields, fields.listed("no_rope_layers"))
        window = _window(fields, 0, switched=True)
        fields.drop(["max_window_layers"])
        fields.names |= {"layer_pattern": "no_rope_layers", "sliding_window_size": "sliding_window"}
        types = fields.listed("layer_types")
        if types is not None:
            # transformers masks by layer_types even without the switch, which its fused kernels go by.
            fields.check_layer_types(types, layers, window, (_LOCAL, GLOBAL))
        if types is None or len(types) != layers:
            types = [GLOBAL if turned or not window else _LOCAL for turned in rotated]
        names = {(GLOBAL, 1): "global", (GLOBAL, 0): "nope", (_LOCAL, 1): "local", (_LOCAL, 0): "local_nope"}
        kinds = [
            names[_LOCAL if window and kind == _LOCAL else GLOBAL, turned]
            for kind, turned in zip(types, rotated, strict=True)
        ]
        fields.has_local_layers = any(kind.startswith("local") for kind in kinds)
        return {"layer_pattern": pattern_of(kinds), "sliding_window_size": window if fields.has_local_layers else 0}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        kinds = config.layer_kinds
        window = config.sliding_window_size
        return {
            "no_rope_layers": [int(not kind.endswith("nope")) for kind in kinds],
            "layer_types": [_LOCAL if kind.startswith("local") else GLOBAL for kind in kinds],
            "sliding_window": window or None,
            "use_sliding_window": window > 0,
        }
