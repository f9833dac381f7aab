"""Splits agree with the whole; planted bugs, failed runs and impossible splits get verdicts of their own.

Each of eight bugs is planted by tests/invariance/test_planted_bugs.py.
"""

import pytest

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
