"""The parts of a decoder layer as NNX modules: norms, attention projections, mlp.

The tables in `config.weights` list their weights. Each parameter knows its logical axes, from which its sharding
follows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext_lite.config.keys import ATTENTION_KINDS, OutputGate
from maxtext_lite.config.registry import resolve
from maxtext_lite.config.weights import (
    Weight,
    WeightTable,
    attention_weights,
    end_weights,
    layer_kind,
    layer_weights,
    mlp_weights,
    part_of,
)
from maxtext_lite.models.ops import (
    Activation,
    Rotation,
    gated,
    layer_norm,
    mlp_hidden,
    project,
    rms_norm,
    rotate,
    rows_at,
    xielu,
)
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import all_gather_for_compute, constrain

RESIDUAL_AXES = ("batch", "residual_length", "activation_embed")
"""Logical axes of the stream between blocks: split over `tensor` along the tokens. No device holds or norms all of it.
Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2."""

HEADS_AXES = ("batch", "length", "activation_heads", None)
"""Logical axes of queries, keys, values and context."""

Attend = Callable[[Array, Any, Any, Array | None], tuple[Array, Any]]
"""(q_BTNH, k_BTKH, v_BTKH, sink_N) -> (context_BTNH, whatever the caller keeps, such as keys and values).

The keys and values of a layer that has none are None."""


class OverCache:
    """An `Attend` over a cache, which keeps latent attention's vectors in place of keys and values."""

    def __call__(self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Any, sink_N: Array | None) -> tuple[Array, Any]:
        """As `Attend`."""
        raise NotImplementedError


def declare(
    module: nnx.Module,
    table: WeightTable,
    shape: DecoderShape,
    rngs: nnx.Rngs | None = None,
) -> None:
    """Gives a module the parameters of a table that are its own: those whose paths are a name."""
    for name, weight in table.items():
        if "/" not in name:
            setattr(module, name, _parameter(weight, shape, rngs))


def _parameter(weight: Weight, shape: DecoderShape, rngs: nnx.Rngs | None) -> nnx.Param:
    """A parameter with its logical axes; a matrix also has its gradient's dtype and `project`'s quantization."""
    if not weight.is_normal:
        # The router's bias is always float32: its steps are small.
        dtype = jnp.float32 if weight.axes == ("router_bias",) else shape.weight_dtype
        return nnx.Param(jnp.full(weight.sizes, int(weight.start == "ones"), dtype), axes=weight.axes)
    assert rngs is not None, weight
    values = shape.initializer_range * jax.random.normal(rngs.params(), weight.sizes, jnp.float32)
    values = values.astype(shape.weight_dtype)
    return nnx.Param(
        values,
        axes=weight.axes,
        grad_dtype=shape.grad_dtype,
        quantization=shape.quantization,
    )


def _plus(y: Array, bias: nnx.Param | None) -> Array:
    return y if bias is None else (y.astype(jnp.float32) + bias[...].astype(jnp.float32)).astype(y.dtype)


class Norm(nnx.Module):
    """The shape's norm over the last dims.

    Args:
      table: of its scale and bias, if it has them, each learned for every entry of these dims.
      num_dims: how many dims are normed as one; the scale may have more dims, with its own values for each entry.
    """

    scale: nnx.Param | None = None
    bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, table: WeightTable, num_dims: int = 1):
        self.kind = shape.norm
        self.epsilon = shape.norm_epsilon
        self.num_dims = num_dims
        declare(self, table, shape)

    def __call__(self, x: Array) -> Array:
        """The normed vectors, in the shape and dtype of x."""
        scale = None if self.scale is None else self.scale[...]
        if scale is not None and self.kind.endswith("_plus_one"):
            scale = scale.astype(jnp.float32) + 1
        flat: Any = x.reshape(*x.shape[: x.ndim - self.num_dims], -1)
        width = flat.shape[-1]
        if scale is None:
            y = self._norm(flat, jnp.ones(width, jnp.float32))
        elif scale.size == width:
            y = self._norm(flat, scale.reshape(-1))
        else:  # each head has its own, which is applied before the result is rounded
            y = self._norm(flat.astype(jnp.float32), jnp.ones(width, jnp.float32))
            y = (y * scale.astype(jnp.float32)).astype(x.dtype)
        return y.reshape(x.shape)

    def _norm(self, x: Array, scale: Array) -> Any:
        if not self.kind.startswith("layer_norm"):
            return rms_norm(x, scale, self.epsilon)
        bias = jnp.zeros(x.shape[-1], jnp.float32) if self.bias is None else self.bias[...].reshape(-1)
        return layer_norm(x, scale, bias, self.epsilon)


