"""Which layers of a model have windows, chunks, rotation or experts, by the fields of its config.json."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from maxtext_lite.config.errors import any_of
from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, is_whole
from maxtext_lite.hf.parts import Part

LOCAL = "sliding_attention"
GLOBAL = "full_attention"
CHUNKED = "chunked_attention"
_KINDS = {LOCAL: "local", GLOBAL: "global", CHUNKED: "chunked"}


def pattern_of(kinds: Sequence[str]) -> str:
    """The shortest pattern whose repetition gives the layers' kinds."""
    for length in range(1, len(kinds)):
        if kinds[length:] == kinds[:-length]:
            kinds = kinds[:length]
            break
    return ",".join(_KINDS.get(kind, kind) for kind in kinds) or "global"


def layer_kinds(config: ModelConfig) -> list[str]:
    """Each layer's kind in the words of config.json; one without a word there is as in the config."""
    words = {kind: word for word, kind in _KINDS.items()}
    return [words.get(kind, kind) for kind in config.layer_kinds]


def _stated_kinds(fields: Fields, name: str, *known: str) -> list[str] | None:
    """A list with the kind of each layer; None if it is missing or wrong."""
    kinds = fields.listed(name)
    if kinds is None:
        return None
    layers = fields.num_layers
    if layers and len(kinds) != layers:
        fields.refuse(name, len(kinds), f"kinds do not name the {layers} layers.")
    odd = [kind for kind in kinds if kind not in known]
    if odd:
        fields.refuse(name, odd[0], f"cannot be expressed: a layer is {any_of(known)}.")
    return None if odd or len(kinds) != layers else kinds


def _layer_types(fields: Fields, window: int) -> list[str] | None:
    """`layer_types` of a model with sliding windows; None if it is missing or wrong."""
    kinds = _stated_kinds(fields, "layer_types", LOCAL, GLOBAL)
    if kinds and LOCAL in kinds and not window:
        fields.refuse("layer_types", LOCAL, "needs a sliding_window that is switched on.")
    return kinds


def _rotated_layers(fields: Fields, stated: list[Any] | None) -> list[int]:
    """1 for each layer that is rotated, otherwise 0: as `no_rope_layers` states, or all but every fourth."""
    layers = fields.num_layers
    every = fields.whole("no_rope_layer_interval", 4)
    if stated is not None and layers:
        if len(stated) == layers and all(is_whole(each, 0, 1) for each in stated):
            return stated
        fields.refuse("no_rope_layers", stated, f"is not a list of 1 or 0 for each of the {layers} layers.")
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def _window(fields: Fields, usual: int, *, switched: bool, is_used: bool = True) -> int:
    """The width of a model's sliding windows; 0: none, by a null in config.json or by its switch.

    Args:
      usual: if `sliding_window` is missing.
      switched: the family has the switch, `use_sliding_window`, which is off if it is missing.
      is_used: layers have a window unless something else is stated.
    """
    fields.names["sliding_window_size"] = "sliding_window"
    is_on = not switched or fields.flag("use_sliding_window", False)
    stated = fields.peek("sliding_window")
    if stated is None:
        return usual if is_on and not fields.is_null("sliding_window") else 0
    width = fields.whole("sliding_window", least=0)
    if is_on and is_used and is_whole(stated, 0, 0):
        fields.refuse("sliding_window", 0, "lets no token see even itself. Nearest that works: null, for no window.")
    return width if is_on else 0


