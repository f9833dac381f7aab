"""What a model thinks of given tokens: log-likelihoods of continuations, and of long texts window by window."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.models import Decoder
from maxtext_lite.training.loss import likeliest_tokens, token_losses

_PADDED_TO = 64  # rows are padded to a power of two times this, so that few shapes are compiled
_TILE_TOKENS = 64  # logits of so many tokens of each row exist at a time


@dataclasses.dataclass(frozen=True)
class Scored:
    """Of one continuation.

    Attributes:
      log_likelihood: sum of its tokens' log-probabilities, in nats, each given all tokens before it.
      is_greedy: each of its tokens is the likeliest.
      num_tokens: of them.
    """

    log_likelihood: float
    is_greedy: bool
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens, of which those from `first` on are scored; `first` is at least 1."""

    tokens: Sequence[int]
    first: int


class Scorer:
    """A decoder with its parameters on a mesh, and the jitted function that scores rows.

    Args:
      rows_at_once: rows of one forward pass.
    """

    def __init__(self, decoder: Decoder, params: Any, mesh: jax.sharding.Mesh, *, rows_at_once: int):
        self._decoder, self._mesh = decoder, mesh
        self._params = jax.jit(decoder.cast)(params)
        shards = mesh.shape["fsdp"]
        self._rows = -(-rows_at_once // shards) * shards
        self._score = jax.jit(functools.partial(_row_scores, decoder))
        # The last token has no target. Where rotation follows the length it counts all the same, and must be there.
        self._unseen = 0 if decoder.shape.follows_length else 1

    def score(self, spans: Sequence[Span]) -> list[Scored]:
        """Of each span, in their order. Rows of about the same length go together."""
        found: list[Scored | None] = [None] * len(spans)
        longest_first = sorted(range(len(spans)), key=lambda number: -len(spans[number].tokens))
        for begin in range(0, len(spans), self._rows):
            numbers = longest_first[begin : begin + self._rows]
            for number, scored in zip(numbers, self._batch([spans[number] for number in numbers]), strict=True):
                found[number] = scored
        return [scored for scored in found if scored is not None]

    def _batch(self, spans: list[Span]) -> Iterator[Scored]:
        length = _padded(max(len(span.tokens) for span in spans) - self._unseen)
        token_BT, target_BT, first_B, end_B = (
            np.zeros((self._rows, length), np.int32),
            np.zeros((self._rows, length), np.int32),
            np.zeros(self._rows, np.int32),
            np.zeros(self._rows, np.int32),
        )
        for row, span in enumerate(spans):
            assert 1 <= span.first < len(span.tokens), "a span scores at least one token, after at least one"
            end_B[row], first_B[row] = len(span.tokens) - 1, span.first - 1
            seen = span.tokens[: len(span.tokens) - self._unseen]
            token_BT[row, : len(seen)], target_BT[row, : end_B[row]] = seen, span.tokens[1:]
        with jax.set_mesh(self._mesh):
            likelihood_B, is_greedy_B = jax.device_get(
                self._score(self._params, token_BT, target_BT, jnp.asarray(first_B), jnp.asarray(end_B))
            )
        for row, span in enumerate(spans):
            yield Scored(float(likelihood_B[row]), bool(is_greedy_B[row]), len(span.tokens) - span.first)


def _row_scores(
    decoder: Decoder, params: Any, token_BT: jax.Array, target_BT: jax.Array, first_B: jax.Array, end_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-likelihood [B] of the targets at positions first_B ... end_B - 1, and whether each is the likeliest."""
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    is_real_BT = position_BT < end_B[:, None] + decoder.shape.follows_length
    x_BTD = decoder.hidden(params, token_BT, is_real_BT.astype(jnp.int32), position_BT)
    head_DV = decoder.head(params).astype(x_BTD.dtype)
    tiles = T // _TILE_TOKENS
    nll_BT = token_losses(x_BTD, head_DV, target_BT, tiles, decoder.shape.final_soft_cap)
    is_scored_BT = (position_BT >= first_B[:, None]) & (position_BT < end_B[:, None])
    is_likeliest_BT = likeliest_tokens(x_BTD, head_DV, tiles) == target_BT  # a soft cap keeps their order
    return -jnp.sum(jnp.where(is_scored_BT, nll_BT, 0), axis=1), jnp.all(is_likeliest_BT | ~is_scored_BT, axis=1)


def _padded(count: int) -> int:
    length = _PADDED_TO
    while length < count:
        length *= 2
    return length


def windows(tokens: Sequence[int], *, length: int, stride: int) -> list[Span]:
    """Spans of at most `length` tokens that together score each token but the first once.

    Args:
      stride: tokens from the start of one window to that of the next; the others of a window are context that the
        window before has scored. At most length - 1.
    """
    spans, scored = [], 1
    while scored < len(tokens):
        begin = 0 if scored == 1 else scored + stride - length
        end = min(begin + length, len(tokens))
        spans.append(Span(tokens[begin:end], scored - begin))
        scored = end
    return spans
