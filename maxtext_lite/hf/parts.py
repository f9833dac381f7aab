"""Families of Hugging Face models, and their parts: each translates some fields of config.json to keys and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.hf.fields import DEFAULTS, Fields, JsonObject, Keys


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