@dataclass(frozen=True)
class LayerTypes(Part):
    """Which layers have a sliding window.

    Attributes:
      window: the default of `sliding_window`; 0: none.
      switched: no layer has one unless `use_sliding_window` is true.
      listed: `layer_types` may name each layer's kind.
      every: all but one of `every` layers have a window; 0: all.
      without: which of them has none, from 0; -1: the last.
      ends: the first and the last layer have none either.
      has_pattern: `pattern_field` states `every`.
      since: the default of `max_window_layers`: the layers from it on have a window, or with `every` those before it.
      ends_global: the last layer has no window, whatever `layer_types` says.
      rotated: layers without a window are rotated always, never, or alone: only in a model without any window. With
        never, a model must have one.
    """

    window: int
    _: KW_ONLY
    switched: bool = False
    listed: bool = True
    every: int = 0
    without: int = -1
    ends: bool = False
    has_pattern: bool = False
    pattern_field: str = "sliding_window_pattern"
    since: int | None = None
    ends_global: bool = False
    rotated: Literal["always", "alone", "never"] = "always"

    def read(self, fields: Fields) -> JsonObject:
        fields.names["layer_pattern"] = "layer_types"
        window = _window(fields, self.window, switched=self.switched, is_used=self.every != 1)
        if self.rotated == "never" and fields.is_null("sliding_window"):
            fields.refuse("sliding_window", None, "is a model that transformers does not run. State a window.")
        kinds = _layer_types(fields, window) if self.listed else None
        usual = self._usual_kinds(fields, window, is_stated=fields.peek("layer_types") is not None)
        if kinds is None:
            kinds = usual
        if self.ends_global:
            kinds = [*kinds[:-1], GLOBAL]
        fields.has_local_layers = LOCAL in kinds
        fields.global_layers = [layer for layer, kind in enumerate(kinds) if kind == GLOBAL]
        if window and self.rotated != "always":
            kinds = ["nope" if kind == GLOBAL else kind for kind in kinds]
        return {"layer_pattern": pattern_of(kinds), "sliding_window_size": window if fields.has_local_layers else 0}

    def _usual_kinds(self, fields: Fields, window: int, *, is_stated: bool) -> list[str]:
        """The kinds of the layers without `layer_types`."""
        layers = range(fields.num_layers)
        every = self.every
        if self.has_pattern and (is_stated or not window):
            fields.drop([self.pattern_field])  # not read then
        elif self.has_pattern:
            every = fields.whole(self.pattern_field, every)
        first = 0 if self.since is None else fields.whole("max_window_layers", self.since, least=0)
        if not window:
            return [GLOBAL for _ in layers]
        if not every:
            return [LOCAL if layer >= first else GLOBAL for layer in layers]
        last = len(layers) if self.since is None else first
        kinds = [LOCAL if (layer - self.without) % every and layer < last else GLOBAL for layer in layers]
        if self.ends and kinds:
            kinds[0] = kinds[-1] = GLOBAL
        return kinds

    def write(self, config: ModelConfig) -> JsonObject:
        kinds = layer_kinds(config)
        window = config.sliding_window_size
        fields: JsonObject = {"sliding_window": window or None}
        if self.switched:
            fields["use_sliding_window"] = window > 0
        if self.since is not None:
            fields["max_window_layers"] = kinds.index(LOCAL) if LOCAL in kinds else len(kinds)
        if self.rotated != "always":
            if not window and GLOBAL not in kinds:  # layers without a window are not rotated in a model that states one
                fields["sliding_window"] = self.window
            kinds = [GLOBAL if kind == "nope" else kind for kind in kinds]
        elif not window and self.listed and not self.switched and self.since is None:
            fields["sliding_window"] = self.window or None  # transformers needs one, even where no layer has it
        if self.listed:
            fields["layer_types"] = kinds
        return fields


class GlobalHeads(Part):
    """Gemma 4's heads of layers without a window, as fields or for each layer. It comes after `windows`."""

    def read(self, fields: Fields) -> JsonObject:
        usual = {"head_dim": fields.size("head_dim", 256), "num_key_value_heads": fields.size("num_key_value_heads", 4)}
        shares = fields.flag("attention_k_eq_v", False)
        own = usual | {"head_dim": fields.whole("global_head_dim", 512)}
        kv_heads = fields.whole("num_global_key_value_heads", own["num_key_value_heads"])
        if shares:
            own["num_key_value_heads"] = kv_heads
        is_stated = fields.peek("per_layer_config") is not None
        stated = fields.mapping("per_layer_config")
        if is_stated:
            layers = fields.global_layers
            given = {name.lstrip("0") or "0": each for name, each in stated.items() if isinstance(each, dict)}
            own = usual | given.get(str(layers[-1]), {}) if layers else usual
            due = {str(layer): own for layer in layers if own != usual}
            wide = {name: usual | each for name, each in given.items() if usual | each != usual}
            if wide != due or own.keys() != usual.keys() or len(given) != len(stated):
                why = "cannot be expressed: all layers without a window have the same heads, and all others the usual."
                fields.refuse("per_layer_config", stated, why)
        fields.names["global_attention"] = "per_layer_config" if is_stated else "global_head_dim"
        if own == usual and not shares:
            return {"global_attention": {}}
        heads = {"global_head_dim": own["head_dim"], "global_num_kv_heads": own["num_key_value_heads"]}
        return {"global_attention": {**heads, "share_kv_projections": shares}}

    def write(self, config: ModelConfig) -> JsonObject:
        own = config.global_attention
        if own is None:
            return {"global_head_dim": config.head_dim, "attention_k_eq_v": False}
        heads = {"head_dim": own.global_head_dim, "num_key_value_heads": own.global_num_kv_heads}
        layers = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "global"]
        return {
            "global_head_dim": own.global_head_dim,
            "num_global_key_value_heads": own.global_num_kv_heads,
            "attention_k_eq_v": own.share_kv_projections,
            "per_layer_config": {str(layer): heads for layer in layers},
        }


