"""The loss of pairs is the published one, and their scores are evaluated by it.

Their steps, however split: tests/invariance/test_matrix.py.
"""

import jax
import numpy as np
import pytest

from maxtext_lite.parallel import (
    sharding,
)
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.preference import (
    pair_losses,
    pairs_of,
    segment_sums,
)
from maxtext_lite.training.step import EVAL_BATCH_AXES, make_eval_step
from tests.gpu import unordered_sums
from tests.training.conftest import LENGTH


def published(margin, label_smoothing):
    """The sigmoid loss as TRL publishes it, of beta times the margin, in double precision."""
    right, wrong = np.logaddexp(0, -margin), np.logaddexp(0, margin)
    return right * (1 - label_smoothing) + wrong * label_smoothing


@pytest.mark.fast
def test_the_loss_of_pairs_is_the_published_one():
    margin = np.concatenate([[0], np.random.default_rng(0).normal(0, 40, 50)])
    got = pair_losses(margin, beta=0.1, label_smoothing=0.2)
    np.testing.assert_allclose(got, published(0.1 * margin, 0.2), rtol=2e-6)


def test_sums_over_segments_are_those_by_hand_and_have_an_order_on_gpus():
    sums = jax.jit(segment_sums)
    values, segments = (
        np.array([[1.0, 2.0, 4.0, 8.0]], np.float32),
        np.array([[2, 1, 2, 0]], np.int32),
    )
    np.testing.assert_array_equal(sums(values, segments), [[8, 2, 5, 0, 0]])
    traced = sums.trace(np.zeros((2, 300), np.float32), np.zeros((2, 300), np.int32))
    assert unordered_sums(traced.lower(lowering_platforms=("cuda",)).as_text()) == []


PAIRS = (1, 3, 0, 2)
"""Of each example."""


def examples_of_pairs():
    """Examples [4, 2 T] of ragged answers."""
    rng = np.random.default_rng(3)
    whole = ("tokens", "targets", "segments", "positions")
    rows = {name: np.zeros((4, 2, LENGTH), np.int32) for name in whole}
    rows |= {
        name: np.zeros((4, 2, LENGTH), np.float32) for name in ("weights", "reference")
    }
    for example, side in np.ndindex(4, 2):
        first = 0
        for pair in range(PAIRS[example]):
            length = int(rng.integers(2, LENGTH // 3))
            here = (example, side, slice(first, first + length))
            rows["tokens"][here], rows["targets"][here] = rng.integers(
                0, 264, (2, length)
            )
            rows["segments"][here], rows["positions"][here] = (
                pair + 1,
                np.arange(length),
            )
            rows["weights"][here] = np.arange(length) > length // 3
            rows["reference"][example, side, first] = rng.normal(-9)
            first += length
    return rows


def test_scores_and_their_evaluation_are_those_of_the_formula(setup):
    rows = examples_of_pairs()
    it = setup(
        "dataset_type=dpo", "dpo_beta=0.3", "dpo_label_smoothing=0.1", data=2, fsdp=2
    )
    flat = {name: x.reshape(8, LENGTH) for name, x in rows.items()}
    where = sharding(it.mesh, EVAL_BATCH_AXES)
    batch = {name: jax.device_put(x.reshape(4, -1), where) for name, x in rows.items()}
    params = it.initial.params
    with jax.default_matmul_precision("highest"):
        x = it.decoder.hidden(
            params, flat["tokens"], flat["segments"], flat["positions"]
        )
        log_probability = jax.nn.log_softmax(x @ it.decoder.head(params))
        with jax.set_mesh(it.mesh):
            scores = make_eval_step(it.parts)(it.state().params, batch)
    of_target = np.take_along_axis(
        np.asarray(log_probability), flat["targets"][..., None], -1
    )
    above = (of_target[..., 0] * flat["weights"] - flat["reference"]).reshape(
        4, 2, LENGTH
    )
    ratios = [
        [
            above[example, side][rows["segments"][example, side] == pair + 1].sum()
            for side in range(2)
        ]
        for example in range(4)
        for pair in range(PAIRS[example])
    ]
    scores = jax.device_get(scores)
    np.testing.assert_allclose(pairs_of(scores), ratios, rtol=1e-4, atol=1e-5)
    margin = 0.3 * np.subtract(*np.transpose(ratios))
    found = objective_of(it.config).evaluation([scores, scores])
    assert found.pop("eval_loss") == pytest.approx(
        published(margin, 0.1).mean(), rel=1e-5
    )
    assert found.pop("eval_reward_margin") == pytest.approx(margin.mean(), rel=1e-4)
    assert found == {
        "eval_target_tokens": 2 * np.count_nonzero(rows["weights"]),
        "eval_pairs": 2 * sum(PAIRS),
        "eval_reward_accuracy": (margin > 0).mean(),
    }
