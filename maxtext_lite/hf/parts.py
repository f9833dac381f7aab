"""Parts of config.json that families are made of: each reads some fields as keys, and writes keys as fields."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, is_whole


class Part:
    """Some fields of config.json and their meaning."""

    def read(self, fields: Fields) -> JsonObject:
        """The keys that the fields decide; `fields` notes which field decides which key, and every problem."""
        raise NotImplementedError

    def write(self, config: ModelConfig) -> JsonObject:
        """The fields that state the keys."""
        return {}


class Rename(Part):
    """Required fields that are keys under another name."""

    def __init__(self, **keys: str) -> None:
        self._keys = keys

    def read(self, fields: Fields) -> JsonObject:
        return {key: fields.need(name, key=key) for name, key in self._keys.items()}

    def write(self, config: ModelConfig) -> JsonObject:
        return {name: getattr(config, key) for name, key in self._keys.items()}


@dataclass(frozen=True)
class Defaulted(Part):
    """A field with a default that is a key under another name."""

    name: str
    key: str
    default: object

    def read(self, fields: Fields) -> JsonObject:
        return {self.key: fields.take(self.name, self.default, key=self.key)}

    def write(self, config: ModelConfig) -> JsonObject:
        return {self.name: getattr(config, self.key)}


class OrNull(Defaulted):
    """A field that is a key under another name, null where the key is 0: off."""

    def read(self, fields: Fields) -> JsonObject:
        unstated = 0.0 if fields.is_null(self.name) else self.default
        return {self.key: fields.take(self.name, unstated, key=self.key)}

    def write(self, config: ModelConfig) -> JsonObject:
        return {self.name: getattr(config, self.key) or None}


@dataclass(frozen=True)
class Choice(Part):
    """A field whose values have other names as values of a key; of two that mean the same, the first is written."""

    name: str
    key: str
    default: object
    values: Mapping[Any, object]

    def read(self, fields: Fields) -> JsonObject:
        value = fields.take(self.name, self.default, key=self.key)
        known = list(self.values)
        if value not in known or type(value) is not type(known[0]):
            fields.refuse(self.name, value, f"is none of {any_of([value_text(each) for each in known])}.")
            value = self.default
        return {self.key: self.values[value]}

    def write(self, config: ModelConfig) -> JsonObject:
        meant = getattr(config, self.key)
        if self.values[self.default] == meant:
            return {self.name: self.default}
        return {self.name: next((value for value, key in self.values.items() if key == meant), meant)}


def switch(name: str, key: str, on: object, off: object, *, default: bool = False) -> Choice:
    """A field that is true or false, and a key with a value for each."""
    return Choice(name, key, default, {True: on, False: off})


def attention_biases(name: str, which: str, *, default: bool = False) -> Choice:
    """Whether attention's projections have biases."""
    return switch(name, "attention_bias", which, "none", default=default)


_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu_squared", "xielu": "xielu",
}  # fmt: skip


def activation(name: str, default: str) -> Choice:
    """The mlp's activation."""
    return Choice(name, "mlp_activation", default, _ACTIVATIONS)


class Every(Part):
    """One key under several names, which must agree."""

    def __init__(self, *names: str, key: str) -> None:
        self._names = names
        self._key = key

    def read(self, fields: Fields) -> JsonObject:
        first, *others = sorted(self._names, key=lambda name: fields.peek(name) is None)
        value = fields.need(first, key=self._key)
        for name in others:
            other = fields.take(name, value)
            if other != value:
                fields.refuse(name, other, f"contradicts {first}={value_text(value)}.")
        return {self._key: value}

    def write(self, config: ModelConfig) -> JsonObject:
        return dict.fromkeys(self._names, getattr(config, self._key))