class SharedKv(Part):
    """Gemma 4's last layers, which attend to the keys and values of earlier ones. It comes after `windows`."""

    def read(self, fields: Fields) -> JsonObject:
        fields.names["shared_kv"] = name = "num_kv_shared_layers"
        shared = fields.whole(name, 0, least=0)
        wide = fields.flag("use_double_wide_mlp", False)
        is_global = [layer in fields.global_layers for layer in range(fields.num_layers)]
        if {*is_global} != {*is_global[: max(len(is_global) - shared, 0)]}:
            fields.refuse(name, shared, "leaves a kind of layer_types without a layer that has keys.")
        return {"shared_kv": {name: shared, "use_double_wide_mlp": wide} if shared else {}}

    def write(self, config: ModelConfig) -> JsonObject:
        shared = config.shared_kv
        if shared is None:
            return {"num_kv_shared_layers": 0}
        return shared.to_mapping()


class WithoutRotation(Part):
    """SmolLM3's layers that are not rotated: every fourth, or those with a 0 in `no_rope_layers`.

    With `use_sliding_window` these have a window, or else the layers that `layer_types` names.
    """

    def read(self, fields: Fields) -> JsonObject:
        fields.names["layer_pattern"] = "no_rope_layers"
        fields.drop(["max_window_layers"])
        rotated = _rotated_layers(fields, fields.listed("no_rope_layers"))
        window = _window(fields, 0, switched=True)
        # transformers masks by layer_types even without the switch, which its fused kernels go by.
        types = _layer_types(fields, window)
        if types is None:
            types = [LOCAL if window and not turned else GLOBAL for turned in rotated]
        kinds: list[str] = []
        for type_, turned in zip(types, rotated, strict=True):
            if window and type_ == LOCAL:
                kinds.append("local" if turned else "local_nope")
            else:
                kinds.append("global" if turned else "nope")
        fields.has_local_layers = any(kind.startswith("local") for kind in kinds)
        return {"layer_pattern": pattern_of(kinds), "sliding_window_size": window if fields.has_local_layers else 0}

    def write(self, config: ModelConfig) -> JsonObject:
        kinds = config.layer_kinds
        window = config.sliding_window_size
        return {
            "no_rope_layers": [int(not kind.endswith("nope")) for kind in kinds],
            "layer_types": [LOCAL if kind.startswith("local") else GLOBAL for kind in kinds],
            "sliding_window": window or None,
            "use_sliding_window": window > 0,
        }


