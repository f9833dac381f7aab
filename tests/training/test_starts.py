"""Which starts a run lists, the settings of its steps, and what a resume says of the learning rate."""

import pytest

from maxtext_lite.batching import batch_settings, keep_batches, make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training.checkpoint import (
    append_restart,
    average_note,
    moved_batch,
    resume_between,
    schedule_change_note,
    settings_at,
)


def start(before, step, seen, *overrides):
    """The config, the plan and the starts of a run of 64 examples or stated steps, begun after `step` steps."""
    keys = """
    warmup_steps=0 learning_rate_schedule=linear learning_rate_final_fraction=0 num_epochs=1 global_batch_size=4
    per_device_batch_size=-1 learning_rate=1
    """
    config = load_config(None, [*keys.split(), *overrides])
    plan = make_plan(config, num_devices=1, num_examples=64)
    return config, plan, append_restart(before, config, plan, step, seen)


def test_rates_of_two_peaks_are_compared():
    *_, starts = start([], 0, 0, "learning_rate=2e-3")
    *of, starts = start(starts, 8, 32, "global_batch_size=8", "learning_rate=1e-3")
    (said,) = schedule_change_note(*of, starts, 8, 32)
    for rate in ("about 0.000333 ", "instead of 0.001:"):
        assert rate in said


DATA_MESH = {"ici_data_parallelism": -1, "ici_fsdp_parallelism": 1}


def test_the_rates_that_are_compared_are_those_of_the_batches():
    """Root of 8 / 4 and 16 / 4 of half the peak, the rate half-way; then of the stage."""
    scaled = [
        "learning_rate_scaling=sqrt",
        "base_global_batch_size=4",
        "num_epochs=0",
        "steps=16",
    ]
    *_, starts = start([], 0, 0, *scaled, "global_batch_size=8")
    *of, starts = start(starts, 8, 64, *scaled, "global_batch_size=16")
    (said,) = schedule_change_note(*of, starts, 8, 64)
    assert "about 1 instead of 0.707" in said
    staged = [
        "global_batch_size=0",
        "per_device_batch_size=16",
        "batch_schedule=[[0, 4], [99, 16]]",
    ]
    *of, starts = start(
        starts, 8, 64, *scaled, *staged, "learning_rate_scaling_of=stage"
    )
    (said,) = schedule_change_note(*of, starts, 8, 64)
    assert "about 0.5 instead of 1" in said


CONSTANT = ["learning_rate_schedule=constant", "warmup_steps=0.5", "num_epochs=0"]
STATED = ["num_epochs=0", "steps=16", "global_batch_size=8"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("first", "overrides", "end", "rates"),
    [
        # The run of 16 steps and 64 examples is half done, and its rate half its peak; its end moves.
        ([], ["global_batch_size=8"], "step 12 instead of 16", "0.333 -> 0.5"),
        ([], ["global_batch_size=8", "schedule_unit=examples"], "", ""),
        (
            [],
            [*STATED, "schedule_unit=examples"],
            "example 96 instead of 64",
            "0.667 -> 0.5",
        ),
        # Or its shape changes: the rate before is that of the schedule of then, though the end may be the same.
        (
            [],
            ["learning_rate_schedule=constant", "global_batch_size=8"],
            "step 12 instead of 16",
            "1 -> 0.5",
        ),
        (
            ["schedule_unit=examples"],
            ["schedule_unit=examples", "warmup_steps=10"],
            "learning rate",
            "0.8 -> 0.5",
        ),
        # A constant rate moves with the end where its warm-up, half of the run here, is not over.
        (
            [*CONSTANT, "steps=16"],
            [*CONSTANT, "steps=32"],
            "step 32 instead of 16",
            "0.5 -> 1",
        ),
        ([*CONSTANT, "steps=6"], [*CONSTANT, "steps=12"], "", ""),
    ],
)
def test_a_resume_that_moves_the_schedule_says_so_once(first, overrides, end, rates):
    *_, starts = start([], 0, 0, *first)
    *of, starts = start(starts, 8, 32, *overrides)
    said = schedule_change_note(*of, starts, 8, 32)
    assert len(said) == bool(end)
    for sentence in said:
        assert end in sentence
        after, before = rates.split(" -> ")
        assert (
            f"after step 8 the learning rate is about {after} instead of {before}"
            in sentence
        )
    batch = of[1].global_batch_to_train
    *of, again = start(starts, 9, 32 + batch, *overrides)
    assert again == starts
    assert schedule_change_note(*of, again, 9, 32 + batch) == []


@pytest.mark.parametrize(
    ("devices", "overrides", "why"),
    [
        (
            4,
            [],
            "x 4 devices x 1 accumulation instead of 4 per device x 2 devices x 1 accumulation; on_resume_batch=keep",
        ),
        (2, ["per_device_batch_size=8"], "per_device_batch_size=8 instead of 4"),
    ],
)
def test_a_resume_that_changes_the_batch_says_from_what_to_what_and_why(
    devices, overrides, why
):
    starts = []
    for step, num_devices, keys in ((0, 2, []), (3, devices, overrides)):
        config = load_config(None, ["per_device_batch_size=4", *keys])
        plan = make_plan(config, num_devices=num_devices, num_examples=512)
        starts = append_restart(starts, config, plan, step, 8 * step)
    (said,) = moved_batch(plan, starts, 3)
    assert "16 instead of 8 after step 3" in said
    assert why in said
    assert moved_batch(plan, starts, 4) == []


