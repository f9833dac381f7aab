"""What changes for a run on other devices is what differs between the two plans; training is what the batch says."""

import json

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.analysis.elsewhere import changed_settings, kept_settings, moved
from maxtext_lite.batching import batch_settings, resumed

STATED = [
    "global_batch_size=48",
    "per_device_batch_size=2",
    "gradient_accumulation_steps=-1",
]
RAMP = [
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=1/3",
    "per_device_batch_size_increment=1/3",
    "global_rampup_samples=480",
    "rampup_mode=gradient_accumulation_steps",
    "global_batch_size=48",
    "per_device_batch_size=1",
    "gradient_accumulation_steps=-1",
]
HELD_OUT = [*STATED, "eval_dataset_path=held_out.txt", "eval_fraction=0.1"]


def written(plan):
    return json.loads(json.dumps(plan.to_json()))


def move(words, *, to, changed=()):
    """From 8 devices."""
    run, config = load_config(None, words), load_config(None, [*words, *changed])
    before = written(make_plan(run, num_devices=8))
    return moved(
        before, make_plan(config, num_devices=to), changed_settings(run, config)
    )


def test_a_stated_batch_stays_and_its_accumulation_follows():
    found = move(STATED, to=4)
    assert found.trains_alike
    assert found.changes["gradient_accumulation_steps"] == (3, 6)
    assert found.changes["num_devices"] == (8, 4)
    assert found.changes["mesh"][0] | {"fsdp": 4} == found.changes["mesh"][1]
    assert found.unchanged["global_batch_to_train"] == 48
    assert "per_device_batch_size" not in found.changes
    assert "gradient_accumulation_steps  3 -> 6" in found.lines()
    ramp = move(RAMP, to=4)  # compared by its batches and not by their split
    assert ramp.trains_alike
    assert ramp.unchanged["rampup"]
    assert "rampup" in move(RAMP, to=8, changed=["global_rampup_samples=960"]).changes


def test_a_batch_of_each_device_grows_with_them():
    found = move(["per_device_batch_size=2"], to=16)
    assert not found.trains_alike
    assert found.changes["global_batch_to_train"] == (16, 32)
    assert found.to_json()["changes"]["global_batch_to_train"] == {"from": 16, "to": 32}


def test_a_run_whose_memory_was_not_estimated_is_compared_too():
    config = load_config(None, STATED)
    before = written(make_plan(config, num_devices=8))
    del before["memory"]
    found = moved(before, make_plan(config, num_devices=4))
    assert found.trains_alike
    assert found.changes["memory"][0] is None
    assert any("not estimated -> " in line for line in found.lines())


ANOTHER_RUN = (
    "max_target_length=128",
    "seed=3",
    "data_shuffle_seed=5",
    "optimizer=sgd",
    "learning_rate=1e-4",
    "warmup_steps=5",
    "base_emb_dim=256",
    "dtype=bfloat16",
    "eval_fraction=0.1",
    "excluded_rows=rows.jsonl",
    "steps=300",
)
THE_SAME_RUN = (
    "ici_data_parallelism=2",
    "remat_policy=full",
    "attention=dot_product",
    "expansion_factor_real_data=0.5",
    "run_name=other",
    "eval_interval=7",
    "optimizer_memory_host_offload=true",
    "num_vocab_tiling=2",
    "dataset_path=/mnt/texts/shakespeare.jsonl.gz",
)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "changed", "alike"),
    [
        (STATED, [], True),
        *((STATED, [word], False) for word in ANOTHER_RUN),
        *((STATED, [word], True) for word in THE_SAME_RUN),
        (STATED, ["learning_rate_scaling=sqrt", "base_global_batch_size=16"], False),
        (RAMP, [], True),
        (RAMP, ["global_rampup_samples=960"], False),
        (HELD_OUT, ["eval_dataset_path=other.txt"], True),
        (HELD_OUT, ["eval_dataset_path=other.txt", "eval_fraction=0.5"], True),
        (
            HELD_OUT,
            ["eval_dataset_path="],
            False,
        ),  # the training text itself has the held-out rows then
    ],
)
def test_another_training_key_is_another_run_and_another_split_or_path_is_not(
    words, changed, alike
):
    found = move(words, to=8, changed=changed)
    assert found.trains_alike == alike
    assert (
        alike
        or len(changed) > 1
        or words != STATED
        or changed[0].partition("=")[0] in found.changes
    )
    assert changed or not found.changes


def test_a_run_that_goes_on_ends_where_what_is_left_does():
    """64 examples: 8 steps of 4, then 4 steps of 8."""
    keys = [
        "num_epochs=1",
        "per_device_batch_size=-1",
        "global_batch_size=4",
        "warmup_steps=0",
    ]
    before = written(make_plan(load_config(None, keys), num_devices=1, num_examples=64))
    config = load_config(None, [*keys, "global_batch_size=8"])
    plan = make_plan(config, num_devices=1, num_examples=64)
    found = moved(
        before, resumed(config, plan, step=8, examples_seen=32), may_end_before=True
    )
    assert found.changes["steps"] == (16, 12)
    assert found.unchanged["total_examples"] == 64
    assert found.to_json()["resumed"] == {
        "step": 8,
        "examples_seen": 32,
        "steps": 12,
        "total_examples": 64,
        "may_end_before": True,
    }


@pytest.mark.parametrize(
    "of", ["stated", "settings"]
)  # the user's keys, or the run's config.yml
@pytest.mark.parametrize(
    ("words", "devices", "kept"),
    [
        # 32 = 4 x 4 x 2; on 3 devices the most up to 12 examples in a micro-batch is 8.
        ([], 3, ["gradient_accumulation_steps=-1", "batch_schedule=[[0, 32]]"]),
        ([], 4, []),
        (["per_device_batch_size=2"], 3, []),
        (["on_resume_batch=config"], 3, []),
    ],
)
def test_a_plan_elsewhere_keeps_the_batch_as_a_resume_does(
    tmp_path, of, words, devices, kept
):
    keys = ["per_device_batch_size=4", "gradient_accumulation_steps=2"]
    start = {of: batch_settings(load_config(None, keys)), "batches": [[0, 32]]}
    about = tmp_path / "checkpoints" / "3" / "about"
    about.mkdir(parents=True)
    (about / "metadata").write_text(
        json.dumps({"examples_seen": 96, "starts": [start]})
    )
    config = load_config(None, [*keys, *words])
    assert kept_settings(tmp_path, config, devices) == kept
