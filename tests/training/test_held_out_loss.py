"""The held-out loss is a sum over tokens divided once."""

import numpy as np
import pytest

from maxtext_lite.data.feed import DeviceBatch
from maxtext_lite.training import failures
from maxtext_lite.training.failures import UnreadError
from maxtext_lite.training.held_out_loss import scores_of
from maxtext_lite.training.objective import NEXT_TOKEN


def _batches(rows, size):
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        yield DeviceBatch(
            {"rows": np.asarray(part, np.float32)},
            np.arange(len(part)),
            len(part),
            num_micro_batches=1,
            data_seconds=0.0,
        )


def evaluate(eval_step, params, batches):
    return NEXT_TOKEN.evaluation(list(scores_of(eval_step, params, batches)))


def _eval_step(params, arrays):
    return params * arrays["rows"][:, 0], arrays["rows"][:, 1].astype(np.int32)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_mean_over_tokens_not_over_batches(size):
    rows = [(6.0, 1), (8.0, 4), (0.0, 0), (9.0, 3), (2.0, 2)]  # nll sum, tokens
    assert evaluate(_eval_step, 2.0, _batches(rows, size)) == {"eval_loss": 2 * 25 / 10, "eval_target_tokens": 10}


def test_nothing_held_out_counts_nothing():
    assert evaluate(_eval_step, 1.0, iter(())) == {"eval_loss": 0.0, "eval_target_tokens": 0}


def test_what_another_host_could_not_read_is_raised_after_the_last_batch(monkeypatch):
    monkeypatch.setattr(failures, "exchange", lambda mine: [mine, "record 7 is damaged"])
    scores = scores_of(_eval_step, 1.0, _batches([(6.0, 1), (8.0, 4)], 1))
    assert [float(nll[0]) for nll, _ in (next(scores), next(scores))] == [6.0, 8.0]
    with pytest.raises(UnreadError, match="record 7 is damaged"):
        next(scores)
