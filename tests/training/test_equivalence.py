"""Splits agree with the whole; planted bugs, failed runs and impossible splits get verdicts of their own.

Each of eight bugs is planted by tests/invariance/test_planted_bugs.py.
"""

import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training import equivalence
from maxtext_lite.training.equivalence import verdicts
from maxtext_lite.training.shrunk import Split
from tests.planted_bugs import train_all


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Verdicts on a split, on two with bugs, on missing data and on a split that no number of devices allows."""
    fsdp = {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}
    ways = [
        Split("fsdp 4 x data 2", fsdp, 2),
        Split("mean of means", fsdp, 2),
        Split("lost reduction over data", fsdp),
        Split("no data", {**fsdp, "dataset_path": f"{tmp_path}/nowhere.txt"}),
        Split("seven shards", {"ici_fsdp_parallelism": 7}),
    ]
    (tmp_path / "planted.txt").write_text("\n".join(["", *(split.name for split in ways)]))
    monkeypatch.setattr(equivalence, "_train_all", train_all)
    monkeypatch.setattr(equivalence, "splits", lambda config: ways)
    return {each.split: each for each in verdicts(None, ["base_num_decoder_layers=2"], tmp_path)}


def test_a_split_agrees_and_a_bug_does_not(found):
    split, means, lost, missing, refused = found.values()
    assert (split.agrees, split.refused, split.optimizer) == (True, "", "sgd")
    assert max(split.loss, split.parameters) < 1e-6
    assert not means.agrees
    assert means.difference.startswith("step 1: ")
    assert not lost.agrees
    assert lost.difference.startswith("step 1: grad_norm ")  # as the loss of step 1 is right
    assert missing.difference.startswith("it does not run: UserError: dataset_path=")
    assert not missing.agrees
    assert refused.agrees  # nothing ran
    assert "ici_fsdp_parallelism=7" in refused.refused


def _runs(directory, *losses):
    for name, each in enumerate(losses):
        (directory / str(name)).mkdir()
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(each, start=1)]
        (directory / str(name) / "metrics.jsonl").write_text("".join(lines))
    return equivalence._verdict("a split", "adamw", directory, "1")


@pytest.mark.parametrize(("whole", "split", "difference", "loss"), [
    ((2.0, None), (2.0, None), "", 0),  # skipped for a loss that is not finite
    ((2.0, 0.0), (2.0, 0.0), "", 0),  # without targets
    ((2.0, 0.0), (2.0, 0.5), "step 2: loss 0.0 and 0.5", 0.5),
    ((2.0, 1.0), (2.0, None), "step 2: loss 1.0 and None", 0),
    ((2.0, 1.0, 1.0), (2.0, 1.0), "the run ends after step 2, not 3", 0),
])  # fmt: skip
def test_losses_that_have_no_relative_difference_get_a_verdict(whole, split, difference, loss, tmp_path):
    found = _runs(tmp_path, whole, split)
    assert (found.difference, found.loss) == (difference, loss)


def test_a_config_that_does_not_run_whole_is_refused_with_the_reason(tmp_path, monkeypatch):
    def fail(devices, path, runs, directory):
        for name, *_ in runs:
            (directory / name).mkdir(parents=True)
            (directory / name / "failed.txt").write_text("ValueError: its reason\nand more")

    monkeypatch.setattr(equivalence, "_run_on", fail)
    with pytest.raises(UserError) as refused:
        next(verdicts(None, [], tmp_path))
    assert str(refused.value) == "the shrunk config does not run with its batch whole: ValueError: its reason"