def projections(x_BTD: Array, *weights: nnx.Param) -> list[Array]:
    """`project` of the residual stream by several weights: its tokens are gathered over `tensor` once for all of them.

    Left to it, XLA gathers the tokens for each weight by itself on GPUs. Kept for the backward pass are the tokens of a
    device's own shard, which are gathered once more there.
    """

    def of_all_tokens(x_BTD: Array) -> list[Array]:
        x_BTD = all_gather_for_compute(x_BTD, ("batch", "length", "activation_embed"), RESIDUAL_AXES)
        return [project(x_BTD, weight) for weight in weights]

    return jax.checkpoint(of_all_tokens, prevent_cse=False)(constrain(x_BTD, RESIDUAL_AXES))


def norm_in(table: WeightTable, name: str, shape: DecoderShape, num_dims: int = 1) -> Norm | None:
    """The norm of that name, if the table or, for norms that learn nothing, the shape has one; else None."""
    found = part_of(table, name)
    is_plain = shape.norm == "layer_norm_plain" and shape.has_norm(name)
    return Norm(shape, found, num_dims) if found or is_plain else None


class Attention(nnx.Module):
    """Grouped-query attention's four projections around an `attend` that the caller chooses."""

    query: nnx.Param
    key: nnx.Param | None = None
    value: nnx.Param | None = None
    out: nnx.Param
    query_bias: nnx.Param | None = None
    key_bias: nnx.Param | None = None
    value_bias: nnx.Param | None = None
    out_bias: nnx.Param | None = None
    sinks: nnx.Param | None = None
    output_gate: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        table = attention_weights(shape)
        declare(self, table, shape, rngs)
        num_dims = 2 if shape.qk_norm == "all_heads" else 1
        self.query_norm = norm_in(table, "query_norm", shape, num_dims)
        self.key_norm = norm_in(table, "key_norm", shape, num_dims)
        self.clip = shape.clip_qkv
        self.gate_function: OutputGate = shape.output_gate
        self.qk_norm = shape.qk_norm
        self.epsilon = shape.norm_epsilon

    def __call__(self, x_BTD: Array, rotation: Rotation | None, attend: Attend) -> tuple[Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""
        weights = {name: getattr(self, name) for name in ("query", "key", "value", "output_gate")}
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        made = dict(zip(weights, projections(x_BTD, *weights.values()), strict=True))
        q_BTNH = heads(made["query"], self.query_bias, "query_proj")
        q_BTNH = self._turned(q_BTNH, self.query_norm, rotation)
        k_BTKH: Any = None  # an earlier layer's
        v_BTKH: Any = None
        if self.key is not None:
            k_BTKH = heads(made["key"], self.key_bias, "key_proj")
            v_BTKH = heads(made["value"], self.value_bias, "value_proj") if "value" in made else k_BTKH
            k_BTKH = self._turned(k_BTKH, self.key_norm, rotation)
            if self.qk_norm == "head_and_values":
                v_BTKH = self._without_scale(v_BTKH)
            if self.clip:
                v_BTKH = jnp.clip(v_BTKH, -self.clip, self.clip)
        sink_N = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        context_BTNH, kept = attend(q_BTNH, k_BTKH, v_BTKH, sink_N)
        gate = [made["output_gate"]] if "output_gate" in made else []
        return attention_output(context_BTNH, self.out, self.out_bias, gate=gate, function=self.gate_function), kept

    def _turned(self, x_BTNH: Any, norm: Norm | None, rotation: Rotation | None) -> Any:
        """Queries or keys, normed, clipped and rotated."""
        norms_last = self.qk_norm == "head_after_rope"
        if not norms_last:
            x_BTNH = normed(norm, x_BTNH)
        if self.clip:
            x_BTNH = jnp.clip(x_BTNH, -self.clip, self.clip)
        if rotation is not None:
            x_BTNH = rotate(x_BTNH, rotation)
            if self.qk_norm == "l2_after_rope":
                x_BTNH = self._without_scale(x_BTNH)
        return normed(norm, x_BTNH) if norms_last else x_BTNH

    def _without_scale(self, x_BTNH: Any) -> Any:
        return rms_norm(x_BTNH, jnp.ones(x_BTNH.shape[-1]), self.epsilon)


def heads(projected_BTNH: Array, bias: nnx.Param | None, name: str) -> Array:
    """Queries, keys or values with their bias, under a name for rematerialisation."""
    return checkpoint_name(_plus(constrain(projected_BTNH, HEADS_AXES), bias), name)


def attention_output(
    context_BTNH: Array,
    out: nnx.Param,
    bias: nnx.Param | None = None,
    *,
    gate: Sequence[Array] = (),
    function: OutputGate = "none",
) -> Array:
    """Attention's output, [B, T, D].

    Args:
      gate: the output gate's projection of each head, in a list that is empty without a gate.
    """
    context_BTNH = constrain(context_BTNH, HEADS_AXES)  # its gradient too, which could be split by tokens instead
    if gate:
        gate_BTNG = heads(gate[0], None, "query_proj")  # like the queries, saved or recomputed with them
        context_BTNH = gated(context_BTNH, gate_BTNG, function)
    y_BTD = constrain(project(context_BTNH, out), RESIDUAL_AXES)
    return checkpoint_name(_plus(y_BTD, bias), "out_proj")


def query_factor(shape: DecoderShape, kind: str, position_BT: Array, number: Array | None) -> Array | None:
    """The factor of a layer's queries, [B, T], float32; None: there is none.

    Args:
      number: the layer's, from 0.
    """
    if kind not in ATTENTION_KINDS:
        return None
    factor_BT = None
    tuning = shape.position_temperature
    if tuning is not None and tuning.of(kind):
        steps_BT = jnp.floor((position_BT.astype(jnp.float32) + tuning.offset) / tuning.floor_scale)
        factor_BT = 1 + tuning.scale * jnp.log1p(steps_BT)
    if shape.inverse_layer_scaling:
        assert number is not None
        if factor_BT is None:
            factor_BT = jnp.ones(position_BT.shape, jnp.float32)
        factor_BT /= number + 1
    return factor_BT


def scaled_queries(attend: Attend, factor_BT: Array) -> Attend:
    """`attend` with each query multiplied by its factor."""

    def attend_scaled(q_BTNH: Array, k: Any, v: Any, sink: Array | None) -> tuple[Array, Any]:
        q_BTNH = (q_BTNH.astype(jnp.float32) * factor_BT[:, :, None, None]).astype(q_BTNH.dtype)
        return attend(q_BTNH, k, v, sink)

    return attend_scaled


class Mlp(nnx.Module):
    """down(activation(gate x) * up x), or down(activation(up x)). Source: Shazeer 2020, arXiv:2002.05202, eq. 6."""

    gate: nnx.Param | None = None
    up: nnx.Param
    down: nnx.Param
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None
    alpha_p: nnx.Param | None = None
    alpha_n: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, width: str = "F", *, rngs: nnx.Rngs):
        self.activation: Activation = shape.activation
        declare(self, mlp_weights(shape, width), shape, rngs)

    def __call__(self, x_BTD: Array) -> Array:
        """The mlp's output [B, T, D], in the dtype of x_BTD."""
        weights = [self.up] if self.gate is None else [self.up, self.gate]
        up_BTF, *gate = projections(x_BTD, *weights)
        up_BTF = checkpoint_name(_plus(up_BTF, self.up_bias), "mlpwi_1")
        if self.alpha_p is not None and self.alpha_n is not None:
            hidden_BTF: Any = xielu(up_BTF, self.alpha_p[...], self.alpha_n[...])
        elif not gate:
            hidden_BTF = mlp_hidden(self.activation, up_BTF, None)
        else:
            gate_BTF = checkpoint_name(_plus(gate[0], self.gate_bias), "mlpwi_0")
            hidden_BTF = mlp_hidden(self.activation, gate_BTF, up_BTF)
        hidden_BTF = constrain(hidden_BTF, ("batch", "length", "activation_mlp"))
        y_BTD = constrain(project(hidden_BTF, self.down), RESIDUAL_AXES)
        return checkpoint_name(_plus(y_BTD, self.down_bias), "mlpwo")


