"""Every weight of a model, declared once: its path, dims, logical axes and initial values. Imports no jax.

The plan counts elements and shards from these tables, `models` makes its parameters from them, and `hf` adds the tensor
names of each family.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from maxtext_lite.config.keys import (
    GlobalAttention,
    Mla,
    MlpKind,
    ModelConfig,
    Normalization,
    NormPlacement,
    OutputGate,
    QueryKeyNorm,
    SharedKv,
    listed,
    mixer_of,
)
from maxtext_lite.config.registry import load

MESH_AXES_OF_WEIGHTS: dict[str, tuple[str, ...]] = {
    "repeats": (),
    "layers": ("stage",),
    "dense_layers": (),
    "mtp_layers": (),
    "latent": (),
    "lora_rank": (),
    "positions": (),
    "embed": ("expert", "context", "fsdp"),  # every axis that splits tokens, except data
    "expert_embed": ("context", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
    "experts": ("expert",),
    "router": (),
    "router_bias": (),
}
"""The sharding rules of parameters: the mesh axes over which each logical axis is split."""


MTP_LAYERS = "mtp_layers"
"""The stack of the layers of multi-token prediction."""


def num_parts(axis: str, mesh: Mapping[str, int]) -> int:
    """The number of parts into which a mesh splits a logical axis.

    Args:
      mesh: size of each mesh axis; 1 where it is not named.
    """
    return math.prod(mesh.get(mesh_axis, 1) for mesh_axis in MESH_AXES_OF_WEIGHTS[axis])


def unstacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's parameter, from a stack's; other axes unchanged."""
    return tuple(axis for axis in axes if axis not in ("repeats", "layers", "dense_layers", MTP_LAYERS))


def per_tensor_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's and one expert's tensor, from a stack's, whose dims come first."""
    return tuple(axis for axis in unstacked(axes) if axis != "experts")


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix that multiplies vectors: not a norm, a bias or a lookup table."""
    axes = unstacked(axes)
    contracted = {"embed", "expert_embed", "latent", "lora_rank"}
    return not contracted.isdisjoint(axes) and len(axes) > 1 and axes[0] not in ("vocab", "positions")


def num_inputs(axes: tuple[str, ...]) -> int:
    """How many of a matrix's first dims a matmul sums over; the result has the other dims.

    Args:
      axes: of one layer's matrix, or of one expert's.
    """
    # Other matrices have one output dim.
    return 1 if axes[0] in ("embed", "expert_embed", "latent", "lora_rank") else len(axes) - 1


def halves(axes: tuple[str, ...], dims: tuple[Any, ...], between: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """An entry for each dim of a weight, rearranged for LoRA's a [..., *in, r] and b [..., r, *out]."""
    matrix = per_tensor_axes(axes)
    first = len(axes) - len(matrix)
    cut = first + num_inputs(matrix)
    return (*dims[:cut], between), (*dims[:first], between, *dims[cut:])


Start = Literal["normal", "ones", "zeros"]
"""The initial values of a parameter."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter, of the model or of one of its layers.

    Attributes:
      dims: letters of ModelShape.sizes.
      sizes: their lengths.
      axes: their logical axes.
      start: the initial values; matrices and tables are normal, and all others are norms, biases and sinks.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    start: Start

    @property
    def is_normal(self) -> bool:
        """Whether it is a matrix or a table."""
        return self.start == "normal"

    def adapters(self, rank: int) -> "tuple[Weight, Weight]":
        """LoRA's matrices for it, [.., in, rank] and [.., rank, out], sharded like it."""
        a_dims, b_dims = halves(self.axes, self.dims, "r")
        a_sizes, b_sizes = halves(self.axes, self.sizes, rank)
        a_axes, b_axes = halves(self.axes, self.axes, "lora_rank")
        return Weight(a_dims, a_sizes, a_axes, "normal"), Weight(b_dims, b_sizes, b_axes, "zeros")


