"""Which starts a run lists, the settings of its steps, and what a resume says of the learning rate."""

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.training.starts import moved_schedule, resume_between, settings_at, with_start


def start(before, step, seen, *overrides):
    """The config and the starts of a run of 64 examples, or with stated steps, that begins again after `step` steps."""
    words = ["warmup_steps=0", "learning_rate_schedule=linear", "learning_rate_final_fraction=0", "num_epochs=1",
             "global_batch_size=4", "per_device_batch_size=-1", *overrides]  # fmt: skip
    config = load_config(None, words)
    return config, with_start(before, config, make_plan(config, num_devices=1, num_examples=64), step, seen)


@pytest.mark.parametrize(("overrides", "end", "rate"), [
    (["global_batch_size=8"], "step 12", 33.3),
    (["global_batch_size=2"], "step 24", 66.7),
    (["num_epochs=2"], "step 32", 75),
    (["global_batch_size=8", "schedule_unit=examples"], None, None),
    (["num_epochs=0", "steps=16", "global_batch_size=8", "schedule_unit=examples"], "example 96", 66.7),
    (["num_epochs=0", "steps=16", "global_batch_size=8"], None, None),
    (["global_batch_size=8", "learning_rate_schedule=constant"], None, None),
    (["seed=5"], None, None),
])  # fmt: skip
def test_a_resume_that_moves_the_end_of_the_schedule_says_so_once(overrides, end, rate):
    """The run of 16 steps and 64 examples is half done, and its rate half its peak."""
    _, first = start([], 0, 0)
    config, starts = start(first, 8, 32, *overrides)
    before = 64 if end and end.startswith("example") else 16
    sentence = (
        f"the learning rate's schedule ends with this run, at {end} instead of {before}: after step 8 the rate is "
        f"about {rate or 0:.1f}% of its peak instead of 50.0%"
    )
    assert moved_schedule(config, starts, 8, 32) == ([] if end is None else [sentence])
    batch = config.global_batch_size
    config, again = start(starts, 9, 32 + batch, *overrides)
    assert again == starts
    assert moved_schedule(config, again, 9, 32 + batch) == []


def test_a_new_run_and_one_of_an_earlier_version_say_nothing():
    for step, seen in ((0, 0), (8, 32)):
        config, starts = start([], step, seen, "global_batch_size=8")
        assert [entry["step"] for entry in starts] == [step]
        assert moved_schedule(config, starts, step, seen) == []


def test_a_step_has_the_settings_of_the_start_that_took_it():
    rows = "excluded_rows=rows.jsonl"
    _, starts = start([], 2, 8)
    for step, seen, *words in ((4, 16, rows, "learning_rate=0.1"), (5, 20, rows, "learning_rate=0.1", "log_period=7"),
                               (6, 24)):  # fmt: skip
        config, starts = start(starts, step, seen, *words)
    assert [each["step"] for each in starts] == [2, 4, 6]
    assert settings_at(starts, 2) == []
    of_config = config.learning_rate, ""
    for step, *of_step in ((3, *of_config), (4, *of_config), (5, 0.1, "rows.jsonl"), (6, 0.1, "rows.jsonl"),
                           (7, *of_config)):  # fmt: skip
        found = load_config(None, ["global_batch_size=1", *settings_at(starts, step)])
        assert [found.learning_rate, found.excluded_rows] == of_step
        assert (found.global_batch_size, found.log_period) == (4, config.log_period)
    assert not [
        word for word in settings_at(starts, 3) if word.startswith(("dataset_path", "run_name", "base_emb_dim"))
    ]


@pytest.mark.parametrize(("overrides", "changes"), [
    (["seed=5"], True),
    (["num_epochs=2"], True),
    (["num_epochs=0", "steps=40", "learning_rate_schedule=constant"], False),
    (["num_epochs=0", "steps=40", "learning_rate_schedule=constant", "global_batch_size=8"], True),
])  # fmt: skip
def test_the_first_resume_that_changed_steps_is_found_between_a_checkpoint_and_a_step(overrides, changes):
    """A length changes steps by the learning rate or the last batch alone."""
    stated = overrides[:1] + ["steps=16", overrides[2]] if "steps=40" in overrides else []
    _, first = start([], 0, 0, *stated)
    _, starts = start(first, 4, 16, *overrides)
    assert len(starts) == 2
    found = {(after, step): resume_between(starts, after, step) for after, step in ((0, 4), (0, 5), (3, 9), (4, 9))}
    seam = 4 if changes else None
    assert found == {(0, 4): None, (0, 5): seam, (3, 9): seam, (4, 9): None}
