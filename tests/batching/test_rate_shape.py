"""The course of the rate by hand, between the end of the warm-up and that of the run."""

import math

import numpy as np
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.schedule import decay, warm_up
from maxtext_lite.config import load_config

KEYS = (
    "warmup_steps=10",
    "learning_rate_final_fraction=0.1",
    "wsd_decay_steps_fraction=0.2",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # At the end of the warm-up, a quarter of the way, half-way, within the last fifth, at the end, and after it.
        (
            "cosine",
            [
                1,
                0.1 + 0.9 * (1 + 0.5**0.5) / 2,
                0.55,
                0.1 + 0.9 * (1 + math.cos(0.89 * math.pi)) / 2,
                0.1,
                0.1,
            ],
        ),
        ("linear", [1, 0.775, 0.55, 0.199, 0.1, 0.1]),
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("wsd", [1, 1, 1, 0.55, 0.1, 0.1]),
    ],
)
def test_the_rate_falls_from_the_end_of_the_warm_up_to_that_of_the_run(name, expected):
    config = load_config(None, [f"learning_rate_schedule={name}", *KEYS])
    found = decay(
        config, np.array([10.0, 35.0, 60.0, 99.0, 110.0, 200.0]), 110.0, np
    ).tolist()
    assert found == pytest.approx(expected)
    at_once = load_config(None, ["warmup_steps=0"])
    assert warm_up(at_once, np.array([0.25, 1.0]), 110.0, np).tolist() == [1, 1]
    part = load_config(None, ["warmup_steps=1/11"])
    for each in (config, part):
        found = warm_up(each, np.array([0.0, 4.0, 10.0, 60.0]), 110.0, np)
        assert found.tolist() == pytest.approx([0, 0.4, 1, 1])


def test_periods_below_one_are_parts_of_an_epoch():
    config = load_config(
        None, ["eval_interval=0.25", "log_period=0.001", "per_device_batch_size=10"]
    )
    plan = make_plan(config, num_devices=1, num_examples=1000)
    stated = (config.eval_interval, config.log_period, config.checkpoint_period)
    assert [plan.period_steps(each) for each in stated] == [25, 1, 100]
