"""The update from given gradients does not depend on the mesh, and costs on each device what the plan says."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.analysis.hlo import collectives, parse, work
from maxtext_lite.analysis.optimizer_state import orthogonalized
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.training.state import gradient_shardings, state_shardings

LAYERS = "base_num_decoder_layers=4"
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", LAYERS)
ZERO = "shard_optimizer_over_data=true"
MESHES = {
    "fsdp": ((LAYERS,), {"fsdp": 8}),
    "tensor": ((LAYERS,), {"tensor": 2, "fsdp": 4}),
    "data": ((LAYERS,), {"data": 2, "fsdp": 2}),
    "ZeRO-1": ((LAYERS, ZERO), {"data": 2, "fsdp": 4}),
    "experts": (EXPERTS, {"expert": 4, "data": 2}),
    "stages": ((LAYERS,), {"pipeline": Pipeline(2, 2, 2), "fsdp": 2}),
    "six layers": (("base_num_decoder_layers=6",), {"fsdp": 8}),
}


def update_twice(it):
    """The text of the compiled update, and the parameters and state after two updates by random gradients."""
    shardings = state_shardings(it.parts)
    where = (shardings.params, shardings.opt_state)
    gradients_on_mesh = gradient_shardings(it.parts)

    def draw(seed):
        rng = np.random.default_rng(seed)
        gradients = jax.tree.map(
            lambda p: rng.standard_normal(p.shape, np.float32), it.initial.params
        )
        return jax.device_put(gradients, gradients_on_mesh)

    state = it.state()
    params, opt_state = state.params, state.opt_state
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        finish = jax.jit(it.optimizer.finish, out_shardings=where)
        compiled = finish.lower(draw(0), opt_state, params, 0.1).compile()
        for seed in range(2):
            params, opt_state = compiled(draw(seed), opt_state, params, 0.1)
    return compiled.as_text(), jax.device_get((params, opt_state))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_no_update_of_muon(setup, mesh):
    keys, sizes = MESHES[mesh]
    keys = ("optimizer=muon", "adam_b1=0.8", *keys)
    it = setup(*keys, **sizes)
    hlo, found = update_twice(it)
    _, wanted = update_twice(setup(*keys))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_allclose(x, y.reshape(x.shape), rtol=2e-5, atol=2e-6)

    planned = list(orthogonalized(it.config, it.mesh.shape))
    module = parse(hlo)
    (flops,) = work(module).matmul_flops.values()
    assert flops == sum(2 * stack.products for stack in planned)
    sent = sum(
        each.payload_bytes for each in collectives(module) if each.kind == "all-to-all"
    )
    assert sent == sum(
        2 * len(stack.exchanged) * 4 * stack.matrices * stack.elements
        for stack in planned
    )
