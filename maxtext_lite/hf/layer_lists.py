"""The parts of config.json about which layers have experts, and which attend within chunks."""

from collections.abc import Sequence
from types import MappingProxyType

from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.hf.fields import Fields, JsonObject, Keys, is_whole
from maxtext_lite.hf.parts import Part
from maxtext_lite.hf.positions import CHUNKED, GLOBAL, layer_kinds, pattern_of, rotated_layers


def layers_with_experts(config: ModelConfig) -> list[bool]:
    """Whether each layer has experts."""
    kinds, first = config.mlp_kinds, config.first_num_dense_layers
    if config.num_experts == 1:
        first = config.base_num_decoder_layers
    layers = range(config.base_num_decoder_layers)
    return [layer >= first and kinds[layer % len(kinds)] == "moe" for layer in layers]


def _keys(has_experts: Sequence[bool], fields: Fields, name: str) -> Keys:
    """The keys for these layers: the number of dense layers before all others, maybe none, or a pattern.

    Args:
      name: the field that decides.
    """
    fields.names |= {"first_num_dense_layers": name, "mlp_pattern": name}
    first = next((layer for layer, has in enumerate(has_experts) if has), len(has_experts))
    if all(has_experts[first:]):
        return {"first_num_dense_layers": first, "mlp_pattern": "moe"}
    kinds = ["moe" if has else "dense" for has in has_experts]
    return {"first_num_dense_layers": 0, "mlp_pattern": pattern_of(kinds)}


def _numbers(name: str, fields: Fields) -> list[int] | None:
    """A field's value, a list of layers' numbers; None if it is missing."""
    stated = fields.listed(name)
    wrong = [each for each in stated or () if isinstance(each, bool) or not isinstance(each, int)]
    if wrong:
        fields.refuse(name, wrong[0], "is not the number of a layer.")
        return None
    return stated


class FirstDense(Part):
    """DeepSeek's: the layers from `first_k_dense_replace` on have experts."""

    keys = MappingProxyType({"first_k_dense_replace": "first_num_dense_layers"})

    def __init__(self, default: int) -> None:
        self._default = default

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        self._note_names(fields)
        return {"first_num_dense_layers": fields.take("first_k_dense_replace", self._default)}

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        return {"first_k_dense_replace": (*layers_with_experts(config), True).index(True)}


class SparseStep(Part):
    """Qwen's: every `decoder_sparse_step`th layer has experts, except `mlp_only_layers`."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        step, dense = fields.whole("decoder_sparse_step", 1), _numbers("mlp_only_layers", fields) or []
        has = [layer not in dense and (layer + 1) % step == 0 for layer in range(fields.num_layers)]
        return _keys(has, fields, "mlp_only_layers" if dense else "decoder_sparse_step")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        dense = [layer for layer, has in enumerate(layers_with_experts(config)) if not has]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class LayerInterval(Part):
    """Ernie's: of the layers from `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`th."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers, every = fields.num_layers, fields.whole("moe_layer_interval", 1)
        start, end = (
            fields.whole("moe_layer_start_index", 1, least=0),
            fields.whole("moe_layer_end_index", -1, least=-1),
        )
        end = layers - 1 if end == -1 else end
        has = [start <= layer <= end and (layer + 1) % every == 0 for layer in range(layers)]
        return _keys(has, fields, "moe_layer_start_index" if start or every == 1 else "moe_layer_interval")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        has = layers_with_experts(config)
        numbers = [layer for layer, each in enumerate(has) if each] or [len(has)]
        start, end = numbers[0], numbers[-1]
        fitting = [
            every
            for every in range(1, len(has) + 1)
            if numbers == [layer for layer in range(start, end + 1) if (layer + 1) % every == 0]
        ]
        every = fitting[0] if fitting else 1  # a round trip then fails, and the family is not written
        return {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": every}


class InterleavedStep(Part):
    """Llama 4's: `moe_layers`, or every `interleave_moe_layer_step`th layer."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        step, stated = fields.whole("interleave_moe_layer_step", 1), _numbers("moe_layers", fields)
        layers = range(fields.num_layers)
        has = [(layer + 1) % step == 0 if stated is None else layer in stated for layer in layers]
        return _keys(has, fields, "interleave_moe_layer_step" if stated is None else "moe_layers")

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        numbers = [layer for layer, has in enumerate(layers_with_experts(config)) if has]
        return {"interleave_moe_layer_step": 1, "moe_layers": numbers}


class ChunkedLayers(Part):
    """Llama 4's layers: rotated ones attend within chunks. Every fourth, or those with a 0 in `no_rope_layers`, is not
    rotated and attends to everything, with queries that may grow with their positions."""

    def read(self, fields: Fields) -> Keys:
        """See Part."""
        layers, rotated = fields.num_layers, rotated_layers(fields, fields.listed("no_rope_layers") or None)
        types = fields.listed("layer_types")
        if types is not None:
            fields.check_layer_types(types, layers, 1, (CHUNKED, GLOBAL))
        types = types if types and len(types) == layers else [CHUNKED if turned else GLOBAL for turned in rotated]
        kinds = [kind if turned else "nope" for kind, turned in zip(types, rotated, strict=True)]
        odd = [layer for layer in range(layers) if types[layer] == CHUNKED and not rotated[layer]]
        if odd:
            fields.refuse(
                "no_rope_layers", rotated, f"cannot be expressed: layer {odd[0]} has chunks, but no rotation."
            )
        fields.names |= {"layer_pattern": "layer_types", "chunk_attn_window_size": "attention_chunk_size"}
        fields.names["position_temperature"] = "attn_scale"
        chunk = fields.whole("attention_chunk_size", None if fields.is_null("attention_chunk_size") else 8192)
        tuning = {"scale": fields.take("attn_scale", 0.1), "floor_scale": fields.whole("floor_scale", 8192)}
        tuning |= {"offset": 1, "layers": "nope"}
        is_tuned = bool(fields.whole("attn_temperature_tuning", least=0) if is_whole(
            fields.peek("attn_temperature_tuning", True), 0
        ) else fields.flag("attn_temperature_tuning", True))  # fmt: skip
        return {
            "layer_pattern": pattern_of(kinds),
            "chunk_attn_window_size": chunk if CHUNKED in kinds else 0,
            "position_temperature": tuning if is_tuned and "nope" in kinds else {},
        }

    def write(self, config: ModelConfig) -> JsonObject:
        """See Part."""
        kinds, tuning = layer_kinds(config), config.position_temperature
        tuned = {} if tuning is None else {"attn_scale": tuning.scale, "floor_scale": tuning.floor_scale}
        return {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": [GLOBAL if kind == "nope" else kind for kind in kinds],
            "attention_chunk_size": config.chunk_attn_window_size or 8192,
            "attn_temperature_tuning": tuning is not None,
        } | tuned
