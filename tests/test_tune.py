"""The command `tune`: a table, a page, and the best candidate as a config to train."""

import json

import pytest

from maxtext_lite.batching.devices import device_named
from maxtext_lite.batching.tuning import Timing
from maxtext_lite.cli import run_command
from maxtext_lite.config import load_config
from maxtext_lite.training import timing
from maxtext_lite.tune import main
from tests.run_directories import step_line, write_run
from tests.test_verify_resume import SIZES

WORDS = [*SIZES, "per_device_batch_size=2", "gradient_accumulation_steps=2", "remat_policy=minimal", "run_name=here"]


@pytest.fixture
def machine(monkeypatch):
    """Each micro-batch takes a second, and a whole batch at once does not fit."""

    def measured(candidate, directory, **limits):
        assert limits == {"warm_up": 2, "steps": 8, "device_memory_gb": None}
        accumulation = candidate.plan.gradient_accumulation_steps
        if accumulation == 1:
            return Timing(None, None)
        write_run(directory, [step_line(1), step_line(2)], [])
        return Timing(float(accumulation), 10**6)

    monkeypatch.setattr(timing, "measured", measured)


def test_a_table_a_page_and_the_best_config(machine, tmp_path, capsys):
    words = [*WORDS, f"base_output_directory={tmp_path}"]
    asked = load_config(None, words)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "per_device_batch_size=4 gradient_accumulation_steps=1: does not fit" in said
    assert "no room" in said
    best = load_config(tmp_path / "here-tune" / "best.yml")
    assert (best.per_device_batch_size, best.gradient_accumulation_steps) == (2, 2)
    assert best.model_dump() == asked.model_dump()  # which was the best already
    assert main([*words, "--json", "--output", str(tmp_path / "other")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["least_step_seconds"] for each in told["ways"]] == [None] * 3  # a CPU's peak is not known
    tokens = 8 * 2 * 2 * asked.max_target_length
    assert [each["tokens_per_second"] for each in told["ways"]] == [tokens / 2, tokens / 4, None]
    assert told["ways"][1]["keys"] == {"per_device_batch_size": "1", "gradient_accumulation_steps": "4"}
    assert (tmp_path / "other" / "report.html").stat().st_size > 10_000


def test_the_least_time_of_known_devices_stands_beside_the_measured(machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("maxtext_lite.tune.device_of_kind", lambda kind: device_named("h200", option="--device"))
    assert main([*WORDS, f"base_output_directory={tmp_path}"]) == 0
    header, *rows = capsys.readouterr().out.split("\n\n")[-1].splitlines()[:4]
    assert header.split()[:4] == ["step,", "ms", "at", "least"]
    measured, least = zip(*(row.split()[:2] for row in rows), strict=True)
    assert measured == ("2000.0", "4000.0", "-")
    assert main([*WORDS, "--json", f"base_output_directory={tmp_path}"]) == 0
    seconds = [each["least_step_seconds"] for each in json.loads(capsys.readouterr().out)["ways"]]
    assert min(seconds) > 0
    assert least == tuple(f"{1e3 * each:.1f}" for each in seconds)


@pytest.mark.parametrize(("words", "error"), [
    (["--steps", "0"], "error: --steps=0 must be at least 1. Nearest that works: 1."),
    (["enable_rampup_batch_size=true"], "error: enable_rampup_batch_size=true: tune measures one batch"),
    (["configs/post_train/rl.yml"], "error: a config of reinforcement learning"),
])  # fmt: skip
def test_what_is_wrong_is_refused(words, error, tmp_path, capsys):
    assert run_command(main, [*words, f"base_output_directory={tmp_path}"]) == 2
    assert error in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
