"""The parts of a decoder layer as NNX modules: norms, attention projections, mlp, experts.

Their weights are those of the tables in `config.weights`. Each parameter knows its logical axes, from which its
sharding follows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext_lite.config.keys import ATTENTION_KINDS
from maxtext_lite.config.registry import resolve
from maxtext_lite.config.weights import (
    Weight,
    WeightTable,
    attention_weights,
    end_weights,
    expert_weights,
    layer_kind,
    layer_weights,
    mlp_weights,
    part_of,
)
from maxtext_lite.models.decoding import CachedAttend, Memory
from maxtext_lite.models.experts import DROPPED, ExpertShape, ExpertWeights, Router, dropless, route, with_capacity
from maxtext_lite.models.ops import (
    Activation,
    Rotation,
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
"""Logical axes of the stream between blocks: split over `tensor` along the tokens, so that no device holds or norms
all of it. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2."""

HEADS_AXES = ("batch", "length", "activation_heads", None)
"""Logical axes of queries, keys, values and context."""

Attend = Callable[[jax.Array, jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]
"""(q_BTNH, k_BTKH, v_BTKH, sink_N) -> (context_BTNH, whatever the caller keeps, such as keys and values)."""


def declare(module: nnx.Module, table: WeightTable, shape: DecoderShape, rngs: nnx.Rngs | None = None) -> None:
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
    return nnx.Param(values, axes=weight.axes, grad_dtype=shape.grad_dtype, quantization=shape.quantization)


def _plus(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
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
        self.kind, self.epsilon, self.num_dims = shape.norm, shape.norm_epsilon, num_dims
        declare(self, table, shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The normed vectors, in the shape and dtype of x."""
        together: Any = x.reshape(*x.shape[: x.ndim - self.num_dims], math.prod(x.shape[x.ndim - self.num_dims :]))
        scale, bias = (None if part is None else part[...] for part in (self.scale, self.bias))
        width = together.shape[-1]
        apart = scale is not None and scale.size > width  # each head has its own, which rms_norm does not take
        if scale is None:
            scale = jnp.ones(width, jnp.float32)
        elif self.kind.endswith("_plus_one"):
            scale = scale.astype(jnp.float32) + 1
        within = jnp.ones(width, jnp.float32) if apart else scale.reshape(-1)
        together = together.astype(jnp.float32) if apart else together  # rounded once, after the scale
        if self.kind.startswith("layer_norm"):
            plain = jnp.zeros(width, jnp.float32) if bias is None else bias.reshape(-1)
            y: Any = layer_norm(together, within, plain, self.epsilon)
        else:
            y = rms_norm(together, within, self.epsilon)
        y = (y * scale.astype(jnp.float32)).astype(x.dtype) if apart else y
        return y.reshape(x.shape)


