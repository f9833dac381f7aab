"""Without what estimates memory and ranks plans, everything else of a plan is the same."""

import sys

import pytest

from maxtext_lite.batching import format_plan, load_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training.opening import chosen_split

PIPELINE = (
    "base_num_decoder_layers=2",
    "ici_pipeline_parallelism=2",
    "ici_fsdp_parallelism=-1",
)


def plan_of(*overrides):
    return load_plan(None, overrides, num_devices=4, device_memory_gb=0.5)[1]


@pytest.mark.parametrize("overrides", [(), PIPELINE])
def test_a_plan_without_an_estimate_lacks_memory_only(monkeypatch, overrides):
    found, text = plan_of(*overrides).to_json(), format_plan(plan_of(*overrides))
    monkeypatch.setitem(sys.modules, "maxtext_lite.analysis.memory", None)
    plan = plan_of(*overrides)
    del found["memory"]
    for cost in found["pipeline_schedules"].values():
        del cost["activations"]
    assert plan.to_json() == found
    assert plan.memory.limit == 500_000_000
    lines = [
        line.partition(", activations")[0]
        for line in text.splitlines()
        if not line.startswith("memory per device")
    ]
    names = [line.split()[0] for line in format_plan(plan).splitlines()]
    assert names == [line.split()[0] for line in lines]


def test_auto_is_refused_with_a_number_where_nothing_chooses_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxtext_lite.analysis.ranking", None)
    config = load_config(None, ["global_batch_size=16", "per_device_batch_size=auto"])
    assert config.gradient_accumulation_steps == -1
    with pytest.raises(UserError, match=r"^per_device_batch_size=-1 .*works: 2\.$"):
        chosen_split(config, None)
