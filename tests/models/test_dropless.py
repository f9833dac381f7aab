"""Dropless experts on every kind of mesh against sums over all experts in float64; what is exchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.models import ExpertShape
from maxtext_lite.models.experts import ExpertWeights, dropless
from maxtext_lite.parallel import (
    sharding,
)
from tests.meshes import mesh_of
from tests.models import exact

B, T, D, F, E, J = 8, 16, 16, 8, 8, 2
SHAPE = ExpertShape(num_experts=E, num_per_token=J, mlp_dim=F)
ON_INPUT = dataclasses.replace(SHAPE, on_input=True)
RNG = np.random.default_rng(0)
X, G = (RNG.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
SHARE = RNG.uniform(size=(B, T, J)).astype(np.float32)
WEIGHTS = ExpertWeights(
    *(
        RNG.normal(size=sizes).astype(np.float32)
        for sizes in ((E, D, F), (E, D, F), (E, F, D))
    )
)
EVEN = (
    np.stack([RNG.permutation(E)[:J] for _ in range(B * T)])
    .reshape(B, T, J)
    .astype(np.int32)
)
UNEVEN = np.broadcast_to(
    np.array([0, 1], np.int32), (B, T, J)
).copy()  # all of them to one or two devices
for chosen in (EVEN, UNEVEN):
    chosen[0, :3] = E  # padding


def by_hand(expert, **how):
    return exact.experts(X, expert, SHARE, WEIGHTS.arrays(), G, **how)


def assert_close(found, expected, tolerance=1e-5):
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())


def with_gradients(x, share, weights, g, expert, shape=SHAPE):
    y, back = jax.vjp(
        lambda x, share, weights: dropless(x, expert, share, weights, shape),
        x,
        share,
        weights,
    )
    dx, dshare, dweights = back(g)
    return y, dx, dshare, *dweights.arrays()


def compiled_on(mesh, function=with_gradients):
    """The program, and a function from the experts of each token to its results."""
    rows = sharding(mesh, ("global_batch", "length", None))
    places = ExpertWeights(*(sharding(mesh, axes) for axes in WEIGHTS.axes()))
    weights = ExpertWeights(*map(jax.device_put, WEIGHTS.arrays(), places.arrays()))
    x, g, share, even = (jax.device_put(array, rows) for array in (X, G, SHARE, EVEN))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        compiled = jax.jit(function).lower(x, share, weights, g, even).compile()
    return compiled, lambda expert: jax.device_get(
        compiled(x, share, weights, g, jax.device_put(expert, rows))
    )


@pytest.mark.fast
def test_weight_gradients_cross_fsdp_in_their_dtype_as_an_all_to_all():
    shape = dataclasses.replace(SHAPE, grad_dtype=jnp.bfloat16)
    compiled, run = compiled_on(
        mesh_of(fsdp=8), lambda *arguments: with_gradients(*arguments, shape)
    )
    found, want = run(EVEN), by_hand(EVEN)
    assert_close(found[:3], want[:3])
    for got, right in zip(found[3:], want[3:], strict=True):
        assert 1e-4 < np.linalg.norm(got - right) / np.linalg.norm(right) < 0.01
    assert {c.kind for c in collectives(compiled.as_text())} == {
        "all-gather",
        "all-to-all",
    }
