"""Decoding token by token: the key/value cache, attention over it, and sampling of the next token."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.models.attention import PLAIN, Scoring

_QUERIES = 512


class KVCache(NamedTuple):
    """Keys [L, B, K, S, H] and values [L, B, K, S, W] of the tokens seen so far.

    A head's positions are contiguous, in the order in which attention reads them. Latent attention has one kv head for
    all queries, whose values are the first dims of its keys: `value` is None. On a CPU two-byte numbers are stored as
    their bits, uint16: XLA would cast a whole cache to float32 to write one token's bfloat16 into it, in every layer.

    Attributes:
      states: [L, B, ...] of layers without attention, by kind and name; L counts the layers of a kind, as above.
    """

    key: Array
    value: Array | None
    states: dict[str, dict[str, Array]] = {}  # noqa: RUF012

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

        return self._replace(key=grown(self.key), value=None if self.value is None else grown(self.value))


@dataclasses.dataclass(frozen=True)
class Memory:
    """The tokens of a layer without attention, and what it keeps of those before them.

    Attributes:
      segment_BT: document number of each token, 0 for padding, which changes no state. With a cache all tokens continue
        one document.
      position_BT: position of each token in its document.
      state: after the tokens before these, float32 [B, ...] by name: zeros in training and at first.
      cache: None: nothing is kept.
      kind, layer: the layer's place in the cache.
    """

    segment_BT: Array
    position_BT: Array
    state: dict[str, Array]
    kind: str
    cache: KVCache | None = None
    layer: Array | None = None

    def kept(self, state: dict[str, Array]) -> KVCache | None:
        """The cache with the state after these tokens."""
        if self.cache is None:
            return None
        of_kind = self.cache.states[self.kind]
        of_kind = {name: all_LB.at[self.layer].set(state[name]) for name, all_LB in of_kind.items()}
        return self.cache._replace(states={**self.cache.states, self.kind: of_kind})


@dataclasses.dataclass(frozen=True)
class CachedAttend:
    """Attention of new tokens over a layer of the cache, after their keys and values are written to it.

    The cache has all layers and is carried from one to the next, so only the new tokens' entries are ever written.

    Attributes:
      position_BT: positions of the new tokens, each below the cache's S.
      layer: number of the layer in the cache.
      scoring: how queries score keys, and how many they see; with a scale, because keys may be wider in the cache.
    """

    position_BT: Array
    cache: KVCache
    layer: Array
    scoring: Scoring = PLAIN

    def __call__(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKW: Array | None, sink_N: Array | None
    ) -> tuple[Array, KVCache]:
        """Context [B, T, N, W] in the dtype of q_BTNH, and the cache with the new tokens; the softmax is float32.

        Args:
          v_BTKW: None for a cache without values: the keys are then the values, and W is H.
          sink_N: each head's learned score without a key, which takes part in the softmax; None: no sinks.
        """
        B, T, N, _ = q_BTNH.shape
        key_LBKSH, key_BKSH = self._written(self.cache.key, k_BTKH)
        value_LBKSW = None
        value_BKSW = key_BKSH
        if self.cache.value is not None:
            assert v_BTKW is not None
            value_LBKSW, value_BKSW = self._written(self.cache.value, v_BTKW)
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
        return jnp.concatenate(contexts, axis=1), self.cache._replace(key=key_LBKSH, value=value_LBKSW)

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
            key_BKSH, q_BKTGH, (((3,), (4,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
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

    def _written(self, all_LBKSH: Array, new_BTKH: Array) -> tuple[Array, Array]:
        """All layers' entries with the new tokens, and this layer's."""
        row_B1 = jnp.arange(new_BTKH.shape[0])[:, None]
        as_bits = all_LBKSH.dtype == jnp.uint16
        dtype = new_BTKH.dtype if as_bits else all_LBKSH.dtype
        stored_BTKH = new_BTKH.view(jnp.uint16) if as_bits else new_BTKH.astype(dtype)
        all_LBKSH = all_LBKSH.at[self.layer, row_B1, :, self.position_BT].set(stored_BTKH)
        return all_LBKSH, jax.lax.dynamic_index_in_dim(all_LBKSH, self.layer, keepdims=False).view(dtype)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the k likeliest tokens; 0: all.
      top_p: only the smallest set of tokens whose probabilities, at this temperature, sum to at least p; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def policy_temperature(self) -> float:
        """The temperature of the distribution that reinforcement learning trains; 1, the model's own, if greedy."""
        return self.temperature or 1.0


def sample_token(logits_BV: Array, key_B: Array, sampling: Sampling, scored_at: float = 1.0) -> tuple[Array, Array]:
    """The next token of each sequence, and its log-probability.

    Args:
      logits_BV: float32 logits.
      key_B: one PRNG key per sequence, so that a sequence's text does not depend on its neighbours.
      scored_at: temperature of the distribution of the log-probabilities; 1: the model's own.
    Returns:
      Tokens [B] int32, and log-probabilities [B] float32 over the whole vocabulary, even if `sampling` restricts it.
    Source: top-p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    log_probability_BV = jax.nn.log_softmax(logits_BV / scored_at, axis=-1)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        scaled_BV = logits_BV / sampling.temperature
        if sampling.top_k:
            kth_B1 = jax.lax.top_k(scaled_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:]
            scaled_BV = jnp.where(scaled_BV < kth_B1, -jnp.inf, scaled_BV)
        if sampling.top_p < 1:  # the only case that sorts the vocabulary
            ordered_BV = -jnp.sort(-scaled_BV, axis=-1)
            probability_BV = jax.nn.softmax(ordered_BV, axis=-1)
            before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
            kept_BV = before_BV < sampling.top_p
            least_B1 = jnp.min(jnp.where(kept_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
            # Of equally likely tokens the first ones are kept.
            above_BV = scaled_BV > least_B1
            equal_BV = scaled_BV == least_B1
            left_B1 = (kept_BV.sum(axis=-1) - above_BV.sum(axis=-1))[:, None]
            scaled_BV = jnp.where(above_BV | (equal_BV & (equal_BV.cumsum(axis=-1) <= left_B1)), scaled_BV, -jnp.inf)
        token_B = jax.vmap(jax.random.categorical)(key_B, scaled_BV)
    chosen_B = jnp.take_along_axis(log_probability_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B.astype(jnp.int32), chosen_B
