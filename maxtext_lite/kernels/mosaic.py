"""Attention by tokamax's Mosaic kernels for Hopper and Blackwell, for whole examples and examples split over shards.

The kernels' mask is the first key that each query sees: documents and windows are ranges. Their backward pass skips
tiles of later keys, but no tile because of a range. On context shards, a device's queries therefore attend to its own
keys in a causal call, and to another shard's in calls for two pairs of chunks in which every key precedes every query,
so no product is wasted. The results are merged by their log-partitions.
Source: Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.config.kernels import KERNEL_SCOPE
from maxtext_lite.kernels.chunk_pairs import Pairs, merged_over_shards, summed_over_shards
from maxtext_lite.kernels.cudnn import FusedKernel, Inputs, fused_attention
from maxtext_lite.kernels.tokamax_ops import flash_attention, with_blocks
from maxtext_lite.models.attention import PLAIN, Scoring, part, ungrouped, whole_blocks
from maxtext_lite.parallel import (
    CHUNKS_PER_SHARD,
    Tree,
    chunks_of,
    context_shards,
    over_shards,
    own_shard,
    whole_examples,
)

_HEADS = ("batch", "length", "activation_heads", None)
_TOKENS = ("batch", "length")
_BLOCK = 256
"""Tokens of the largest block of queries; tokamax 0.0.12 takes only a whole number of blocks."""
_filled = functools.partial(whole_blocks, block=_BLOCK)
_HIDDEN = 1e30
"""The log-partition of a query beside which every score counts for nothing."""

_TUNED_FORWARD = {64: {"block_kv": 256, "num_stages": 3}}
_TUNED_BACKWARD = {256: {"compute_wgs": 1}}
"""The fastest settings on an H100 by the width of keys and values, where they differ from tokamax's own. They hold for
causal bfloat16 rows of 4,096 to 16,384 tokens. Its own look-up finds nothing, because its entries have no ranges.
Source: tokamax 0.0.17, data/autotuning/nvidia_h100_80gb_hbm3, pallas_mosaic_gpu_flash_attention and its vjp."""


def mosaic_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None = None,
    *,
    strategy: str = "all_gather",
    scoring: Scoring = PLAIN,
) -> Array:
    """`attention` by tokamax's Mosaic kernels, for any T.

    Args:
      strategy: how the shards of a context axis exchange keys, one of `key_exchange.STRATEGIES`.
    """

    def local(q_BTNH: Array, k_BSKH: Array, v_BSKW: Array, segment_BT: Array, sink_N: Array | None) -> Array:
        """The heads, rows and queries of one device."""
        options = scoring.scale_of(q_BTNH.shape[-1]), scoring.soft_cap
        first_BS = first_keys(whole_examples(segment_BT), scoring.window)
        if context_shards() == 1:
            kernel: FusedKernel = Mosaic(*options)
            return fused_attention(Inputs(q_BTNH, k_BSKH, v_BSKW, first_BS), sink_N, kernel)
        chunk = q_BTNH.shape[1] // CHUNKS_PER_SHARD
        own = [part(first_BS, number * chunk, chunk, 1) for number in chunks_of(own_shard())]
        inputs = Inputs(q_BTNH, k_BSKH, v_BSKW, jnp.concatenate(own, axis=1))
        return fused_attention(inputs, sink_N, Sharded(*options, strategy))

    run = over_shards(local, (_HEADS, _HEADS, _HEADS, _TOKENS, ("activation_heads",)), _HEADS)
    return run(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N)


def first_keys(segment_BT: Array, window: int | None) -> Array:
    """The first key that each query sees, int32 [B, T]: the first in both its document and its window.

    Args:
      segment_BT: document number of each token; a document's tokens are contiguous.
    """
    at_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    begins_BT = segment_BT[:, 1:] != segment_BT[:, :-1]
    begins_BT = jnp.concatenate([jnp.ones_like(segment_BT[:, :1], bool), begins_BT], axis=1)
    first_BT = jax.lax.cummax(jnp.where(begins_BT, at_T, 0), axis=1)
    return first_BT if window is None else jnp.maximum(first_BT, at_T + 1 - window)


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """tokamax's flash attention; `mask_BT` is the first key that each query sees, and S = T.

    Queries and keys are padded to whole blocks. The op's own gradient drops that of the residuals, which sinks need.

    Attributes:
      causal: a query has the position of the key with its number, and sees no later key; otherwise it sees all keys
        from its first on.
    """

    scale: float
    soft_cap: float | None
    causal: bool = True

    def forward(self, inputs: Inputs) -> tuple[Array, Array]:
        """See FusedKernel."""
        *heads, mask_BT = inputs
        T = mask_BT.shape[1]
        op, options = self._op(mask_BT)
        heads = [_filled(x) for x in heads]
        better = _better(_TUNED_FORWARD if self.causal else {}, heads)
        op = with_blocks(op, op.bind(*heads, return_residuals=True, **options), better)
        with jax.named_scope(f"{KERNEL_SCOPE}tokamax_mosaic"):
            context_BTNW, (max_BNT, sum_BNT) = op(*heads, return_residuals=True, **options)
        return context_BTNW[:, :T], (max_BNT + jnp.log(sum_BNT))[..., :T]

    def backward(
        self, inputs: Inputs, context_BTNW: Array, log_partition_BNT: Array, g_BTNW: Array
    ) -> tuple[Array, Array, Array]:
        """See FusedKernel."""
        *heads, mask_BT = inputs
        T = mask_BT.shape[1]
        op, options = self._op(mask_BT)
        heads = [_filled(x) for x in heads]
        bound = dict(op.bind(*heads, **options).kwargs)
        del bound["return_residuals"]
        # Maximum and denominator of the softmax: any two whose product is right.
        maximum_BNT = _filled(log_partition_BNT, axis=2, value=_HIDDEN)
        results = (maximum_BNT, jnp.ones_like(maximum_BNT)), _filled(context_BTNW), _filled(g_BTNW)
        better = _better(_TUNED_BACKWARD, heads)
        backward = with_blocks(op.vjp, op.vjp.bind(*results, *heads, **bound), better)
        with jax.named_scope(f"{KERNEL_SCOPE}tokamax_mosaic_backward"):
            gradients = backward(*results, *heads, **bound)
        return gradients["q"][:, :T], gradients["k"][:, :T], gradients["v"][:, :T]

    def _op(self, first_key_BT: Array) -> tuple[Any, dict[str, Any]]:
        """The op, and its arguments beside queries, keys and values."""
        op, mask = flash_attention()
        T = first_key_BT.shape[1]
        # Padding queries see the padding keys; if not all keys are seen anyway, none of these is.
        first_B1T = _filled(first_key_BT, value=T if self.causal else 0)[:, None]
        end: dict[str, Array] = {}
        if not self.causal and T % _BLOCK:
            end["k_end"] = jnp.full_like(first_B1T, T)
        seen = mask(k_start=first_B1T, is_causal=self.causal, **end)
        return op, {"mask": seen, "logits_scale": self.scale, "logits_soft_cap": self.soft_cap}


def _better(tuned: dict[int, dict[str, int]], heads: list[Array]) -> dict[str, int]:
    """The measured block sizes for these queries, keys and values; {} if there are none."""
    width = heads[0].shape[-1]
    if heads[2].shape[-1] != width:
        return {}
    return tuned.get(width, {})


@dataclasses.dataclass(frozen=True)
class Sharded:
    """`Mosaic` for a context shard's queries and all shards' keys; `mask_BT` is the first token that each query sees.

    Attributes:
      strategy: how the shards exchange keys, one of `key_exchange.STRATEGIES`.
    """

    scale: float
    soft_cap: float | None
    strategy: str

    def forward(self, inputs: Inputs) -> tuple[Array, Array]:
        """See FusedKernel."""
        q_BTNH, *keys, mask_BT = inputs

        def as_state(context_BTNW: Array, log_partition_BNT: Array) -> tuple[Array, Array]:
            return _by_heads(context_BTNW), log_partition_BNT[:, :, None, :, None]

        def find(pairs: Pairs, theirs: Tree, other: Array) -> tuple[Array, ...]:
            of_pairs, is_seen_BT = self._pairs(inputs, pairs, theirs, other)
            context_BTNW, log_partition_BNT = self._kernel(causal=False).forward(of_pairs)
            return as_state(context_BTNW, jnp.where(is_seen_BT[:, None], log_partition_BNT, -_HIDDEN))

        own = as_state(*self._kernel().forward(self._own_places(inputs)))
        chunk = mask_BT.shape[1] // CHUNKS_PER_SHARD
        context_BN1TW, log_partition_BN1T1 = merged_over_shards(self.strategy, chunk, tuple(keys), own, find)
        return ungrouped(context_BN1TW).astype(q_BTNH.dtype), log_partition_BN1T1[:, :, 0, :, 0]

    def backward(
        self, inputs: Inputs, context_BTNW: Array, log_partition_BNT: Array, g_BTNW: Array
    ) -> tuple[Array, Array, Array]:
        """See FusedKernel. A shard gets its dk and dv for other shards' queries in float32."""
        q_BTNH, *keys, mask_BT = inputs

        def find(pairs: Pairs, theirs: Tree, other: Array) -> tuple[Array, ...]:
            of_pairs, is_seen_BT = self._pairs(inputs, pairs, theirs, other)
            context = pairs.queries(context_BTNW, axis=1)
            g = pairs.queries(g_BTNW, axis=1)
            log_partition = pairs.queries(log_partition_BNT, axis=2)
            log_partition = jnp.where(is_seen_BT[:, None], log_partition, _HIDDEN)
            gradients = self._kernel(causal=False).backward(of_pairs, context, log_partition, g)
            return tuple(map(_by_heads, gradients))

        places = self._own_places(inputs)
        gradients = self._kernel().backward(places, context_BTNW, log_partition_BNT, g_BTNW)
        own = tuple(map(_by_heads, gradients))
        chunk = mask_BT.shape[1] // CHUNKS_PER_SHARD
        found = summed_over_shards(self.strategy, chunk, tuple(keys), own, find)
        dq, dk, dv = (ungrouped(x).astype(q_BTNH.dtype) for x in found)
        return dq, dk, dv

    def _kernel(self, *, causal: bool = True) -> Mosaic:
        return Mosaic(self.scale, self.soft_cap, causal)

    @staticmethod
    def _own_places(inputs: Inputs) -> Inputs:
        """The inputs, and the first of the shard's own keys that each query sees. Later places are later tokens."""
        chunk = inputs.mask_BT.shape[1] // CHUNKS_PER_SHARD
        early, late = chunks_of(own_shard())
        first_early = jnp.clip(inputs.mask_BT - early * chunk, 0, chunk)
        first_late = jnp.clip(inputs.mask_BT - late * chunk, 0, chunk)
        return inputs._replace(mask_BT=first_early + first_late)

    @staticmethod
    def _pairs(inputs: Inputs, pairs: Pairs, theirs: Tree, other: Array) -> tuple[Inputs, Array]:
        """The inputs of the pairs with another shard's keys. With them are the first key that each query sees, [2 B, T
        / 2], and whether it sees one: a query that sees none gets the last key."""
        chunk = pairs.chunk
        early, late = chunks_of(other)
        firsts = [
            part(inputs.mask_BT, query, chunk, 1) - chunk * jnp.where(key == 0, early, late)
            for query, key in zip(pairs.query, pairs.key, strict=True)
        ]
        first_BT = jnp.maximum(jnp.concatenate(firsts), 0)
        k, v = (pairs.keys(x, axis=1) for x in theirs)
        q = pairs.queries(inputs.q_BTNH, axis=1)
        return Inputs(q, k, v, jnp.minimum(first_BT, chunk - 1)), first_BT < chunk


def _by_heads(x_BTNH: Array) -> Array:
    """[B, N, 1, T, H] in float32, the layout of states, with tokens in dim 3."""
    return x_BTNH.astype(jnp.float32).swapaxes(1, 2)[:, :, None]
