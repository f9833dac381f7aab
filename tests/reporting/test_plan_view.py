import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.reporting.plan_view import long_number, memory_parts, plain, plan_rows, ranges, short_number


def plan_of(*overrides, num_devices=1, num_hosts=1, **options):
    return make_plan(load_config(None, overrides), num_devices=num_devices, num_hosts=num_hosts, **options).to_json()


def by_name(plan):
    return plan_rows(plan)


def test_a_plan_in_words():
    rows = by_name(plan_of("per_device_batch_size=0.5", "ici_tensor_parallelism=4", num_devices=256, num_hosts=64))
    assert rows["num_devices"] == ("256", "fsdp 64 × tensor 4, on 64 hosts")
    assert rows["micro_batch_to_train"][0] == "128"
    assert rows["tokens_per_step"][0] == "32,768"
    assert rows["loading_hosts"] == ("64 of 64", "hosts 0–63")
    assert "num_pipeline_stages" not in rows
    assert "epochs" not in rows, "null without a data index"


def test_a_resumed_run_says_where_it_goes_on():
    rows = by_name({"resumed": {"step": 5400, "examples_seen": 43200, "stages_ahead": []}})
    assert rows == {"resumed": ("after step 5,400", "43,200 examples")}


def test_pipeline_rows_are_there_where_there_is_one():
    rows = by_name(plan_of("ici_pipeline_parallelism=2", num_devices=2))
    # One stage of two waits for one tick: (2 - 1) / (M + 1) with M = 2 microbatches or more.
    assert rows["num_pipeline_stages"][0] == "2"
    assert "pipeline_bubble_fraction" in rows


def test_every_entry_is_shown_somewhere():
    plan = plan_of("ici_pipeline_parallelism=2", num_devices=2) | {"key_of_the_future": [1, {"a": None}], "epochs": 2.5}
    rows = by_name(plan)
    assert rows["key_of_the_future"] == ('[1, {"a": null}]', "")
    unknown = {key for key, value in plan.items() if value is None}
    assert set(plan) - set(rows) == {"mesh", "num_hosts", "rampup", "memory", "warnings"} | unknown
    assert not [key for key in plan if key in rows and key != "key_of_the_future" and not rows[key][1]], "unexplained"


def test_the_batches_of_reinforcement_learning_are_rows_like_the_others():
    apart = ["trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5"]
    words = ["batch_size=4", "num_generations=8", "micro_batch_size=8", *apart]
    plan = make_plan(load_config("post_train/rl.yml", words), num_devices=2, num_hosts=1).to_json()
    rows = by_name(plan)
    assert rows["pairs_per_batch"][0] == "32"
    assert rows["micro_batches"][0] == "4"
    assert rows["overlap_fraction"][0] == "0.75"
    assert "rl" not in rows
    of_rl = plan["rl"]
    assert isinstance(of_rl, dict)
    assert not [name for name in of_rl if not rows[name][1]], "unexplained"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0–3"), ([0, 2, 3, 9], "0, 2–3, 9")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


@pytest.mark.parametrize(("value", "text"), [(12_345, "12,345"), (True, "true"), (None, "null"), (["<"], '["<"]')])
def test_plain_values(value, text):
    assert plain(value) == text


def test_memory_is_shares_of_the_device_or_of_the_sum():
    memory = {"params": 10_000, "optimizer_state": 30_000, "total": 40_000, "limit": None}
    sentence, parts = memory_parts({"memory": memory})
    assert sentence == "40.0 kB per device"
    assert parts == [("parameters", "10.0 kB", 0.25), ("optimizer", "30.0 kB", 0.75)]
    sentence, parts = memory_parts({"memory": memory | {"limit": 80_000}})
    assert (sentence, parts[1][2]) == ("40.0 kB of 80.0 kB per device", 0.375)
    peak = {"params": 10_000, "optimizer_state": 0, "activations": 30_000}
    _, parts = memory_parts({"memory": memory | {"at_peak": peak}})
    assert [share for _, _, share in parts] == [0.25, 0, 0.75], "what is held at the peak adds up to the total"
    _, parts = memory_parts({"memory": memory | {"limit": 20_000}})
    assert sum(share for _, _, share in parts) == 1, "more than there is still fits the bar"


@pytest.mark.parametrize("plan", [{}, {"memory": None}, {"memory": {}}, {"memory": {"params": 3, "total": "x"}}])
def test_without_memory_there_is_no_bar(plan):
    assert memory_parts(plan) == ("", [])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.003, "0.003"), (5e-6, "5e-06"), (12.5, "12.5"), (999, "999"), (50_000, "50k"), (999_999, "1M"),
     (3.2e6, "3.2M"), (-1500, "-1.5k"), (2e9, "2G"), (1.5e12, "1.5T")],
)  # fmt: skip
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12_345_678, "12,345,678"), (4.0, "4"), (2.345678, "2.3457"), (123_456.78, "123,456.8")]
)
def test_long_numbers(value, text):
    assert long_number(value) == text