class Embedding(nnx.Module):
    """The token table [V, D], and the table of learned positions, if there is one."""

    table: nnx.Param
    positions: nnx.Param | None = None
    per_layer_table: nnx.Param | None = None
    per_layer_model_projection: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.factor = math.sqrt(shape.emb_dim) if shape.scaled_embeddings else 1.0
        self.multiplier = shape.embedding_multiplier
        table = part_of(end_weights(shape), "embedding")
        declare(self, table, shape, rngs)
        self.per_layer_norm = norm_in(table, "per_layer_norm", shape)
        self.num_layers = shape.num_layers

    def __call__(self, token_BT: Array, position_BT: Array, dtype: DTypeLike) -> Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        x_BTD = self._rows(self.table, token_BT, dtype)
        if self.factor != 1:  # in `dtype`, as Gemma was trained
            x_BTD *= jnp.asarray(self.factor, dtype)
        if self.multiplier != 1:
            x_BTD = (x_BTD.astype(jnp.float32) * self.multiplier).astype(dtype)
        if self.positions is not None:
            x_BTD += self._rows(self.positions, position_BT, dtype)
        # Each device looks up the tokens in its part of the vocabulary before tokens are split over `tensor`: for its
        # own tokens at once it would need the whole table.
        x_BTD = constrain(x_BTD, ("end_batch", "length", "activation_embed"))
        return constrain(x_BTD, ("end_batch", *RESIDUAL_AXES[1:]))

    def per_layer_inputs(self, token_BT: Array, x_BTD: Array) -> Array | None:
        """Each layer's own inputs [L, B, T, Y], from the tokens and their vectors x_BTD, in its dtype; None: none."""
        if self.per_layer_table is None or self.per_layer_model_projection is None:
            return None
        looked_up_BTX = self._rows(self.per_layer_table, token_BT, x_BTD.dtype)
        looked_up_BTX = constrain(looked_up_BTX, ("end_batch", *RESIDUAL_AXES[1:]))
        sizes = (*token_BT.shape, self.num_layers, -1)
        looked_up_BTLY = looked_up_BTX.reshape(sizes)
        looked_up_BTLY *= jnp.asarray(math.sqrt(looked_up_BTLY.shape[-1]), x_BTD.dtype)
        made_BTX = project(x_BTD, self.per_layer_model_projection) * x_BTD.shape[-1] ** -0.5
        made_BTLY = normed(self.per_layer_norm, made_BTX.reshape(sizes))
        return jnp.moveaxis((made_BTLY + looked_up_BTLY) * 2**-0.5, 2, 0)

    def _rows(self, table: nnx.Param, index_BT: Array, dtype: DTypeLike) -> Array:
        """Entries of a table [.., D], in `dtype`.

        Each device looks up all tokens of its replica in its part of `embed`. Tokens then cross the mesh, not the table
        and its gradient. That is a sum over tokens, so it is one of float32 whatever the table's dtype.
        """
        index_BT = constrain(index_BT, (None, None))
        wide_VD = table[...].astype(jnp.float32)
        rows: Any = rows_at(wide_VD, index_BT, len(wide_VD))
        x_BTD = constrain(rows.astype(dtype), (None, None, "embed"))
        x_BTD = constrain(x_BTD, ("looked_up_batch", None, "embed_without_fsdp"))
        return constrain(x_BTD, ("looked_up_batch", "length", "embed_of_expert"))


