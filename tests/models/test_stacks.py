"""Layers of several kinds, scanned."""

import jax.numpy as jnp
import pytest

from maxtext_lite.models.stacks import scan_pattern


@pytest.mark.parametrize("kinds", ["a", "ab", "abc", "abcdefgh"])
def test_every_layer_runs_once_in_its_place_with_its_kind(kinds):
    def layer(kind, place, carry, stack):
        each = stack if place is None else stack[place]
        seen, count = carry
        return seen.at[each].set(10 * count + kinds.index(kind)), count + 1

    seen, count = scan_pattern(layer, tuple(kinds), (jnp.full(7, -1), 0), jnp.arange(7))
    assert count == 7
    assert list(seen) == [10 * number + number % len(kinds) for number in range(7)]
