"""The command `equiv`: what is split otherwise agrees, and a run that computes something else does not."""

import json

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.equiv import main
from maxtext_lite.training import equivalence
from maxtext_lite.training.shrunk import Split


@pytest.fixture
def few(monkeypatch):
    """Three ways: a split, another computation, and one that no device count allows."""
    fsdp = {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}
    ways = [
        Split("fsdp 4 x data 2", fsdp, 2),
        Split("another loss", {**fsdp, "z_loss_multiplier": 1e-3}),
        Split("seven shards", {"ici_fsdp_parallelism": 7}),
    ]
    monkeypatch.setattr(equivalence, "splits", lambda config: ways)


def test_a_split_agrees_another_loss_does_not_and_the_exit_code_says_so(few, capsys):
    assert main(["base_num_decoder_layers=2", "--json"]) == 1
    found = {each["split"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    split, other, refused = (found[name] for name in ("fsdp 4 x data 2", "another loss", "seven shards"))
    assert (split["agrees"], split["refused"], split["optimizer"]) == (True, "", "sgd")
    assert max(split["loss"], split["parameters"]) < 1e-6
    assert not other["agrees"]
    assert other["difference"].startswith("step 1: ")
    assert "ici_fsdp_parallelism=7" in refused["refused"]


@pytest.mark.parametrize(("argv", "error"), [
    (["steps=-4"], "error: steps=-4"),
    (["enable_diloco=true", "ici_data_parallelism=-1", "ici_fsdp_parallelism=1"], "error: enable_diloco=true: each"),
])  # fmt: skip
def test_what_is_wrong_is_refused(argv, error, capsys):
    assert run_command(main, argv) == 2
    assert capsys.readouterr().err.startswith(error)
