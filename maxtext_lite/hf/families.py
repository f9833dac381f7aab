"""The families of Hugging Face models that can be read and written: families.yml as parts of config.json.

The classes of transformers are no substitute: they accept fields that they do not know, and importing one takes 3.4 s
of CPU (version 5.23; with torch 790 MB on disk), where all families take 0.3 s.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.hf.fields import DEFAULTS, TABLE, Fields, JsonObject, is_whole
from maxtext_lite.hf.layers import (
    ChunkedLayers,
    DensePrefix,
    FirstDense,
    GlobalHeads,
    InterleavedStep,
    LayerInterval,
    LayerTypes,
    MlpTypes,
    SharedKv,
    SparseStep,
    WithoutRotation,
)
from maxtext_lite.hf.parts import (
    BlockBeside,
    ExpertGroups,
    Field,
    Fixed,
    Heads,
    Ignored,
    LatentWidths,
    LearnedPositions,
    OutBias,
    Part,
    PerLayerInputs,
    Scaled,
    SharedSum,
    SharedWidth,
    Switch,
)
from maxtext_lite.hf.rotation import (
    MultipliedRope,
    PositionScaling,
    RopeByLayerType,
    RopeFields,
    RotaryDim,
    ThetaByLayer,
)

PARTS: Mapping[str, Callable[..., Part]] = {
    "keys": Fixed,
    "scaled": Scaled,
    "switch": Switch,
    "heads": Heads,
    "latent_widths": LatentWidths,
    "learned_positions": LearnedPositions,
    "out_bias": OutBias,
    "windows": LayerTypes,
    "global_heads": GlobalHeads,
    "shared_kv": SharedKv,
    "per_layer_inputs": PerLayerInputs,
    "moe_block": BlockBeside,
    "unrotated_layers": WithoutRotation,
    "chunked_layers": ChunkedLayers,
    "expert_groups": ExpertGroups,
    "shared_width": SharedWidth,
    "shared_sum": SharedSum,
    "first_dense": FirstDense,
    "mlp_types": MlpTypes,
    "dense_prefix": DensePrefix,
    "sparse_step": SparseStep,
    "layer_interval": LayerInterval,
    "interleaved_step": InterleavedStep,
    "rope": RopeFields,
    "rope_by_layer_type": RopeByLayerType,
    "position_scaling": PositionScaling,
    "multiplied_rope": MultipliedRope,
    "rotary_dim": RotaryDim,
    "theta_by_layer": ThetaByLayer,
}
"""The rows of families.yml that are about several fields, by their names there."""

_ROWS = ("sizes", "range", "epsilon", "tied", "heads", "activation", "fields", "rope")


@dataclass(frozen=True)
class Family:
    """A model_type.

    Attributes:
      architecture: its class in transformers.
      parts: the fields of config.json and their meaning; a later part wins.
    """

    architecture: str
    parts: tuple[Part, ...]

    def read(self, fields: Fields) -> JsonObject:
        """Every key; those that no field decides have their DEFAULTS."""
        keys = dict(DEFAULTS)
        for part in self.parts:
            keys |= part.read(fields)
        first, layers = keys["first_num_dense_layers"], fields.num_layers
        if keys["global_attention"] and is_whole(first, 1, layers - 1):  # then a pattern says which layers are dense
            kinds = ["dense"] * first + ["moe"] * (layers - first)
            keys |= {"first_num_dense_layers": 0, "mlp_pattern": ",".join(kinds)}
        # With is_causal=false, transformers lets each token of any model see the later ones too.
        Field("is_causal", default=True, values={True: True}).read(fields)
        return keys

    def write(self, config: ModelConfig) -> JsonObject:
        """The fields that state the keys."""
        fields: JsonObject = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields


def entries(rows: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping of families.yml, or of all in a list that may hold lists."""
    if isinstance(rows, Mapping):
        yield from rows.items()
    else:
        for row in rows:
            yield from entries(row)


def _part(name: str, row: JsonObject | None) -> Part:
    if row is None:
        return Ignored(name)
    if name in PARTS:
        return PARTS[name](**row)
    if "only" in row:
        value = row["only"]
        return Field(name, key=row.get("key", ""), default=value, values={value: value})
    return Field(name, **row)


def _family(stated: JsonObject) -> Family:
    whole = TABLE["usual"] | stated
    rows = [whole[name] for name in _ROWS]
    return Family(whole["class"], tuple(_part(name, row) for name, row in entries(rows)))


FAMILIES: Mapping[str, Family] = {kind: _family(stated) for kind, stated in TABLE["families"].items()}
"""What can be read and written, by model_type. Where two would do for a model, the first is written."""
