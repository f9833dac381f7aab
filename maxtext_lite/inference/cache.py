"""The key/value cache, and attention over it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.models.attention import PLAIN, Scoring
from maxtext_lite.models.layers import OverCache

_QUERIES = 512


class KVCache(NamedTuple):
    """Keys [L, B, K, S, H] and values [L, B, K, S, W] of the tokens seen so far.

    A head's positions are contiguous, in the order in which attention reads them. Latent attention has one kv head for
    all queries, whose values are the first dims of its keys: `value` is None. On a CPU two-byte numbers are stored as
    their bits, uint16: XLA would cast a whole cache to float32 to write one token's bfloat16 into it, in every layer.

    Attributes:
      wide: keys and values of layers without a window, where their heads have other sizes.
      states: [L, B, ...] of layers without attention, by kind and name; L counts the layers of a kind, as above.
    """

    key: Array
    value: Array | None
    states: dict[str, dict[str, Array]] = {}  # noqa: RUF012
    wide: "KVCache | None" = None

    @staticmethod
    def empty(sizes: tuple[int, ...], key_dim: int, value_dim: int | None, dtype: DTypeLike) -> "KVCache":
        """A cache of zeros.

        Args:
          sizes: the layers, the sequences, the kv heads and the most tokens of a sequence.
        """
        if jnp.dtype(dtype).itemsize == 2 and jax.default_backend() == "cpu":
            dtype = jnp.uint16
        value = None if value_dim is None else jnp.zeros((*sizes, value_dim), dtype)
        return KVCache(jnp.zeros((*sizes, key_dim), dtype), value)

    def grown(self, num_positions: int) -> "KVCache":
        """The cache with room for sequences of at most this many tokens, more than before."""

        def grown(x_LBKSH: Array) -> Array:
            more = num_positions - x_LBKSH.shape[3]
            return jnp.pad(x_LBKSH, ((0, 0), (0, 0), (0, 0), (0, more), (0, 0)))

        value = None if self.value is None else grown(self.value)
        wide = None if self.wide is None else self.wide.grown(num_positions)
        return self._replace(key=grown(self.key), value=value, wide=wide)


@dataclasses.dataclass(frozen=True)
class CachedAttend(OverCache):
    """Attention of new tokens over a layer of the cache, after their keys and values are written to it.

    The cache has all layers and is carried from one to the next, so only the new tokens' entries are ever written.

    Attributes:
      position_BT: positions of the new tokens, each below the cache's S.
      layer: number of the layer in the cache.
      scoring: how queries score keys, and how many they see; with a scale, because keys may be wider in the cache.
      is_wide: the layer is in the cache's `wide`.
    """

    position_BT: Array
    cache: KVCache
    layer: Array
    scoring: Scoring = PLAIN
    is_wide: bool = False

    def __call__(
        self, q_BTNH: Array, k_BTKH: Array | None, v_BTKW: Array | None, sink_N: Array | None
    ) -> tuple[Array, KVCache]:
        """Context [B, T, N, W] in q_BTNH's dtype, and the cache with the new tokens; the softmax is float32.

        Args:
          k_BTKH: None, like v_BTKW, if another layer has written this layer's keys and values.
          v_BTKW: None for a cache without values: the keys are then the values, and W is H.
          sink_N: each head's learned score without a key, which takes part in the softmax; None: no sinks.
        """
        B, T, N, _ = q_BTNH.shape
        cache: Any = self.cache.wide if self.is_wide else self.cache
        key_LBKSH, key_BKSH = self._written(cache.key, k_BTKH, q_BTNH.dtype)
        value_LBKSW = None
        value_BKSW = key_BKSH
        if cache.value is not None:
            value_LBKSW, value_BKSW = self._written(cache.value, v_BTKW, q_BTNH.dtype)
        attend = functools.partial(self._attend, key_BKSH=key_BKSH, value_BKSW=value_BKSW, sink_N=sink_N)
        # A prompt's queries run in blocks, so the memory for their scores is linear in the tokens.
        num_blocks = T // _QUERIES
        whole = num_blocks * _QUERIES
        contexts: list[Array] = []
        if num_blocks:
            q_blocks = q_BTNH[:, :whole].reshape(B, num_blocks, -1, *q_BTNH.shape[2:])
            position_blocks = self.position_BT[:, :whole].reshape(B, num_blocks, -1)
            blocks = (jnp.moveaxis(q_blocks, 1, 0), jnp.moveaxis(position_blocks, 1, 0))
            context = jax.lax.map(lambda block: attend(*block), blocks)
            contexts.append(jnp.moveaxis(context, 0, 1).reshape(B, whole, N, -1))
        if whole < T:
            contexts.append(attend(q_BTNH[:, whole:], self.position_BT[:, whole:]))
        cache = cache._replace(key=key_LBKSH, value=value_LBKSW)
        return jnp.concatenate(contexts, axis=1), self.cache._replace(wide=cache) if self.is_wide else cache

    def _attend(
        self,
        q_BTNH: Array,
        position_BT: Array,
        *,
        key_BKSH: Array,
        value_BKSW: Array,
        sink_N: Array | None,
    ) -> Array:
        """Context [B, T, N, W] of some of the new tokens."""
        B, T, N, H = q_BTNH.shape
        q_BKTGH = q_BTNH.reshape(B, T, key_BKSH.shape[1], -1, H).swapaxes(1, 2)
        # The keys are the first factor: as the second, some compilers would transpose all of them.
        product_BKSTG = jax.lax.dot_general(
            key_BKSH,
            q_BKTGH,
            (((3,), (4,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        product_BKGTS = jnp.transpose(product_BKSTG, (0, 1, 4, 3, 2))
        score_BKGTS = self.scoring.score(product_BKGTS, H)
        key_11S = jnp.arange(key_BKSH.shape[2])[None, None, :]
        query_BT1 = position_BT[:, :, None]
        seen_BTS = key_11S <= query_BT1
        if self.scoring.window is not None:
            seen_BTS &= query_BT1 - key_11S < self.scoring.window
        if self.scoring.chunk is not None:
            seen_BTS &= key_11S // self.scoring.chunk == query_BT1 // self.scoring.chunk
        score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, -jnp.inf)
        if sink_N is not None:  # one more key, whose weight is dropped
            sink_KG11 = sink_N.astype(jnp.float32).reshape(*score_BKGTS.shape[1:3], 1, 1)
            sink_BKGT1 = jnp.broadcast_to(sink_KG11, (*score_BKGTS.shape[:-1], 1))
            score_BKGTS = jnp.concatenate([score_BKGTS, sink_BKGT1], axis=-1)
        weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(value_BKSW.dtype)[..., : value_BKSW.shape[2]]
        context_BKGTW = jax.lax.dot_general(weight_BKGTS, value_BKSW, (((4,), (2,)), ((0, 1), (0, 1))))
        return jnp.transpose(context_BKGTW, (0, 3, 1, 2, 4)).reshape(B, T, N, -1).astype(q_BTNH.dtype)

    def _written(self, all_LBKSH: Array, new_BTKH: Array | None, dtype: DTypeLike) -> tuple[Array, Array]:
        """All layers' entries with the new tokens, and this layer's; those stored as bits have this dtype."""
        as_bits = all_LBKSH.dtype == jnp.uint16
        dtype = dtype if as_bits else all_LBKSH.dtype
        if new_BTKH is not None:
            row_B1 = jnp.arange(new_BTKH.shape[0])[:, None]
            stored_BTKH = new_BTKH.view(jnp.uint16) if as_bits else new_BTKH.astype(dtype)
            all_LBKSH = all_LBKSH.at[self.layer, row_B1, :, self.position_BT].set(stored_BTKH)
        return all_LBKSH, jax.lax.dynamic_index_in_dim(all_LBKSH, self.layer, keepdims=False).view(dtype)