class OutputHead(NamedTuple):
    """The map from final hidden states to logits [B, T, V]: a projection, and a bias or None."""

    projection_DV: Array
    bias_V: Array | None = None


def projected(x_BTD: Array, head: OutputHead) -> Array:
    """The head's logits [B, T, V], float32."""
    logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head.projection_DV, preferred_element_type=jnp.float32)
    return logits_BTV if head.bias_V is None else logits_BTV + head.bias_V.astype(jnp.float32)


class Head(nnx.Module):
    """The output projection [D, V] of a decoder whose embeddings are not tied, and the logits' bias."""

    projection: nnx.Param | None = None
    bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        declare(self, part_of(end_weights(shape), "head"), shape, rngs)


class Block(Protocol):
    """A layer of the decoder, an `nnx.Module`: from the stream to the stream, the same in training and decoding.

    Its parameters are `nnx.Param` with the logical axes of their dims (`axes`, those of `parallel.axes`), which decide
    how they are sharded, decayed and rounded. Layers are stacked and scanned, whole or in pipeline stages: a stack's
    layers have parameters of the same shapes, and whatever else differs between layers comes from the caller.
    """

    def __call__(
        self,
        x_BTD: Array,
        rotation: Rotation | None,
        attend: Attend,
        real_BT: Array,
        *,
        drop: bool = True,
        own_BTY: Array | None = None,
    ) -> tuple[Array, Any, dict[str, Array]]:
        """The stream after the block, what `attend` keeps, and what the block adds to the stream's `aux`.

        Args:
          rotation: of queries and keys, for the layer's kind; None: they are not rotated.
          attend: the only access to other tokens, for the layer's kind. Of attention it maps queries, keys, values and
            sinks to the context; with a cache it also returns the cache. A `Mixer` gets a `Memory` instead.
          real_BT: False for padding.
          drop: apply the experts' capacity, if they have one.
          own_BTY: the layer's own inputs, in a model that has some.
        """
        ...


