"""The state is created on its own devices, and its values do not depend on them."""

import jax
import numpy as np

from maxtext_lite.training.state import init_state, state_shardings


def test_parameters_are_created_on_their_devices_and_every_bit_of_a_seed_changes_them(
    setup,
):
    it = setup("optimizer=adamw", data=2, fsdp=2, tensor=2)
    state = init_state(it.parts, 0)
    assert {
        shard.data.shape
        for shard in state.params["layers"]["mlp"]["up"].addressable_shards
    } == {(2, 8, 12)}
    for leaf, where in zip(
        jax.tree.leaves(state), jax.tree.leaves(state_shardings(it.parts)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), it.initial)
    other = init_state(it.parts, 2**32).params["embedding"]["table"]
    assert not np.array_equal(other, state.params["embedding"]["table"])
