import dataclasses
import random
from fractions import Fraction

import pytest

from maxtext_lite.batching import BatchStage, RampupBatchManager, RunLength, make_plan
from maxtext_lite.config import UserError, load_config

# One device, 1 -> 4 by 1, 15 samples: 5 steps of 1, 3 of 2, 2 of 3, then 4.
SEEDS_RAMP = RampupBatchManager(1, Fraction(1), Fraction(4), Fraction(1), 15)


def epochs(examples, *, short, stages=SEEDS_RAMP.all_stages):
    return RunLength(stages, None, examples, short)


def plain(batch):
    return (BatchStage(Fraction(batch), 1, batch),)


def plan_of(*overrides, num_devices=1, **machine):
    overrides = ("ici_data_parallelism=-1", "ici_fsdp_parallelism=1", *overrides)
    return make_plan(load_config(None, overrides), num_devices=num_devices, **machine)


@pytest.mark.parametrize(
    ("examples", "short", "steps", "total", "left_over"),
    # The batches are 1 1 1 1 1 2 2 2 3 3 4 4 ..., their sums 1 2 3 4 5 7 9 11 14 17 21 25 ...
    [
        (0, False, 0, 0, 0), (1, False, 1, 1, 0), (5, True, 5, 5, 0), (6, False, 5, 5, 1), (6, True, 6, 6, 1),
        (13, False, 8, 11, 2), (13, True, 9, 13, 2), (17, False, 10, 17, 0), (20, False, 10, 17, 3),
        (20, True, 11, 20, 3), (21, True, 11, 21, 0), (10**12 + 2, True, 249999999999 + 8, 10**12 + 2, 1),
    ],
)  # fmt: skip
def test_whole_batches_fit_into_the_examples(examples, short, steps, total, left_over):
    length = epochs(examples, short=short)
    assert (length.steps, length.total_examples, length.short_batch_examples) == (steps, total, left_over)


def test_the_examples_of_each_step():
    trained, dropped = epochs(20, short=True), epochs(20, short=False)
    assert [trained.step_examples(seen) for seen in (0, 5, 16, 17, 18, 20, 25)] == [1, 2, 3, 3, 2, 0, 0]
    assert [dropped.step_examples(seen) for seen in (0, 5, 16, 17, 18, 20, 25)] == [1, 2, 3, 0, 0, 0, 0]
    stated = RunLength(SEEDS_RAMP.all_stages, 3, None, False)
    assert [stated.step_examples(seen) for seen in (0, 17, 10**12)] == [1, 4, 4]


def test_stated_steps_are_counted():
    length = RunLength(plain(4), 7, None, False)
    assert (length.steps, length.total_examples, length.short_batch_examples) == (7, 28, 0)
    assert [length.steps_left(step, 4 * step) for step in (0, 6, 7, 9)] == [7, 1, 0, 0]


def test_a_run_that_ended_in_a_short_batch_continues():
    # 10 examples in batches of 4: 4 4 2. A second epoch from there is 4 4 2 again: 6 steps in all, not 5.
    assert epochs(10, short=True, stages=plain(4)).steps == 3
    longer = epochs(20, short=True, stages=plain(4))
    assert longer.steps == 5
    assert longer.steps_left(3, 10) == 3
    assert [longer.step_examples(seen) for seen in (10, 14, 18, 20)] == [4, 4, 2, 0]
    assert longer.steps_left(6, 20) == 0
    # Within a ramp, whose stages go by the examples seen: 1 1 1 1 1 2 | 1 short | 2 2 3 3 4 4.
    ramped = epochs(23, short=False)
    assert epochs(8, short=True).steps == 7
    assert ramped.steps_left(7, 8) == 5  # 10 12 15 18 22


@pytest.mark.parametrize(("step", "seen"), [(-1, 0), (0, -1)])
def test_positions_that_do_not_exist_are_refused(step, seen):
    with pytest.raises(ValueError, match="negative"):
        epochs(10, short=False).steps_left(step, seen)


def replay(stages, examples, short, seen=0):
    """One step after the other: (steps, examples consumed), and the examples of each step."""
    batches = []
    while True:
        batch = [stage for stage in stages if stage.samples_before <= seen][-1].global_batch_to_train
        if seen + batch > examples:
            break
        batches.append(batch)
        seen += batch
    if short and seen < examples:
        batches.append(examples - seen)
    return batches


def test_the_closed_form_equals_replay_from_anywhere():
    rng = random.Random(3)
    for _ in range(10_000):
        devices, start, stride = rng.choice([1, 2, 5]), rng.randint(1, 5), rng.randint(1, 3)
        size, increment = Fraction(start, devices), Fraction(stride, devices)
        target = size + rng.randint(1, 4) * increment
        ramp = RampupBatchManager(devices, size, target, increment, rng.randint(1, 60), rng.randint(1, 2))
        stages = rng.choice([ramp.all_stages, plain(rng.randint(1, 9))])
        examples, short, seen = rng.randint(0, 120), rng.random() < 0.5, rng.randint(0, 130)
        length = epochs(examples, short=short, stages=stages)
        whole_run, rest = replay(stages, examples, short), replay(stages, examples, short, seen)
        assert (length.steps, length.total_examples) == (len(whole_run), sum(whole_run))
        step = rng.randint(0, 9)
        assert length.steps_left(step, seen) == len(rest)
        end = (step + len(rest), seen + sum(rest))
        for batch in [*rest, 0]:
            assert length.step_examples(seen) == batch
            assert length.end_after(step, seen) == end
            step, seen = step + 1, seen + batch


