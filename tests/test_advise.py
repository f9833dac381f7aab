"""The command `advise`: every law's figure, an interval, and batches that can be planned on the machine."""

import json
import re
import shlex

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.advise import main


@pytest.fixture
def printed(capsys):
    def run(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.fast
def test_every_law_stands_by_name_with_its_figure(printed):
    found = json.loads(
        printed("--parameters", "1e9", "--tokens", "20e9", "--json", "--devices", "8")
    )
    laws = {(law["name"], law["purpose"]): law["tokens"] for law in found["batch_laws"]}
    assert laws["OLMo ladder", "best"] == pytest.approx(
        327_680 * (1e9 / 108e6) ** (2 / 3)
    )
    assert laws["Kaplan", "critical"] is None
    assert found["best"]["low"] == laws["Step Law", "best"]
    assert found["best"]["widened"]["high"] == 2 * laws["OLMo ladder", "best"]
    assert all(batch["tokens"] == batch["examples"] * 256 for batch in found["legal"])
    assert found["budget"]["flops"] == 1.2e20


def test_a_devices_memory_time_and_empty_slots_are_looked_at(printed):
    words = "--tokens 160e9 model_name=llama3-8b max_target_length=4096 --devices"
    out = printed(*words.split(), "64", "--device", "h200")
    assert "8.03B parameters (6.98B without embeddings)" in out
    assert "2.82 to 4.7 days" in out
    too_much = "more memory than the device has"
    assert too_much not in out
    assert too_much in printed(*words.split(), "8", "--device", "v5e")


def test_of_a_number_of_parameters_the_days_are_those_of_6_n_d_and_memory_is_not_looked_at(
    printed,
):
    words = "--tokens 20e9 --parameters 1e9 --devices 8 --device v5e dtype=bfloat16"
    seconds = 6 * 1e9 * 20e9 / (8 * 197e12)  # v5e: 197 TFLOP/s in bfloat16
    for legal in json.loads(printed(*words.split(), "--json"))["legal"]:
        assert legal["fits"] is None
        # The last batch is whole.
        for bound, mfu in (("low", 0.5), ("high", 0.3)):
            days = pytest.approx(seconds / mfu / 86_400, rel=1e-3)
            assert legal["days"][bound] == days


@pytest.mark.parametrize(
    "words",
    [
        "global_batch_size=64 per_device_batch_size=auto",
        "enable_rampup_batch_size=true",
        "batch_schedule=[[0,4],[9,8]] batch_schedule_unit=tokens",
        "global_batch_tokens=16384 per_device_batch_size=auto",
        "num_epochs=2 last_batch=train",
        "warmup_steps=9000 steps=10000",
    ],
)
def test_what_is_printed_plans_behind_the_words_of_the_command_line(words, printed):
    words = words.split()
    out = printed(*words, "--tokens", "2e9", "--parameters", "1e8", "--devices", "8")
    lines = out.splitlines()
    legal = [re.findall(r"\w+=\S+", line) for line in lines if " examples: " in line]
    ramp = [shlex.split(line) for line in lines if "batch_schedule=[[" in line]
    assert (
        len(legal) == 4
    )  # the one nearest to the upper end of the interval is above it
    assert ramp
    for settings in [*legal, *ramp]:  # as many whole batches as the tokens need
        plan = make_plan(load_config(None, [*words, *settings]), num_devices=8)
        assert 2e9 / 256 <= plan.total_examples < 2e9 / 256 + plan.global_batch_to_train
        assert bool(plan.rampup) == (settings in ramp)


@pytest.mark.parametrize("optimizer", ["muon", "lion"])
def test_an_optimizer_without_a_law_for_its_ramp_is_told_why(optimizer, printed):
    out = printed("--tokens", "1e9", "--devices", "8", f"optimizer={optimizer}")
    assert "ramp          none: " in out
    assert "batch_schedule" not in out
