"""The parts of config.json that state a term of the decoder another way: switches, inverses, temperatures."""

from typing import Any, TypeGuard

from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, Keys
from maxtext_lite.hf.parts import Part
from maxtext_lite.hf.positions import RopeFields, is_unsaid


class OldGelu(Part):
    """Gemma 1's activation: its `gelu` means the tanh approximation, and `hidden_activation` may only repeat it."""

    _MEANT = "gelu_pytorch_tanh"

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value, other = fields.take("hidden_act", self._MEANT), fields.take("hidden_activation", self._MEANT)
        for name, stated in (("hidden_act", value), ("hidden_activation", other)):
            if stated not in ("gelu", self._MEANT):
                fields.refuse(name, stated, f"cannot be expressed: it must be {self._MEANT}.")
        return {"mlp_activation": "gelu_tanh"}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        del config
        return {"hidden_act": self._MEANT}


class Switch(Part):
    """A field that is true or false, and a key with a value for each.

    Args:
      also: other keys that follow the field, with their values for true and for false.
    """

    def __init__(self, name: str, key: str, on: object, off: object, *, default: bool = False, **also: Any) -> None:
        self._name, self._key, self._values, self._default, self._also = name, key, (on, off), default, also

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        is_off = not fields.flag(self._name, self._default)
        fields.names |= {self._key: self._name}
        return {self._key: self._values[is_off]} | {key: values[is_off] for key, values in self._also.items()}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {self._name: getattr(config, self._key) == self._values[0]}


class OutBias(Part):
    """Seed-OSS's biases, of queries, keys and values, and of the output."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        inner, out = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
        if out and not inner:
            fields.refuse("attention_out_bias", out, "cannot be expressed without attention_bias.")
        return {"attention_bias": "all" if inner and out else "qkv" if inner else "none"}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"attention_bias": config.attention_bias != "none", "attention_out_bias": config.attention_bias == "all"}


def _rounded(value: float) -> float:
    """To 12 digits: far finer than float32, and few enough that the inverse gives the original number."""
    return float(f"{value:.12g}")


def _is_real(value: object) -> TypeGuard[int | float]:
    """Whether a field's value is a number from 0 to 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


class Inverse(Part):
    """A field that is 1 over a key, or 1 over a key's square root.

    Args:
      power: -1, or -2 if the field multiplies scores and the key's square root divides them.
    """

    def __init__(self, name: str, key: str, *, power: int = -1) -> None:
        self._name, self._key, self._power = name, key, power

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value = fields.take(self._name, 1.0)
        fields.names[self._key] = self._name
        if not _is_real(value) or not value:
            fields.refuse(self._name, value, "is not a number above 0.")
            value = 1
        return {self._key: float(value) ** self._power if self._power == -1 else _rounded(float(value) ** self._power)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        value = getattr(config, self._key) or config.head_dim  # query_pre_attn_scalar=0 means head_dim
        return {self._name: _rounded(value ** (1 / self._power))}


_MAPPINGS = ("rope_parameters", "rope_scaling")


def _taken(fields: Fields, entry: str) -> Any:
    """An entry of the last of _MAPPINGS that has it, marked as read in both; None if it is missing."""
    value = None
    for name in _MAPPINGS:
        value = fields.take_entry(name, entry, value)
    return value


def _with_entries(fields: JsonObject, entries: JsonObject) -> JsonObject:
    """The fields with more entries in each of _MAPPINGS that is there."""
    return fields | {name: fields[name] | entries for name in _MAPPINGS if isinstance(fields.get(name), dict)}


class PositionScaling(RopeFields):
    """Ministral 3's rotation, and queries that grow with each multiple of its original length."""

    _ENTRY = "llama_4_scaling_beta"

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        scale = 0.1 if is_unsaid(fields) else _taken(fields, self._ENTRY)
        _taken(fields, "max_position_embeddings")  # not read by transformers
        keys = super().read(fields)
        length = keys["rope_scaling"].get("original_max_position_embeddings")
        if not _is_real(scale) or length is None:
            fields.refuse(self._ENTRY, scale, "must be a number beside an original_max_position_embeddings.")
            return keys
        return {**keys, "position_temperature": {"scale": float(scale), "floor_scale": length} if scale else {}}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        tuning = config.position_temperature
        return _with_entries(super().write(config), {self._ENTRY: tuning.scale if tuning else 0.0})


class MultipliedRope(RopeFields):
    """Phi-3.5-MoE's rotation: longrope with a multiplier of cosines and sines for short and for long documents.

    transformers uses the short factors at every length, and so does this.
    """

    _ENTRIES = ("short_mscale", "long_mscale")

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        values = [_taken(fields, entry) for entry in self._ENTRIES]
        _taken(fields, "long_factor")
        keys = dict(super().read(fields))
        scaling = keys["rope_scaling"]
        if scaling.get("rope_type") != "longrope":
            if scaling:
                fields.refuse("rope_scaling", scaling["rope_type"], "cannot be expressed: it must be longrope.")
            return keys
        short, long = values
        if not _is_real(short) or not short or short != long:
            why = "cannot be expressed: it must be a number above 0, and both the same."
            fields.refuse("short_mscale and long_mscale", values, why)
            return keys
        factors = {"long_factor": scaling.get("short_factor"), "attention_factor": float(short)}
        return keys | {"rope_scaling": scaling | factors}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        fields, scaling = super().write(config), config.rope_scaling
        return _with_entries(fields, dict.fromkeys(self._ENTRIES, scaling.attention_factor)) if scaling else fields


class RotaryDim(RopeFields):
    """MiniMax's rotation, whose share of a head is also stated in dims."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        keys, width = dict(super().read(fields)), fields.size("head_dim", 128)
        dims = fields.whole("rotary_dim", width)
        if dims != width and keys["partial_rotary_factor"] not in (1.0, dims / width):
            fields.refuse("rotary_dim", dims, f"contradicts partial_rotary_factor={keys['partial_rotary_factor']}.")
        return keys if dims == width else keys | {"partial_rotary_factor": dims / width}


class SharedWidth(Part):
    """Granite's width of the shared expert; 0: there is none."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        width = fields.whole("shared_intermediate_size", 0, least=0)
        fields.names["base_shared_mlp_dim"] = "shared_intermediate_size"
        return {"shared_experts": int(width > 0), "base_shared_mlp_dim": width or -1}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"shared_intermediate_size": config.shared_mlp_dim}
