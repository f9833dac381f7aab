"""A ramp's stages in closed form are those of a replay, step by step."""

import random
from fractions import Fraction

import pytest

from maxtext_lite.batching.schedule import RampupBatchManager


def replay(num_devices, start, target, increment, samples, accumulation, num_steps):
    """The ramp as the seeds tell it, one step after the other: an independent route."""
    increments = (target - start) / increment
    sizes, seen, in_stage, current = [], [], 0, start
    total = 0
    for _ in range(num_steps):
        batch = current * num_devices * accumulation
        assert batch.denominator == 1
        sizes.append(int(batch))
        seen.append(total)
        total += int(batch)
        if current < target:
            in_stage += int(batch)
            if in_stage * increments >= samples:
                current, in_stage = current + increment, 0
    return sizes, seen


def manager(
    num_devices,
    start,
    target,
    increment,
    samples,
    accumulation=1,
    mode="per_device_batch_size",
):
    return RampupBatchManager.of_ramp(
        num_devices,
        Fraction(start),
        Fraction(target),
        Fraction(increment),
        samples,
        accumulation,
        mode,
    )


def random_ramps(how_many, seed=0):
    rng = random.Random(seed)
    for _ in range(how_many):
        num_devices = rng.choice([1, 2, 3, 5, 8, 100])
        first, stride, increments = (
            rng.randint(1, 6),
            rng.randint(1, 4),
            rng.randint(1, 6),
        )
        start, increment = Fraction(first, num_devices), Fraction(stride, num_devices)
        yield (
            num_devices,
            start,
            start + increments * increment,
            increment,
            rng.randint(1, 300),
            rng.randint(1, 4),
        )


def test_the_closed_form_equals_replay():
    for num_devices, start, target, increment, samples, accumulation in random_ramps(
        1_000
    ):
        ramp = manager(num_devices, start, target, increment, samples, accumulation)
        num_steps = min(ramp.total_steps + 2, 60)
        sizes, seen = replay(
            num_devices, start, target, increment, samples, accumulation, num_steps
        )
        steps = range(1, num_steps + 1)
        assert [ramp.batch_size_at(step) for step in steps] == sizes
        assert [ramp.samples_before(step) for step in steps] == seen
        assert [
            ramp.stage_at(examples).global_batch_to_train for examples in seen
        ] == sizes


@pytest.mark.parametrize(
    "arguments",
    [
        (8, 5, 4, 1, 5),
        (8, 1, 4, 2, 5),
        (8, "0.3", "0.6", "0.3", 5),
    ],
)
def test_an_impossible_ramp_is_refused(arguments):
    with pytest.raises(ValueError, match=r"ramp goes up|increments|whole"):
        manager(*arguments)
