"""The two pairs of chunks, of a context shard's queries and another's keys, in which keys precede queries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_lite.models.tile import part, put
from maxtext_lite.parallel import own_shard


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two pairs of chunks, of a device's queries and another shard's keys, in which no key is later than a query.

    Attributes:
      query: place of the first query of each among its device's tokens.
      key: place of the first key of each among its device's tokens.
    """

    query: tuple[Any, Any]
    key: tuple[Any, Any]
    chunk: int

    @classmethod
    def of(cls, other: jax.Array, chunk: int) -> "Pairs":
        """The late queries with the early keys, and both late or both early chunks."""
        later = chunk * (other > own_shard()).astype(jnp.int32)
        return cls((chunk, later), (0, later), chunk)

    def queries(self, x: jax.Array, axis: int) -> jax.Array:
        """Both pairs' queries, [2 B, ...] from [B, ...]."""
        return jnp.concatenate([part(x, first, self.chunk, axis) for first in self.query])

    def keys(self, x: jax.Array, axis: int) -> jax.Array:
        """Both pairs' keys, [2 B, ...] from [B, ...]."""
        return jnp.concatenate([part(x, first, self.chunk, axis) for first in self.key])

    def updated(self, state: Any, found: Any, firsts: tuple[Any, Any], change: Callable[[Any, Any], Any]) -> Any:
        """`state`, arrays whose dim 3 counts tokens, after `change(before, found)` at each pair's tokens."""
        for first, *of_pair in zip(firsts, *(jnp.split(x, 2) for x in found), strict=True):
            before = tuple(part(x, first, self.chunk, axis=3) for x in state)
            state = tuple(put(x, new, first) for x, new in zip(state, change(before, tuple(of_pair)), strict=True))
        return state
