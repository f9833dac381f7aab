"""Logical axes become PartitionSpecs through one table; collectives along them; replicas have contiguous rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maxtext_lite.parallel import (
    all_gather_for_compute,
    axes_in_use,
    constrain,
    exchanged,
    gathered,
    largest,
    num_shards,
    over_shards,
    scattered_sum,
    shard_index,
    sharding,
    summed,
    with_dims,
)
from tests.meshes import mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(data=2, fsdp=2, tensor=2)


def test_shards_are_counted_over_all_mesh_axes_of_a_name(mesh):
    assert num_shards("global_batch") == 1
    x = np.ones((2, 3))
    assert constrain(x, ("batch", None)) is x
    with jax.set_mesh(mesh):
        names = "batch", "global_batch", "heads", "length", "residual_length", "norm"
        assert [num_shards(axis) for axis in names] == [2, 4, 2, 1, 2, 1]


def test_a_dim_that_does_not_divide_falls_back_to_its_uneven_axis_and_dims_are_replaced(
    mesh,
):
    with jax.set_mesh(mesh):
        lay_out = jax.jit(
            lambda *arrays: [
                constrain(x, ("batch", "residual_length", None)) for x in arrays
            ]
        )
        whole, odd = lay_out(np.zeros((2, 4, 3)), np.zeros((2, 1, 3)))
    assert whole.sharding.shard_shape(whole.shape) == (1, 2, 3)
    assert odd.sharding.shard_shape(odd.shape) == (1, 1, 3)
    where = sharding(mesh, ("layers", "embed", "mlp"))
    assert with_dims(where, 3, 0, 1, 2).spec == jax.P(
        None, None, ("expert", "context", "fsdp"), "tensor"
    )


def test_the_gradient_of_a_gathered_weight_is_sharded_like_the_stored_weight(mesh):
    lies_as, weight, place = (
        ("embed", "mlp"),
        np.arange(24, dtype=np.float32).reshape(4, 6),
        np.array([1, 3, 1, 1]),
    )
    want = np.zeros_like(weight)
    np.add.at(want, place, 2 * weight[place])

    def total(w):
        return jnp.sum(
            jnp.square(all_gather_for_compute(w, axes_in_use(lies_as), lies_as)[place])
        )

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(total))(jax.device_put(weight, sharding(mesh, lies_as)))
    assert_array_equal(got, want)
    assert got.sharding.shard_shape(got.shape) == (2, 3)


# ---- Collectives ----------------------------------------------------------------------------------------------------

X = np.arange(32, dtype=np.float32).reshape(8, 4)
AXES = ("batch", "activation_mlp")
WHOLE = ("exchanged_batch", "activation_mlp")


def run_on(function, out_axes, **sizes):
    """Results for X, of which each device has rows and columns, and the lowered program."""
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        lowered = jax.jit(over_shards(function, [AXES], out_axes)).lower(
            jax.device_put(X, sharding(mesh, AXES))
        )
        return jax.device_get(lowered.compile()(X)), lowered.as_text()


def test_parts_are_gathered_scattered_summed_and_numbered_along_a_logical_axis():
    """fsdp 2 x experts 2 x columns 2: each device has two rows, of the first for the first device of its axis."""

    def everything(x):
        scattered = scattered_sum(jnp.concatenate([x, 10 * x]), "experts", 0)
        return (
            gathered(x, "experts", 0),
            scattered,
            summed(x, "mlp"),
            0 * x + shard_index("experts"),
        )

    out_axes = [WHOLE, AXES, ("batch", None), AXES]
    (all_rows, scattered, sums, numbers), _ = run_on(
        everything, out_axes, fsdp=2, expert=2, tensor=2
    )
    assert_array_equal(all_rows, X)
    for half in (slice(0, 4), slice(4, 8)):
        total = X[half][:2] + X[half][2:]
        assert_array_equal(scattered[half], np.concatenate([total, 10 * total]))
    assert_array_equal(sums, X[:, :2] + X[:, 2:])
    assert_array_equal(numbers[:, 0], [0, 0, 1, 1, 0, 0, 1, 1])


def test_parts_are_exchanged_the_largest_is_found_and_narrow_parts_are_added_in_float32():
    """Four devices with two rows each: the first gets the first halves. 1 and 2^-8 are bfloat16, their sum not."""

    def everything(x):
        part = jnp.where(shard_index("experts") == 0, 1.0, 2.0**-8) * jnp.ones((4, 4))
        total = scattered_sum(part.astype(jnp.bfloat16), "experts", 0)
        return (
            exchanged(jnp.repeat(x, 2, axis=0), "experts"),
            largest(x, "experts"),
            total,
        )

    (sent, most, total), _ = run_on(everything, [AXES, WHOLE, AXES], expert=4)
    assert_array_equal(
        sent, X.reshape(4, 2, 4).swapaxes(0, 1).repeat(2, axis=0).reshape(16, 4)
    )
    assert_array_equal(most, X[6:])
    assert_array_equal(total, np.full((4, 4), 1 + 3 * 2.0**-8, np.float32))


def test_collectives_along_an_unsplit_axis_are_the_identity():
    def function(x):
        x = exchanged(largest(x, "experts"), "experts")
        return summed(
            scattered_sum(gathered(x, "experts", 0), "experts", 0), "experts"
        ) + shard_index("experts")

    got, text = run_on(function, AXES, fsdp=2, tensor=2)
    assert_array_equal(got, X)
    assert not [
        word
        for word in ("all_gather", "all_to_all", "all_reduce", "partition_id")
        if word in text
    ]
    assert_array_equal(jax.jit(function)(X), X)  # without a mesh
