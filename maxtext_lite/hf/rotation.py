"""Rotary positions in config.json: rope_parameters of transformers 5, or rope_theta and rope_scaling of version 4."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.keys import ROPE_ENTRIES, ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, is_whole
from maxtext_lite.hf.layers import GLOBAL, LOCAL, LayerTypes, pattern_of
from maxtext_lite.hf.parts import Part, is_real

# In a config.json, ntk is called dynamic.
SCALINGS = {kind: needed + optional for kind, (needed, optional) in ROPE_ENTRIES.items() if kind != "ntk"}
"""The entries of each rope_type of a config.json."""


@dataclass(frozen=True)
class RopeFields(Part):
    """The rotation of a family whose layers all have the same.

    Attributes:
      theta: the default base of wavelengths.
      partial: the default share of a head that is rotated; None: the family rotates whole heads.
      scaling: `rope_parameters` if a config.json has neither field.
      theta_name, partial_name: of the fields for the base and the share.
      original: the default of `original_max_position_embeddings`, for a family with that field.
      types: the only rope_types of this family, by the words for each; {}: all of them.
      has_old: `rope_scaling` is read, and `rope_theta` even beside an entry of that name.
      alpha: a `dynamic` rotation may have the entry `alpha`, which makes it ntk. Other families do not read the entry.
    """

    theta: float
    _: KW_ONLY
    partial: float | None = None
    scaling: JsonObject = field(default_factory=JsonObject)
    theta_name: str = "rope_theta"
    partial_name: str = "partial_rotary_factor"
    original: int = 0
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    has_old: bool = True
    alpha: bool = False

    def read(self, fields: Fields) -> JsonObject:
        new = fields.mapping("rope_parameters")
        old = fields.mapping("rope_scaling") if self.has_old else {}
        for entry in old.keys() & new.keys():
            if old[entry] != new[entry]:
                fields.refuse("rope_scaling", old, f"contradicts rope_parameters in {value_text(entry)}.")
        # An empty rope_parameters leaves nothing to the family's default.
        is_unsaid = fields.peek("rope_parameters") is None and not fields.peek("rope_scaling")
        usual = dict(self.scaling) if is_unsaid else {}
        name = "rope_scaling" if old else "rope_parameters"
        fields.names["rope_scaling"] = name
        return self.keys_of(fields, name, old or new or usual)

    def keys_of(self, fields: Fields, name: str, parameters: JsonObject) -> JsonObject:
        """The keys by the field `name` with these entries, and by the fields beside it."""
        if self.has_old or "rope_theta" not in parameters:
            theta = _stated(fields, name, parameters, "rope_theta", self.theta_name, self.theta)
        else:
            theta = parameters.pop("rope_theta")
            fields.drop([self.theta_name])
        if self.partial not in (None, 1.0) and fields.is_null(self.partial_name):
            fields.refuse(self.partial_name, None, f"is not a value of this field. Nearest that works: {self.partial}.")
        share = _stated(fields, name, parameters, "partial_rotary_factor", self.partial_name, self.partial or 1.0)
        fields.names |= {"rope_max_timescale": self.theta_name, "partial_rotary_factor": self.partial_name}
        if share != 1 and not self.partial:
            fields.refuse("partial_rotary_factor", share, "has no effect in this family in every version; remove it.")
        length = fields.whole("original_max_position_embeddings", self.original, least=0)
        if length and parameters:
            parameters["original_max_position_embeddings"] = length
        scaling = read_scaling(fields, name, parameters, types=self.types, alpha=self.alpha)
        if self.partial and scaling.get("rope_type") == "proportional":
            fields.refuse(name, "proportional", "cannot be expressed in this family. Nearest that works: default.")
        return {"rope_max_timescale": theta, "rope_scaling": scaling, "partial_rotary_factor": share}

    def write(self, config: ModelConfig) -> JsonObject:
        if self.partial is None:
            fields = _written(config, {})
        else:
            share = config.partial_rotary_factor
            fields = _written(config, {"partial_rotary_factor": share}) | {self.partial_name: share}
        fields[self.theta_name] = fields.pop("rope_theta")
        if not self.has_old:
            del fields["rope_scaling"]
        return fields


def _stated(fields: Fields, mapping: str, parameters: JsonObject, entry: str, name: str, default: float) -> Any:
    """The value of a field or of an entry of the mapping; if both are stated, they must agree."""
    value = parameters.pop(entry, None)
    beside = fields.take(name, value)
    if value is not None and beside != value:
        fields.refuse(name, beside, f"contradicts {mapping}, in which it is {value_text(value)}.")
    return default if beside is None else beside


def read_scaling(
    fields: Fields, name: str, parameters: JsonObject, *, types: Mapping[str, str], alpha: bool = False
) -> JsonObject:
    """The rope_scaling of the field `name`, from its entries without the base; `types` and `alpha` as in RopeFields."""
    given = {entry: value for entry, value in parameters.items() if value is not None}
    stated = [given.pop(word) for word in ("rope_type", "type") if word in given]
    kinds = [types.get(str(word), word) for word in stated]
    kind = kinds[0] if kinds else "default"
    if len(kinds) == 2 and kinds[1] != kind:
        fields.refuse(name, parameters, "names two types: rope_type and type.")
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
        if given:
            fields.refuse(name, parameters, f"has {value_text(any_of(list(given)))}, which rope_type default does not.")
        return {}
    if alpha and kind == "dynamic" and given.get("alpha"):  # nothing else is read then
        return {"rope_type": "ntk", "factor": given["alpha"]}
    known = list(dict.fromkeys(types.values())) or list(SCALINGS)
    if kind not in known:
        fields.refuse(name, kind, f"cannot be expressed: a rope_type must be default, {any_of(known)}.")
        return {}
    length = fields.peek("max_position_embeddings")
    if length is not None and not is_whole(length, 1):
        fields.refuse("max_position_embeddings", length, "is not an integer of at least 1.")
        length = 1
    if "original_max_position_embeddings" in SCALINGS[kind]:
        if kind == "dynamic":  # transformers reads max_position_embeddings alone
            given.pop("original_max_position_embeddings", None)
        original = given.setdefault("original_max_position_embeddings", length)
        if original is None:
            where = "max_position_embeddings beside it" if kind == "dynamic" else "original_max_position_embeddings"
            fields.refuse(name, parameters, f"lacks {where}.")
        elif kind == "longrope" and "factor" not in given and length is not None and is_whole(original, 1):
            given["factor"] = max(length / original, 1.0)
    if kind == "proportional":
        given.setdefault("partial_rotary_factor", 1.0)
    if kind == "yarn" and "attention_factor" in given:
        # An attention_factor overrides both in the rotation, but mscale_all_dim also scales DeepSeek's scores.
        given.pop("mscale", None)
    for entry in given:
        if entry not in SCALINGS[kind]:
            fields.refuse(name, parameters, f"has {value_text(entry)}, which is not known of rope_type {kind}.")
    return {"rope_type": kind} | given


def _written(config: ModelConfig, more: JsonObject) -> JsonObject:
    """The fields of both versions, with more entries in rope_parameters."""
    theta = config.rope_max_timescale
    if config.rope_scaling is None:
        parameters = {"rope_theta": theta, "rope_type": "default", **more}
        return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": None}
    scaling = config.rope_scaling.to_mapping()
    beside: JsonObject = {}
    if scaling["rope_type"] == "dynamic":  # where transformers reads the original length
        beside["max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "longrope":  # a family with this field reads no other
        beside["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "ntk":  # in Hunyuan's words
        scaling = {"rope_type": "dynamic", "factor": 1.0, "alpha": scaling["factor"]}
    parameters = {"rope_theta": theta, **scaling, **more}
    return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": parameters, **beside}


def _with_entries(fields: JsonObject, **entries: object) -> JsonObject:
    """The fields with more entries in each object that describes the rotation."""
    objects = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields[name] is not None}
    return fields | {name: stated | entries for name, stated in objects.items()}


class PositionScaling(RopeFields):
    """Ministral 3's rotation, and queries that grow with each multiple of its original length."""

    def keys_of(self, fields: Fields, name: str, parameters: JsonObject) -> JsonObject:
        scale = parameters.pop("llama_4_scaling_beta", None)
        parameters.pop("max_position_embeddings", None)  # not read by transformers
        keys = super().keys_of(fields, name, parameters)
        length = keys["rope_scaling"].get("original_max_position_embeddings")
        if not is_real(scale) or length is None:
            why = "must be a number beside an original_max_position_embeddings."
            fields.refuse("llama_4_scaling_beta", scale, why)
        elif scale:
            keys["position_temperature"] = {"scale": float(scale), "floor_scale": length}
        return keys

    def write(self, config: ModelConfig) -> JsonObject:
        tuning = config.position_temperature
        return _with_entries(super().write(config), llama_4_scaling_beta=tuning.scale if tuning else 0.0)


