"""The update from given gradients does not depend on the mesh."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.training.state import gradient_shardings, state_shardings

LAYERS = "base_num_decoder_layers=4"
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", LAYERS)
ZERO = "shard_optimizer_over_data=true"
MESHES = {
    "fsdp": ((LAYERS,), {"fsdp": 8}),
    "tensor": ((LAYERS,), {"tensor": 2, "fsdp": 4}),
    "ZeRO-1": ((LAYERS, ZERO), {"data": 2, "fsdp": 4}),
    "experts": (EXPERTS, {"expert": 4, "data": 2}),
    "stages": ((LAYERS,), {"pipeline": Pipeline(2, 2, 2), "fsdp": 2}),
    "six layers": (("base_num_decoder_layers=6",), {"fsdp": 8}),
}


def after_two_updates(it):
    """The parameters and the optimizer's state, from gradients drawn by position."""
    shardings = state_shardings(it.parts)
    where = (shardings.params, shardings.opt_state)
    rng = np.random.default_rng(3)
    state = it.state()
    params, opt_state = state.params, state.opt_state
    finish = jax.jit(it.optimizer.finish, out_shardings=where)
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        for _ in range(2):
            gradients = jax.tree.map(
                lambda p: rng.standard_normal(p.shape, np.float32), it.initial.params
            )
            gradients = jax.device_put(gradients, gradient_shardings(it.parts))
            params, opt_state = finish(gradients, opt_state, params, 0.1)
    return jax.device_get((params, opt_state))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_no_update_of_muon(setup, mesh):
    keys, sizes = MESHES[mesh]
    keys = ("optimizer=muon", "adam_b1=0.8", *keys)
    found = after_two_updates(setup(*keys, **sizes))
    wanted = after_two_updates(setup(*keys))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_allclose(x, y.reshape(x.shape), rtol=2e-5, atol=2e-6)
