"""Pipelines hand pieces over by permutes; with 1f1b memory does not grow with the step.

That their gradients are those of no pipeline: tests/invariance/test_matrix.py.
"""

import jax
import pytest

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.parallel.pipeline import Pipeline
from tests.training.conftest import LENGTH

FOUR_LAYERS = ("optimizer=sgd", "base_num_decoder_layers=4", "learning_rate=0.5")


@pytest.fixture(scope="module")
def compiled(setup):
    """The steps of so many micro-batches of pieces of 4 rows, wide enough that activations count."""

    def step(accumulation, pipeline):
        it = setup(
            *FOUR_LAYERS, "base_emb_dim=64", "base_mlp_dim=128", pipeline=pipeline
        )
        return it, it.compile_step(
            it.abstract_batch(accumulation, 4 * pipeline.num_microbatches, LENGTH)
        )

    interleaved = Pipeline(2, 4, schedule="1f1b")
    return step(1, interleaved), step(8, interleaved), step(1, Pipeline(2, 16, 2))


def test_memory_is_flat_in_the_pieces_of_a_step_where_gpipes_grows(compiled):
    few, many, gpipe = (
        step.memory_analysis().temp_size_in_bytes for _, step in compiled
    )
    assert abs(many - few) <= 0.05 * few  # 2 S to 16 S pieces
    assert gpipe > 4 * few


def across_stages(it, step):
    """What crosses the stages, and the last two dims of what is gathered over them."""
    found = [c for c in collectives(step.as_text()) if "stage" in c.axes(it.mesh)]
    results = [
        c.line.split(" all-gather")[0].split("[")[1].split("]")[0]
        for c in found
        if c.kind == "all-gather"
    ]
    return found, {tuple(map(int, result.split(",")))[-2:] for result in results}


def test_pieces_are_handed_over_and_parameters_stay(compiled):
    _, (it, step), (gpipe, rounds) = compiled
    found, gathered = across_stages(it, step)
    permuted = [c for c in found if c.kind == "collective-permute" and c.in_loop]
    # Forwards the stream (x, segments, positions), backwards the cotangent of x, each tick.
    assert (
        len([c for c in permuted if "f32[" in c.line.split(" collective-permute")[0]])
        == 2
    )
    layers = {
        leaf.shape[-2:]
        for leaf in jax.tree.leaves(it.decoder.abstract_params["layers"])
    }
    assert not gathered & layers
    found, gathered = across_stages(gpipe, rounds)
    assert [c for c in found if c.kind == "collective-permute" and c.in_loop]
    assert gathered <= {
        (LENGTH, 64)
    }  # what the embedding gives to the first stage, and its gradient: [.., T, D]