class Fixed(Part):
    """Keys with the same value in every model of the family."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def read(self, fields: Fields) -> JsonObject:
        return self._values


@dataclass(frozen=True)
class Only(Part):
    """A field that must have one value, the one that maxtext_lite computes; with `key`, also that key's value."""

    name: str
    value: object
    _: KW_ONLY
    key: str = ""

    def read(self, fields: Fields) -> JsonObject:
        value = fields.take(self.name, self.value)
        if value != self.value or isinstance(value, bool) != isinstance(self.value, bool):
            fields.refuse(self.name, value, f"cannot be expressed: it must be {value_text(self.value)}.")
        return {self.key: self.value} if self.key else {}

    def write(self, config: ModelConfig) -> JsonObject:
        return {self.name: self.value}


class Ignored(Part):
    """Fields of the family that transformers does not read."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def read(self, fields: Fields) -> JsonObject:
        fields.drop(self._names)
        return {}


def is_real(value: object) -> bool:
    """Whether a field's value is a number from 0 to 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


@dataclass(frozen=True)
class Inverse(Part):
    """A field that is a power of a key: with -1, one over it.

    Attributes:
      power: -1, or -0.5 if the field multiplies scores and the key's square root divides them.
    """

    name: str
    key: str
    power: float = -1

    def read(self, fields: Fields) -> JsonObject:
        value = fields.take(self.name, 1.0, key=self.key)
        if not is_real(value) or not value:
            fields.refuse(self.name, value, "is not a number above 0.")
            value = 1
        meant = float(value) ** (1 / self.power)
        return {self.key: meant if self.power == -1 else _rounded(meant)}

    def write(self, config: ModelConfig) -> JsonObject:
        value = getattr(config, self.key) or config.head_dim  # query_pre_attn_scalar=0 means head_dim
        return {self.name: _rounded(value**self.power)}


def _rounded(value: float) -> float:
    """To 12 digits: far finer than float32, and few enough that the inverse gives the original number."""
    return float(f"{value:.12g}")


# ---- Attention and experts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads(Part):
    """The attention heads.

    Attributes:
      kv_heads: the default of `num_key_value_heads`; None: one for each query head.
      head_dim: the default of `head_dim`; None, or null in config.json: hidden_size / num_attention_heads.
      shared_out: the width is hidden_size / num_attention_heads, and `head_dim` may not state another.
      grouped: query heads may share kv heads; False: each has its own, and `num_key_value_heads` is not read.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    shared_out: bool = False
    grouped: bool = True

    def read(self, fields: Fields) -> JsonObject:
        heads = fields.whole("num_attention_heads", key="base_num_query_heads")
        stream = fields.size("hidden_size", heads)
        width = fields.take("head_dim", None if fields.is_null("head_dim") else self.head_dim, key="head_dim")
        if width is None:
            if stream < heads:
                fields.refuse("num_attention_heads", heads, f"is more than hidden_size={stream}.")
            width = max(stream // heads, 1)
        if self.shared_out and not (is_whole(width, 1) and width * heads == stream):
            fields.refuse("head_dim", width, f"is not hidden_size / num_attention_heads={heads}.")
        keys = {"base_num_query_heads": heads, "head_dim": width}
        one_each = not self.grouped or self.kv_heads is None or fields.is_null("num_key_value_heads")
        kv_heads = fields.take("num_key_value_heads", heads if one_each else self.kv_heads, key="base_num_kv_heads")
        return keys | {"base_num_kv_heads": kv_heads if self.grouped else heads}

    def write(self, config: ModelConfig) -> JsonObject:
        return _heads(config) | {"head_dim": config.head_dim}


def _heads(config: ModelConfig) -> JsonObject:
    return {"num_attention_heads": config.base_num_query_heads, "num_key_value_heads": config.base_num_kv_heads}


class LearnedPositions(Part):
    """GPT-2's sizes: n_embd / n_head dims a head, `n_positions` learned positions, an mlp of `n_inner` or 4 n_embd."""

    def read(self, fields: Fields) -> JsonObject:
        heads = fields.whole("n_head", key="base_num_query_heads")
        width = fields.size("n_embd", 0)
        if width % heads:
            fields.refuse("n_embd", width, f"is not a multiple of n_head={heads}.")
        fields.names |= {"base_num_kv_heads": "n_head", "head_dim": "n_embd"}
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": heads,
            "head_dim": width // heads,
            "base_mlp_dim": fields.take("n_inner", 4 * width, key="base_mlp_dim"),
            "trainable_position_size": fields.whole("n_positions", fields.take("n_ctx"), key="trainable_position_size"),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        return {
            "n_head": config.base_num_query_heads,
            "n_inner": config.base_mlp_dim,
            "n_positions": max(config.trainable_position_size, 1),
        }


