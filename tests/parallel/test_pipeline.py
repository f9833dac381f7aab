"""The scan over time of the stages against the same layers in sequence, on a toy without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.analysis.hlo import collectives, parse
from maxtext_lite.parallel import vmap_over_data
from maxtext_lite.parallel.pipeline import Pipeline
from tests.meshes import mesh_of

AXES = {"x": ("batch", None), "label": ("batch",)}


def layers(stack, rows):
    """x -> tanh(x w) + label, layer after layer; label passes through unchanged."""

    def layer(x, w):
        return jnp.tanh(x @ w) + rows["label"][:, None], None

    return rows | {"x": jax.lax.scan(layer, rows["x"], stack)[0]}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(8, 6, 6)).astype(np.float32) / 2
    rows = {
        "x": rng.normal(size=(32, 6)).astype(np.float32),
        "label": rng.integers(0, 3, 32).astype(np.int32),
    }
    weight = rng.normal(size=(32, 6)).astype(np.float32)
    return stack, rows, weight


@pytest.fixture(scope="module")
def in_turn(problem):
    """All rows after all layers, and the gradients by the layers and by the rows."""
    stack, rows, weight = problem

    def total(stack, x):
        out = layers(stack, rows | {"x": x})
        return jnp.sum(weight * out["x"]), out

    with jax.default_matmul_precision("highest"):
        gradients, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
            stack, rows["x"]
        )
    return out, gradients


@pytest.mark.fast
@pytest.mark.parametrize(
    ("pipeline", "mesh"),
    [
        (Pipeline(2, 8), {"stage": 2, "fsdp": 2, "data": 2}),
        (Pipeline(4, 4, 2), {"stage": 4, "fsdp": 2}),
        (Pipeline(2, 2, 4), {"stage": 2, "data": 4}),
    ],
)
def test_rows_and_gradients_are_those_of_all_layers_in_turn(
    pipeline, mesh, problem, in_turn
):
    stack, rows, weight = problem
    want_rows, want = in_turn
    with jax.default_matmul_precision("highest"):
        replicas = mesh.get("data", 1)

        def piped(stack, x):
            run = vmap_over_data(
                lambda stack, rows: pipeline.run(layers, stack, rows, axes=AXES),
                replicas,
                rows=(1,),
            )
            stored = pipeline.in_stages(stack)
            out = jax.tree.map(
                lambda x: x.reshape(-1, *x.shape[2:]), run(stored, rows | {"x": x})
            )
            return jnp.sum(weight * out["x"]), out

        with jax.set_mesh(mesh_of(**mesh)):
            got, got_rows = jax.jit(jax.grad(piped, (0, 1), has_aux=True))(
                stack, rows["x"]
            )
    jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        got_rows,
        want_rows,
    )
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("pipeline", [Pipeline(2, 8), Pipeline(2, 8, 2)])
def test_a_tick_neither_copies_nor_adds_up_all_pieces_and_sends_one(pipeline, problem):
    """Each stage has 8 pieces of 4 rows. All of them are touched before the loops over ticks, and after."""
    stack, rows, weight = problem

    def total(stack, x):
        return jnp.sum(
            weight
            * pipeline.run(
                layers, pipeline.in_stages(stack), rows | {"x": x}, axes=AXES
            )["x"]
        )

    with jax.set_mesh(mesh_of(stage=2)):
        module = parse(
            jax.jit(jax.grad(total, (0, 1))).lower(stack, rows["x"]).compile().as_text()
        )
    ticks = [
        it
        for computation, it, times in module.scheduled()
        if (times or 0) > 1
        and it.opcode
        not in ("parameter", "get-tuple-element", "bitcast", "tuple", "while")
        for array in it.arrays
        if array.dims == (1, 8, 4, 6)
    ]
    assert ticks, "the pieces are not found"
    for it in ticks:
        assert it.opcode == "fusion", it.line
        root = module.computations[dict(it.called)["calls"]].root
        assert root.opcode == "dynamic-update-slice", it.line
    sent = [
        c.times
        for c in collectives(module)
        if c.kind == "collective-permute" and "f32" in c.payload
    ]
    assert sent == [pipeline.num_ticks] * 2  # forward and backward


def test_gradients_of_many_pieces_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256."""
    pipeline = Pipeline(2, 512, 2)
    rows = np.zeros((512, 6), jnp.bfloat16)

    def shift(stack, rows):
        return rows + jnp.sum(stack, axis=0)

    def total(stack):
        return jnp.sum(
            pipeline.run(
                shift, pipeline.in_stages(stack), rows, axes=("batch", None)
            ).astype(jnp.float32)
        )

    with jax.set_mesh(mesh_of(stage=2)):
        found = jax.jit(jax.grad(total))(np.zeros((4, 6), jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    assert_array_equal(np.asarray(found, np.float32), np.full((4, 6), 512.0))
