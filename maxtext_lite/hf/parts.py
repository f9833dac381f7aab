"""Parts of config.json that families are made of: each reads some fields as keys, and writes keys as fields."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
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


_REQUIRED = object()


@dataclass(frozen=True)
class Field(Part):
    """A field that is a key, maybe under another name.

    Attributes:
      key: "": none, and the default is written.
      default: of a missing field; a field without one is required.
      like: a field whose value this one has if it is missing.
      values: the field's values, each with the key's; {}: they are the key's.
      if_null: the key's value where the field is null; with a default of null, also where it is missing.
      power: the field is this power of the key.
      aliases: other names of the field, which must agree with it.
    """

    name: str
    _: KW_ONLY
    key: str = ""
    default: object = _REQUIRED
    values: Mapping[Any, object] = field(default_factory=dict[Any, object])
    if_null: object = None
    like: str = ""
    power: float = 0
    aliases: Sequence[str] = ()

    def read(self, fields: Fields) -> JsonObject:
        stated = [name for name in (self.name, *self.aliases) if fields.peek(name) is not None]
        if self.default is _REQUIRED or (self.aliases and stated):
            value = fields.need(self.name, *self.aliases, key=self.key)
        elif self.if_null is not None and not stated and (self.default is None or fields.is_null(self.name)):
            fields.names[self.key] = self.name
            return {self.key: self.if_null}
        else:
            default = fields.peek(self.like) if self.like else self.default
            value = fields.take(self.name, default, key=self.key)
        if self.values:
            value = self._meaning(fields, value)
        if self.power:
            value = self._base(fields, value)
        return {self.key: value} if self.key else {}

    def _meaning(self, fields: Fields, value: object) -> object:
        for stated, meaning in self.values.items():
            if value == stated and isinstance(value, bool) == isinstance(stated, bool):
                return meaning
        known = any_of([value_text(each) for each in self.values])
        fields.refuse(self.name, value, f"cannot be expressed: it must be {known}.")
        return self.values[self.default]

    def _base(self, fields: Fields, value: Any) -> float:
        if not is_real(value) or not value:
            fields.refuse(self.name, value, "is not a number above 0.")
            return 1.0
        return self._inverse(float(value))

    def _inverse(self, power: float) -> float:
        base = power ** (1 / self.power)
        return base if self.power == -1 else _rounded(base)

    def write(self, config: ModelConfig) -> JsonObject:
        if not self.key:
            return {self.name: self.default}
        value = getattr(config, self.key)
        if value == self.if_null:
            return dict.fromkeys((self.name, *self.aliases))
        if self.key == "query_pre_attn_scalar":
            value = value or config.head_dim  # 0 means head_dim
        if self.values:
            known = [stated for stated in (self.default, *self.values) if self.values[stated] == value]
            value = known[0] if known else self.default
        elif self.power:
            power = value**self.power
            value = _rounded(power) if self._inverse(_rounded(power)) == value else power
        elif isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        return dict.fromkeys((self.name, *self.aliases), value)


def is_real(value: object) -> bool:
    """Whether a field's value is a number from 0 to 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _rounded(value: float) -> float:
    """To 12 digits: far finer than float32."""
    return float(f"{value:.12g}")


@dataclass(frozen=True)
class Scaled(Part):
    """A field that is a key times a power of a size; null: the key is 1.

    Attributes:
      key: the key.
      default: of a missing field, which is an integer if this is one.
      size, size_key: the size, as a field and as a key.
      power: key = field * size ** power.
    """

    name: str
    _: KW_ONLY
    key: str
    default: float
    size: str
    size_key: str
    power: float

    def read(self, fields: Fields) -> JsonObject:
        if fields.is_null(self.name):
            return {self.key: 1.0}
        value = fields.take(self.name, self.default, key=self.key)
        if not is_real(value) or not value:
            fields.refuse(self.name, value, "is not a number above 0.")
            return {self.key: 1.0}
        return {self.key: _rounded(value * fields.size(self.size, 1) ** self.power)}

    def write(self, config: ModelConfig) -> JsonObject:
        value = getattr(config, self.key) / getattr(config, self.size_key) ** self.power
        return {self.name: round(value) if isinstance(self.default, int) else value}


@dataclass(frozen=True)
class Switch(Part):
    """A field that, where it is stated, is a key and fixes others.

    Attributes:
      key: the key.
      keys: the other keys.
    """

    name: str
    _: KW_ONLY
    key: str
    keys: JsonObject

    def read(self, fields: Fields) -> JsonObject:
        if fields.peek(self.name) is None:
            return {}
        return {self.key: fields.take(self.name, key=self.key), **self.keys}

    def write(self, config: ModelConfig) -> JsonObject:
        is_on = all(getattr(config, key) == value for key, value in self.keys.items())
        return {self.name: getattr(config, self.key) if is_on else None}


