"""One forward and one backward piece per tick: the same gradients, in memory that does not grow with the step."""

import jax
import numpy as np
import pytest

from maxtext_lite.parallel import Pipeline, sharding
from maxtext_lite.training.step import TRAIN_BATCH_AXES
from maxtext_lite.xla.hlo import collectives
from tests.training.conftest import LENGTH, ROWS

FOUR_LAYERS = ("optimizer=sgd", "base_num_decoder_layers=4", "learning_rate=0.5")


def one_f_one_b(stages, microbatches):
    return Pipeline(stages, microbatches, schedule="1f1b")


@pytest.fixture(scope="module")
def plain(setup, rows):
    """Gradients and five steps of all rows at once on one device."""
    it = setup(*FOUR_LAYERS, "z_loss_multiplier=1e-3")
    batch = it.batch(rows, 1, 16)
    return it.gradients(it.initial.params, batch), it.run(it.compile_step(batch), batch, 5)


@pytest.mark.parametrize(
    ("stages", "microbatches", "accumulation", "slots", "mesh", "overrides"),
    [
        (2, 2, 1, 16, {}, ()),
        (2, 8, 2, 8, {"fsdp": 1}, ("num_vocab_tiling=4", "remat_policy=full")),
        (4, 4, 4, 4, {}, ("remat_policy=minimal",)),
        (2, 2, 3, 8, {"data": 2, "fsdp": 2}, ()),
        (2, 4, 1, 16, {"fsdp": 2, "tensor": 2}, ()),
        (4, 4, 1, 16, {"data": 2}, ()),
    ],
)
def test_gradients_are_those_of_no_pipeline(
    stages, microbatches, accumulation, slots, mesh, overrides, setup, rows, plain, agrees
):
    it = setup(*FOUR_LAYERS, "z_loss_multiplier=1e-3", *overrides, **mesh, pipeline=one_f_one_b(stages, microbatches))
    want, _ = plain
    got = it.gradients(it.state().params, it.batch(rows, accumulation, slots))
    agrees(got.gradients, want.gradients)
    np.testing.assert_allclose([got.loss, got.z_loss], [want.loss, want.z_loss], rtol=1e-6)
    assert (got.target_tokens, got.examples) == (want.target_tokens, ROWS)
    # One group for each replica: the micro-batches of a replica have no gradients of their own.
    assert got.groups == (mesh["data"] if mesh.get("data", 1) > 1 else 0)


def test_five_steps_with_a_traced_number_of_micro_batches_agree(setup, rows, plain, agrees):
    """One executable for a capacity of 4, of which 2 are in use; the others are not read."""
    it = setup(*FOUR_LAYERS, "z_loss_multiplier=1e-3", data=2, pipeline=one_f_one_b(2, 2))
    few = it.batch(rows, 2, 8)
    batch = {
        name: jax.device_put(np.concatenate([np.asarray(x), np.full_like(x, 7 if name == "tokens" else 0)]), x.sharding)
        for name, x in few.items()
    }
    state, metrics = it.run(it.compile_step(batch, np.int32(0)), batch, 5, np.int32(2))
    want_state, want_metrics = plain[1]
    agrees(state.params, want_state.params)
    for name in ("loss", "grad_norm", "z_loss", "target_tokens"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in want_metrics], rtol=1e-5)


def test_the_noise_scales_groups_are_the_replicas(setup, rows):
    """By hand: W / w |G|^2 of each replica's part of the gradient, from runs on the rows of one replica each."""
    it = setup(*FOUR_LAYERS, data=2, pipeline=one_f_one_b(2, 2))
    got = it.gradients(it.state().params, it.batch(rows, 1, 16))
    one, squares = setup(*FOUR_LAYERS), 0.0
    total = np.count_nonzero(rows["weights"])
    for half in (slice(0, 8), slice(8, 16)):
        part = {name: array[half] for name, array in rows.items()}
        tokens = np.count_nonzero(part["weights"])
        gradients = one.gradients(one.initial.params, one.batch(part, 1, 8)).gradients
        norm = sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients))
        squares += tokens / total * norm  # W / w |w / W m|^2
    assert got.groups == 2
    assert got.group_squares == pytest.approx(squares, rel=1e-5)


@pytest.fixture(scope="module")
def compiled(setup):
    """The step for several (accumulation, microbatches) of pieces of 4 rows, wide enough that activations count."""

    def steps(schedule, sizes):
        found = {}
        for accumulation, microbatches in sizes:
            pipeline = Pipeline(2, microbatches, schedule=schedule)
            it = setup(*FOUR_LAYERS, "base_emb_dim=64", "base_mlp_dim=128", pipeline=pipeline)
            where = sharding(it.mesh, TRAIN_BATCH_AXES)
            batch = {
                name: jax.ShapeDtypeStruct(
                    (accumulation, 4 * microbatches, LENGTH),
                    "float32" if name == "weights" else "int32",
                    sharding=where,
                )
                for name in ("tokens", "targets", "segments", "positions", "weights")
            }
            found[accumulation, microbatches] = it, it.compile_step(batch)
        return found

    return steps("1f1b", [(1, 4), (8, 4)]), steps("gpipe", [(1, 4), (1, 16)])


def test_memory_is_flat_in_the_pieces_of_a_step_where_gpipes_grows(compiled):
    interleaved, gpipe = (
        {sizes: step.memory_analysis().temp_size_in_bytes for sizes, (_, step) in steps.items()} for steps in compiled
    )
    assert abs(interleaved[8, 4] - interleaved[1, 4]) <= 0.05 * interleaved[1, 4]  # 2 S to 16 S pieces
    assert gpipe[1, 16] > 2 * gpipe[1, 4] > 2 * interleaved[1, 4]


def test_pieces_are_handed_over_and_parameters_stay(compiled):
    it, step = compiled[0][8, 4]
    found = [c for c in collectives(step.as_text()) if "stage" in c.axes(it.mesh)]
    permuted = [c for c in found if c.kind == "collective-permute"]
    # Forwards the stream (x, segments, positions), backwards the cotangent of x, each tick.
    assert len([c for c in permuted if c.in_loop and "f32[" in c.line.split(" collective-permute")[0]]) == 2
    layers = {leaf.shape[1:] for leaf in jax.tree.leaves(it.decoder.abstract_params["layers"])}
    for c in found:
        if c.kind != "all-gather":
            continue
        shape = c.line.split(" all-gather")[0].split("[")[1].split("]")[0]
        assert tuple(map(int, shape.split(",")))[-2:] not in {sizes[-2:] for sizes in layers}, c.line
