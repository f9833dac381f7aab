import json
from fractions import Fraction

import pytest

from maxtext_lite.batching import make_plan, row_slots
from maxtext_lite.config import load_config

# The keys of plan.json in the interface.
PROMISED = """num_devices, num_hosts, mesh, per_device_batch_size, micro_batch_to_train, empty_slots_per_micro_batch,
gradient_accumulation_steps, global_batch_to_train, global_batch_to_load, loads_per_step, loading_hosts,
examples_per_loading_host, tokens_per_step, num_pipeline_stages, num_pipeline_microbatches, pipeline_microbatch_size,
pipeline_bubble_fraction, steps, epochs, steps_per_epoch, learning_rate, learning_rate_multiplier, rampup,
memory, num_examples, total_examples, last_batch_examples, dropped_examples, adam_b1, adam_b2, adam_eps,
diloco_num_replicas, diloco_sync_period""".replace("\n", " ").split(", ")


def plan_of(*overrides, num_devices=8, **machine):
    return make_plan(load_config(None, overrides), num_devices=num_devices, **machine)


def test_a_plan_has_the_fields_of_the_interface():
    plan = plan_of("enable_rampup_batch_size=true")
    written = json.loads(json.dumps(plan.to_json()))
    assert set(PROMISED) <= set(written)
    assert all(hasattr(plan, name) for name in PROMISED)
    assert list(written["rampup"]) == [
        "mode", "num_increments", "samples_per_increment", "total_steps", "stages", "target"]  # fmt: skip
    assert written["rampup"]["target"] == {
        "first_step": plan.rampup.total_steps + 1, "num_steps": None, "per_device_batch_size": 16,
        "gradient_accumulation_steps": 1, "global_batch_to_train": 128, "samples": None}  # fmt: skip
    assert list(written["rampup"]["stages"][0]) == [
        "first_step", "num_steps", "per_device_batch_size", "gradient_accumulation_steps", "global_batch_to_train",
        "samples"]  # fmt: skip
    assert list(written["mesh"]) == ["stage", "data", "fsdp", "expert", "context", "tensor"]


def test_a_plan_does_not_change():
    with pytest.raises(AttributeError):
        plan_of().steps = 3


@pytest.mark.parametrize(
    ("examples", "shards", "hosts", "pieces", "slots"),
    [(4, 8, 1, 1, 8), (16, 8, 1, 1, 16), (17, 8, 1, 1, 24), (4, 2, 4, 1, 4), (5, 2, 4, 1, 8), (3, 1, 1, 1, 3),
     (6, 1, 1, 4, 8), (16, 4, 2, 4, 16), (1, 1, 3, 2, 6)],
)  # fmt: skip
def test_rows_are_rounded_up_to_shards_hosts_and_pipeline_pieces(examples, shards, hosts, pieces, slots):
    assert row_slots(examples, shards, hosts, pieces) == slots


def test_slots_of_training_and_evaluation():
    plan = plan_of("per_device_batch_size=0.5", "eval_per_device_batch_size=1.25")
    assert (plan.micro_batch_to_train, plan.empty_slots_per_micro_batch, plan.micro_batch_slots) == (4, 4, 8)
    assert (plan.eval_batch_examples, plan.eval_batch_slots, plan.batch_shards) == (10, 16, 8)
    assert plan.slots_for(9) == 16


def test_the_length_of_a_ramped_run_in_steps_of_the_target():
    ramp = ("enable_rampup_batch_size=true", "per_device_batch_size_start=4", "per_device_batch_size_increment=4")
    plan = plan_of("per_device_batch_size=16", *ramp, "global_rampup_samples=90", "steps=10", num_devices=1)
    # 8 steps of 4, 4 of 8 would follow, of which two are left: 32 + 16 examples = 3 steps of 16.
    assert (plan.total_examples, plan.schedule_end("examples", 0, 0), plan.schedule_end("steps", 0, 0)) == (48, 3, 10)


def test_the_bubble_is_that_of_one_micro_batch():
    plan = plan_of("ici_pipeline_parallelism=4", "num_pipeline_microbatches=8", "gradient_accumulation_steps=4")
    assert plan.pipeline_bubble_fraction == Fraction(3, 1 * 8 + 3)
    assert plan.pipeline_microbatch_size == 128 // 8
    assert plan_of().pipeline_bubble_fraction == 0


def test_plans_with_and_without_a_ramp_answer_alike():
    plain, ramped = plan_of(), plan_of("enable_rampup_batch_size=true")
    assert len(plain.stages) == 1
    assert plain.stage_at(10**9) == plain.stages[0]
    assert plain.length.examples_after(2, 0) == 2 * plain.global_batch_to_train
    assert ramped.stages[-1].global_batch_to_train == ramped.global_batch_to_train
    assert ramped.stage_at(0) == ramped.stages[0]
    assert ramped.total_examples == sum(ramped.rampup.batch_size_at(step) for step in range(1, ramped.steps + 1))
    for plan in (plain, ramped):
        with pytest.raises(ValueError, match="negative"):
            plan.stage_at(-1)
    with pytest.raises(ValueError, match="first step"):
        ramped.rampup.samples_before(0)
