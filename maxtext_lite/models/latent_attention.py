"""Multi-head latent attention: one narrow vector of each token makes the keys and values of all heads.

A cache contains that vector and the part of the keys that all heads share: attention over it has one kv head for all
queries.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.config.weights import attention_weights, part_of
from maxtext_lite.models.decoding import CachedAttend
from maxtext_lite.models.layers import HEADS_AXES, Attend, Norm, attention_output, declare, norm_in, projections
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