class QueryScalar(Part):
    """Gemma's number whose square root divides the scores."""

    def read(self, fields: Fields) -> JsonObject:
        return {"query_pre_attn_scalar": fields.take("query_pre_attn_scalar", 256, key="query_pre_attn_scalar")}

    def write(self, config: ModelConfig) -> JsonObject:
        scalar = config.query_pre_attn_scalar or config.head_dim
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


class LatentWidths(Part):
    """DeepSeek's attention; a head is its unrotated dims and then its rotated ones."""

    _WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(self, fields: Fields) -> JsonObject:
        heads = fields.whole("num_attention_heads", key="base_num_query_heads")
        widths = {name: fields.whole(name) for name in self._WIDTHS}
        rotated = widths["qk_rope_head_dim"]
        whole = rotated + widths["qk_nope_head_dim"]
        for name, known in (("head_dim", (rotated, whole)), ("qk_head_dim", (whole,))):
            stated = fields.whole(name, whole)
            if stated not in known:
                fields.refuse(name, stated, f"contradicts the other widths of a head, by which it is {whole}.")
        fields.names["mla"] = "qk_rope_head_dim"
        without = 0 if fields.is_null("q_lora_rank") else 1536
        return {
            "base_num_query_heads": heads,
            "base_num_kv_heads": fields.take("num_key_value_heads", heads, key="base_num_kv_heads"),
            "head_dim": whole,
            "mla": {"q_lora_rank": fields.whole("q_lora_rank", without, least=0), **widths},
        }

    def write(self, config: ModelConfig) -> JsonObject:
        if config.mla is None:
            return _heads(config)
        return _heads(config) | config.mla.to_mapping() | {"q_lora_rank": config.mla.q_lora_rank or None}


class ExpertGroups(Part):
    """DeepSeek-V2's choice of experts: `greedy` among all of them, even if groups are stated, or in the best groups."""

    def read(self, fields: Fields) -> JsonObject:
        method = fields.take("topk_method", "greedy")
        groups = fields.whole("n_group", 1, key="n_routing_groups")
        chosen = fields.whole("topk_group", 1, key="topk_routing_group")
        if method == "greedy":
            return {}
        if method != "group_limited_greedy":
            fields.refuse("topk_method", method, "cannot be expressed: it must be greedy or group_limited_greedy.")
        return {"n_routing_groups": groups, "topk_routing_group": chosen}

    def write(self, config: ModelConfig) -> JsonObject:
        method = "greedy" if config.n_routing_groups == 1 else "group_limited_greedy"
        groups = {"n_group": config.n_routing_groups, "topk_group": config.topk_routing_group}
        return {"topk_method": method, **groups}


class OutBias(Part):
    """Seed-OSS's biases, of queries, keys and values, and of the output."""

    def read(self, fields: Fields) -> JsonObject:
        inner = fields.flag("attention_bias", True, key="attention_bias")
        out = fields.flag("attention_out_bias", False)
        if out and not inner:
            fields.refuse("attention_out_bias", out, "cannot be expressed without attention_bias.")
        if not inner:
            return {}
        return {"attention_bias": "all" if out else "qkv"}

    def write(self, config: ModelConfig) -> JsonObject:
        return {"attention_bias": config.attention_bias != "none", "attention_out_bias": config.attention_bias == "all"}


class SharedWidth(Part):
    """Granite's width of the shared expert; 0: there is none."""

    def read(self, fields: Fields) -> JsonObject:
        width = fields.whole("shared_intermediate_size", 0, least=0, key="base_shared_mlp_dim")
        return {"shared_experts": int(width > 0), "base_shared_mlp_dim": width or -1}

    def write(self, config: ModelConfig) -> JsonObject:
        return {"shared_intermediate_size": config.shared_mlp_dim}
