"""Attention that projects keys and values from latent vectors; the cache keeps only the vectors."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from maxtext_lite.config.keys import OutputGate
from maxtext_lite.config.weights import attention_weights, part_of
from maxtext_lite.models.layers import (
    HEADS_AXES,
    Attend,
    Norm,
    OverCache,
    attention_output,
    declare,
    heads,
    norm_in,
    normed,
    projections,
)
from maxtext_lite.models.ops import Rotation, project, rotate
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import constrain

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
    output_gate: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        widths = shape.latent
        table = attention_weights(shape)
        assert widths is not None
        self.rank = widths.kv_lora_rank
        self.plain_dim = widths.qk_nope_head_dim
        self.gate_function: OutputGate = shape.output_gate
        declare(self, table, shape, rngs)
        shape = dataclasses.replace(shape, norm="rms_norm", norm_epsilon=_EPSILON)
        self.query_down_norm = norm_in(table, "query_down_norm", shape)
        self.kv_down_norm = Norm(shape, part_of(table, "kv_down_norm"))

    def __call__(self, x_BTD: Array, rotation: Rotation | None, attend: Attend) -> tuple[Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""
        assert rotation is not None, "the config gives every layer of latent attention a rotation"
        gates = () if self.output_gate is None else (self.output_gate,)
        if self.query is not None:
            q_BTNH, down_BTD, *gate = projections(x_BTD, self.query, self.kv_down, *gates)
        else:
            assert self.query_down is not None
            assert self.query_up is not None
            query_BTD, down_BTD, *gate = projections(x_BTD, self.query_down, self.kv_down, *gates)
            q_BTNH = project(normed(self.query_down_norm, query_BTD), self.query_up)
        q_BTNH = heads(q_BTNH, None, "query_proj")
        latent_BTD, shared_BTD = jnp.split(down_BTD, (self.rank,), axis=-1)
        latent_BTD = self.kv_down_norm(latent_BTD)
        plain_BTNH, rotated_BTNH = jnp.split(q_BTNH, (self.plain_dim,), axis=-1)
        rotated_BTNH = rotate(rotated_BTNH, rotation)
        shared_BT1H = rotate(shared_BTD[:, :, None], rotation)
        if isinstance(attend, OverCache):
            # Keys are linear in the latent vectors, so queries can be projected to these, and so can the context.
            query_BTND = jnp.einsum("BTNH,DNH->BTND", plain_BTNH, self.key_up[...].astype(x_BTD.dtype))
            q_BTNH = constrain(jnp.concatenate([query_BTND, rotated_BTNH], axis=-1), HEADS_AXES)
            k_BT1H = jnp.concatenate([latent_BTD[:, :, None], shared_BT1H], axis=-1)
            found_BTNH, kept = attend(q_BTNH, k_BT1H, None, None)
            value_up_DNH = self.value_up[...].astype(x_BTD.dtype)
            context_BTNH = jnp.einsum("BTND,DNH->BTNH", found_BTNH[..., : self.rank], value_up_DNH)
            return attention_output(context_BTNH, self.out, gate=gate, function=self.gate_function), kept
        plain_k_BTNH = heads(project(latent_BTD, self.key_up), None, "key_proj")
        v_BTNH = heads(project(latent_BTD, self.value_up), None, "value_proj")
        shared_BTNH = jnp.broadcast_to(shared_BT1H, (*v_BTNH.shape[:3], shared_BT1H.shape[-1]))
        k_BTNH = constrain(jnp.concatenate([plain_k_BTNH, shared_BTNH], axis=-1), HEADS_AXES)
        q_BTNH = constrain(jnp.concatenate([plain_BTNH, rotated_BTNH], axis=-1), HEADS_AXES)
        context_BTNH, kept = attend(q_BTNH, k_BTNH, v_BTNH, None)
        return attention_output(context_BTNH, self.out, gate=gate, function=self.gate_function), kept
