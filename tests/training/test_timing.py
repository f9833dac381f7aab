"""A short run gives the median time of its steps; one that does not fit gives none."""

import json
import statistics

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.tuning import Candidate, Timing
from maxtext_lite.config import load_config
from maxtext_lite.training.timing import measured
from tests.training.conftest import TINY


def test_the_median_after_the_warm_up(tmp_path, capsys):
    config = load_config(None, [*TINY, "dataset_type=synthetic", "base_output_directory=/nowhere"])
    candidate = Candidate({}, config, make_plan(config, num_devices=8, platform="cpu"))
    found = measured(candidate, tmp_path / "way", warm_up=1, steps=3, device_memory_gb=None)
    lines = [json.loads(line) for line in (tmp_path / "way" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    memory = json.loads((tmp_path / "way" / "memory.json").read_text())
    assert found == Timing(statistics.median(line["step_seconds"] for line in lines[1:]), memory["compiled_bytes"])
    assert not (tmp_path / "way" / "checkpoints").exists()
    assert capsys.readouterr().out == ""
    assert measured(candidate, tmp_path / "way", warm_up=1, steps=3, device_memory_gb=1e-6) == Timing(None, None)
