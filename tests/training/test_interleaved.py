"""Pipelines hand pieces over by permutes; with 1f1b memory does not grow with the step.

That their gradients are those of no pipeline: tests/invariance/test_matrix.py.
"""

import jax
import pytest

from maxtext_lite.parallel import Pipeline
from maxtext_lite.xla.hlo import collectives
from tests.training.conftest import LENGTH

FOUR_LAYERS = ("optimizer=sgd", "base_num_decoder_layers=4", "learning_rate=0.5")


@pytest.fixture(scope="module")
def compiled(setup):
    """The step for several (accumulation, microbatches) of pieces of 4 rows, wide enough that activations count."""

    def steps(schedule, sizes):
        found = {}
        for accumulation, microbatches in sizes:
            pipeline = Pipeline(2, microbatches, schedule=schedule)
            it = setup(*FOUR_LAYERS, "base_emb_dim=64", "base_mlp_dim=128", pipeline=pipeline)
            found[accumulation, microbatches] = it, it.compile_step(
                it.abstract_batch(accumulation, 4 * microbatches, LENGTH)
            )
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


def test_stages_of_several_rounds_hand_over_by_permutes_and_keep_their_parameters(setup, rows):
    it = setup(*FOUR_LAYERS, pipeline=Pipeline(2, 4, 2))
    found = [c for c in collectives(it.compile_step(it.batch(rows, 2, 8)).as_text()) if "stage" in c.axes(it.mesh)]
    assert [c for c in found if c.kind == "collective-permute" and c.in_loop]
    for c in found:
        if c.kind == "all-gather":  # what the embedding gives to the first stage, and its gradient: [.., T, D]
            shape = c.line.split(" all-gather")[0].split("[")[1].split("]")[0]
            assert tuple(map(int, shape.split(",")))[-2:] == (32, 16), c.line
