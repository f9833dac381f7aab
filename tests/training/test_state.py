"""The state is created on its own devices, and its values do not depend on them."""

import jax
import numpy as np
import pytest

from maxtext_lite.training.state import abstract_state, init_state, state_shardings


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_optimizer_state_lies_with_its_parameter(optimizer, setup):
    it = setup(f"optimizer={optimizer}", data=2, fsdp=2, tensor=2)
    shardings = state_shardings(it.parts)
    abstract = abstract_state(it.parts)
    big = [leaf for leaf in jax.tree.leaves(abstract.opt_state) if leaf.shape == (2, 16, 24)]
    assert all(leaf.sharding.spec == jax.P("stage", ("expert", "context", "fsdp"), "tensor") for leaf in big)
    if optimizer != "adafactor":  # which keeps row and column sums instead
        assert len(big) >= 2
    assert shardings.params["head"]["projection"].spec == jax.P(("expert", "context", "fsdp"), "tensor")
    assert shardings.step.is_fully_replicated


def test_parameters_are_created_on_their_devices(setup):
    it = setup("optimizer=adamw", data=2, fsdp=2, tensor=2)
    state = init_state(it.parts, 0)
    up = state.params["layers"]["mlp"]["up"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 8, 12)}
    jax.tree.map(
        lambda leaf, where: leaf.sharding.is_equivalent_to(where, leaf.ndim) or pytest.fail(str(leaf.sharding)),
        state,
        state_shardings(it.parts),
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), setup("optimizer=adamw").initial)


def test_every_bit_of_a_seed_changes_the_parameters(setup):
    parts = setup("optimizer=adamw").parts
    tables = [init_state(parts, seed).params["embedding"]["table"] for seed in (0, 2**32)]
    assert not np.array_equal(*tables)


def test_shapes_of_the_state_are_found_without_running_anything(setup):
    """While a step is compiled for unattached devices, nothing may run on the default device."""
    it = setup("optimizer=adamw", data=2, fsdp=2, tensor=2)
    with jax.transfer_guard("disallow"):
        abstract_state(it.parts)
