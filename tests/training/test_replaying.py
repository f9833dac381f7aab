"""Which steps can be replayed; tests/test_replay.py replays some."""

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.replay import main as replay


@pytest.mark.parametrize(("config", "argv", "error"), [
    (None, [], "error: RUN_DIR=it is not a run directory: it has no config.yml."),
    ("base: base.yml", [], "error: --step=9: metrics.jsonl of RUN_DIR=it has no such step; it has steps 3 to 3."),
    ("base: post_train/dpo.yml", [], "error: RUN_DIR=it is a run of dpo: its rows are pairs, "),
    ("base: post_train/rl.yml", [], "error: RUN_DIR=it is a run of reinforcement learning: its responses were sampled"),
    ("base: base.yml", ["--tolerance", "2"], "error: --tolerance=2 must be from 0 to 1. Nearest that works: 1."),
])  # fmt: skip
def test_what_cannot_be_replayed_is_refused(config, argv, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it").mkdir()
    if config:
        (tmp_path / "it" / "config.yml").write_text(f"{config}\n")
    (tmp_path / "it" / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    assert run_command(replay, ["it", "--step", "9", *argv]) == 2
    assert capsys.readouterr().err.startswith(error)
