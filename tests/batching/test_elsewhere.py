"""What changes for a run on other devices is what differs between the two plans; training is what the batch says."""

import json

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.batching import resumed
from maxtext_lite.batching.elsewhere import changed_settings, done_in, moved, read_plan
from maxtext_lite.config import UserError

STATED = ["global_batch_size=48", "per_device_batch_size=2", "gradient_accumulation_steps=-1"]
RAMP = ["enable_rampup_batch_size=true", "per_device_batch_size_start=1/3", "per_device_batch_size_increment=1/3",
        "global_rampup_samples=480", "rampup_mode=gradient_accumulation_steps"]  # fmt: skip


def move(words, *, to, changed=()):
    """From 8 devices."""
    run, config = load_config(None, words), load_config(None, [*words, *changed])
    before = json.loads(json.dumps(make_plan(run, num_devices=8).to_json()))
    return moved(before, make_plan(config, num_devices=to), changed_settings(run, config))


def test_a_stated_batch_stays_and_its_accumulation_follows():
    found = move(STATED, to=4)
    assert found.trains_alike
    assert found.changes["gradient_accumulation_steps"] == (3, 6)
    assert found.changes["num_devices"] == (8, 4)
    assert found.changes["mesh"][0] | {"fsdp": 4} == found.changes["mesh"][1]
    assert found.unchanged["global_batch_to_train"] == 48
    assert "steps" in found.unchanged
    assert "per_device_batch_size" not in found.changes
    lines = found.lines()
    assert "gradient_accumulation_steps  3 -> 6" in lines
    assert "same examples in the same steps" in lines[-1]


@pytest.mark.parametrize(("changed", "alike"), [
    (["eval_dataset_path=other.txt"], True),
    (["eval_dataset_path=other.txt", "eval_fraction=0.5"], True),
    (["eval_dataset_path="], False),  # the training text itself has the held-out rows then
])  # fmt: skip
def test_held_out_rows_change_the_training_where_they_leave_it(changed, alike):
    found = move([*STATED, "eval_dataset_path=held_out.txt", "eval_fraction=0.1"], to=8, changed=changed)
    assert found.trains_alike == alike
    assert ("eval_fraction" in found.changes) != alike


def test_a_batch_of_each_device_grows_with_them():
    found = move(["per_device_batch_size=2"], to=16)
    assert not found.trains_alike
    assert found.changes["global_batch_to_train"] == (16, 32)
    assert "would not be the same there: global_batch_to_train, " in found.lines()[-1]
    assert found.to_json()["changes"]["global_batch_to_train"] == {"from": 16, "to": 32}


def test_ramps_are_compared_by_batches_and_not_by_their_split():
    same = move([*STATED[:1], "per_device_batch_size=1", "gradient_accumulation_steps=-1", *RAMP], to=4)
    assert same.trains_alike
    assert same.unchanged["rampup"]
    assert "16 then 32 then 48" in same.lines()[-2]
    other = move([*STATED[:1], "per_device_batch_size=1", "gradient_accumulation_steps=-1", *RAMP], to=8,
                 changed=["global_rampup_samples=960"])  # fmt: skip
    assert "rampup" in other.changes
    assert not other.trains_alike


def test_on_the_same_machine_nothing_changes():
    found = move(STATED, to=8)
    assert not found.changes
    assert found.lines()[0] == "nothing changes"


@pytest.mark.parametrize("changed", [
    "max_target_length=128", "seed=3", "data_shuffle_seed=5", "optimizer=sgd", "learning_rate=1e-4", "warmup_steps=5",
    "base_emb_dim=256", "dtype=bfloat16", "eval_fraction=0.1", "excluded_rows=rows.jsonl", "steps=300",
])  # fmt: skip
def test_another_training_key_is_another_run(changed):
    found = move(STATED, to=8, changed=[changed])
    key = changed.partition("=")[0]
    assert not found.trains_alike
    assert key in found.changes
    assert found.lines()[-1].startswith("The run would not be the same there: ")
    assert key in found.lines()[-1]
    assert "global_batch_size" not in found.lines()[-1]


def test_a_scaled_learning_rate_is_another_run():
    found = move(STATED, to=8, changed=["learning_rate_scaling=sqrt", "base_global_batch_size=16"])
    assert found.changes["learning_rate_scaling"] == ("none", "sqrt")
    assert not found.trains_alike