class MultipliedRope(RopeFields):
    """Phi-3.5-MoE's rotation: longrope with a multiplier of cosines and sines for short and for long documents.

    transformers uses the short factors at every length, and so does this.
    """

    def keys_of(self, fields: Fields, name: str, parameters: JsonObject) -> JsonObject:
        parameters.pop("long_factor", None)
        short = parameters.pop("short_mscale", None)
        long = parameters.pop("long_mscale", None)
        keys = super().keys_of(fields, name, parameters)
        scaling = keys["rope_scaling"]
        if not scaling:
            return keys
        if scaling["rope_type"] != "longrope":
            fields.refuse("rope_scaling", scaling["rope_type"], "cannot be expressed: it must be longrope.")
        elif not is_real(short) or not short or short != long:
            why = "cannot be expressed: it must be a number above 0, and both the same."
            fields.refuse("short_mscale and long_mscale", [short, long], why)
        else:
            scaling |= {"long_factor": scaling.get("short_factor"), "attention_factor": float(short)}
        return keys

    def write(self, config: ModelConfig) -> JsonObject:
        fields = super().write(config)
        if config.rope_scaling is None:
            return fields
        factor = config.rope_scaling.attention_factor
        return _with_entries(fields, short_mscale=factor, long_mscale=factor)


