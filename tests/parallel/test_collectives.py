"""Collectives inside `over_shards`, and the identity along an axis that is not split."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.parallel import (
    MESH_AXES,
    exchanged,
    gathered,
    largest,
    make_mesh,
    over_shards,
    scattered_sum,
    shard_index,
    sharding,
    summed,
)

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
AXES = ("batch", "activation_mlp")


def _run(function, out_axes, **sizes):
    sizes = dict.fromkeys(MESH_AXES, 1) | sizes
    mesh = make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: int(np.prod(list(sizes.values())))])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, sharding(mesh, AXES))
        lowered = jax.jit(over_shards(function, [AXES], out_axes)).lower(x)
        return np.asarray(lowered.compile()(x)), lowered.as_text()


def test_parts_are_gathered_along_a_logical_axis():
    got, _ = _run(
        lambda x: gathered(x, "experts", 0), ("exchanged_batch", "activation_mlp"), fsdp=2, expert=2, tensor=2
    )
    np.testing.assert_array_equal(got, X)


def test_sums_are_scattered_to_the_devices_of_each_part():
    """Each device has its rows for the first along the axis, and ten times them for the second."""

    def function(x):
        return scattered_sum(jnp.concatenate([x, 10 * x]), "experts", 0)

    got, _ = _run(function, AXES, fsdp=2, expert=2, tensor=2)
    for half in (slice(0, 4), slice(4, 8)):  # of the fsdp axis: two devices with two rows each
        total = X[half][:2] + X[half][2:]
        np.testing.assert_array_equal(got[half], np.concatenate([total, 10 * total]))


def test_narrow_parts_of_a_sum_are_added_in_float32():
    """1 and 2^-8 are bfloat16; their sum is not."""

    def function(x):
        part = jnp.where(shard_index("experts") == 0, 1.0, 2.0**-8) * jnp.ones_like(x)
        return scattered_sum(part.astype(jnp.bfloat16), "experts", 0)

    got, _ = _run(function, ("batch", "activation_mlp"), expert=2)
    np.testing.assert_array_equal(got, np.full((4, 4), 1 + 2.0**-8, np.float32))


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sets_under_vmap_are_exchanged_and_summed_as_each_alone(sets, dim):
    """Dims of size 1 are not sent, because TPUs pad them to whole tiles."""

    def of_one(x, factor):
        x = jnp.moveaxis(factor * x[:, None], 0, dim)  # whose other dims are 1 and 4
        whole = scattered_sum(jnp.concatenate([x, 10 * x], axis=dim), "experts", dim)
        return jnp.moveaxis(whole, dim, 0)[:, 0] + exchanged(x.reshape(-1, 1), "experts").reshape(-1, 4)

    factor = jnp.arange(1.0, sets + 1)

    def of_all(x):
        return jax.vmap(of_one, in_axes=(None, 0), out_axes=1)(x, factor).reshape(len(x), -1)

    alone = [_run(lambda x, f=f: of_one(x, f), AXES, expert=2)[0] for f in factor]
    got, text = _run(of_all, AXES, expert=2)
    np.testing.assert_array_equal(got, np.concatenate(alone, axis=1))
    sent = re.findall(r"all_to_all.*-> tensor<([\dx]+)xf32>", text)
    assert sorted(sent) == (["16", "2x4x4"] if sets == 1 else ["3x16", "3x2x4x4"])


def test_parts_are_exchanged_and_the_largest_is_found():
    """Four devices with two rows each; afterwards the first has the first halves of all rows."""
    got, _ = _run(lambda x: exchanged(jnp.repeat(x, 2, axis=0), "experts"), AXES, expert=4)
    np.testing.assert_array_equal(got, X.reshape(4, 2, 4).swapaxes(0, 1).repeat(2, axis=0).reshape(16, 4))
    got, _ = _run(lambda x: largest(x, "experts"), ("exchanged_batch", "activation_mlp"), expert=4)
    np.testing.assert_array_equal(got, X[6:])


def test_sums_over_an_axis_and_the_number_of_a_part():
    got, _ = _run(lambda x: summed(x, "mlp"), ("batch", None), fsdp=2, expert=2, tensor=2)
    np.testing.assert_array_equal(got, X[:, :2] + X[:, 2:])
    got, _ = _run(lambda x: 0 * x + shard_index("experts"), AXES, fsdp=2, expert=2, tensor=2)
    np.testing.assert_array_equal(got[:, 0], [0, 0, 1, 1, 0, 0, 1, 1])


def test_collectives_along_an_unsplit_axis_are_the_identity():
    def function(x):
        x = exchanged(largest(x, "experts"), "experts")
        return summed(scattered_sum(gathered(x, "experts", 0), "experts", 0), "experts") + shard_index("experts")

    got, text = _run(function, AXES, fsdp=2, tensor=2)
    np.testing.assert_array_equal(got, X)
    assert not [word for word in ("all_gather", "all_to_all", "all_reduce", "partition_id") if word in text]
    np.testing.assert_array_equal(function(jnp.asarray(X)), X)  # without a mesh
