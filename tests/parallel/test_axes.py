"""Logical axes become PartitionSpecs through one table, which refuses unknown names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.parallel import (
    MESH_AXES,
    axes_in_use,
    constrain,
    gathered_for_use,
    make_mesh,
    num_shards,
    over_replicas,
    over_shards,
    over_stages,
    sharding,
    with_dims,
)
from maxtext_lite.parallel.axes import AS_IT_IS, MESH_AXES_OF, partition_spec


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(
        {axis: 2 if axis in ("data", "fsdp", "tensor") else 1 for axis in MESH_AXES}, dict.fromkeys(MESH_AXES, 1)
    )


def test_every_rule_names_mesh_axes():
    assert {axis for axes in MESH_AXES_OF.values() for axis in axes} <= set(MESH_AXES)


def test_known_axes():
    assert partition_spec(("layers", "embed", "mlp")) == jax.P("stage", ("expert", "context", "fsdp"), "tensor")
    assert partition_spec(("experts", "expert_embed", "mlp")) == jax.P("expert", ("context", "fsdp"), "tensor")
    assert partition_spec(("accumulation", "global_batch", None)) == jax.P(None, ("data", "fsdp", "expert"), None)


def test_an_unconstrained_dim_is_left_to_the_compiler():
    assert partition_spec(("batch", AS_IT_IS, None)) == jax.P(("fsdp", "expert"), jax.P.UNCONSTRAINED, None)


def test_shards_are_counted_over_all_mesh_axes_of_a_name(mesh):
    assert num_shards("global_batch") == 1
    with jax.set_mesh(mesh):
        assert (num_shards("global_batch"), num_shards("heads"), num_shards("length")) == (4, 2, 1)


def test_unknown_axis_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown logical axis 'embde'"):
        partition_spec(("embde",))


def test_mesh_axis_used_twice_is_refused_by_name():
    with pytest.raises(ValueError, match="mesh axis 'tensor' is used twice, by 'heads' and 'mlp'"):
        partition_spec(("heads", "mlp"))


def test_constrain_without_a_mesh_changes_nothing():
    x = jnp.ones((2, 3))
    assert constrain(x, ("batch", None)) is x


def test_a_weight_in_use_drops_only_the_axis_that_fsdp_shards():
    assert axes_in_use(("embed", "heads", "head_dim")) == (None, "heads", "head_dim")
    assert axes_in_use(("vocab", None)) == ("vocab", None)


def test_the_gradient_of_a_gathered_weight_is_sharded_like_the_stored_weight(mesh):
    """A constraint alone asks for the whole gradient on every device."""
    lies_as, weight, place = ("embed", "mlp"), np.arange(24.0, dtype=np.float32).reshape(4, 6), np.array([1, 3, 1, 1])
    want = np.zeros_like(weight)
    np.add.at(want, place, 2 * weight[place])
    used_as = axes_in_use(lies_as)
    ways = {False: lambda w: constrain(w, used_as), True: lambda w: gathered_for_use(w, used_as, lies_as)}
    for is_ours, use in ways.items():
        with jax.set_mesh(mesh):
            x = jax.device_put(weight, sharding(mesh, lies_as))
            got = jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(use(w)[place]))))(x)  # noqa: B023
        np.testing.assert_array_equal(got, want)
        assert got.sharding.shard_shape(got.shape) == ((2, 3) if is_ours else (4, 3))


def test_over_replicas_gives_each_replica_its_contiguous_rows(mesh):
    rows = jax.device_put(jnp.arange(8.0).reshape(8, 1), sharding(mesh, ("global_batch", None)))
    with jax.set_mesh(mesh):
        sums_R = jax.jit(lambda rows: over_replicas(lambda scale, x: scale * x.sum(), 2, rows=(1,))(10.0, rows))(rows)
    np.testing.assert_array_equal(sums_R, [10 * (0 + 1 + 2 + 3), 10 * (4 + 5 + 6 + 7)])


def test_over_replicas_leaves_tokens_split():
    sizes = dict.fromkeys(MESH_AXES, 1) | {"data": 2, "context": 2}
    mesh = make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[:4])
    rows = jax.device_put(jnp.arange(8.0).reshape(2, 4), sharding(mesh, ("global_batch", "length")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda rows: over_replicas(lambda x: 2 * x, 2, rows=(0,))(rows)).lower(rows).compile()
    np.testing.assert_array_equal(compiled(rows)[:, 0], 2 * np.arange(8.0).reshape(2, 4))
    assert "all-gather" not in compiled.as_text()


def test_over_shards_runs_on_each_device_part_inside_over_replicas(mesh):
    x = jnp.arange(32.0).reshape(8, 4)

    def part_sums(_, rows):  # 4 rows a replica, 2 a device; 2 columns a device
        local = lambda part: jnp.full_like(part, part.sum())  # noqa: E731
        return over_shards(local, (("batch", "activation_mlp"),), ("batch", "activation_mlp"))(rows)

    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: over_replicas(part_sums, 2, rows=(1,))(None, x))(x)
    blocks = np.asarray(x).reshape(4, 2, 2, 2).sum(axis=(1, 3))
    np.testing.assert_array_equal(np.asarray(got).reshape(8, 4), np.repeat(np.repeat(blocks, 2, 0), 2, 1))


def test_a_dim_that_does_not_divide_falls_back_to_its_uneven_axis(mesh):
    with jax.set_mesh(mesh):
        lay_out = jax.jit(lambda x: constrain(x, ("batch", "residual_length", None)))
        whole, odd = lay_out(jnp.zeros((2, 4, 3))), lay_out(jnp.zeros((2, 1, 3)))
        assert whole.sharding.shard_shape(whole.shape) == (1, 2, 3)
        assert odd.sharding.shard_shape(odd.shape) == (1, 1, 3)


def test_dims_are_replaced(mesh):
    where = sharding(mesh, ("layers", "embed", "mlp"))
    assert with_dims(where, 3, 0, 1, 2).spec == jax.P(None, None, ("expert", "context", "fsdp"), "tensor")
    assert with_dims(sharding(mesh, ("replica",)), 3, 1, 3, 1).spec == jax.P("data", None)


def test_shards_are_counted_on_the_mesh_in_use(mesh):
    assert num_shards("batch") == 1
    with jax.set_mesh(mesh):
        assert [num_shards(axis) for axis in ("batch", "global_batch", "residual_length", "norm")] == [2, 4, 2, 1]


def test_over_stages_runs_each_stage_on_its_part():
    stages = make_mesh({axis: 4 if axis == "stage" else 1 for axis in MESH_AXES}, dict.fromkeys(MESH_AXES, 1),
                       jax.devices()[:4])  # fmt: skip
    with jax.set_mesh(stages):
        got = jax.jit(over_stages(lambda a, b: a @ b, in_axes=(0, None)))(jnp.arange(8.0).reshape(4, 2), jnp.ones(2))
    np.testing.assert_array_equal(got, [1, 5, 9, 13])


def test_over_shards_lays_out_several_results(mesh):
    x = jnp.arange(16.0).reshape(8, 2)
    local = lambda part: (part, part[:, :1] * 0 + part.shape[0])  # noqa: E731
    with jax.set_mesh(mesh):
        same, rows = jax.jit(over_shards(local, (("global_batch", None),), [("global_batch", None)] * 2))(x)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(rows, np.full((8, 1), 2))
