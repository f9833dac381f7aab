"""Seconds of phases and their overlap, by hand."""

import time

import pytest

from maxtext_lite.rl.timeline import Timeline, busy_seconds, merged, shared_seconds


def test_stretches_that_touch_are_one():
    assert merged([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert busy_seconds([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == 3.5


def test_shared_seconds_count_once():
    rollout, train = [(0, 2), (2, 4)], [(1, 3), (2.5, 3.5), (6, 7)]
    assert shared_seconds(rollout, train) == 2.5
    assert shared_seconds(train, rollout) == 2.5
    assert shared_seconds(rollout, []) == 0


def test_phases_are_recorded_in_the_order_of_their_starts_and_those_that_fail_are_not():
    timeline = Timeline()
    with timeline.phase("rollout", 1), timeline.phase("train", 0):
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), timeline.phase("reward", 0):
        raise ZeroDivisionError
    assert [(phase.name, phase.chunk) for phase in timeline.phases] == [("rollout", 1), ("train", 0)]
    record = timeline.record()
    assert record["overlap_fraction"] == 1  # the rollout lasts from before the training to after it
    assert record["rollout_seconds"] >= record["train_seconds"] >= 0.01
    assert record["reward_seconds"] == 0
    (name, chunk, start, stop), _ = timeline.to_json()
    assert (name, chunk) == ("rollout", 1)
    assert stop - start == pytest.approx(record["rollout_seconds"], abs=2e-6)


def test_a_step_without_phases_overlaps_nothing():
    assert Timeline().record()["overlap_fraction"] == 0