def projections(x_BTD: jax.Array, *weights: nnx.Param) -> list[jax.Array]:
    """`project` of the residual stream by several weights: its tokens are gathered over `tensor` once for all of them.

    Left to it, XLA gathers the tokens for each weight by itself on GPUs. Kept for the backward pass are the tokens of a
    device's own shard, which are gathered once more there.
    """

    def of_all_tokens(x_BTD: jax.Array) -> list[jax.Array]:
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
    key: nnx.Param
    value: nnx.Param
    out: nnx.Param
    query_bias: nnx.Param | None = None
    key_bias: nnx.Param | None = None
    value_bias: nnx.Param | None = None
    out_bias: nnx.Param | None = None
    sinks: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        table = attention_weights(shape)
        declare(self, table, shape, rngs)
        num_dims = 2 if shape.qk_norm == "all_heads" else 1
        self.query_norm = norm_in(table, "query_norm", shape, num_dims)
        self.key_norm = norm_in(table, "key_norm", shape, num_dims)
        self.clip, self.norms_after = shape.clip_qkv, shape.qk_norm == "head_after_rope"
        self.unweighted_epsilon = shape.norm_epsilon if shape.qk_norm == "l2_after_rope" else None

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend) -> tuple[jax.Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""

        def heads(projected_BTNH: jax.Array, bias: nnx.Param | None, name: str) -> jax.Array:
            return checkpoint_name(_plus(constrain(projected_BTNH, HEADS_AXES), bias), name)

        query, key, value = projections(x_BTD, self.query, self.key, self.value)

        def clipped(y_BTNH: jax.Array) -> jax.Array:
            return jnp.clip(y_BTNH, -self.clip, self.clip) if self.clip else y_BTNH

        def turned(y_BTNH: jax.Array, norm: Norm | None) -> jax.Array:
            y_BTNH = clipped(y_BTNH if norm is None or self.norms_after else norm(y_BTNH))
            if rotation is not None:
                y_BTNH = rotate(y_BTNH, rotation)
                if self.unweighted_epsilon is not None:
                    y_BTNH = rms_norm(y_BTNH, jnp.ones(y_BTNH.shape[-1]), self.unweighted_epsilon)
            return norm(y_BTNH) if norm is not None and self.norms_after else y_BTNH

        q_BTNH = turned(heads(query, self.query_bias, "query_proj"), self.query_norm)
        k_BTKH = turned(heads(key, self.key_bias, "key_proj"), self.key_norm)
        v_BTKH = clipped(heads(value, self.value_bias, "value_proj"))
        sink_N = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        context_BTNH, kept = attend(q_BTNH, k_BTKH, v_BTKH, sink_N)
        return attention_output(context_BTNH, self.out, self.out_bias), kept


def attention_output(context_BTNH: jax.Array, out: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """Attention's output, [B, T, D]."""
    context_BTNH = constrain(context_BTNH, HEADS_AXES)  # its gradient too, which could be split by tokens instead
    y_BTD = constrain(project(context_BTNH, out), RESIDUAL_AXES)
    return checkpoint_name(_plus(y_BTD, bias), "out_proj")


def query_factor(shape: DecoderShape, kind: str, position_BT: jax.Array, number: jax.Array | None) -> jax.Array | None:
    """The factor of a layer's queries, [B, T], float32; None: there is none.

    Args:
      number: the layer's, from 0.
    """
    factor_BT = None
    if kind not in ATTENTION_KINDS:
        return None
    if (tuning := shape.position_temperature) is not None and tuning.of(kind):
        steps_BT = jnp.floor((position_BT.astype(jnp.float32) + tuning.offset) / tuning.floor_scale)
        factor_BT = 1 + tuning.scale * jnp.log1p(steps_BT)
    if shape.inverse_layer_scaling:
        assert number is not None
        factor_BT = (jnp.ones(position_BT.shape, jnp.float32) if factor_BT is None else factor_BT) / (number + 1)
    return factor_BT


def scaled_queries(attend: Attend, factor_BT: jax.Array) -> Attend:
    """`attend` with each query multiplied by its factor."""

    def attend_scaled(q_BTNH: jax.Array, k: jax.Array, v: Any, sink: jax.Array | None) -> tuple[jax.Array, Any]:
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

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The mlp's output [B, T, D], in the dtype of x_BTD."""
        up, *gate = projections(x_BTD, self.up, *([] if self.gate is None else [self.gate]))
        up_BTF = checkpoint_name(_plus(up, self.up_bias), "mlpwi_1")
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

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.factor = math.sqrt(shape.emb_dim) if shape.scaled_embeddings else 1.0
        self.multiplier = shape.embedding_multiplier
        declare(self, part_of(end_weights(shape), "embedding"), shape, rngs)

    def __call__(self, token_BT: jax.Array, position_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
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

    def _rows(self, table: nnx.Param, index_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
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

    projection_DV: jax.Array
    bias_V: jax.Array | None = None


def projected(x_BTD: jax.Array, head: OutputHead) -> jax.Array:
    """The head's logits [B, T, V], float32."""
    logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head.projection_DV, preferred_element_type=jnp.float32)
    return logits_BTV if head.bias_V is None else logits_BTV + head.bias_V.astype(jnp.float32)


class Head(nnx.Module):
    """The output projection [D, V] of a decoder whose embeddings are not tied, and the logits' bias."""

    projection: nnx.Param | None = None
    bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        declare(self, part_of(end_weights(shape), "head"), shape, rngs)


_EPSILON = 1e-6  # of the latent vectors' norms, whatever the other norms have, as in the published code


class LatentAttention(nnx.Module):
    """Attention with queries, keys and values from latent vectors; the last dims of a head are rotated."""

    query: nnx.Param | None = None
    query_down: nnx.Param | None = None
    query_up: nnx.Param | None = None
    kv_down: nnx.Param
    key_up: nnx.Param
    value_up: nnx.Param
    out: nnx.Param

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        widths, table = shape.latent, attention_weights(shape)
        assert widths is not None
        self.rank, self.plain, self.rotated = widths.kv_lora_rank, widths.qk_nope_head_dim, widths.qk_rope_head_dim
        declare(self, table, shape, rngs)
        shape = dataclasses.replace(shape, norm="rms_norm", norm_epsilon=_EPSILON)
        self.query_down_norm = norm_in(table, "query_down_norm", shape)
        self.kv_down_norm = Norm(shape, part_of(table, "kv_down_norm"))

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend) -> tuple[jax.Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""
        assert rotation is not None, "the config gives every layer of latent attention a rotation"

        def named(projected_BTNH: jax.Array, name: str) -> jax.Array:
            return checkpoint_name(constrain(projected_BTNH, HEADS_AXES), name)

        if self.query_down is None or self.query_down_norm is None or self.query_up is None:
            assert self.query is not None
            q_BTNH, down_BTD = projections(x_BTD, self.query, self.kv_down)
        else:
            query_BTD, down_BTD = projections(x_BTD, self.query_down, self.kv_down)
            q_BTNH = project(self.query_down_norm(query_BTD), self.query_up)
        q_BTNH = named(q_BTNH, "query_proj")
        latent_BTD, shared_BTD = jnp.split(down_BTD, (self.rank,), axis=-1)
        latent_BTD = self.kv_down_norm(latent_BTD)
        plain_BTNH, turned_BTNH = jnp.split(q_BTNH, (self.plain,), axis=-1)
        turned_BTNH, shared_BT1H = rotate(turned_BTNH, rotation), rotate(shared_BTD[:, :, None], rotation)
        if isinstance(attend, CachedAttend):
            # Keys are linear in the latent vectors, so queries can be projected to these, and so can the context.
            asked_BTNH = jnp.einsum("BTNH,DNH->BTND", plain_BTNH, self.key_up[...].astype(x_BTD.dtype))
            q_BTNH = constrain(jnp.concatenate([asked_BTNH, turned_BTNH], axis=-1), HEADS_AXES)
            k_BT1H = jnp.concatenate([latent_BTD[:, :, None], shared_BT1H], axis=-1)
            found_BTNH, kept = attend(q_BTNH, k_BT1H, None, None)
            value_up_DNH = self.value_up[...].astype(x_BTD.dtype)
            context_BTNH = jnp.einsum("BTND,DNH->BTNH", found_BTNH[..., : self.rank], value_up_DNH)
            return attention_output(context_BTNH, self.out), kept
        own_BTNH = named(project(latent_BTD, self.key_up), "key_proj")
        v_BTNH = named(project(latent_BTD, self.value_up), "value_proj")
        shared_BTNH = jnp.broadcast_to(shared_BT1H, (*own_BTNH.shape[:3], self.rotated))
        k_BTNH = constrain(jnp.concatenate([own_BTNH, shared_BTNH], axis=-1), HEADS_AXES)
        q_BTNH = jnp.concatenate([plain_BTNH, turned_BTNH], axis=-1)
        context_BTNH, kept = attend(constrain(q_BTNH, HEADS_AXES), k_BTNH, v_BTNH, None)
        return attention_output(context_BTNH, self.out), kept


class MixtureOfExperts(nnx.Module):
    """Gated mlps, of which a router chooses a few for each token, and possibly one that all tokens share."""

    router: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    shared_gate: nnx.Param | None = None
    router_bias: nnx.Param | None = None
    router_logit_bias: nnx.Param | None = None
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, experts: ExpertShape, *, rngs: nnx.Rngs):
        self.experts = experts
        declare(self, expert_weights(shape), shape, rngs)
        self.shared = Mlp(shape, "S", rngs=rngs) if experts.shared_dim else None

    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array, *, drop: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' output [B, T, D], in the dtype of x_BTD, and what the layer adds to the stream's `aux`.

        Args:
          real_BT: False for padding, which goes to no expert.
          drop: apply the capacity, if there is one.
        """
        experts = self.experts
        router = Router(self.router[...], *map(_array, (self.router_bias, self.router_logit_bias)))
        routing = route(x_BTD, router, real_BT, experts)
        biases = map(_array, (self.gate_bias, self.up_bias, self.down_bias))
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...], *biases)
        aux = routing.aux
        if experts.capacity_factor is None or not drop:
            y_BTD: Any = dropless(x_BTD, routing.expert_BTJ, routing.share_BTJ, weights, experts)
        else:
            y_BTD, dropped_B = with_capacity(x_BTD, routing, weights, experts)
            aux = aux | {DROPPED: dropped_B}
        y_BTD = checkpoint_name(constrain(y_BTD, RESIDUAL_AXES), "mlpwo")
        return y_BTD if self.shared is None else y_BTD + self._shared(self.shared, x_BTD), aux

    def _shared(self, shared: Mlp, x_BTD: jax.Array) -> jax.Array:
        """The shared expert's output."""
        y_BTD = shared(x_BTD)
        if self.shared_gate is None:
            return y_BTD
        gate_D1 = self.shared_gate[...].astype(jnp.float32)
        gate_BT1 = jax.nn.sigmoid(jnp.einsum("BTD,DU->BTU", x_BTD.astype(jnp.float32), gate_D1))
        return (gate_BT1 * y_BTD.astype(jnp.float32)).astype(y_BTD.dtype)


def _array(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]


class Block(Protocol):
    """A layer of the decoder, an `nnx.Module`: from the stream to the stream, the same in training and decoding.

    Its parameters are `nnx.Param` with the logical axes of their dims (`axes`, those of `parallel.axes`), which decide
    how they are sharded, decayed and rounded. Layers are stacked and scanned, whole or in pipeline stages: a stack's
    layers have parameters of the same shapes, and whatever else differs between layers comes from the caller.
    """

    def __call__(
        self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend, real_BT: jax.Array, *, drop: bool = True
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The stream after the block, what `attend` keeps, and what the block adds to the stream's `aux`.

        Args:
          rotation: of queries and keys, for the layer's kind; None: they are not rotated.
          attend: the only access to other tokens, for the layer's kind. Of attention it maps queries, keys, values and
            sinks to the context; with a cache it also returns the cache. A `Mixer` gets a `Memory` instead.
          real_BT: False for padding.
          drop: apply the experts' capacity, if they have one.
        """
        ...


BlockFactory = Callable[..., Block]
"""(shape, *, rngs) -> a block with new parameters."""


class Mixer(Protocol):
    """What a layer has in attention's place, an `nnx.Module`: the half with jax of a `config.weights.Layer`.

    Made as `Mixer(shape, rngs=rngs)`, with the parameters of the Layer's weights (`declare`).
    """

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, memory: Memory) -> tuple[jax.Array, Any]:
        """The output [B, T, D], in the dtype of x_BTD, and `memory.kept(state)` with the state after these tokens.

        Documents never mix: a token depends on earlier ones of its document alone.
        """
        ...


def attention_of(shape: DecoderShape) -> Callable[..., nnx.Module]:
    """What the shape's layers, which are equal, have as attention or in its place: (shape, *, rngs) -> module."""
    kind = layer_kind(shape.mixers[0])
    if kind is not None:
        return resolve(kind.module)
    return Attention if shape.latent is None else LatentAttention


class DecoderLayer(nnx.Module):
    """One block: attention and then the mlp, or both on the same stream. Each has a norm before it, after it or both,
    and is added to the stream."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        table = layer_weights(shape)
        self.attention_norm = norm_in(table, "attention_norm", shape)
        self.attention = attention_of(shape)(shape, rngs=rngs)
        self.attention_post_norm = norm_in(table, "attention_post_norm", shape)
        self.mlp_norm = norm_in(table, "mlp_norm", shape)
        if shape.experts is None:
            self.mlp = Mlp(shape, rngs=rngs)
        else:
            self.mlp = MixtureOfExperts(shape, shape.experts, rngs=rngs)
        self.mlp_post_norm = norm_in(table, "mlp_post_norm", shape)
        self.parallel, self.multiplier = shape.parallel_block, shape.residual_multiplier

    def __call__(
        self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend, real_BT: jax.Array, *, drop: bool = True
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The residual stream [B, T, D] after the layer, what `attend` keeps, and the experts' `aux`.

        Args:
          real_BT: False for padding; like `drop`, only experts use it (`MixtureOfExperts`).
        """
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        first_BTD = _normed(self.attention_norm, x_BTD)
        attended_BTD, kept = self.attention(first_BTD, rotation, attend)
        before_BTD = x_BTD
        x_BTD = self._plus(x_BTD, _normed(self.attention_post_norm, attended_BTD))
        read_BTD = {"none": x_BTD, "one_norm": first_BTD, "two_norms": before_BTD}[self.parallel]
        normed_BTD, aux = _normed(self.mlp_norm, read_BTD), {}
        if isinstance(self.mlp, MixtureOfExperts):
            y_BTD, aux = self.mlp(normed_BTD, real_BT, drop=drop)
        else:
            y_BTD = self.mlp(normed_BTD)
        return self._plus(x_BTD, _normed(self.mlp_post_norm, y_BTD)), kept, aux

    def _plus(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """The stream plus a block's output."""
        if self.multiplier != 1:  # which two bytes need not hold
            y_BTD = (y_BTD.astype(jnp.float32) * self.multiplier).astype(y_BTD.dtype)
        return constrain(x_BTD + y_BTD, RESIDUAL_AXES)


def _normed(norm: Norm | None, x_BTD: jax.Array) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)
