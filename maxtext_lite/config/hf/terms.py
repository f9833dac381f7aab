"""Parts of config.json that say a term of the decoder in words of their own: switches, inverses, temperatures."""

from typing import Any

from maxtext_lite.config.hf.fields import Fields, JsonObject, Keys
from maxtext_lite.config.hf.parts import Part
from maxtext_lite.config.hf.positions import RopeFields
from maxtext_lite.config.schema import ModelConfig


class OldGelu(Part):
    """Gemma's first configs: gelu is meant as its approximation, and what `hidden_activation` says is the same."""

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
    """A field that is true or false, and a key that then has one of two values.

    Args:
      also: other keys that follow it, with their values where it is true and where it is false.
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
    """Seed-OSS's biases: of queries, keys and values, and of the output."""

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
    """To 12 digits: far finer than float32, and what it was made of is found again."""
    return float(f"{value:.12g}")


class Inverse(Part):
    """A field that is 1 over a key, or 1 over its root.

    Args:
      power: -1, or -2 where the field is a multiplier of scores and the key what they are divided by the root of.
    """

    def __init__(self, name: str, key: str, default: float, *, power: int = -1) -> None:
        self._name, self._key, self._default, self._power = name, key, default, power

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        value = fields.take(self._name, self._default)
        fields.names[self._key] = self._name
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            fields.refuse(self._name, value, "is not a number above 0.")
            value = 1
        return {self._key: float(value) ** self._power if self._power == -1 else _rounded(float(value) ** self._power)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        value = getattr(config, self._key) or config.head_dim  # the one key that may be 0 then means this
        return {self._name: _rounded(value ** (1 / self._power))}


class PositionScaling(Part):
    """Ministral 3's rotation, and queries that grow with every original length of it.

    Args:
      rope: the rotation without that.
    """

    _ENTRY = "llama_4_scaling_beta"

    def __init__(self, rope: RopeFields) -> None:
        self._rope = rope

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        scale = None
        for name in ("rope_parameters", "rope_scaling"):
            scale = fields.take_entry(name, self._ENTRY, scale)
            fields.take_entry(name, "max_position_embeddings", None)  # which nobody looks at
        if not fields.peek("rope_parameters", None) and not fields.peek("rope_scaling", None):
            scale = 0.1
        keys = self._rope.read(fields)
        length = keys["rope_scaling"].get("original_max_position_embeddings")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or scale < 0 or length is None:
            fields.refuse(self._ENTRY, scale, "must be a number beside an original_max_position_embeddings.")
            return keys
        return {**keys, "position_temperature": {"scale": float(scale), "floor_scale": length} if scale else {}}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        fields, tuning = self._rope.write(config), config.position_temperature
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(fields.get(name), dict):
                fields[name] = fields[name] | {self._ENTRY: tuning.scale if tuning else 0.0}
        return fields
