"""Moments in few bits follow what float32 ones do, lie where their parameters do, and take what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import load_config
from maxtext_lite.kernels.moments import to_bfloat16, to_int8, widen
from maxtext_lite.training import train
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.optimizer import GradientAccumulation
from tests.training.conftest import TINY
from tests.training.test_meshes_of_the_update import MESHES, update_twice


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_the_second_moment_of_a_constant_gradient_is_its_square(dtype, b2):
    """After 5,000 updates, on average over 2,048 elements of one size, and over as many of sizes down to 1/1000. The
    nearest bfloat16 would stay below 1/4 with b2 = 0.999."""
    sizes = np.stack([np.ones(2048), np.geomspace(1e-3, 1, 2048)])
    gradient = jnp.asarray(sizes, jnp.float32)
    optimizer = GradientAccumulation(
        optax.scale_by_adam(0.9, b2), state_dtype=dtype, seed=3
    )

    def update(_, state):
        return optimizer.finish(gradient, state, gradient, jnp.float32(0))[1]

    state = jax.jit(lambda s: jax.lax.fori_loop(0, 5000, update, s))(
        optimizer.init(gradient)
    )
    adam = widen(state).inner_opt_state
    for moment, power in ((adam.mu, 1), (adam.nu, 2)):
        ratio = np.float64(moment) / sizes**power
        assert_allclose(ratio.mean(axis=1), 1 - (power == 2) * b2**5000, atol=0.015)
        assert_allclose(ratio[0], 1, atol=0.1)
    assert (np.asarray(adam.nu) > 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounding_has_the_value_as_its_mean_and_keeps_what_has_a_code(dtype):
    values = np.float32([0, 3e-7, -0.3, 0.7, 1.0, -1.0, 1e-30, 2.5])
    tree = {"mu": np.tile(values, (4096, 32)), "nu": np.tile(abs(values), (4096, 32))}
    state = optax.ScaleByAdamState(jnp.int32(1), **tree)
    narrow = {"bfloat16": to_bfloat16, "int8": to_int8}[dtype]
    once = narrow(state, jax.random.key(1))
    again = narrow(widen(once), jax.random.key(2))
    jax.tree.map(assert_array_equal, once, again)
    found = widen(once)
    for name, moment in (("mu", found.mu), ("nu", found.nu)):
        mean = np.float64(moment).reshape(-1, 8).mean(axis=0)
        assert_allclose(mean, tree[name][0, :8], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        ("fsdp", "optimizer_state_dtype=bfloat16 optimizer=lion"),
        ("tensor", "optimizer_state_dtype=int8"),
        ("ZeRO-1", "optimizer_state_dtype=int8 optimizer=muon"),
        ("experts", "optimizer_state_dtype=int8 optimizer=sgd sgd_momentum=0.9"),
        ("stages", "optimizer_state_dtype=bfloat16"),
    ],
)
def test_a_mesh_changes_no_bit_of_a_moment(setup, mesh, keys):
    of_mesh, sizes = MESHES[mesh]
    keys = (*keys.split(), *of_mesh, "gradient_clipping_threshold=0")
    _, (_, found) = update_twice(setup(*keys, **sizes))
    _, (_, wanted) = update_twice(setup(*keys))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_array_equal(x, y.reshape(x.shape))


RUN = "dataset_type=synthetic global_batch_size=8 per_device_batch_size=-1 eval_interval=-1 run_name=run steps=2"
RESTORED = [  # dtypes of the checkpoint and of the resume, and the keys of the resume
    ("float32", "int8", "ici_pipeline_parallelism=2"),
    ("int8", "bfloat16", "shard_optimizer_over_data=true ici_data_parallelism=4"),
    ("int8", "float32", "optimizer_memory_host_offload=true ici_tensor_parallelism=2"),
]


@pytest.mark.parametrize(("saved", "here", "keys"), RESTORED)
def test_a_resume_converts_moments_on_any_mesh(tmp_path, saved, here, keys):
    def config_of(*more):
        path = f"base_output_directory={tmp_path}"
        return load_config(None, [*TINY, *RUN.split(), path, *more])

    then = train(config_of(f"optimizer_state_dtype={saved}")).state
    run = open_run(config_of(f"optimizer_state_dtype={here}", *keys.split()))
    with run.opened(print):
        now, _ = run.restore_or_init()
    states = (
        widen(jax.device_get(state.opt_state)).inner_opt_state[1]
        for state in (now, then)
    )
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        error = np.linalg.norm(x - y.reshape(x.shape))
        assert error <= (0.03 if here != "float32" else 0) * np.linalg.norm(y)
    wanted, found = map(jax.tree.leaves, (run.abstract_state, now))
    for like, x in zip(wanted, found, strict=True):
        assert (like.shape, like.dtype, like.sharding) == (x.shape, x.dtype, x.sharding)
