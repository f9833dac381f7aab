"""The parts of a decoder layer as NNX modules: norms, attention projections, mlp, experts.

Their weights are those of the tables in `config.weights`. Each parameter knows its logical axes, from which its
sharding follows.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext_lite.config.weights import (
    Weight,
    WeightTable,
    attention_weights,
    end_weights,
    mlp_weights,
    part_of,
)
from maxtext_lite.models.ops import Rotation, layer_norm, mlp_hidden, project, rms_norm, rotate
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import constrain

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
    """A parameter that knows how it lies; of normal values, also how its gradient goes there and `project` uses it."""
    if not weight.is_normal:
        # The router's bias is float32 always: its steps are small.
        dtype = jnp.float32 if weight.axes == ("router_bias",) else shape.weight_dtype
        return nnx.Param(jnp.full(weight.sizes, int(weight.start == "ones"), dtype), axes=weight.axes)
    assert rngs is not None, weight
    values = shape.initializer_range * jax.random.normal(rngs.params(), weight.sizes, jnp.float32)
    values = values.astype(shape.weight_dtype)
    return nnx.Param(values, axes=weight.axes, grad_dtype=shape.grad_dtype, quantization=shape.quantization)


def _plus(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    return y if bias is None else (y.astype(jnp.float32) + bias[...].astype(jnp.float32)).astype(y.dtype)


class Norm(nnx.Module):
    """The shape's norm over the last dims, as many as its scale in the table has, which is learned for each entry."""

    scale: nnx.Param
    bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, table: WeightTable):
        self.kind, self.epsilon = shape.norm, shape.norm_epsilon
        declare(self, table, shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The normed vectors, in the shape and dtype of x."""
        scale = self.scale[...]
        together: Any = x.reshape(*x.shape[: x.ndim - scale.ndim], math.prod(scale.shape))
        if self.bias is not None:
            y: Any = layer_norm(together, scale.reshape(-1), self.bias[...].reshape(-1), self.epsilon)
            return y.reshape(x.shape)
        scale = scale.reshape(-1).astype(jnp.float32) + 1 if self.kind == "rms_norm_plus_one" else scale.reshape(-1)
        y = rms_norm(together, scale, self.epsilon)
        return y.reshape(x.shape)


def norm_in(table: WeightTable, name: str, shape: DecoderShape) -> Norm | None:
    """The norm of that name, where the table has one."""
    found = part_of(table, name)
    return Norm(shape, found) if found else None


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
        self.after_rotation = shape.norm_epsilon if shape.qk_norm == "l2_after_rope" else None
        self.query_norm, self.key_norm = norm_in(table, "query_norm", shape), norm_in(table, "key_norm", shape)

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend) -> tuple[jax.Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""

        def heads(weight: nnx.Param, bias: nnx.Param | None, name: str) -> jax.Array:
            y_BTNH = constrain(project(x_BTD, weight), HEADS_AXES)
            return checkpoint_name(_plus(y_BTNH, bias), name)

        def turned(y_BTNH: jax.Array, norm: Norm | None) -> jax.Array:
            normed_BTNH = y_BTNH if norm is None else norm(y_BTNH)
            if rotation is None:
                return normed_BTNH
            turned_BTNH: Any = rotate(normed_BTNH, rotation)
            if self.after_rotation is None:
                return turned_BTNH
            return rms_norm(turned_BTNH, jnp.ones(turned_BTNH.shape[-1]), self.after_rotation)

        q_BTNH = turned(heads(self.query, self.query_bias, "query_proj"), self.query_norm)
        k_BTKH = turned(heads(self.key, self.key_bias, "key_proj"), self.key_norm)
        v_BTKH = heads(self.value, self.value_bias, "value_proj")
        sink_N = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        context_BTNH, kept = attend(q_BTNH, k_BTKH, v_BTKH, sink_N)
        return attention_output(context_BTNH, self.out, self.out_bias), kept


def attention_output(context_BTNH: jax.Array, out: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """What attention adds to the stream, [B, T, D]."""
    context_BTNH = constrain(context_BTNH, HEADS_AXES)  # and its gradient, which could follow the tokens instead
    y_BTD = constrain(project(context_BTNH, out), RESIDUAL_AXES)
    return checkpoint_name(_plus(y_BTD, bias), "out_proj")


class Mlp(nnx.Module):
    """down(activation(gate x) * up x), or down(activation(up x)). Source: Shazeer 2020, arXiv:2002.05202, eq. 6."""

    gate: nnx.Param | None = None
    up: nnx.Param
    down: nnx.Param
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, width: str = "F", *, rngs: nnx.Rngs):
        self.activation = shape.activation
        declare(self, mlp_weights(shape, width), shape, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The mlp's output [B, T, D], in the dtype of x_BTD."""
        up_BTF = checkpoint_name(_plus(project(x_BTD, self.up), self.up_bias), "mlpwi_1")
        if self.gate is None:
            hidden_BTF: Any = mlp_hidden(self.activation, up_BTF, None)
        else:
            gate_BTF = checkpoint_name(_plus(project(x_BTD, self.gate), self.gate_bias), "mlpwi_0")
            hidden_BTF = mlp_hidden(self.activation, gate_BTF, up_BTF)
        hidden_BTF = constrain(hidden_BTF, ("batch", "length", "activation_mlp"))
        y_BTD = constrain(project(hidden_BTF, self.down), RESIDUAL_AXES)
        return checkpoint_name(_plus(y_BTD, self.down_bias), "mlpwo")


class Embedding(nnx.Module):
    """The token table [V, D], and the table of positions where they are learned."""

    table: nnx.Param
    positions: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.factor = math.sqrt(shape.emb_dim) if shape.scaled_embeddings else None
        declare(self, part_of(end_weights(shape), "embedding"), shape, rngs)

    def __call__(self, token_BT: jax.Array, position_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        x_BTD = self._rows(self.table, token_BT, dtype)
        if self.factor is not None:
            x_BTD *= jnp.asarray(self.factor, dtype)
        if self.positions is not None:
            x_BTD += self._rows(self.positions, position_BT, dtype)
        # Each device finds what its part of the vocabulary has, and only then are tokens split over `tensor`: asked for
        # its own tokens at once, it would be given the whole table.
        x_BTD = constrain(x_BTD, ("end_batch", "length", "activation_embed"))
        return constrain(x_BTD, ("end_batch", *RESIDUAL_AXES[1:]))

    def _rows(self, table: nnx.Param, index_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Entries of a table [.., D], in `dtype`.

        Each device looks up all of its replica's tokens in the part of `embed` that it has. What then crosses are
        tokens, not the table and its gradient.
        """
        index_BT = constrain(index_BT, (None, None))
        x_BTD = constrain(table[...][index_BT].astype(dtype), (None, None, "embed"))
        x_BTD = constrain(x_BTD, ("looked_up_batch", None, "embed_without_fsdp"))
        return constrain(x_BTD, ("looked_up_batch", "length", "embed_of_expert"))


class Head(nnx.Module):
    """The output projection [D, V] of a decoder whose embeddings are not tied."""

    projection: nnx.Param

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        declare(self, part_of(end_weights(shape), "head"), shape, rngs)
