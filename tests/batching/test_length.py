"""How many steps a run has, and the examples of each: in closed form as step by step."""

import dataclasses
import random
from fractions import Fraction

import pytest

from maxtext_lite.batching import BatchStage, RampupBatchManager, RunLength

# One device, 1 -> 4 by 1, 15 samples: 5 steps of 1, 3 of 2, 2 of 3, then 4.
SEEDS_RAMP = RampupBatchManager.of_ramp(1, Fraction(1), Fraction(4), Fraction(1), 15)


def epochs(examples, *, short, stages=SEEDS_RAMP.all_stages):
    return RunLength(stages, None, examples, short)


def plain(batch):
    return (BatchStage(Fraction(batch), 1, batch),)


@pytest.mark.parametrize(
    ("examples", "short", "steps", "total", "left_over"),
    # The batches are 1 1 1 1 1 2 2 2 3 3 4 4 ..., their sums 1 2 3 4 5 7 9 11 14 17 21 25 ...
    [
        (13, False, 8, 11, 2),
        (13, True, 9, 13, 2),
        (10**12 + 2, True, 249999999999 + 8, 10**12 + 2, 1),
    ],
)
def test_whole_batches_fit_into_the_examples(examples, short, steps, total, left_over):
    length = epochs(examples, short=short)
    assert (length.steps, length.total_examples, length.short_batch_examples) == (
        steps,
        total,
        left_over,
    )


def replay(stages, examples, short, seen=0):
    """One step after the other: (steps, examples consumed), and the examples of each step."""
    batches = []
    while True:
        batch = [stage for stage in stages if stage.samples_before <= seen][
            -1
        ].global_batch_to_train
        if seen + batch > examples:
            break
        batches.append(batch)
        seen += batch
    if short and seen < examples:
        batches.append(examples - seen)
    return batches


def test_the_closed_form_equals_replay_from_anywhere():
    rng = random.Random(3)
    for _ in range(2_000):
        devices, start, stride = (
            rng.choice([1, 2, 5]),
            rng.randint(1, 5),
            rng.randint(1, 3),
        )
        size, increment = Fraction(start, devices), Fraction(stride, devices)
        target = size + rng.randint(1, 4) * increment
        ramp = RampupBatchManager.of_ramp(
            devices, size, target, increment, rng.randint(1, 60), rng.randint(1, 2)
        )
        stages = rng.choice([ramp.all_stages, plain(rng.randint(1, 9))])
        examples, short, seen = (
            rng.randint(0, 120),
            rng.random() < 0.5,
            rng.randint(0, 130),
        )
        length = epochs(examples, short=short, stages=stages)
        whole_run, rest = (
            replay(stages, examples, short),
            replay(stages, examples, short, seen),
        )
        assert (length.steps, length.total_examples) == (len(whole_run), sum(whole_run))
        step = rng.randint(0, 9)
        assert length.steps_left(step, seen) == len(rest)
        end = (step + len(rest), seen + sum(rest))
        assert length.examples_after(len(rest), seen) == end[1]
        steps = rng.randint(
            0, 20
        )  # stated, of which as many are within `examples` as a replay has
        stated = RunLength(stages, steps, None, False)
        assert stated.steps_within(seen, examples) == len(
            replay(stages, examples, False, seen)
        )
        assert stated.steps_left(min(step, steps), seen) == steps - min(step, steps)
        for batch in [*rest, 0]:
            assert length.step_examples(seen) == batch
            assert length.end_after(step, seen) == end
            step, seen = step + 1, seen + batch


def test_a_resumed_run_has_the_length_and_the_stages_of_what_is_left():
    """After 4 steps of 2, the batches 1 2 3 4 4 ... continue at example 8: 2 until 11, 3 until 17, then 4."""
    length = dataclasses.replace(epochs(27, short=True), done=(4, 8))
    assert (length.steps, length.total_examples, length.short_batch_examples) == (
        11,
        27,
        1,
    )
    ahead = [
        (each.first_step, each.num_steps, each.samples_before)
        for each in length.stages_ahead
    ]
    assert ahead == [(5, 2, 8), (7, 2, 12), (9, None, 18)]
    assert epochs(26, short=True).stages_ahead == SEEDS_RAMP.all_stages
    assert (
        dataclasses.replace(epochs(27, short=True), done=(13, 27)).short_batch_examples
        == 0
    )
    over = dataclasses.replace(epochs(26, short=False), done=(30, 30))
    assert (over.steps, over.total_examples, over.short_batch_examples) == (30, 30, 0)