class RotaryDim(RopeFields):
    """MiniMax's rotation: its share of a head is also stated in dims."""

    def read(self, fields: Fields) -> JsonObject:
        keys = super().read(fields)
        width = fields.size("head_dim", 128)
        dims = fields.whole("rotary_dim", width)
        if dims != width:
            if keys["partial_rotary_factor"] not in (1.0, dims / width):
                fields.refuse("rotary_dim", dims, f"contradicts partial_rotary_factor={keys['partial_rotary_factor']}.")
            keys["partial_rotary_factor"] = dims / width
        return keys


class ThetaByLayer(RopeFields):
    """Granite's windows, by default in three of four layers, and the base of each layer's rotation; 0: it has none."""

    _WINDOWS = LayerTypes(window=128, every=4, without=0)

    def read(self, fields: Fields) -> JsonObject:
        keys = super().read(fields) | self._WINDOWS.read(fields)
        name = "layer_rope_theta"
        thetas = fields.listed(name)
        pattern = keys["layer_pattern"].split(",")
        kinds = [pattern[layer % len(pattern)] for layer in range(fields.num_layers)]
        if thetas is None:
            return keys
        if len(thetas) != len(kinds) or not all(map(is_real, thetas)):
            fields.refuse(name, thetas, f"is not a list of numbers, one for each of {len(kinds)} layers.")
            return keys
        bases: dict[str, float] = {}
        for kind, theta in zip(kinds, thetas, strict=True):
            if theta and bases.setdefault(kind, theta) != theta:
                fields.refuse(name, theta, f"cannot be expressed: another {kind} layer has {bases[kind]}.")
        base = bases.get("global", bases.get("local", keys["rope_max_timescale"]))
        local = bases.get("local", base)
        if local != base and keys["rope_scaling"]:
            fields.refuse(name, local, f"cannot be expressed: with a rope_type all must be {base}.")
        fields.names |= {"layer_pattern": name, "rope_max_timescale": name, "rope_local_max_timescale": name}
        unrotated = {"global": "nope", "local": "local_nope"}
        kinds = [kind if theta else unrotated[kind] for kind, theta in zip(kinds, thetas, strict=True)]
        keys |= {"layer_pattern": pattern_of(kinds), "rope_max_timescale": base}
        return keys | {"rope_local_max_timescale": local if local != base else 0.0}

    def write(self, config: ModelConfig) -> JsonObject:
        kinds = config.layer_kinds
        base = config.rope_max_timescale
        bases = {"global": base, "local": config.rope_local_max_timescale or base}
        return super().write(config) | {
            "layer_types": [LOCAL if kind.startswith("local") else GLOBAL for kind in kinds],
            "sliding_window": config.sliding_window_size or self._WINDOWS.window,
            "layer_rope_theta": [bases.get(kind, 0) for kind in kinds],
        }


