import pytest

from maxtext_lite.batching import format_plan, make_plan, resumed
from maxtext_lite.config import load_config


def table_of(overrides=(), **machine):
    return format_plan(make_plan(load_config(None, overrides), **machine))


def row(table, name):
    return next(line[len(name) :].strip() for line in table.splitlines() if line.startswith(f"{name} "))


def test_each_quantity_has_its_formula_filled_in():
    table = table_of(num_devices=4)
    assert row(table, "num_devices") == "4 = fsdp 4, on 1 host"
    assert row(table, "micro_batch_to_train") == "64 examples = 16 per device x 4 devices"
    assert row(table, "global_batch_to_train") == "64 examples = 16 per device x 4 devices x 1 accumulation"
    assert row(table, "tokens_per_step") == "16384 = 64 examples x 256 tokens"
    assert row(table, "empty_slots_per_micro_batch") == "0 = 64 slots over 4 batch shards - 64 examples"
    assert row(table, "loading_hosts") == "1 of 1, each reads 64 examples in each of 1 load per step"


def test_empty_slots_are_shown():
    table = table_of(["per_device_batch_size=0.5"], num_devices=8)
    assert row(table, "empty_slots_per_micro_batch") == "4 = 8 slots over 8 batch shards - 4 examples"


def test_a_pipeline_a_ramp_and_loading_hosts_are_shown():
    overrides = ["ici_pipeline_parallelism=2", "num_pipeline_microbatches=4", "enable_rampup_batch_size=true",
                 "expansion_factor_real_data=2"]  # fmt: skip
    table = table_of(overrides, num_devices=8, num_hosts=4, num_examples=1000, device_memory_gb=0.001)
    assert row(table, "pipeline_microbatch_size") == "32 examples = micro-batch 128 / 4 pipeline microbatches"
    assert row(table, "pipeline_bubble_fraction").startswith("0.1111 = (2 stages - 1) / (2 repeats x 4 microbatches + ")
    assert row(table, "num_increments") == "6 = (16 - 4) / 2"
    assert row(table, "global_batch_to_load") == "256 slots = 128 examples x 2 expansion"
    assert "from step 1: 3 steps of 32 = 4 per device x 8 x 1" in table
    assert row(table, "epochs").endswith("steps_per_epoch 7.8125")
    assert "MB per device are needed, more than the 1.0 MB it has: lower per_device_batch_size" in table


@pytest.mark.parametrize(
    ("steps", "num_examples", "epochs"), [(6, 76538, "0.0003136"), (1, 7, "0.5714"), (7, 4, "7"), (3, 8, "1.5")]
)
def test_epochs_are_decimals(steps, num_examples, epochs):
    table = table_of([f"steps={steps}", "per_device_batch_size=4"], num_devices=1, num_examples=num_examples)
    assert row(table, "epochs").startswith(f"{epochs};")


def test_both_schedules_of_a_pipeline_are_weighed():
    """4 stages, 4 microbatches, 8 micro-batches: 3 of 7 ticks wait in each of 8, or 6 of 38 once."""
    keys = ["ici_pipeline_parallelism=4", "gradient_accumulation_steps=8"]
    table = table_of(keys, num_devices=4)
    assert row(table, "pipeline_bubble_fraction") == (
        "0.4286 = (4 stages - 1) / (1 repeat x 4 microbatches + 4 stages - 1), in every micro-batch; as one "
        "micro-batch of 32 microbatches it would be 0.08571, with 8 times the activations"
    )
    assert row(table, "with gpipe").startswith("bubble 0.4286, activations ")
    assert row(table, "with 1f1b").startswith("bubble 0.1579, activations ")
    interleaved = table_of([*keys, "pipeline_schedule=1f1b"], num_devices=4)
    assert row(interleaved, "pipeline_bubble_fraction") == (
        "0.1579 = 2 x (4 stages - 1) / (8 accumulation x 4 microbatches + 2 x (4 stages - 1)), once in a step"
    )
    assert "with 1f1b" not in table_of(["ici_pipeline_parallelism=2"], num_devices=4), "it goes round twice"


