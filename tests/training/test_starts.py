"""Which starts a run lists, the settings of its steps, and what a resume says of the learning rate."""

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.training.starts import moved_schedule, resume_between, settings_at, with_start


def start(before, step, seen, *overrides):
    """The config, the plan and the starts of a run of 64 examples or stated steps, begun after `step` steps."""
    words = ["warmup_steps=0", "learning_rate_schedule=linear", "learning_rate_final_fraction=0", "num_epochs=1",
             "global_batch_size=4", "per_device_batch_size=-1", *overrides]  # fmt: skip
    config = load_config(None, words)
    plan = make_plan(config, num_devices=1, num_examples=64)
    return config, plan, with_start(before, config, plan, step, seen)


@pytest.mark.parametrize(("overrides", "end", "rate"), [
    (["global_batch_size=8"], "step 12", 33.3),
    (["global_batch_size=2"], "step 24", 66.7),
    (["num_epochs=2"], "step 32", 75),
    (["global_batch_size=8", "schedule_unit=examples"], None, None),
    (["num_epochs=0", "steps=16", "global_batch_size=8", "schedule_unit=examples"], "example 96", 66.7),
    (["num_epochs=0", "steps=16", "global_batch_size=8"], None, None),
    (["seed=5"], None, None),
])  # fmt: skip
def test_a_resume_that_moves_the_end_of_the_schedule_says_so_once(overrides, end, rate):
    """The run of 16 steps and 64 examples is half done, and its rate half its peak."""
    *_, first = start([], 0, 0)
    *of, starts = start(first, 8, 32, *overrides)
    before = 64 if end and end.startswith("example") else 16
    sentence = (
        f"the learning rate's schedule ends with this run, at {end} instead of {before}: after step 8 the rate is "
        f"about {rate or 0:.1f}% of its peak instead of 50.0%"
    )
    assert moved_schedule(*of, starts, 8, 32) == ([] if end is None else [sentence])
    batch = of[0].global_batch_size
    *of, again = start(starts, 9, 32 + batch, *overrides)
    assert again == starts
    assert moved_schedule(*of, again, 9, 32 + batch) == []


@pytest.mark.parametrize(("first", "overrides", "rates"), [
    ([], ["learning_rate_schedule=constant"], ("100.0%", "50.0%")),
    ([], ["learning_rate_schedule=constant", "global_batch_size=8"], ("100.0%", "50.0%")),
    (["learning_rate_schedule=constant"], ["global_batch_size=8"], ("33.3%", "100.0%")),
    (["learning_rate_schedule=constant"], ["learning_rate_schedule=constant", "global_batch_size=8"], None),
    (["schedule_unit=examples"], ["schedule_unit=examples", "warmup_steps=10"], ("80.0%", "50.0%")),
    (["schedule_unit=examples", "warmup_steps=6"], ["schedule_unit=examples", "warmup_steps=6", "global_batch_size=8"],
     ("66.7%", "80.0%")),
    (["schedule_unit=examples"], ["global_batch_size=4"], None),
])  # fmt: skip
def test_a_resume_with_another_shape_of_the_schedule_says_so(first, overrides, rates):
    """The rate before is that of the schedule of then, though the end may be the same."""
    *_, starts = start([], 0, 0, *first)
    *of, starts = start(starts, 8, 32, *overrides)
    sentence = "the learning rate's schedule has changed: after step 8 the rate is about {} of its peak instead of {}"
    assert moved_schedule(*of, starts, 8, 32) == ([] if rates is None else [sentence.format(*rates)])


def test_a_run_of_a_version_that_listed_no_starts_is_told_of_another_end_once():
    """There the schedule ended where 64 examples end in batches of 8; the run has had batches of 4 for 32 of them."""
    *of, starts = start([], 8, 32, "global_batch_size=8")
    assert [entry["step"] for entry in starts] == [8]
    assert moved_schedule(*of, starts, 8, 32) == [
        "the learning rate's schedule ends with this run, at step 12 instead of 8: after step 8 the rate is about "
        "33.3% of its peak instead of 0.0%"
    ]
    assert moved_schedule(*of, starts, 9, 40) == []
    for step, seen, batch in ((0, 0, 8), (8, 32, 4)):
        *of, starts = start([], step, seen, f"global_batch_size={batch}")
        assert moved_schedule(*of, starts, step, seen) == []


def test_a_step_has_the_settings_of_the_start_that_took_it():
    rows = "excluded_rows=rows.jsonl"
    *_, starts = start([], 2, 8)
    for step, seen, *words in ((4, 16, rows, "learning_rate=0.1"), (5, 20, rows, "learning_rate=0.1", "log_period=7"),
                               (6, 24)):  # fmt: skip
        config, _, starts = start(starts, step, seen, *words)
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
    *_, first = start([], 0, 0, *stated)
    *_, starts = start(first, 4, 16, *overrides)
    assert len(starts) == 2
    found = {(after, step): resume_between(starts, after, step) for after, step in ((0, 4), (0, 5), (3, 9), (4, 9))}
    seam = 4 if changes else None
    assert found == {(0, 4): None, (0, 5): seam, (3, 9): seam, (4, 9): None}