@dataclass(frozen=True)
class Ignored(Part):
    """A field of the family that transformers does not read."""

    name: str

    def read(self, fields: Fields) -> JsonObject:
        fields.drop([self.name])
        return {}


class Fixed(Part):
    """Keys with the same value in every model of the family."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def read(self, fields: Fields) -> JsonObject:
        return self._values


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


@dataclass(frozen=True)
class LatentWidths(Part):
    """DeepSeek's attention; a head is its unrotated dims and then its rotated ones.

    Attributes:
      q_lora_rank: its default.
      shares_stream: without a `v_head_dim`, values share out hidden_size.
    """

    q_lora_rank: int = 1536
    shares_stream: bool = False

    def read(self, fields: Fields) -> JsonObject:
        heads = fields.whole("num_attention_heads", key="base_num_query_heads")
        widths = {name: fields.whole(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
        shared = max(fields.size("hidden_size", heads) // heads, 1) if self.shares_stream else None
        widths["v_head_dim"] = fields.whole("v_head_dim", shared)
        rotated = widths["qk_rope_head_dim"]
        whole = rotated + widths["qk_nope_head_dim"]
        for name, known in (("head_dim", (rotated, whole)), ("qk_head_dim", (whole,))):
            stated = fields.whole(name, whole)
            if stated not in known:
                fields.refuse(name, stated, f"contradicts the other widths of a head, by which it is {whole}.")
        fields.names["mla"] = "qk_rope_head_dim"
        without = 0 if fields.is_null("q_lora_rank") else self.q_lora_rank
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
    """Seed-OSS's biases of queries, keys and values, and of the output."""

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


class SharedSum(Part):
    """Command's shared experts: as many as `num_shared_experts`, whose output must be added."""

    def read(self, fields: Fields) -> JsonObject:
        count = fields.whole("num_shared_experts", 0, least=0, key="shared_experts")
        how = fields.take("shared_expert_combination_strategy", "average")
        if count and how != "sum":
            fields.refuse("shared_expert_combination_strategy", how, "cannot be expressed: it must be sum.")
        return {"shared_experts": count}

    def write(self, config: ModelConfig) -> JsonObject:
        return {"num_shared_experts": config.shared_experts, "shared_expert_combination_strategy": "sum"}


class PerLayerInputs(Part):
    """Gemma 4's second table of embeddings; 0: there is none."""

    def read(self, fields: Fields) -> JsonObject:
        width = fields.whole("hidden_size_per_layer_input", 256, least=0, key="hidden_size_per_layer_input")
        rows = fields.whole("vocab_size_per_layer_input", 262144)
        tokens = fields.size("vocab_size", rows)
        if width and rows != tokens:
            fields.refuse("vocab_size_per_layer_input", rows, f"cannot be expressed: it must be vocab_size={tokens}.")
        return {"hidden_size_per_layer_input": width}

    def write(self, config: ModelConfig) -> JsonObject:
        return {
            "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
            "vocab_size_per_layer_input": config.vocab_size,
        }


class BlockBeside(Part):
    """Gemma 4's experts beside the dense mlp, which is their shared expert, each with norms of its own."""

    def read(self, fields: Fields) -> JsonObject:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if not fields.flag("enable_moe_block", False):
            fields.drop(names)
            return {}
        if fields.peek("use_double_wide_mlp") and fields.peek("num_kv_shared_layers"):
            fields.refuse("use_double_wide_mlp", True, "cannot be expressed beside enable_moe_block.")
        keys = ("num_experts", "num_experts_per_tok", "base_moe_mlp_dim")
        sizes = {key: fields.whole(name, key=key) for key, name in zip(keys, names, strict=True)}
        width = fields.size("intermediate_size", 1)
        return {**sizes, "norm_placement": "each", "shared_experts": 1, "base_shared_mlp_dim": width}

    def write(self, config: ModelConfig) -> JsonObject:
        if config.num_experts == 1:
            return {"enable_moe_block": False}
        return {
            "enable_moe_block": True,
            "intermediate_size": config.shared_mlp_dim,
            "num_experts": config.num_experts,
            "top_k_experts": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_mlp_dim,
        }


@dataclass(frozen=True)
class SharedWidth(Part):
    """The width of the shared expert; 0: there is none."""

    name: str = "shared_intermediate_size"
    default: int = 0

    def read(self, fields: Fields) -> JsonObject:
        width = fields.whole(self.name, self.default, least=0, key="base_shared_mlp_dim")
        return {"shared_experts": int(width > 0), "base_shared_mlp_dim": width or -1}

    def write(self, config: ModelConfig) -> JsonObject:
        return {self.name: config.shared_mlp_dim}
