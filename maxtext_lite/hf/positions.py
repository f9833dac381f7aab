"""The parts of config.json about positions: rotation and its scaling, sliding windows, layers without rotation."""

from collections.abc import Sequence
from typing import Any, Literal

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.model_parts import ROPE_ENTRIES
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, Keys, is_whole
from maxtext_lite.hf.parts import Part


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
