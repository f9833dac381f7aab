"""The course of the rate by hand, for the arrays of two libraries."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.batching.rate_shape import decay, warm_up
from maxtext_lite.config import load_config

KEYS = ("warmup_steps=10", "learning_rate_final_fraction=0.1", "wsd_decay_steps_fraction=0.2")


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(("name", "expected"), [
    ("cosine", [1, 1, 0.55, 0.1, 0.1]), ("linear", [1, 1, 0.55, 0.1, 0.1]), ("constant", [1, 1, 1, 1, 1]),
    ("wsd", [1, 1, 1, 0.1, 0.1]),
])  # fmt: skip
def test_the_rate_falls_from_the_end_of_the_warm_up_to_that_of_the_run(name, expected, xp):
    config = load_config(None, [f"learning_rate_schedule={name}", *KEYS])
    at = xp.asarray([0.0, 10.0, 60.0, 110.0, 200.0])
    assert decay(config, at, 110.0, xp).tolist() == pytest.approx(expected)
    assert warm_up(config, xp.asarray([0.0, 4.0, 10.0, 60.0]), xp).tolist() == pytest.approx([0, 0.4, 1, 1])


def test_wsd_falls_within_its_last_fraction():
    config = load_config(None, ["learning_rate_schedule=wsd", *KEYS])
    assert decay(config, np.array([88.0, 99.0]), 110.0, np).tolist() == pytest.approx([1, 0.55])
