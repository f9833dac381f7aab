"""QK-clip: after an update, heads with too large a logit have their queries and keys scaled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config.weights import ModelShape, attention_weights
from maxtext_lite.parallel import Tree, TreePath


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
