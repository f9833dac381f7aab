"""What devices tell each other inside `over_shards`, and that they say nothing where an axis is not split."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.parallel import (
    MESH_AXES,
    gathered,
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


def test_sums_are_scattered_to_those_whose_part_it_is():
    """Each device has its rows for the first along the axis, and ten times them for the second."""

    def function(x):
        return scattered_sum(jnp.concatenate([x, 10 * x]), "experts", 0)

    got, _ = _run(function, AXES, fsdp=2, expert=2, tensor=2)
    for half in (slice(0, 4), slice(4, 8)):  # of the fsdp axis: two devices with two rows each
        total = X[half][:2] + X[half][2:]
        np.testing.assert_array_equal(got[half], np.concatenate([total, 10 * total]))


def test_sums_over_an_axis_and_the_number_of_a_part():
    got, _ = _run(lambda x: summed(x, "mlp"), ("batch", None), fsdp=2, expert=2, tensor=2)
    np.testing.assert_array_equal(got, X[:, :2] + X[:, 2:])
    got, _ = _run(lambda x: 0 * x + shard_index("experts"), AXES, fsdp=2, expert=2, tensor=2)
    np.testing.assert_array_equal(got[:, 0], [0, 0, 1, 1, 0, 0, 1, 1])


def test_where_nothing_is_split_nothing_is_said():
    def function(x):
        return summed(scattered_sum(gathered(x, "experts", 0), "experts", 0), "experts") + shard_index("experts")

    got, text = _run(function, AXES, fsdp=2, tensor=2)
    np.testing.assert_array_equal(got, X)
    assert not [word for word in ("all_gather", "reduce_scatter", "all_reduce", "partition_id") if word in text]
    np.testing.assert_array_equal(function(jnp.asarray(X)), X)  # without a mesh
