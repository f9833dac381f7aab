"""Layers of several kinds, scanned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.stacks import layer_of, scan_pattern


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


def test_a_loop_takes_one_layer_of_a_stack_at_a_time_and_widens_no_more_than_that():
    stack = jnp.arange(5 * 300 * 7.0).reshape(5, 300, 7).astype(jnp.bfloat16)

    def products(stack):
        def product(number, found):
            return found.at[number].set(jnp.ones(300, jnp.bfloat16) @ layer_of({"weight": stack}, number)["weight"])

        return jax.lax.fori_loop(0, 5, product, jnp.zeros((5, 7), jnp.bfloat16))

    compiled = jax.jit(products).lower(stack).compile()
    expected = np.asarray(stack, np.float64).sum(axis=1)
    np.testing.assert_allclose(np.asarray(compiled(stack), np.float64), expected, rtol=2**-8)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 300 * 7  # float32 of all five would be 5 x 4 x ...


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