class ChunkedLayers(Part):
    """Llama 4's layers. Rotated ones attend within chunks. Every fourth, or those with a 0 in `no_rope_layers`, is not
    rotated and attends to everything, with queries that may grow with their positions."""

    def read(self, fields: Fields) -> JsonObject:
        fields.names |= {"layer_pattern": "layer_types", "position_temperature": "attn_scale"}
        rotated = _rotated_layers(fields, fields.listed("no_rope_layers") or None)
        types = _stated_kinds(fields, "layer_types", CHUNKED, GLOBAL)
        if types is None:
            types = [CHUNKED if turned else GLOBAL for turned in rotated]
        kinds: list[str] = []
        for layer, (type_, turned) in enumerate(zip(types, rotated, strict=True)):
            if type_ == CHUNKED and not turned:
                why = f"cannot be expressed: layer {layer} has chunks, but no rotation."
                fields.refuse("no_rope_layers", rotated, why)
            kinds.append(type_ if turned else "nope")
        usual = None if fields.is_null("attention_chunk_size") else 8192
        chunk = fields.whole("attention_chunk_size", usual, key="chunk_attn_window_size")
        scale = fields.take("attn_scale", 0.1)
        floor_scale = fields.whole("floor_scale", 8192)
        tuning = fields.take("attn_temperature_tuning", True)
        if not isinstance(tuning, bool) and not is_whole(tuning, 0):
            fields.refuse("attn_temperature_tuning", tuning, "is not true or false.")
        temperature = {"scale": scale, "floor_scale": floor_scale, "offset": 1, "layers": "nope"}
        return {
            "layer_pattern": pattern_of(kinds),
            "chunk_attn_window_size": chunk if CHUNKED in kinds else 0,
            "position_temperature": temperature if tuning and "nope" in kinds else {},
        }

    def write(self, config: ModelConfig) -> JsonObject:
        kinds = layer_kinds(config)
        tuning = config.position_temperature
        fields: JsonObject = {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": [GLOBAL if kind == "nope" else kind for kind in kinds],
            "attention_chunk_size": config.chunk_attn_window_size or 8192,
            "attn_temperature_tuning": tuning is not None,
        }
        if tuning is not None:
            fields |= {"attn_scale": tuning.scale, "floor_scale": tuning.floor_scale}
        return fields


# ---- Experts --------------------------------------------------------------------------------------------------------


def _layers_with_experts(config: ModelConfig) -> list[int]:
    """The numbers of the layers that have experts."""
    if config.num_experts == 1:
        return []
    kinds = config.mlp_kinds
    layers = range(config.first_num_dense_layers, config.base_num_decoder_layers)
    return [layer for layer in layers if kinds[layer % len(kinds)] == "moe"]


def _expert_keys(fields: Fields, has_experts: Sequence[bool], name: str) -> JsonObject:
    """The keys for these layers: the number of dense layers before all others, maybe none, or a pattern.

    Args:
      name: the field that decides.
    """
    fields.names |= {"first_num_dense_layers": name, "mlp_pattern": name}
    first = next((layer for layer, has in enumerate(has_experts) if has), len(has_experts))
    if all(has_experts[first:]):
        return {"first_num_dense_layers": first, "mlp_pattern": "moe"}
    return {"mlp_pattern": pattern_of(["moe" if has else "dense" for has in has_experts])}


def _numbers(fields: Fields, name: str) -> list[int] | None:
    """A field's value, a list of layers' numbers; None if it is missing or wrong."""
    stated = fields.listed(name)
    for each in stated or ():
        if not is_whole(each, -1):
            fields.refuse(name, each, "is not the number of a layer.")
            return None
    return stated


@dataclass(frozen=True)
class FirstDense(Part):
    """DeepSeek's: the layers from the one that the field states on have experts."""

    default: int
    name: str = "first_k_dense_replace"

    def read(self, fields: Fields) -> JsonObject:
        first = fields.take(self.name, self.default, key="first_num_dense_layers")
        return {"first_num_dense_layers": first}

    def write(self, config: ModelConfig) -> JsonObject:
        return {self.name: (*_layers_with_experts(config), config.base_num_decoder_layers)[0]}


