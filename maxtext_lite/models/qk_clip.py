"""QK-clip: after an update, heads with too large a logit have their queries and keys scaled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config.weights import ModelShape, attention_weights
from maxtext_lite.models.attention import PLAIN, TILE, Scoring, dot, grouped, whole_blocks
from maxtext_lite.parallel import Tree, TreePath, context_order, context_shards


def largest_logits(q_BTNH: Array, k_BSKH: Array, segment_BT: Array, scoring: Scoring = PLAIN) -> Array:
    """Each head's largest score [B, N] before its soft cap over all keys that real tokens see, or 0 if none is larger.

    The arguments are those of `attention`. It has no gradient, and computes all scores once more, tile by tile of keys.
    """
    q_BTKGH = grouped(jax.lax.stop_gradient(q_BTNH), k_BSKH.shape[2])
    number_T = jnp.asarray(context_order(q_BTNH.shape[1], context_shards()))

    def tiles(x: Array) -> Array:
        blocks = whole_blocks(x, TILE, value=-1)
        return jnp.moveaxis(blocks.reshape(len(x), -1, TILE, *x.shape[2:]), 1, 0)

    def look(largest_BKG: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        k_BSKH, segment_BS, number_1S = tile
        distance_TS = number_T[:, None] - number_1S
        seen_BTS = (segment_BT[:, :, None] == segment_BS[:, None]) & (segment_BS[:, None] > 0) & (distance_TS >= 0)
        if scoring.window is not None:
            seen_BTS &= distance_TS < scoring.window
        score_BKGTS = scoring.scale_of(q_BTNH.shape[-1]) * dot("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
        score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, 0)
        return jnp.maximum(largest_BKG, jnp.max(score_BKGTS, axis=(-2, -1))), None

    zeros_BKG = jnp.zeros((len(q_BTNH), *q_BTKGH.shape[2:4]), jnp.float32)
    keys = (jax.lax.stop_gradient(k_BSKH), segment_BT, number_T[None])
    found_BKG, _ = jax.lax.scan(look, zeros_BKG, jax.tree.map(tiles, keys))
    return found_BKG.reshape(len(q_BTNH), -1)


def clip_heads(params: Tree, largest_LN: Array, *, threshold: float, shape: ModelShape) -> Tree:
    """Parameters whose heads' logits are scaled by threshold / largest where that is below 1.

    A query and a key of one head take the root of it each. A query takes all of it where other heads share the key, as
    they do in grouped-query attention and in the rotated dims of latent attention.

    Source: Kimi Team 2025, arXiv:2507.20534, section 2.1; it has no grouped queries.
    """
    factor_LN = threshold / jnp.maximum(largest_LN, threshold)

    def clip(path: TreePath, weight: Array) -> Array:
        *stack, part, name = (entry.key for entry in path)
        if part != "attention":
            return weight
        stack = "/".join(stack)
        of_stack = shape.of_stack(stack)
        power = _powers(of_stack).get(name)
        if power is None:
            return weight
        dims = len(attention_weights(of_stack)[name].dims)  # the last two of them are N and the head's
        factor_LN1 = factor_LN[np.array(shape.stacks[stack])].reshape(*weight.shape[:-dims], *[1] * (dims - 2), -1, 1)
        return (weight * factor_LN1**power).astype(weight.dtype)

    return jax.tree_util.tree_map_with_path(clip, params)


def _powers(shape: ModelShape) -> dict[str, Any]:
    """The power of the factor by weight; of latent attention's queries, for each dim of a head."""
    if shape.latent is not None:
        widths = (shape.latent.qk_nope_head_dim, shape.latent.qk_rope_head_dim)
        of_query = np.repeat(np.array([0.5, 1], np.float32), widths)
        return {"query": of_query, "query_up": of_query, "key_up": 0.5}
    if shape.num_query_heads == shape.num_kv_heads:
        return dict.fromkeys(("query", "query_bias", "key", "key_bias"), 0.5)
    return dict.fromkeys(("query", "query_bias"), 1.0)
