"""The parts of a decoder layer as NNX modules: norms, attention projections, mlp, experts.

Their weights are those of the tables in `config.weights`. Each parameter knows its logical axes, from which its
sharding follows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext_lite.config import LayerKind
from maxtext_lite.config.weights import Weight, WeightTable, attention_weights, end_weights, mlp_weights, part_of
from maxtext_lite.models.ops import Activation, Rotation, layer_norm, mlp_hidden, project, rms_norm, rotate, xielu
from maxtext_lite.models.ordered_sums import rows_at
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import constrain, gathered_for_use

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
        x_BTD = gathered_for_use(x_BTD, ("batch", "length", "activation_embed"), RESIDUAL_AXES)
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


def query_factor(
    shape: DecoderShape, kind: LayerKind, position_BT: jax.Array, number: jax.Array | None
) -> jax.Array | None:
    """The factor of a layer's queries, [B, T], float32; None: there is none.

    Args:
      number: the layer's, from 0.
    """
    factor_BT = None
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


class BiasedHead(NamedTuple):
    """An output projection and the bias added to its logits."""

    projection_DV: jax.Array
    bias_V: jax.Array


OutputHead = jax.Array | BiasedHead
"""The map from final hidden states to logits [B, T, V]: a projection [D, V], with or without a bias."""


def projected(x_BTD: jax.Array, head: OutputHead) -> jax.Array:
    """The head's logits [B, T, V], float32."""
    head_DV, bias_V = head if isinstance(head, BiasedHead) else (head, None)
    logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=jnp.float32)
    return logits_BTV if bias_V is None else logits_BTV + bias_V.astype(jnp.float32)


class Head(nnx.Module):
    """The output projection [D, V] of a decoder whose embeddings are not tied, and the logits' bias."""

    projection: nnx.Param | None = None
    bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        declare(self, part_of(end_weights(shape), "head"), shape, rngs)