WeightTable = dict[str, Weight]
"""Weights by path, in the order that samples their normal values."""


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes and options of a layer's experts that determine their weights.

    Attributes:
      num_experts: routed experts, E.
      num_per_token: experts of a token, J.
      mlp_dim: width of one expert.
      biased: a bias for each expert is added to the scores, for the choice of experts only.
      keeps_load: each expert's share of the previous step's choices, times E and less 1, is kept for the balance loss.
      with_bias: the experts' projections have biases.
      shared_dim: width of the shared expert, which every token passes through; 0: there is none.
      own_norms: norms of their own before and after experts and after the shared expert, a scale of the router's normed
        input, and a factor of each expert.
      shared_gate: the shared expert's output is multiplied by the sigmoid of the token's product with a weight.
    """

    num_experts: int
    num_per_token: int
    mlp_dim: int
    biased: bool = False
    keeps_load: bool = False
    with_bias: bool = False
    shared_dim: int = 0
    shared_gate: bool = False
    own_norms: bool = False


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes and options of a model that determine its weights; the defaults are Llama's.

    Attributes:
      norm: RMSNorm or LayerNorm; times scale or 1 + scale, with or without a bias, or without weights.
      norm_placement: norms before each block, after it, or both; each: also of the parts of experts.
      parallel_block: the mlp has the same input as attention, with the same norm or its own.
      xielu: the mlp's activation has two learned numbers.
      gated: the mlp multiplies the activated projection by a second one.
      attention_bias: which of attention's projections have a bias.
      qk_norm: norm of queries and keys: of each head, before or after rotation, or of all heads together; after
        rotation also without weights; head_and_values: values too, without a scale.
      sinks: each query head has a learned score, which takes part in the softmax but has no value.
      output_gate: the context of attention is multiplied by a function of a projection of the layer's input.
      latent: widths of latent attention; None: ordinary attention.
      global_attention: heads of layers without a window; None: those of the others.
      values_are_keys: the keys' projection is also the values'.
      shared_kv: how many of the last layers have no keys and values; None: all layers have them.
      shares_kv: the layers have no keys and values.
      per_layer_input_dim: width of a token's own input to each layer; 0: there is none.
      layer_scalar: the stream after each layer is multiplied by a learned number.
      num_positions: rows of the table of learned positions; 0: rotary positions.
      rotary_dim: rotated dims of a head; None: all.
      tied: the output projection is the embedding table.
      logits_bias: a bias is added to the logits.
      experts: in place of each layer's mlp; None: an mlp.
      num_dense_layers: first layers that have an mlp nevertheless.
      mlp_kinds: which of the first layers have experts, repeated by the layers after them; all of them, where
        num_dense_layers is not 0.
      pattern: kinds of the first layers, repeated by the layers after them.
      mtp_num_layers: layers of multi-token prediction, which are like the last layer.
    """

    vocab_size: int
    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    norm: Normalization = "rms_norm"
    norm_placement: NormPlacement = "pre"
    parallel_block: Literal["none", "one_norm", "two_norms"] = "none"
    gated: bool = True
    xielu: bool = False
    mlp_bias: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: QueryKeyNorm = "none"
    sinks: bool = False
    output_gate: OutputGate = "none"
    latent: Mla | None = None
    global_attention: GlobalAttention | None = None
    values_are_keys: bool = False
    shared_kv: SharedKv | None = None
    shares_kv: bool = False
    per_layer_input_dim: int = 0
    layer_scalar: bool = False
    num_positions: int = 0
    rotary_dim: int | None = None
    tied: bool = False
    logits_bias: bool = False
    experts: ExpertSizes | None = None
    num_dense_layers: int = 0
    mlp_kinds: tuple[MlpKind, ...] = ("moe",)
    pattern: tuple[str, ...] = ("global",)
    mtp_num_layers: int = 0

    def has_norm(self, name: str) -> bool:
        """Whether layers have this norm of BLOCK_NORMS, or the norm of queries or keys."""
        if name in ("query_norm", "key_norm"):
            return self.qk_norm not in ("none", "l2_after_rope")
        if name == "mlp_norm" and self.parallel_block == "one_norm":
            return False
        return self.norm_placement != ("pre" if name.endswith("post_norm") else "post")

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def is_mixed(self) -> bool:
        """Whether layers with and without experts alternate."""
        return self.experts is not None and len({*self.mlp_kinds}) > 1

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        is_moe = not self.is_mixed or self.mlp_kinds[layer % len(self.mlp_kinds)] == "moe"
        return self.experts is not None and layer >= self.num_dense_layers and is_moe

    @property
    def mixers(self) -> tuple[str, ...]:
        """What each kind of the pattern uses for attention: see `mixer_of`."""
        splits_global = self.global_attention is not None
        return tuple(mixer_of(kind, splits_global=splits_global) for kind in self.pattern)

    @property
    def layers_of(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the layers that have each of the mixers."""
        mixers = self.mixers
        found: dict[str, tuple[int, ...]] = dict.fromkeys(mixers, ())
        for layer in range(self.num_layers):
            found[mixers[layer % len(mixers)]] += (layer,)
        return found

    @property
    def caching_layers_of(self) -> dict[str, tuple[int, ...]]:
        """Those of `layers_of` that keep keys and values of their own, or a state."""
        last = self.num_caching_layers
        return {mixer: tuple(layer for layer in layers if layer < last) for mixer, layers in self.layers_of.items()}

    @property
    def num_caching_layers(self) -> int:
        """The number of first layers with keys and values of their own, or a state."""
        return self.num_layers - (self.shared_kv.num_kv_shared_layers if self.shared_kv else 0)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it attends to: itself, or the last of its kind that has some."""
        kinds = [self.pattern[layer % len(self.pattern)] for layer in range(self.num_layers)]
        last = {kind: layer for layer, kind in enumerate(kinds[: self.num_caching_layers])}
        return tuple(min(layer, last[kind]) for layer, kind in enumerate(kinds))

    def stack_name(self, layer: int) -> str | None:
        """The name below "layers" of the stack that has a layer; None: there is one stack."""
        names = list[str]()
        if len({*self.mixers}) > 1:
            names.append(self.mixers[layer % len(self.mixers)])
        if self.is_mixed:
            names.append(self.mlp_kinds[layer % len(self.mlp_kinds)])
        if self.shared_kv is not None:
            names.append("shared" if layer >= self.num_caching_layers else "caching")
        return "_".join(names) or None

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The stacks of equal layers: the numbers of their layers, by path in the parameters.

        The stacks below "layers" are split over pipeline stages.
        """
        first = self.num_dense_layers
        rest = range(self.num_dense_layers, self.num_layers)
        stacks = {"dense_layers": tuple(range(first))} if first else {}
        if self.mtp_num_layers:
            stacks[MTP_LAYERS] = tuple(range(self.num_layers, self.num_layers + self.mtp_num_layers))
        if self.stack_name(first) is None:
            return {**stacks, "layers": tuple(rest)}
        for name in sorted({str(self.stack_name(layer)) for layer in rest}):
            stacks[f"layers/{name}"] = tuple(layer for layer in rest if self.stack_name(layer) == name)
        return stacks

    def of_stack(self, path: str) -> Self:
        """The shape of the layers of a stack, which are equal."""
        layer = min(next(iter(self.stacks[path]), self.num_dense_layers), self.num_layers - 1)
        mixer = self.mixers[layer % len(self.mixers)]
        pattern = tuple(kind for kind, each in zip(self.pattern, self.mixers, strict=True) if each == mixer)
        shape = dataclasses.replace(self.of_kind(pattern[0]), pattern=pattern)
        if not self.has_experts(layer):
            shape = dataclasses.replace(shape, experts=None)
        if self.shared_kv is not None and layer >= self.num_caching_layers:
            width = self.mlp_dim * (2 if self.shared_kv.use_double_wide_mlp else 1)
            shape = dataclasses.replace(shape, shares_kv=True, mlp_dim=width)
        return shape

    def of_kind(self, kind: str) -> Self:
        """The shape with the heads of this kind of layer."""
        return self.of_mixer(mixer_of(kind, splits_global=True))

    def of_mixer(self, mixer: str) -> Self:
        """The shape with the heads of layers with one of `mixers`."""
        own = self.global_attention
        if own is None or mixer != "global_attention":
            return self
        return dataclasses.replace(
            self,
            head_dim=own.global_head_dim,
            rotary_dim=self.rotary_dim and own.rotary_dim,
            num_query_heads=own.global_num_query_heads or self.num_query_heads,
            num_kv_heads=own.global_num_kv_heads,
            values_are_keys=own.share_kv_projections,
            global_attention=None,
        )

    @property
    def num_expert_layers(self) -> int:
        """The number of layers with experts, in a model that has experts."""
        ahead = self.mtp_num_layers * self.has_experts(self.num_layers - 1)
        return ahead + sum(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def expert_order(self) -> list[int]:
        """The layers with experts in the order of the stacks, each by its place among those layers."""
        layers = list[int]()
        for path, numbers in sorted(self.stacks.items()):
            if self.of_stack(path).experts is not None:
                layers += numbers
        return [sorted(layers).index(layer) for layer in layers]

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each dim of a weight.

        V vocabulary   D embedding      T learned positions   N query heads    K kv heads      H head width
        F mlp          E experts        I one expert          S shared expert  Q latent query  R latent keys and values
        P unrotated dims of a head    O rotated dims    C R + O    W width of a value    U 1
        Y own input of a layer    X own inputs of all layers
        """
        experts = self.experts or ExpertSizes(1, 1, 0)
        sizes = {
            "V": self.vocab_size, "D": self.emb_dim, "T": self.num_positions, "N": self.num_query_heads,
            "K": self.num_kv_heads, "H": self.head_dim, "F": self.mlp_dim, "W": self.value_dim,
            "E": experts.num_experts, "I": experts.mlp_dim, "S": experts.shared_dim,
            "Y": self.per_layer_input_dim, "X": self.num_layers * self.per_layer_input_dim,
            "U": 1, "O": self.head_dim if self.rotary_dim is None else self.rotary_dim,
        }  # fmt: skip
        if (mla := self.latent) is not None:
            sizes |= {"Q": mla.q_lora_rank, "R": mla.kv_lora_rank, "P": mla.qk_nope_head_dim, "O": mla.qk_rope_head_dim}
            sizes["C"] = mla.kv_lora_rank + mla.qk_rope_head_dim
        return sizes

    def weight(self, dims: str, axes: str, start: Start = "normal") -> Weight:
        """A weight with these dims and logical axes, given as words."""
        sizes = self.sizes
        return Weight(tuple(dims.split()), tuple(sizes[letter] for letter in dims.split()), tuple(axes.split()), start)


def model_shape(config: ModelConfig) -> ModelShape:
    """The shape of a config's model."""
    experts = ExpertSizes(
        num_experts=config.num_experts,
        num_per_token=config.num_experts_per_tok,
        mlp_dim=config.moe_mlp_dim,
        biased=config.routed_bias,
        keeps_load=config.load_balance_over == "batch",
        with_bias=config.expert_bias,
        shared_dim=config.shared_mlp_dim,
        shared_gate=config.shared_expert_gate,
        own_norms=config.norm_placement == "each",
    )
    return ModelShape(
        vocab_size=config.vocab_size,
        emb_dim=config.base_emb_dim,
        num_query_heads=config.base_num_query_heads,
        num_kv_heads=config.base_num_kv_heads,
        head_dim=config.head_dim,
        mlp_dim=config.base_mlp_dim,
        num_layers=config.base_num_decoder_layers,
        norm=config.normalization,
        norm_placement=config.norm_placement,
        parallel_block=config.parallel_block,
        xielu=config.mlp_activation == "xielu",
        gated=config.gated_mlp,
        mlp_bias=config.mlp_bias,
        attention_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        sinks=config.attention_sinks,
        output_gate=config.attention_output_gate,
        latent=config.mla,
        global_attention=config.global_attention,
        shared_kv=config.shared_kv,
        per_layer_input_dim=config.hidden_size_per_layer_input,
        layer_scalar=config.layer_scalar,
        num_positions=config.trainable_position_size,
        rotary_dim=config.rotary_dim,
        tied=config.logits_via_embedding,
        logits_bias=config.logits_bias,
        experts=None if config.num_experts == 1 else experts,
        num_dense_layers=config.first_num_dense_layers,
        mlp_kinds=config.mlp_kinds,
        pattern=config.pattern,
        mtp_num_layers=config.mtp_num_layers,
    )


# ---- The tables ---------------------------------------------------------------------------------------------------


def norm_weights(shape: ModelShape, dims: str = "D", axes: str = "norm", *, biased: bool = True) -> WeightTable:
    """The weights of one norm; `biased`: with a bias where the model's norms have one."""
    if shape.norm == "layer_norm_plain":
        return {}
    table = {"scale": shape.weight(dims, axes, "zeros" if shape.norm.endswith("_plus_one") else "ones")}
    has_bias = biased and shape.norm in ("layer_norm", "layer_norm_plus_one")
    return table | ({"bias": shape.weight(dims, axes, "zeros")} if has_bias else {})


def attention_weights(shape: ModelShape) -> WeightTable:
    """The weights of a layer's attention."""
    gate: WeightTable = {}
    if shape.output_gate != "none":
        width = "U" if shape.output_gate.endswith("per_head") else "W"
        gate["output_gate"] = shape.weight(f"D N {width}", "embed heads head_dim")
    if shape.latent is not None:
        return _latent_attention_weights(shape, shape.latent) | gate
    weight = shape.weight
    table = {
        "query": weight("D N H", "embed heads head_dim"),
        "key": weight("D K H", "embed kv_heads head_dim"),
        "value": weight("D K H", "embed kv_heads head_dim"),
        "out": weight("N H D", "heads head_dim embed"),
    }
    if shape.attention_bias != "none":
        table["query_bias"] = weight("N H", "heads head_dim", "zeros")
        table |= {name: weight("K H", "kv_heads head_dim", "zeros") for name in ("key_bias", "value_bias")}
    if shape.attention_bias == "all":
        table["out_bias"] = weight("D", "norm", "zeros")
    if shape.qk_norm in ("head", "head_and_values", "head_after_rope"):
        table |= within("query_norm", norm_weights(shape, "H")) | within("key_norm", norm_weights(shape, "H"))
    if shape.qk_norm in ("all_heads", "each_head"):
        biased = shape.qk_norm == "all_heads"
        table |= within("query_norm", norm_weights(shape, "N H", "heads head_dim", biased=biased))
        table |= within("key_norm", norm_weights(shape, "K H", "kv_heads head_dim", biased=biased))
    if shape.sinks:
        table["sinks"] = weight("N", "heads", "zeros")
    unused = ("key", "value") if shape.shares_kv else ("value",) if shape.values_are_keys else ()
    table = {path: each for path, each in table.items() if not path.startswith(unused)}
    return table | gate


def _latent_attention_weights(shape: ModelShape, widths: Mla) -> WeightTable:
    weight = shape.weight
    query = {"query": weight("D N H", "embed heads head_dim")}
    if widths.q_lora_rank:
        query = {
            "query_down": weight("D Q", "embed latent"),
            "query_down_norm/scale": weight("Q", "norm", "ones"),
            "query_up": weight("Q N H", "latent heads head_dim"),
        }
    return query | {
        "kv_down": weight("D C", "embed latent"),
        "kv_down_norm/scale": weight("R", "norm", "ones"),
        "key_up": weight("R N P", "latent heads head_dim"),
        "value_up": weight("R N W", "latent heads head_dim"),
        "out": weight("N W D", "heads head_dim embed"),
    }


class Layer:
    """A kind of layer with something other than attention, such as a recurrence. Imports no jax.

    A package adds one through an entry point `maxtext_lite.layer`, an instance of a subclass, whose name layer_pattern
    may then have. Its weights are in the parameters where attention's are, and decide sharding, optimizer state and
    checkpoints, and the matmuls' part of FLOPs. Elements are counted per token, and are split over tensor.

    Attributes:
      module: `module:attribute` of the half with jax, a `models.layers.Mixer`.
    """

    module: str

    def weights(self, shape: ModelShape) -> WeightTable:
        """The weights of one layer, by path."""
        raise NotImplementedError

    def state(self, shape: ModelShape) -> WeightTable:
        """What a layer keeps of the tokens so far when it decodes: float32 arrays of each sequence, zero at first."""
        del shape
        return {}

    def flops(self, shape: ModelShape, num_tokens: Any) -> Any:
        """FLOPs of the forward and backward pass over a document, beside those of matmuls with weights.

        Args:
          num_tokens: a number, or an array for several documents, whose shape the result has.
        """
        del shape
        return 0 * num_tokens

    def named_elements(self, shape: ModelShape) -> Mapping[str, int]:
        """Elements of the tensors that the module names (`checkpoint_name`) for the remat keys: REMAT_TENSORS."""
        del shape
        return {}

    def kept_elements(self, shape: ModelShape) -> int:
        """Elements kept for the backward pass with remat_policy=none, in `dtype`."""
        raise NotImplementedError

    def used_elements(self, shape: ModelShape) -> int:
        """Elements in use at once in the backward pass, in `dtype`."""
        raise NotImplementedError


def layer_kind(mixer: str) -> Layer | None:
    """The kind of layer that another package has added under this name; None: attention."""
    return None if mixer.endswith("attention") else load("layer", mixer)


def mixer_weights(shape: ModelShape) -> WeightTable:
    """The weights of attention, or of what replaces it in the shape's layers, which are equal."""
    kind = layer_kind(shape.mixers[0])
    return attention_weights(shape) if kind is None else kind.weights(shape)


def mlp_weights(shape: ModelShape, width: str = "F") -> WeightTable:
    """The weights of an mlp, or of the shared expert."""
    projections = ("gate", "up") if shape.gated else ("up",)
    table = {name: shape.weight(f"D {width}", "embed mlp") for name in projections}
    table["down"] = shape.weight(f"{width} D", "mlp embed")
    if shape.mlp_bias:
        table |= {f"{name}_bias": shape.weight(width, "mlp", "zeros") for name in projections}
        table["down_bias"] = shape.weight("D", "norm", "zeros")
    if shape.xielu:
        table |= {name: shape.weight("U", "norm", "zeros") for name in ("alpha_p", "alpha_n")}
    return table


EXPERT_WEIGHTS = {
    "gate": ("E D I", "experts expert_embed mlp"),
    "up": ("E D I", "experts expert_embed mlp"),
    "down": ("E I D", "experts mlp expert_embed"),
}
EXPERT_BIASES = {
    "gate_bias": ("E I", "experts mlp"),
    "up_bias": ("E I", "experts mlp"),
    "down_bias": ("E D", "experts norm"),
}
"""Dims and logical axes of the experts' projections and their biases."""


def expert_weights(shape: ModelShape) -> WeightTable:
    """The weights of a layer's experts, their router and the shared expert."""
    experts = shape.experts
    weight = shape.weight
    assert experts is not None
    table = {"router": weight("D E", "embed router")}
    table |= {name: weight(*line) for name, line in EXPERT_WEIGHTS.items()}
    if experts.biased:
        table["router_bias"] = weight("E", "router_bias", "zeros")
    if experts.keeps_load:
        table["router_load"] = weight("E", "router_bias", "zeros")
    if experts.with_bias:
        table["router_logit_bias"] = weight("E", "norm", "zeros")
        table |= {name: weight(*line, "zeros") for name, line in EXPERT_BIASES.items()}
    if experts.shared_gate:
        table["shared_gate"] = weight("D U", "embed router")
    if experts.own_norms:
        table |= {"router_scale": weight("D", "norm", "ones"), "expert_scale": weight("E", "norm", "ones")}
        for name in ("norm", "post_norm", "shared_post_norm"):
            table |= within(name, norm_weights(shape))
    return table | (within("shared", mlp_weights(shape, "S")) if experts.shared_dim else {})


def layer_weights(shape: ModelShape) -> WeightTable:
    """The weights of one layer, with experts where the shape has any."""
    norms = {name: within(name, norm_weights(shape)) if shape.has_norm(name) else {} for name in BLOCK_NORMS}
    return {
        **norms["attention_norm"],
        **within("attention", mixer_weights(shape)),
        **norms["attention_post_norm"],
        **norms["mlp_norm"],
        **within("mlp", mlp_weights(shape) if shape.experts is None else expert_weights(shape)),
        **norms["mlp_post_norm"],
        **(_per_layer_input_weights(shape) if shape.per_layer_input_dim else {}),
        **({"layer_scalar": shape.weight("U", "norm", "ones")} if shape.layer_scalar else {}),
    }


def _per_layer_input_weights(shape: ModelShape) -> WeightTable:
    return {
        "per_layer_input_gate": shape.weight("D Y", "embed norm"),
        "per_layer_projection": shape.weight("Y D", "norm embed"),
        **within("per_layer_norm", norm_weights(shape)),
    }


def mtp_weights(shape: ModelShape) -> WeightTable:
    """The weights of a layer of multi-token prediction before its block and after it."""
    norms: WeightTable = {}
    for name in MTP_NORMS:
        norms |= within(name, norm_weights(shape))
    return norms | {name: shape.weight("D D", "embed mlp") for name in ("embed_projection", "hidden_projection")}


MTP_NORMS = ("embed_norm", "hidden_norm", "final_norm")

BLOCK_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
"""A layer's possible norms besides those of queries and keys."""


def end_weights(shape: ModelShape) -> WeightTable:
    """The weights outside the layers: tables, the last norm and the output projection."""
    table = {"embedding/table": shape.weight("V D", "vocab embed")}
    if shape.num_positions:
        table["embedding/positions"] = shape.weight("T D", "positions embed")
    if shape.per_layer_input_dim:
        table["embedding/per_layer_table"] = shape.weight("V X", "vocab embed")
        table["embedding/per_layer_model_projection"] = shape.weight("D X", "embed norm")
        table |= within("embedding/per_layer_norm", norm_weights(shape, "Y"))
    table |= within("final_norm", norm_weights(shape))
    table |= {} if shape.tied else {"head/projection": shape.weight("D V", "embed vocab")}
    return table | ({"head/bias": shape.weight("V", "vocab", "zeros")} if shape.logits_bias else {})


@functools.lru_cache(maxsize=64)  # a plan counts the same model many times
def stacks_of(shape: ModelShape) -> dict[str, tuple[int, WeightTable]]:
    """All weights: for each stack of equal layers their number and one layer's weights; "" has the rest."""
    stacks = {"": (1, end_weights(shape))}
    for stack, layers in shape.stacks.items():
        table = layer_weights(shape.of_stack(stack))
        stacks[stack] = (len(layers), table | (mtp_weights(shape) if stack == MTP_LAYERS else {}))
    return stacks


def within(name: str, table: WeightTable) -> WeightTable:
    """A table with its paths below a name."""
    return {f"{name}/{path}": weight for path, weight in table.items()}


def part_of(table: WeightTable, name: str) -> WeightTable:
    """The part of a table below a name, which may be {}."""
    return {path.removeprefix(f"{name}/"): each for path, each in table.items() if path.startswith(f"{name}/")}


# ---- LoRA ------------------------------------------------------------------------------------------------------------

ALL_TARGETS = "all"
"""The value of lora_targets that names every weight with a name."""


def adaptable_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that may have adapters: every matrix of the layers except routers and shared experts' gates.

    A weight's path in the parameters ends in its name, which experts, shared experts and dense layers have in common.
    """
    names: list[str] = []
    for stack, (_, table) in stacks_of(model_shape(config)).items():
        if stack:
            names += [path.rpartition("/")[2] for path, weight in table.items() if weight.is_normal]
    return tuple(name for name in dict.fromkeys(names) if name not in ("router", "shared_gate"))


def adapted_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that have adapters, in the model's order; none without LoRA."""
    if config.lora_rank == 0:
        return ()
    named = listed(config.lora_targets)
    return tuple(name for name in adaptable_weights(config) if named == (ALL_TARGETS,) or name in named)


# ---- Groups of parameters --------------------------------------------------------------------------------------------


def trained_paths(config: ModelConfig) -> tuple[str, ...]:
    """The paths of the parameters that gradients change; with LoRA they are each weight's lora_a and lora_b."""
    adapted = adapted_weights(config)
    paths: list[str] = []
    for stack, (_, table) in stacks_of(model_shape(config)).items():
        whole = within(stack, table) if stack else table
        if not config.lora_rank:
            paths += [path for path, weight in whole.items() if weight.axes != ("router_bias",)]
        elif stack:
            names = [path for path in whole if path.rpartition("/")[2] in adapted]
            paths += [f"{path}/lora_{matrix}" for path in names for matrix in "ab"]
    return tuple(paths)


def is_in_group(path: str, group: str) -> bool:
    """Whether the names of a group, which may have wildcards, follow one another in a parameter's path."""
    names = path.split("/")
    wanted = group.split("/")
    starts = range(len(names) - len(wanted) + 1)
    return any(all(map(fnmatchcase, names[start:], wanted)) for start in starts)