def test_epochs_derive_the_steps_of_a_plan():
    plan = plan_of("num_epochs=2.5", "per_device_batch_size=4", num_devices=2, num_examples=10)
    assert (plan.steps, plan.total_examples, plan.epochs) == (3, 24, Fraction(12, 5))
    assert (plan.num_examples, plan.dropped_examples, plan.last_batch_examples) == (10, 1, None)
    plan = plan_of("num_epochs=2.5", "per_device_batch_size=4", "last_batch=train", num_devices=2, num_examples=10)
    assert (plan.steps, plan.total_examples, plan.epochs) == (4, 25, Fraction(5, 2))
    assert (plan.dropped_examples, plan.last_batch_examples) == (0, 1)
    assert (plan.length.step_examples(24), plan.length.steps_left(3, 24)) == (1, 1)
    written = plan.to_json()
    assert (written["steps"], written["epochs"], written["last_batch_examples"]) == (4, 2.5, 1)


def test_a_third_of_an_epoch_is_exact():
    assert plan_of("num_epochs=1/3", "per_device_batch_size=1", num_examples=9).steps == 3


@pytest.mark.parametrize(
    ("overrides", "num_examples", "message"),
    [
        (["num_epochs=0.3"], 101, "num_epochs=0.3 x 101 examples in the data = 30.3 examples, not a whole number. "
                                  "Nearest that work: 30/101 or 31/101."),
        (["num_epochs=1", "per_device_batch_size=16"], 10,
         "num_epochs=1 is 10 examples, fewer than the 16 of one batch, and last_batch=drop trains whole batches only: "
         "no step. Nearest that work: per_device_batch_size=10 or num_epochs=1.6."),
        (["num_epochs=1", "per_device_batch_size=4", "gradient_accumulation_steps=20"], 10,
         "num_epochs=1 is 10 examples, fewer than the 80 of one batch, and last_batch=drop trains whole batches only: "
         "no step. Nearest that work: gradient_accumulation_steps=2 or num_epochs=8."),
        (["num_epochs=1", "global_batch_size=32", "gradient_accumulation_steps=-1", "per_device_batch_size=4"], 10,
         "num_epochs=1 is 10 examples, fewer than the 32 of one batch, and last_batch=drop trains whole batches only: "
         "no step. Nearest that work: global_batch_size=8 or num_epochs=3.2."),
        (["num_epochs=1", "enable_rampup_batch_size=true", "per_device_batch_size_start=12"], 10,
         "num_epochs=1 is 10 examples, fewer than the 12 of one batch, and last_batch=drop trains whole batches only: "
         "no step. Nearest that work: per_device_batch_size_start=10 or num_epochs=1.2."),
        (["num_epochs=1"], None, "num_epochs=1 gives no steps without the number of training examples. Give "
                                 "num_examples to make_plan, or --examples N to the command plan."),
    ],
)  # fmt: skip
def test_epochs_without_a_step_are_refused_with_what_works(overrides, num_examples, message):
    with pytest.raises(UserError) as refused:
        plan_of(*overrides, num_examples=num_examples)
    assert refused.value.problems == (message,)


def test_a_length_that_nothing_states_is_refused_also_without_load_config():
    config = load_config().model_copy(update={"steps": -1})
    with pytest.raises(UserError, match=r"nothing states the length of the run\. Nearest that works: 250"):
        make_plan(config, num_devices=1)


def test_a_batch_that_does_not_fit_is_trained_as_a_short_one():
    plan = plan_of("num_epochs=1", "last_batch=train", num_examples=10)
    assert (plan.steps, plan.last_batch_examples, plan.total_examples) == (1, 10, 10)


@pytest.mark.parametrize("length", [RunLength(SEEDS_RAMP.all_stages, 12, None, False), epochs(26, short=True),
                                    epochs(26, short=False)])  # fmt: skip
def test_many_steps_at_once_equal_single_steps(length):
    for step, start in [(0, 0), (4, 4), (2, 9), (11, 16), (3, 30)]:
        seen = start
        for _ in range(length.steps_left(step, start)):
            seen += length.step_examples(seen)
        assert length.examples_after(length.steps_left(step, start), start) == seen
    stated = RunLength(SEEDS_RAMP.all_stages, 12, None, False)
    for end in (0, 4, 8, 17, 24, 30):
        seen = steps = 0
        while seen + stated.step_examples(seen) <= end:
            seen, steps = seen + stated.step_examples(seen), steps + 1
        assert stated.steps_within(0, end) == steps
    assert stated.steps_within(9, 8) == 0


def test_a_resumed_run_has_the_length_and_the_stages_of_what_is_left():
    """After 4 steps of 2, the batches 1 2 3 4 4 ... continue at example 8: 2 until 11, 3 until 17, then 4."""
    length = dataclasses.replace(epochs(27, short=True), done=(4, 8))
    assert (length.steps, length.total_examples, length.short_batch_examples) == (11, 27, 1)
    ahead = [(each.first_step, each.num_steps, each.samples_before) for each in length.stages_ahead]
    assert ahead == [(5, 2, 8), (7, 2, 12), (9, None, 18)]
    assert epochs(26, short=True).stages_ahead == SEEDS_RAMP.all_stages
    assert dataclasses.replace(epochs(27, short=True), done=(13, 27)).short_batch_examples == 0
    over = dataclasses.replace(epochs(26, short=False), done=(30, 30))
    assert (over.steps, over.total_examples, over.short_batch_examples) == (30, 30, 0)
