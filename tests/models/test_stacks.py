"""Layers of several kinds, scanned."""

import jax.numpy as jnp
import pytest

from maxtext_lite.models.stacks import scan_pattern


@pytest.mark.parametrize("kinds", ["a", "ab", "abc", "abcdefgh"])
def test_every_layer_runs_once_in_its_place_with_its_kind(kinds):
    def layer(kind, place, carry, stack):
        each = stack if place is None else stack[place]
        seen, count = carry
        return seen.at[each].set(10 * count + kinds.index(kind[0])), count + 1

    of_layers = tuple((kind, None) for kind in kinds)
    seen, count = scan_pattern(layer, of_layers, (jnp.full(7, -1), 0), {None: jnp.arange(7)})
    assert count == 7
    assert list(seen) == [10 * number + number % len(kinds) for number in range(7)]


@pytest.mark.parametrize("mlps", ["dm", "mdd", "mmdmm", "dmmmmmm", "mmmddmm"])
@pytest.mark.parametrize("kinds", ["g", "lg"])
def test_layers_of_two_stacks_take_turns(kinds, mlps):
    """Regular ones by rounds, irregular ones run by run: always in the order of their numbers."""
    stack_of = [mlps[layer % len(mlps)] for layer in range(7)]
    stacks = {mlp: jnp.asarray([layer for layer in range(7) if stack_of[layer] == mlp]) for mlp in "dm"}

    def layer(kind, place, carry, stack):
        number = stack if place is None else stack[place]
        seen, count = carry
        return seen.at[count].set(100 * number + 10 * kinds.index(kind[0]) + "dm".index(kind[1])), count + 1

    period = range(len(kinds) * len(mlps))
    of_layers = tuple((kinds[layer % len(kinds)], mlps[layer % len(mlps)]) for layer in period)
    seen, _ = scan_pattern(layer, of_layers, (jnp.full(7, -1), 0), stacks)
    expected = [100 * n + 10 * (n % len(kinds)) + "dm".index(stack_of[n]) for n in range(7)]
    assert list(seen) == expected
