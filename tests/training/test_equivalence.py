"""What is split otherwise agrees; what computes something else, does not run or cannot be planned is told apart."""

import pytest

from maxtext_lite.training import equivalence
from maxtext_lite.training.equivalence import verdicts
from maxtext_lite.training.shrunk import Split


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Verdicts on a split, another computation, data that are not there and what no device count allows."""
    fsdp = {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}
    ways = [
        Split("fsdp 4 x data 2", fsdp, 2),
        Split("another loss", {**fsdp, "z_loss_multiplier": 1e-3}),
        Split("no data", {**fsdp, "dataset_path": f"{tmp_path}/nowhere.txt"}),
        Split("seven shards", {"ici_fsdp_parallelism": 7}),
    ]
    monkeypatch.setattr(equivalence, "splits", lambda config: ways)
    return {each.split: each for each in verdicts(None, ["base_num_decoder_layers=2"], tmp_path)}


def test_a_split_agrees_and_what_is_something_else_does_not(found):
    split, other, missing, refused = found.values()
    assert (split.agrees, split.refused, split.optimizer) == (True, "", "sgd")
    assert max(split.loss, split.parameters) < 1e-6
    assert not other.agrees
    assert other.difference.startswith("step 1: ")
    assert missing.difference.startswith("it does not run: UserError: dataset_path=")
    assert not missing.agrees
    assert refused.agrees  # nothing ran
    assert "ici_fsdp_parallelism=7" in refused.refused
