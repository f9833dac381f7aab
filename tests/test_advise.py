"""The command `advise`."""

import json
import re
import subprocess
import sys

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.advise import main
from maxtext_lite.cli import run_command


def printed(capsys, *argv):
    assert main(argv) == 0
    return capsys.readouterr().out


def test_every_law_stands_by_name_with_its_figure(capsys):
    out = printed(capsys, "--parameters", "1e9", "--tokens", "20e9", "--loss", "2.5")
    for figures in (  # by logarithms
        "Step Law          442k", "DeepSeek         1.08M", "Power Lines       553k", "OLMo ladder      1.44M",
        "Zhang            1.23M", "Power Lines      5.54M", "Kaplan           2.55M",
        "Step Law      9.96e-04", "DeepSeek      9.64e-04", "OLMo ladder   1.12e-03",
    ):  # fmt: skip
        assert figures in out, figures
    assert "span: 442k to 1.44M, a factor of 3.3" in out
    assert "widened by a factor of 2: 221k to 2.89M, at the price of about 5 % more compute" in out


def test_json_holds_the_same(capsys):
    found = json.loads(printed(capsys, "--parameters", "1e9", "--tokens", "20e9", "--json", "--devices", "8"))
    laws = {(law["name"], law["purpose"]): law["tokens"] for law in found["batch_laws"]}
    assert laws["OLMo ladder", "best"] == pytest.approx(327_680 * (1e9 / 108e6) ** (2 / 3))
    assert laws["Kaplan", "critical"] is None
    assert found["best"]["low"] == laws["Step Law", "best"]
    assert found["best"]["widened"]["high"] == 2 * laws["OLMo ladder", "best"]
    assert all(batch["tokens"] == batch["examples"] * 256 for batch in found["legal"])
    assert found["budget"]["flops"] == 1.2e20


def test_a_devices_memory_and_time_are_looked_at(capsys):
    words = ["--tokens", "160e9", "model_name=llama3-8b", "max_target_length=4096", "--devices", "64"]
    out = printed(capsys, *words, "--device", "h200")
    assert "8.03B parameters (6.98B without embeddings)" in out
    assert "and their days at an MFU of 50% to 30%" in out
    assert "2.82 to 4.7 days" in out
    assert "more memory than the device has" not in out
    assert "the plan needs more memory than the device has" in printed(capsys, *words[:-1], "8", "--device", "v5e")


def test_empty_slots_are_named(capsys):
    words = ["--tokens", "2e9", "--parameters", "1e8", "--devices", "4096", "ici_fsdp_parallelism=64"]
    out = printed(capsys, *words, "ici_data_parallelism=64", "max_target_length=8192")
    (line,) = (line for line in out.splitlines() if " = 8 examples: " in line)
    assert "; 4,088 of 4,096 slots empty" in line


def test_of_a_number_of_parameters_the_days_are_those_of_6_n_d_and_memory_is_not_looked_at(capsys):
    words = ["--tokens", "20e9", "--parameters", "1e9", "--devices", "8", "--device", "v5e", "dtype=bfloat16"]
    found = json.loads(printed(capsys, *words, "--json"))
    seconds = 6 * 1e9 * 20e9 / (8 * 197e12)  # v5e: 197 TFLOP/s in bfloat16
    for legal in found["legal"]:
        assert legal["fits"] is None
        assert legal["days"]["low"] == pytest.approx(seconds / 0.5 / 86_400, rel=1e-3)  # the last batch is whole
        assert legal["days"]["high"] == pytest.approx(seconds / 0.3 / 86_400, rel=1e-3)
    out = printed(capsys, *words)
    assert "1.76 to 2.94 days" in out
    assert "of 50% to 30%, for C FLOPs; the memory of --parameters is unknown\n" in out


@pytest.mark.parametrize("words", [
    ["global_batch_size=512", "per_device_batch_size=8", "gradient_accumulation_steps=-1"],
    ["global_batch_size=64", "per_device_batch_size=auto"],
    ["enable_rampup_batch_size=true"],
    ["num_epochs=2", "last_batch=train"],
    ["num_epochs=1", "steps=-1"],
    ["warmup_steps=9000", "steps=10000"],
])  # fmt: skip
def test_what_is_printed_plans_behind_the_words_of_the_command_line(words, capsys):
    out = printed(capsys, *words, "--tokens", "2e9", "--parameters", "1e8", "--devices", "8")
    legal = [re.findall(r"\w+=\S+", line) for line in out.splitlines() if " examples: " in line]
    ramp = [re.findall(r"\w+=\S+", line) for line in out.splitlines() if "global_rampup_samples=" in line]
    assert len(legal) == 5
    assert ramp
    for settings in [*legal, *ramp]:  # as many whole batches as the tokens need
        plan = make_plan(load_config(None, [*words, *settings]), num_devices=8)
        assert 2e9 / 256 <= plan.total_examples < 2e9 / 256 + plan.global_batch_to_train
        assert bool(plan.rampup) == (settings in ramp)


def test_muon_gets_no_ramp(capsys):
    assert "ramp          none: Muon's" in printed(capsys, "--tokens", "1e9", "optimizer=muon")
    assert "doubled as the critical batch grows" in printed(capsys, "--tokens", "1e9")


@pytest.mark.parametrize(("argv", "error"), [
    (["--tokens", "0"], "error: --tokens=0 must be from 1 to 1e+21. Nearest that works: 1."),
    (["--tokens", "1e30"], "error: --tokens=1e+30 must be from 1 to 1e+21. Nearest that works: 1e+21."),
    (["--tokens", "1e9", "--loss", "-1"], "error: --loss=-1 must be from 0.01 to 100. Nearest that works: 0.01."),
    (["--tokens", "1e9", "--loss", "1e-300"],
     "error: --loss=1e-300 must be from 0.01 to 100. Nearest that works: 0.01."),
    (["--tokens", "1e9", "--device", "h300"], "error: --device=h300 is no device."),
    (["--tokens", "many"], "error: argument --tokens: many is not a number."),
    ([], "error: the following arguments are required: --tokens."),
    (["--tokens", "1e9", "steps=-3"], "error: steps=-3"),
    (["--tokens", "1e9", "--devices", "0"], "error: num_devices=0 must be at least 1. Nearest that works: 1."),
    (["--tokens", "1e9", "--devices", "8", "--hosts", "3"], "error: num_hosts=3 does not divide num_devices=8:"),
    (["--tokens", "1e9", "configs/post_train/rl.yml"], "error: advise knows laws of pre-training"),
])  # fmt: skip
def test_what_is_wrong_is_refused(argv, error, capsys):
    assert run_command(main, argv) == 2
    assert capsys.readouterr().err.startswith(error)


def test_nothing_but_what_is_wrong_is_refused(capsys):
    words = ("steps=200000", "warmup_steps=100000", "base_emb_dim=256", "ici_fsdp_parallelism=-1")
    assert run_command(main, ["--devices", "7", "--tokens", "5e9", *words]) == 2
    assert re.findall(r"error: (\w+)", capsys.readouterr().err) == ["ici_fsdp_parallelism"]


def test_no_jax_is_imported():
    code = (
        "import sys; from maxtext_lite.advise import main; main(['--tokens', '1e9']); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
