import pytest

from maxtext_lite.analysis.plan_view import memory_parts, plan_rows
from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config


def plan_of(*overrides, num_devices=1, num_hosts=1, **options):
    return make_plan(
        load_config(None, overrides),
        num_devices=num_devices,
        num_hosts=num_hosts,
        **options,
    ).to_json()


@pytest.mark.fast
def test_a_plan_in_words():
    plan = plan_of("ici_pipeline_parallelism=2", num_devices=2) | {
        "key_of_the_future": [1, {"a": None}],
        "epochs": 2.5,
    }
    rows = plan_rows(plan)
    assert rows["key_of_the_future"][0] == '[1, {"a": null}]'
    assert rows["num_pipeline_stages"][0] == "2"
    unknown = {key for key, value in plan.items() if value is None}
    assert (
        set(plan) - set(rows)
        == {"mesh", "num_hosts", "rampup", "memory", "warnings"} | unknown
    )
    rows = plan_rows(
        plan_of(
            "per_device_batch_size=0.5",
            "ici_tensor_parallelism=4",
            num_devices=256,
            num_hosts=64,
        )
    )
    assert rows["num_devices"] == ("256", "fsdp 64 × tensor 4, on 64 hosts")
    assert rows["micro_batch_to_train"][0] == "128"
    assert rows["tokens_per_step"][0] == "32,768"
    assert rows["loading_hosts"] == ("64 of 64", "hosts 0–63")
    assert "num_pipeline_stages" not in rows
    assert "epochs" not in rows, "null without a data index"


def test_the_batches_of_reinforcement_learning_are_rows_like_the_others():
    apart = ["trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5"]
    words = ["batch_size=4", "num_generations=8", "micro_batch_size=8", *apart]
    plan = make_plan(
        load_config("post_train/rl.yml", words), num_devices=2, num_hosts=1
    ).to_json()
    rows = plan_rows(plan)
    assert rows["pairs_per_batch"][0] == "32"
    assert rows["micro_batches"][0] == "4"
    assert rows["overlap_fraction"][0] == "0.75"
    assert "rl" not in rows
    assert not [name for name in plan["rl"] if name not in rows]


def test_memory_is_shares_of_the_device_or_of_the_sum():
    memory = {
        "params": 10_000,
        "optimizer_state": 30_000,
        "total": 40_000,
        "limit": None,
    }

    def shares(**more):
        _, parts = memory_parts({"memory": memory | more})
        return [share for _, _, share in parts]

    sentence, parts = memory_parts({"memory": memory})
    assert sentence == "40.0 kB per device"
    assert parts == [("parameters", "10.0 kB", 0.25), ("optimizer", "30.0 kB", 0.75)]
    assert shares(limit=80_000) == [0.125, 0.375]
    peak = {"params": 10_000, "optimizer_state": 0, "activations": 30_000}
    assert shares(at_peak=peak) == [0.25, 0, 0.75], "they add up to the total"
    assert sum(shares(limit=20_000)) == 1, "more than there is still fits the bar"
