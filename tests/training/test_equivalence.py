"""Splits agree with the whole; other numbers, failed runs and impossible splits get verdicts of their own.

Bugs of every kind are planted by tests/mutants.
"""

import json

import pytest

from maxtext_lite.training import equivalence
from maxtext_lite.training.equivalence import verdicts
from maxtext_lite.training.shrunk import Split

WAYS = {
    "fsdp 4 x data 2": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    "other rows": {
        "ici_fsdp_parallelism": 4,
        "ici_data_parallelism": 2,
        "data_shuffle_seed": 1,
    },
    "no data": {"ici_fsdp_parallelism": 8, "dataset_path": "nowhere.txt"},
    "seven shards": {"ici_fsdp_parallelism": 7},
}


def test_a_split_agrees_and_another_run_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(
        equivalence,
        "splits",
        lambda config: [Split(name, keys) for name, keys in WAYS.items()],
    )
    split, other, missing, refused = verdicts(
        None, ["base_num_decoder_layers=1"], tmp_path
    )
    assert (split.agrees, split.refused, split.optimizer) == (True, "", "sgd")
    assert max(split.loss, split.parameters) < 1e-6
    assert not other.agrees
    assert other.difference.startswith("step 1: ")
    assert missing.difference.startswith("it does not run: UserError: dataset_path=")
    assert not missing.agrees
    assert refused.agrees  # nothing ran
    assert "ici_fsdp_parallelism=7" in refused.refused


def _runs(directory, *losses):
    for name, each in enumerate(losses):
        (directory / str(name)).mkdir()
        lines = [
            json.dumps({"step": step, "loss": loss}) + "\n"
            for step, loss in enumerate(each, start=1)
        ]
        (directory / str(name) / "metrics.jsonl").write_text("".join(lines))
    return equivalence._verdict("a split", "adamw", directory, "1")


@pytest.mark.parametrize(
    ("whole", "split", "difference", "loss"),
    [
        ((2.0, 0.0), (2.0, 0.5), "step 2: loss 0.0 and 0.5", 0.5),
        ((2.0, 1.0, 1.0), (2.0, 1.0), "the run ends after step 2, not 3", 0),
    ],
)
def test_losses_that_have_no_relative_difference_get_a_verdict(
    whole, split, difference, loss, tmp_path
):
    found = _runs(tmp_path, whole, split)
    assert (found.difference, found.loss) == (difference, loss)
