from maxtext_lite.batching import format_plan, make_plan
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


def test_a_long_ramp_is_cut_short():
    table = table_of(["enable_rampup_batch_size=true", "per_device_batch_size=1000"], num_devices=1)
    assert "... 487 more stages (--json has them all)" in table