def test_context_shards_are_shown():
    table = table_of(["ici_context_parallelism=4"], num_devices=8)
    assert row(table, "num_devices") == "8 = fsdp 2 x context 4, on 1 host"
    assert (
        row(table, "context shards") == "4, each with an early and a late chunk of 32 of the 256 tokens of an example"
    )
    assert "context shards" not in table_of(num_devices=8)


def test_a_long_ramp_is_cut_short():
    table = table_of(["enable_rampup_batch_size=true", "per_device_batch_size=1000"], num_devices=1)
    assert "... 487 more stages (--json has them all)" in table


def test_a_short_or_dropped_last_batch_is_shown():
    keys = ["per_device_batch_size=8", "num_epochs=1"]
    table = table_of(keys, num_devices=1, num_examples=19)
    assert row(table, "steps") == "2: 16 examples, 4096 tokens"
    assert row(table, "last batch") == "3 examples at the end, of 8, are dropped"
    table = table_of([*keys, "last_batch=train"], num_devices=1, num_examples=19)
    assert row(table, "steps") == "3: 19 examples, 4864 tokens"
    assert row(table, "last batch") == "the last step has 3 of 8 examples"
    assert "last batch" not in table_of(keys, num_devices=1, num_examples=16)


def test_the_batch_of_a_ramp_that_the_end_cuts_short_is_the_stage_s():
    # Batches of 1 1 1 1 1 2 2 2 3 3 4: 13 examples end in the first batch of 3.
    ramp = ["enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
            "per_device_batch_size=4", "global_rampup_samples=15", "num_epochs=1", "last_batch=train"]  # fmt: skip
    assert row(table_of(ramp, num_devices=1, num_examples=13), "last batch") == "the last step has 2 of 3 examples"


def test_old_and_new_settings_of_the_optimizer_are_shown():
    keys = ["learning_rate_scaling=sqrt", "base_global_batch_size=4"]
    table = table_of([*keys, "scale_adam_with_batch=true"], num_devices=1)
    assert row(table, "batch ratio m") == "4 = 16 / base_global_batch_size=4"
    assert row(table, "learning_rate") == "0.003 -> 0.006 = 0.003 x 2, the root of m"
    assert row(table, "adam_b1") == "0.9 -> 0.6 = 1 - m x (1 - 0.9)"
    assert row(table, "adam_b2") == "0.95 -> 0.8 = 1 - m x (1 - 0.95)"
    assert row(table, "adam_eps") == "1e-08 -> 5e-09 = 1e-08 / root of m"
    assert "adam" not in table_of(keys, num_devices=1)
    assert row(table_of(num_devices=1), "learning_rate") == "0.003 = 0.003 x 1"


def test_local_updates_are_shown():
    table = table_of(["enable_diloco=true", "ici_data_parallelism=2", "diloco_num_replicas=4"], num_devices=4)
    assert row(table, "local updates") == "4 replicas, 2 on each part of the data axis (2), synchronised every 30 steps"
    assert "local updates" not in table_of(num_devices=4)


def test_a_resume_shows_what_is_done_and_what_is_left():
    ramp = ["enable_rampup_batch_size=true", "per_device_batch_size_start=2", "per_device_batch_size_increment=2",
            "per_device_batch_size=6", "global_rampup_samples=48", "num_epochs=1"]  # fmt: skip
    config = load_config(None, ramp)
    plan = make_plan(config, num_devices=1, num_examples=78)
    table = format_plan(resumed(config, plan, step=20, examples_seen=20))
    assert row(table, "steps") == "33: 78 examples, 19968 tokens"
    assert row(table, "already done") == "20: 20 examples, 5120 tokens; 13 steps and 58 examples are left"
    assert row(table, "ramp-up") == "8 steps left; rampup_mode=per_device_batch_size"
    stages = [line.strip() for line in table.splitlines() if "from step" in line]
    assert stages == [
        "from step 21: 2 steps of 2 = 2 per device x 1 x 1",
        "from step 23: 6 steps of 4 = 4 per device x 1 x 1",
        "from step 29: 6",
    ]
    over = format_plan(resumed(config, plan, step=40, examples_seen=60))
    assert row(over, "ramp-up") == "0 steps left; rampup_mode=per_device_batch_size"
    assert "already done" not in format_plan(plan)