def test_a_resume_says_that_it_begins_or_drops_the_average():
    said = []
    settings = ({}, {"ema_decay": "0.5"}, {"ema_decay": "0.9"}, {"ema_decay": "0"})
    starts = [{"step": step, "settings": each} for step, each in enumerate(settings)]
    for step in range(4):
        said += average_note(starts[: step + 1], step)
    assert average_note(starts, 4) == []
    assert said == [
        "ema_decay=0.5: the average of the parameters begins with those after step 1",
        "ema_decay=0: the average of the parameters is dropped",
    ]


def test_a_resume_that_keeps_the_batch_says_how_it_is_split():
    config = load_config(None, ["per_device_batch_size=4"])
    starts = []
    stated = batch_settings(config)
    for step, devices in ((0, 8), (3, 6), (5, 4)):
        kept = keep_batches(config, [(0, 32)], devices)
        plan = make_plan(kept.model_copy(update=DATA_MESH), num_devices=devices)
        starts = append_restart(starts, kept, plan, step, 32 * step, stated)
        stated = batch_settings(kept)  # from now on the run's config.yml is resumed
    assert [each["stated"] for each in starts] == 3 * [batch_settings(config)]
    (said,) = moved_batch(plan, starts[:2], 3)
    assert said == (
        "global_batch_to_train stays 32 = 2.66667 per device x 6 devices x 2 accumulation instead of 4 per device x "
        "8 devices x 1 accumulation"
    )
    assert starts[0]["batches"] == starts[1]["batches"] == [[0, 32]]
    shared = load_config(None, ["per_device_batch_size=1/4"])
    with pytest.raises(
        UserError,
        match=r"^num_devices=3 .* less than one example\. Nearest that works: 4\.$",
    ):
        keep_batches(shared, [(0, 32)], 3)


def test_a_ramp_to_a_derived_target_is_kept():
    ramp = "global_batch_size=24 per_device_batch_size=-1 enable_rampup_batch_size=true"
    ramp += " per_device_batch_size_start=2 per_device_batch_size_increment=6 global_rampup_samples=9"
    config = load_config(None, ramp.split())  # 6, then 24 on 3 devices
    kept = keep_batches(config, [(0, 6), (12, 24)], 2)
    plan = make_plan(kept, num_devices=2)
    found = [
        (each.global_batch_to_train, each.per_device_batch_size) for each in plan.stages
    ]
    assert found == [(6, 3), (24, 12)]


def test_a_resume_with_other_stages_says_so():
    starts = []
    for step, first in ((0, 4), (3, 8)):
        words = [f"batch_schedule=[[0, {first}], [99, 16]]", "num_epochs=0", "steps=16"]
        words += ["global_batch_size=0", "per_device_batch_size=16"]
        _, plan, starts = start(starts, step, 4 * step, *words)
    said = "the stages of the batch are [[0, 8], [99, 16]] instead of [[0, 4], [99, 16]] after step 3"
    assert moved_batch(plan, starts, 3) == [said]


def test_a_step_has_the_settings_of_the_start_that_took_it():
    own = ["excluded_rows=rows.jsonl", "learning_rate=0.1"]
    *_, starts = start([], 2, 8)
    for step, seen, words in (
        (4, 16, own),
        (5, 20, [*own, "log_period=7"]),
        (6, 24, []),
    ):
        config, _, starts = start(starts, step, seen, *words)
    assert [each["step"] for each in starts] == [2, 4, 6]
    assert settings_at(starts, 2) == []
    for step, is_own in ((3, False), (4, False), (5, True), (6, True), (7, False)):
        found = load_config(None, ["global_batch_size=1", *settings_at(starts, step)])
        want = (0.1, "rows.jsonl") if is_own else (config.learning_rate, "")
        assert (found.learning_rate, found.excluded_rows) == want
        assert (found.global_batch_size, found.log_period) == (4, config.log_period)
    assert not any(
        word.startswith(("dataset_path", "run_name", "base_emb_dim"))
        for word in settings_at(starts, 3)
    )


@pytest.mark.parametrize(
    ("warmup", "seam"), [("0.5", 4), ("0.1", 4), ("0", None), ("2", None)]
)
def test_a_longer_run_has_other_steps_where_its_rate_depends_on_the_end(warmup, seam):
    keys = ["learning_rate_schedule=constant", f"warmup_steps={warmup}", "num_epochs=0"]
    *_, starts = start([], 0, 0, *keys, "steps=8")
    *_, starts = start(starts, 4, 16, *keys, "steps=16")
    assert resume_between(starts, 0, 6) == seam