BlockFactory = Callable[..., Block]
"""(shape, *, rngs) -> a block with new parameters."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The tokens of a layer without attention, and what it keeps of those before them.

    Attributes:
      segment_BT: document number of each token, 0 for padding, which changes no state. With a cache all tokens continue
        one document.
      position_BT: position of each token in its document.
      state: after the tokens before these, float32 [B, ...] by name: zeros in training and at first.
      cache: an `inference.cache.KVCache`; None: nothing is kept.
      kind, layer: the layer's place in the cache.
    """

    segment_BT: Array
    position_BT: Array
    state: dict[str, Array]
    kind: str
    cache: Any = None
    layer: Array | None = None

    def kept(self, state: dict[str, Array]) -> Any:
        """The cache with the state after these tokens."""
        if self.cache is None:
            return None
        of_kind = self.cache.states[self.kind]
        of_kind = {name: all_LB.at[self.layer].set(state[name]) for name, all_LB in of_kind.items()}
        return self.cache._replace(states={**self.cache.states, self.kind: of_kind})


class Mixer(Protocol):
    """An `nnx.Module` in place of a layer's attention: the half with jax of a `config.weights.Layer`.

    Made as `Mixer(shape, rngs=rngs)`, with the parameters of the Layer's weights (`declare`).
    """

    def __call__(self, x_BTD: Array, rotation: Rotation | None, memory: Memory) -> tuple[Array, Any]:
        """The output [B, T, D], in the dtype of x_BTD, and `memory.kept(state)` with the state after these tokens.

        Documents never mix: a token depends on earlier ones of its document alone.
        """
        ...


def state_table(shape: DecoderShape, kind: str) -> WeightTable:
    """The state that a layer without attention keeps of earlier tokens, with its sizes and axes."""
    layer = layer_kind(kind)
    assert layer is not None
    return layer.state(shape)