@dataclass(frozen=True)
class RopeByLayerType(Part):
    """Rotary positions by the kind of layer: local layers have a base of their own and no scaling.

    Attributes:
      theta, local_theta: the default bases.
      has_field: the local base has a field, `rope_local_base_freq`.
      has_old: `rope_theta` and `rope_scaling` are read too.
      usual: `rope_parameters` if a config.json has none.
      heads: each kind of layer has its own share of a head that is rotated, and its own query heads (Laguna).
    """

    theta: float = 1_000_000.0
    local_theta: float = 10_000.0
    has_field: bool = True
    has_old: bool = True
    usual: JsonObject = field(default_factory=JsonObject)
    heads: bool = False

    def read(self, fields: Fields) -> JsonObject:
        new = fields.mapping("rope_parameters") or dict(self.usual)
        old = fields.mapping("rope_scaling") if self.has_old else {}
        parts = {kind: new.pop(kind, {}) for kind in (GLOBAL, LOCAL)}
        for kind, part in parts.items():
            if not isinstance(part, dict):
                new[kind] = part
                parts[kind] = {}
        for name, value in new.items():
            why = f"is not an object of the entries of {GLOBAL} and {LOCAL}."
            fields.refuse("rope_parameters", {name: value}, why)
        if "type" in old and "rope_type" not in old:
            fields.refuse("rope_scaling", old, "says type, which transformers does not read here: say rope_type.")
        whole = parts[GLOBAL] | old
        local = dict(parts[LOCAL])
        if whole.pop("truncate", True) is not True:
            fields.refuse("rope_parameters", {GLOBAL: {"truncate": False}}, "is not read by transformers: remove it.")
        if self.has_old:
            theta = _stated(fields, "rope_parameters", whole, "rope_theta", "rope_theta", self.theta)
        else:
            theta = whole.pop("rope_theta", self.theta)
        if self.has_field:
            base = "rope_local_base_freq"
            local_theta = _stated(fields, "rope_parameters", local, "rope_theta", base, self.local_theta)
        else:
            local_theta = local.pop("rope_theta", self.local_theta)
        shares: list[Any] = []
        if self.heads:
            usual = fields.take("partial_rotary_factor", 1.0)
            shares = [part.pop("partial_rotary_factor", usual) for part in (whole, local)]
        name = "rope_scaling" if old else "rope_parameters"
        fields.names |= {
            "rope_max_timescale": "rope_theta",
            "rope_local_max_timescale": "rope_local_base_freq",
            "rope_scaling": name,
        }
        if read_scaling(fields, "rope_parameters", local, types={}):
            fields.refuse("rope_parameters", local, f"scales the rotation of {LOCAL}; only that of the rest can be.")
        return {
            "rope_max_timescale": theta,
            "rope_local_max_timescale": local_theta if fields.has_local_layers else 0.0,
            "rope_scaling": read_scaling(fields, name, whole, types={}),
            **(_heads_of_kinds(fields, *shares) if self.heads else {}),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        fields = _written(config, {})
        fields.pop("original_max_position_embeddings", None)  # only rope_parameters is read for it
        local = config.rope_local_max_timescale or config.rope_max_timescale
        of_local: JsonObject = {"rope_theta": local, "rope_type": "default"}
        if self.heads:
            return _written_heads(config, fields["rope_parameters"], of_local)
        fields["rope_parameters"] = {GLOBAL: fields["rope_parameters"], LOCAL: of_local}
        if self.has_field:
            fields["rope_local_base_freq"] = local
        if not self.has_old:
            del fields["rope_theta"], fields["rope_scaling"]
        return fields


def _heads_of_kinds(fields: Fields, global_share: float, local_share: float) -> JsonObject:
    """The keys of query heads and of rotated shares, of layers without a window and of the others."""
    name = "num_attention_heads_per_layer"
    usual = fields.size("num_attention_heads", 1)
    heads = fields.listed(name) or [usual] * fields.num_layers
    wide = [each for layer, each in enumerate(heads) if layer in fields.global_layers]
    narrow = [each for layer, each in enumerate(heads) if layer not in fields.global_layers]
    if len(heads) != fields.num_layers or len({*wide}) > 1 or len({*narrow}) > 1:
        why = f"is not a list of a number for each layer, of which those of {GLOBAL} are equal, and all others."
        fields.refuse(name, heads, why)
        return {}
    fields.names |= {"base_num_query_heads": name, "global_attention": name, "partial_rotary_factor": "rope_parameters"}
    if not narrow:
        return {"base_num_query_heads": wide[0] if wide else usual, "partial_rotary_factor": global_share}
    keys: JsonObject = {"base_num_query_heads": narrow[0], "partial_rotary_factor": local_share}
    if wide and (wide[0], global_share) != (narrow[0], local_share):
        keys["global_attention"] = {
            "global_head_dim": fields.size("head_dim", 128),
            "global_num_kv_heads": fields.size("num_key_value_heads", 8),
            "global_num_query_heads": wide[0],
            "global_partial_rotary_factor": global_share,
        }
    return keys


def _written_heads(config: ModelConfig, of_global: JsonObject, of_local: JsonObject) -> JsonObject:
    """The fields that `_heads_of_kinds` reads, with those of the rotation."""
    own = config.global_attention
    heads = config.base_num_query_heads
    share = config.partial_rotary_factor
    wide = heads if own is None else own.global_num_query_heads or heads
    wide_share = share if own is None else own.global_partial_rotary_factor or 1.0
    return {
        "rope_parameters": {
            GLOBAL: of_global | {"partial_rotary_factor": wide_share},
            LOCAL: of_local | {"partial_rotary_factor": share},
        },
        "num_attention_heads_per_layer": [wide if kind == "global" else heads for kind in config.layer_kinds],
    }
