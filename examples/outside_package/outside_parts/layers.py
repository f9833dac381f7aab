"""The halves with jax of the kernel and the layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.models.layers import HEADS_AXES, attention_output, declare, projections
from maxtext_lite.parallel import constrain
from outside_parts.kinds import GATED_RECURRENCE


def plain_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N=None, *, strategy, scoring):
    """Causal attention with all scores at once; the arguments are those of `tiled_attention` of maxtext_lite."""
    B, T, N, H = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(B, T, k_BSKH.shape[2], -1, H)
    score_BKGTS = scoring.score(jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH).astype(jnp.float32), H)
    is_seen_BTS = (segment_BT[:, :, None] == segment_BT[:, None, :]) & jnp.tri(T, dtype=bool)
    weight_BKGTS = jax.nn.softmax(jnp.where(is_seen_BTS[:, None, None], score_BKGTS, -jnp.inf))
    return jnp.einsum("BKGTS,BSKW->BTKGW", weight_BKGTS.astype(v_BSKW.dtype), v_BSKW).reshape(B, T, N, -1)


class Recurrence(nnx.Module):
    """The module of `GatedRecurrence`."""

    def __init__(self, shape, *, rngs):
        declare(self, GATED_RECURRENCE.weights(shape), shape, rngs)

    def __call__(self, x_BTD, rotation, memory):
        """The output [B, T, D], and the cache with the channels after the last token."""
        named = zip(("value_proj", "key_proj", "query_proj"), (self.value, self.decay, self.gate), strict=True)
        names, weights = zip(*named, strict=True)
        of_heads = [constrain(y_BTNH, HEADS_AXES) for y_BTNH in projections(x_BTD, *weights)]
        value, decay, gate = (checkpoint_name(y, name) for y, name in zip(of_heads, names, strict=True))
        segment_BT = memory.segment_BT
        is_real = (segment_BT > 0)[:, :, None, None]
        # The first token continues the state, which is zero at the start of a row.
        before_BT = jnp.concatenate([segment_BT[:, :1], segment_BT[:, :-1]], axis=1)
        is_start = (segment_BT != before_BT)[:, :, None, None]
        keep = jax.nn.sigmoid(decay.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32))
        keep = jnp.where(is_real, keep, 1)  # padding changes no state
        added = (1 - keep) * value.astype(jnp.float32)
        keep = jnp.where(is_start & is_real, 0, keep)
        added = added.at[:, 0].add(keep[:, 0] * memory.state["h"])
        _, h_BTNH = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, added), axis=1)
        context = checkpoint_name((h_BTNH * jax.nn.silu(gate.astype(jnp.float32))).astype(x_BTD.dtype), "context")
        return attention_output(context, self.out), memory.kept({"h": h_BTNH[:, -1]})