def attention_of(shape: DecoderShape) -> Callable[..., nnx.Module]:
    """What the shape's layers, which are equal, have as attention or in its place: (shape, *, rngs) -> module."""
    kind = layer_kind(shape.mixers[0])
    if kind is not None:
        return resolve(kind.module)
    if shape.latent is not None:
        return resolve("maxtext_lite.models.latent_attention:LatentAttention")
    return Attention


def mlp_of(shape: DecoderShape) -> Callable[..., nnx.Module]:
    """The module of a layer's mlp; the experts' is imported for the first model that has some."""
    if shape.experts is None:
        return Mlp
    return resolve("maxtext_lite.models.moe:MixtureOfExperts")


class DecoderLayer(nnx.Module):
    """A block that adds attention and then the mlp to the stream, or both from the same input. Each has a norm before
    it, after it or both."""

    per_layer_input_gate: nnx.Param | None = None
    per_layer_projection: nnx.Param | None = None
    layer_scalar: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        table = layer_weights(shape)
        declare(self, table, shape, rngs)
        self.attention_norm = norm_in(table, "attention_norm", shape)
        self.attention = attention_of(shape)(shape, rngs=rngs)
        self.attention_post_norm = norm_in(table, "attention_post_norm", shape)
        self.mlp_norm = norm_in(table, "mlp_norm", shape)
        self.has_experts = shape.experts is not None
        self.mlp = mlp_of(shape)(shape, rngs=rngs)
        self.mlp_post_norm = norm_in(table, "mlp_post_norm", shape)
        self.per_layer_norm = norm_in(table, "per_layer_norm", shape)
        self.activation: Activation = shape.activation
        self.parallel = shape.parallel_block
        self.multiplier = shape.residual_multiplier

    def __call__(
        self,
        x_BTD: Array,
        rotation: Rotation | None,
        attend: Attend,
        real_BT: Array,
        *,
        drop: bool = True,
        own_BTY: Array | None = None,
    ) -> tuple[Array, Any, dict[str, Array]]:
        """The residual stream [B, T, D] after the layer, what `attend` keeps, and the experts' `aux`.

        Args:
          real_BT: False for padding; like `drop`, only experts use it (`moe.MixtureOfExperts`).
        """
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        first_BTD = normed(self.attention_norm, x_BTD)
        attended_BTD, kept = self.attention(first_BTD, rotation, attend)
        y_BTD = self._plus(x_BTD, normed(self.attention_post_norm, attended_BTD))
        read_BTD = {"none": y_BTD, "one_norm": first_BTD, "two_norms": x_BTD}[self.parallel]
        normed_BTD = normed(self.mlp_norm, read_BTD)
        aux = {}
        if self.has_experts:
            mlp_BTD, aux = self.mlp(normed_BTD, read_BTD, real_BT, drop=drop)
        else:
            mlp_BTD = self.mlp(normed_BTD)
        y_BTD = self._plus(y_BTD, normed(self.mlp_post_norm, mlp_BTD))
        if self.per_layer_input_gate is not None and self.per_layer_projection is not None:
            # Each device has its own tokens of the stream and of the inputs.
            gate_BTY = project(y_BTD, self.per_layer_input_gate)
            hidden_BTY = mlp_hidden(self.activation, gate_BTY, own_BTY)
            y_BTD = self._plus(y_BTD, normed(self.per_layer_norm, project(hidden_BTY, self.per_layer_projection)))
        if self.layer_scalar is not None:
            y_BTD *= self.layer_scalar[...].astype(y_BTD.dtype)
        return y_BTD, kept, aux

    def _plus(self, x_BTD: Array, y_BTD: Array) -> Array:
        """The stream plus a block's output."""
        if self.multiplier != 1:  # it may have no exact bfloat16
            y_BTD = (y_BTD.astype(jnp.float32) * self.multiplier).astype(y_BTD.dtype)
        return constrain(x_BTD + y_BTD, RESIDUAL_AXES)


def normed(norm: Norm | None, x_BTD: Array) -> Array:
    """The norm of x, or x without one."""
    return x_BTD if norm is None else norm(x_BTD)