@dataclass(frozen=True)
class MlpTypes(Part):
    """`mlp_layer_types`: which layers are dense, and which have experts.

    Attributes:
      first_dense: how many layers before all others are dense without it.
      field: states another number of them.
    """

    first_dense: int = 0
    field: str = ""

    def read(self, fields: Fields) -> JsonObject:
        first = fields.whole(self.field, self.first_dense, least=0) if self.field else self.first_dense
        kinds = _stated_kinds(fields, "mlp_layer_types", "dense", "sparse")
        if kinds is None:
            return _expert_keys(fields, [layer >= first for layer in range(fields.num_layers)], self.field)
        return _expert_keys(fields, [kind == "sparse" for kind in kinds], "mlp_layer_types")

    def write(self, config: ModelConfig) -> JsonObject:
        sparse = _layers_with_experts(config)
        layers = range(config.base_num_decoder_layers)
        return {"mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in layers]}


class DensePrefix(Part):
    """Command's first layers, `first_k_dense_replace`, are dense and have a pattern of windows of their own.

    If that has no windows, dense layers are rotated even without one, as only layers with a window are otherwise.
    """

    def read(self, fields: Fields) -> JsonObject:
        fields.names["layer_pattern"] = "layer_types"
        window = _window(fields, 4096, switched=False)
        first = fields.whole("first_k_dense_replace", 0, least=0)
        ahead = fields.whole("prefix_dense_sliding_window_pattern", 1)
        every = fields.whole("sliding_window_pattern", 4)
        layers = range(fields.num_layers)
        mlps = _stated_kinds(fields, "mlp_layer_types", "dense", "sparse")
        if mlps is None:
            mlps = ["dense" if layer < first else "sparse" for layer in layers]
        types = _layer_types(fields, window)
        if types is None:
            is_local = [(layer + 1) % ahead if layer < first else (layer - first + 1) % every for layer in layers]
            types = [LOCAL if each else GLOBAL for each in is_local]
        fields.has_local_layers = LOCAL in types
        unwindowed = {"dense": "global" if ahead == 1 else "nope", "sparse": "nope"}
        kinds = ["local" if type_ == LOCAL else unwindowed[mlp] for type_, mlp in zip(types, mlps, strict=True)]
        return {
            "layer_pattern": pattern_of(kinds),
            "sliding_window_size": window if fields.has_local_layers else 0,
            **_expert_keys(fields, [mlp == "sparse" for mlp in mlps], "mlp_layer_types"),
        }

    def write(self, config: ModelConfig) -> JsonObject:
        kinds = config.layer_kinds
        return MlpTypes().write(config) | {
            "layer_types": [LOCAL if kind == "local" else GLOBAL for kind in kinds],
            "prefix_dense_sliding_window_pattern": 1 if "global" in kinds else 2,
            "sliding_window": config.sliding_window_size or 4096,
        }


@dataclass(frozen=True)
class SparseStep(Part):
    """Qwen's: every `decoder_sparse_step`th layer has experts, except `mlp_only_layers`.

    Attributes:
      dense: the default of `mlp_only_layers`.
    """

    dense: Sequence[int] = ()

    def read(self, fields: Fields) -> JsonObject:
        step = fields.whole("decoder_sparse_step", 1)
        stated = _numbers(fields, "mlp_only_layers")
        dense = self.dense if stated is None else stated
        has = [layer not in dense and (layer + 1) % step == 0 for layer in range(fields.num_layers)]
        return _expert_keys(fields, has, "mlp_only_layers" if dense else "decoder_sparse_step")

    def write(self, config: ModelConfig) -> JsonObject:
        sparse = _layers_with_experts(config)
        dense = [layer for layer in range(config.base_num_decoder_layers) if layer not in sparse]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class LayerInterval(Part):
    """Ernie's: of the layers from `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`th."""

    def read(self, fields: Fields) -> JsonObject:
        layers = fields.num_layers
        every = fields.whole("moe_layer_interval", 1)
        start = fields.whole("moe_layer_start_index", 1, least=0)
        end = fields.whole("moe_layer_end_index", -1, least=-1)
        if end == -1:
            end = layers
        has = [start <= layer <= end and (layer + 1) % every == 0 for layer in range(layers)]
        return _expert_keys(fields, has, "moe_layer_start_index" if start or every == 1 else "moe_layer_interval")

    def write(self, config: ModelConfig) -> JsonObject:
        layers = _layers_with_experts(config) or [config.base_num_decoder_layers]
        # Where the layers are not every nth, a round trip fails, and the family is not written.
        every = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
        return {"moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1], "moe_layer_interval": every}


class InterleavedStep(Part):
    """Llama 4's: `moe_layers`, or every `interleave_moe_layer_step`th layer."""

    def read(self, fields: Fields) -> JsonObject:
        step = fields.whole("interleave_moe_layer_step", 1)
        stated = _numbers(fields, "moe_layers")
        layers = range(fields.num_layers)
        if stated is None:
            return _expert_keys(fields, [(layer + 1) % step == 0 for layer in layers], "interleave_moe_layer_step")
        return _expert_keys(fields, [layer in stated for layer in layers], "moe_layers")

    def write(self, config: ModelConfig) -> JsonObject:
        return {"interleave_moe_layer_step": 1, "moe_layers": _layers_with_experts(config)}
