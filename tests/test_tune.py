"""The command `tune`: a table, a page, and the best candidate as a config to train."""

import json
import math

import pytest

from maxtext_lite.analysis import tuning
from maxtext_lite.analysis.tuning import Timing
from maxtext_lite.config import load_config
from maxtext_lite.tune import main
from tests.run_directories import step_line, write_run
from tests.training.conftest import TINY

KEYS = "per_device_batch_size=2 gradient_accumulation_steps=2 remat_policy=minimal"
WORDS = [*TINY, *KEYS.split(), "run_name=here"]


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Each micro-batch takes a second, and a whole batch at once does not fit."""

    def measured(candidate, directory, **limits):
        assert limits == {"warm_up": 2, "steps": 8, "device_memory_gb": None}
        accumulation = candidate.plan.gradient_accumulation_steps
        if accumulation == 1:
            return Timing(math.inf, None)
        write_run(directory, [step_line(1), step_line(2)], [])
        return Timing(float(accumulation), 10**6)

    monkeypatch.setattr(tuning, "measured", measured)


@pytest.mark.fast
def test_a_table_a_page_and_the_best_config(tmp_path, capsys):
    words = [*WORDS, f"base_output_directory={tmp_path}"]
    asked = load_config(None, words)
    assert main(words) == 0
    assert (
        "per_device_batch_size=4 gradient_accumulation_steps=1: does not fit"
        in capsys.readouterr().out
    )
    best = load_config(tmp_path / "here-tune" / "best.yml")
    assert (best.per_device_batch_size, best.gradient_accumulation_steps) == (2, 2)
    assert best.model_dump() == asked.model_dump()  # which was the best already
    assert main([*words, "--json", "--output", str(tmp_path / "other")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["least_step_seconds"] for each in told["ways"]] == [
        None
    ] * 3  # a CPU's peak is not known
    tokens = 8 * 2 * 2 * asked.max_target_length
    assert [each["tokens_per_second"] for each in told["ways"]] == [
        tokens / 2,
        tokens / 4,
        None,
    ]
    assert told["ways"][1]["keys"] == {
        "per_device_batch_size": "1",
        "gradient_accumulation_steps": "4",
    }
    assert (tmp_path / "other" / "report.html").stat().st_size > 10_000