@pytest.mark.parametrize("changed", [
    "ici_data_parallelism=2", "remat_policy=full", "attention=dot_product", "expansion_factor_real_data=0.5",
    "run_name=other", "eval_interval=7", "optimizer_memory_host_offload=true", "num_vocab_tiling=2",
])  # fmt: skip
def test_another_split_or_path_is_the_same_run(changed):
    assert move(STATED, to=8, changed=[changed]).trains_alike


def test_data_may_lie_elsewhere():
    found = move(STATED, to=8, changed=["dataset_path=/mnt/texts/shakespeare.jsonl.gz"])
    assert found.trains_alike
    assert found.lines()[-1].endswith(" The content of dataset_path must be the same there, which a resume checks.")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"steps": 3}'])
def test_a_damaged_plan_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"--from=.*(is not a run directory|is damaged)"):
        read_plan(tmp_path)


def test_a_run_at_its_end_still_has_had_its_short_batch():
    config = load_config(None, ["num_epochs=1", "per_device_batch_size=15", "last_batch=train", "warmup_steps=0"])
    plan = make_plan(config, num_devices=1, num_examples=100)
    found = moved(json.loads(json.dumps(plan.to_json())), resumed(config, plan, step=7, examples_seen=100))
    assert plan.last_batch_examples == 10
    assert found.trains_alike


def test_a_run_that_is_over_has_no_last_batch_left():
    config = load_config(None, ["num_epochs=1", "per_device_batch_size=15", "warmup_steps=0"])
    plan = make_plan(config, num_devices=1, num_examples=100)
    before = {**json.loads(json.dumps(plan.to_json())), "dropped_examples": 0}  # its batches were others at first
    assert moved(before, resumed(config, plan, step=6, examples_seen=90)).trains_alike


def test_a_source_that_may_be_exhausted_is_told():
    config = load_config(None, ["steps=10", "warmup_steps=0"])
    plan = make_plan(config, num_devices=1)
    before = json.loads(json.dumps(plan.to_json()))
    found = moved(before, resumed(config, plan, step=4, examples_seen=64), may_end_before=True)
    assert found.lines()[-2].endswith("ends at step 10 after 160 examples, if no source is exhausted before.")


@pytest.mark.parametrize("steps", [4, 10])
def test_a_run_at_its_end_does_not_continue(steps):
    config = load_config(None, [f"steps={steps}"])
    plan = make_plan(config, num_devices=1)
    before = json.loads(json.dumps(make_plan(load_config(None, ["steps=10"]), num_devices=1).to_json()))
    found = moved(before, resumed(config, plan, step=10, examples_seen=160))
    assert found.lines()[-1] == "Nothing is left to do after its newest checkpoint, of step 10 after 160 examples."
    other = moved(before, resumed(config, plan, step=10, examples_seen=160), {"base_mlp_dim": (384, 512)})
    assert other.lines()[-2:] == [found.lines()[-1], "The run would not be the same there: base_mlp_dim."]


def test_a_run_that_goes_on_ends_where_what_is_left_does():
    """64 examples: 8 steps of 4, then 4 steps of 8."""
    keys = ["num_epochs=1", "per_device_batch_size=-1", "global_batch_size=4", "warmup_steps=0"]
    before = json.loads(json.dumps(make_plan(load_config(None, keys), num_devices=1, num_examples=64).to_json()))
    config = load_config(None, [*keys, "global_batch_size=8"])
    plan = make_plan(config, num_devices=1, num_examples=64)
    found = moved(before, resumed(config, plan, step=8, examples_seen=32))
    assert found.changes["steps"] == (16, 12)
    assert found.unchanged["total_examples"] == 64
    assert found.lines()[-2] == (
        "Continued from its newest checkpoint, of step 8 after 32 examples, the run ends at step 12 after 64 examples."
    )
    assert found.to_json()["resumed"] == {"step": 8, "examples_seen": 32, "steps": 12, "total_examples": 64,
                                           "may_end_before": False}  # fmt: skip
    assert moved(before, plan).changes["steps"] == (16, 8)
    assert "resumed" not in moved(before, plan).to_json()


def test_a_run_is_as_far_as_its_newest_checkpoint_that_says_so(tmp_path):
    assert done_in(tmp_path) == (0, 0)
    for step, about in ((4, '{"examples_seen": 16}'), (8, '{"examples_seen": 32}'), (9, "{"), (10, "[]"), (12, None)):
        (tmp_path / "checkpoints" / str(step) / "about").mkdir(parents=True)
        if about is not None:
            (tmp_path / "checkpoints" / str(step) / "about" / "metadata").write_text(about)
    assert done_in(tmp_path) == (8, 32)
