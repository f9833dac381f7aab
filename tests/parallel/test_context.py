"""The order of tokens along the context axis, and the exchanges of its shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.parallel import (
    context_order,
    context_shards,
    from_all_shards,
    in_context_order,
    in_token_order,
    over_shards,
    own_shard,
    sharding,
    sum_to_shards,
    to_next_shard,
)
from tests.meshes import mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(data=2, context=4)


@pytest.mark.fast
def test_each_shard_holds_an_early_and_a_late_chunk():
    assert context_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert context_order(6, 3).tolist() == [0, 5, 1, 4, 2, 3]
    assert context_order(4, 1).tolist() == [0, 1, 2, 3]


def test_a_batch_is_arranged_over_the_mesh_in_use(mesh):
    axes = ("global_batch", "length")
    batch = {
        "tokens": jnp.arange(32).reshape(2, 16),
        "weights": jnp.arange(32.0).reshape(2, 16) / 2,
    }
    with jax.set_mesh(mesh):
        assert context_shards() == 4
        got = jax.jit(lambda batch: in_context_order(batch, axes))(batch)
        back = jax.jit(lambda x: in_token_order(x, axes))(got["tokens"])
    for name, x in batch.items():
        np.testing.assert_array_equal(got[name], np.asarray(x)[:, context_order(16, 4)])
        assert got[name].sharding.is_equivalent_to(sharding(mesh, axes), 2)
    np.testing.assert_array_equal(back, batch["tokens"])
    assert back.sharding.is_equivalent_to(sharding(mesh, axes), 2)
    assert context_shards() == 1
    assert in_context_order(batch, axes)["tokens"] is batch["tokens"]
    assert in_token_order(batch["tokens"], axes) is batch["tokens"]


def test_shards_exchange_by_their_number(mesh):
    def numbers(function, *shape):
        """The results of `function` on each shard for [its number, ...]."""

        def local(x):
            return jnp.reshape(function(own_shard() + 0 * x.reshape(shape)), (1, -1))

        x = jnp.zeros((1, 4 * int(np.prod(shape))), jnp.int32)
        with jax.set_mesh(mesh):
            return (
                jax.jit(over_shards(local, ((None, "length"),), (None, "length")))(x)
                .reshape(4, -1)
                .tolist()
            )

    assert numbers(lambda x: x, 1) == [[0], [1], [2], [3]]
    assert numbers(to_next_shard, 1) == [[3], [0], [1], [2]]
    assert numbers(from_all_shards, 1) == [[0, 1, 2, 3]] * 4
    # For shard i, each shard has its own number times i.
    assert numbers(lambda x: sum_to_shards(x * jnp.arange(4)), 4) == [
        [0],
        [6],
        [12],
        [18],
    ]
