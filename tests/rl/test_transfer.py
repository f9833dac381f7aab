"""Parameters arrive complete from any trainer on any devices."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from maxtext_lite.models import Adapted, Decoder, Lora
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.post_training.rollout import Transfer, sampling_mesh
from tests.meshes import mesh_of
from tests.rl.test_rollout import LLAMA, parameters

LORA = Lora(rank=2, alpha=6.0, targets=("query", "down"))
TRAINED = dataclasses.replace(LLAMA, num_layers=4, dtype=jnp.bfloat16, lora=LORA)


def test_parameters_come_from_adapters_and_pipelines_of_other_devices():
    trainer = Decoder(
        TRAINED, Pipeline(num_stages=2, num_microbatches=2, num_repeats=2)
    )
    mesh = mesh_of(stage=2, fsdp=2)
    host = parameters(trainer)
    params = jax.device_put(host, tree_shardings(mesh, trainer.axes))
    sampler = Decoder(dataclasses.replace(TRAINED, lora=None))
    sizes = {"data": 2, "fsdp": 1, "tensor": 2}
    there = sampling_mesh(jax.devices()[2:6], sizes)
    found = Transfer(sampler, there)(params)
    jax.tree.map(lambda x: x.delete(), params)  # as the trainer's next step does

    def expected(leaf):
        if isinstance(leaf, Adapted):
            a, b = (np.asarray(x, np.float64) for x in (leaf.a, leaf.b))
            stack = leaf.weight.shape[:2]
            product = a.reshape(*stack, -1, 2) @ b.reshape(*stack, 2, -1)
            leaf = leaf.weight + 3.0 * product.reshape(leaf.weight.shape)
        return leaf

    wanted = jax.tree.map(
        expected, host, is_leaf=lambda node: isinstance(node, Adapted)
    )
    wanted["layers"] = jax.tree.map(
        lambda x: x.reshape(4, *x.shape[2:]), wanted["layers"]
    )
    for (path, x), want, where in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(wanted),
        jax.tree.leaves(tree_shardings(there, sampler.axes)),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        assert x.sharding == where, name
        assert x.dtype == (jnp.float32 if "norm" in name else jnp.bfloat16), name
        assert x.shape == want.shape, name
        want = want if "norm" in name else want.astype(ml_dtypes.bfloat16)
        np.testing.assert_allclose(
            np.asarray(x, np.float64),
            np.asarray(want, np.float64),
            rtol=1e-2,
            err_msg=name,
        )
