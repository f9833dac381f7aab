"""overwrite=true removes an earlier run, and nothing else; without it a run continues what it is."""

import os
from pathlib import Path

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.operations.lock import Lease
from maxtext_lite.training.checkpoint import CheckpointReader
from maxtext_lite.training.custom_loss import CustomLoss
from maxtext_lite.training.loop import RunResult
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.starting_over import check_removable, remove_run
from maxtext_lite.training.state import Overrides
from tests.training.conftest import TINY

KEYS = ["dataset_type=synthetic", "steps=6", "eval_interval=-1", "run_name=here"]


@pytest.fixture
def earlier(tmp_path):
    """What an earlier run has left."""
    directory = tmp_path / "here"
    (directory / "checkpoints" / "5").mkdir(parents=True)
    (directory / "hf").mkdir()
    for name in ("config.yml", "metrics.jsonl", "hf/notes.txt"):
        (directory / name).write_text("{}")
    return directory


def config_of(tmp_path, *overrides):
    words = [*TINY, *KEYS, f"base_output_directory={tmp_path}", *overrides]
    return load_config(None, words)


def run_of(tmp_path, *overrides, **more):
    return open_run(config_of(tmp_path, *overrides), **more)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("checkpoints", ["true", "false"])
def test_a_run_starts_over_once_its_lease_is_held(
    earlier, tmp_path, capsys, checkpoints
):
    run = run_of(tmp_path, "overwrite=true", f"enable_checkpointing={checkpoints}")
    assert not run.resumes
    assert (earlier / "checkpoints" / "5").exists()  # nothing is removed before
    with run.opened(print):
        assert set(names(earlier)) <= {"lease", "checkpoints"}
        assert not list(earlier.glob("checkpoints/*"))
    assert "of 5 steps" in capsys.readouterr().out
    assert not run.config.overwrite  # as its config.yml says


def test_what_no_run_writes_stays_and_is_named(earlier, tmp_path, capsys):
    own = ("d.jsonl", "export/model.safetensors", "hf/model.safetensors")
    written = """plan.json goodput.json rollouts.jsonl rollouts-5.npz reference.npz stacks-1.txt tensorboard/e
        frozen/about/a reference/checkpoints/0/a rollout_weights/0/model.safetensors checkpoints/unfinished-6/a
        a.json.1-f.partial"""
    for name in (*own, *written.split()):
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        (earlier / name).write_text("{}")
    remove_run(earlier, print)
    assert names(earlier) == ["d.jsonl", "export", "hf"]
    assert (earlier / own[1]).exists()
    assert (earlier / own[2]).exists()
    said = capsys.readouterr().out
    assert all(word in said for word in ("d.jsonl, export, hf", "of 5 steps"))


def test_what_is_held_or_no_run_or_needed_stays(earlier, tmp_path):
    (earlier / "d.jsonl").write_text("")
    before = names(earlier)
    for word in (
        f"load_parameters_path={earlier}",
        f"dataset_path={earlier}/hf/*.txt",
        f"eval_dataset_path=[{{path: {earlier}/a.jsonl, name: a}}]",
    ):
        config = config_of(tmp_path, "overwrite=true", "dataset_type=text", word)
        with pytest.raises(UserError, match=rf"^{word.partition('=')[0]}=.*overwrite"):
            check_removable(config, earlier)
    other = Lease(earlier)
    other.attempt()
    try:
        with (
            pytest.raises(UserError, match=f"process {os.getpid()}"),
            run_of(tmp_path, "overwrite=true").opened(print),
        ):
            pytest.fail("it was opened")
    finally:
        other.release()
    assert names(earlier) == before
    (earlier / "config.yml").unlink()
    with pytest.raises(UserError, match=r"no config\.yml"):
        run_of(tmp_path, "overwrite=true")


def test_a_job_that_is_queued_again_resumes_and_says_so(
    earlier, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = run_of(tmp_path, "overwrite=true")
    assert run.resumes
    with pytest.raises(UserError, match="missing in that of step 5"):
        run.opened(print).__enter__()
    assert "queued this job again" in capsys.readouterr().out
    assert not run.config.overwrite
    assert (earlier / "hf/notes.txt").exists()


def test_a_resume_with_another_objective_is_refused(tmp_path):
    own = Overrides(objective=CustomLoss(lambda *_: (0, 0), 8, 8))
    configured = run_of(tmp_path)
    reader = CheckpointReader(tmp_path, configured._fingerprint)
    saved = run_of(tmp_path, own=own)._fingerprint
    with pytest.raises(UserError, match=r"began with objective=.*Pass it again"):
        reader._refuse_other_run(5, saved)
    reader = CheckpointReader(tmp_path, run_of(tmp_path, own=own)._fingerprint)
    with pytest.raises(UserError, match="began without objective="):
        reader._refuse_other_run(5, configured._fingerprint)


@pytest.mark.fast
def test_a_result_prints_on_three_lines():
    result = RunResult(Path("runs/a"), 7, 1.25, None, False, True, {"w": range(10**6)})
    assert repr(result) == str(result)
    assert str(result).splitlines() == [
        "run directory runs/a",
        "done: step 7",
        "loss 1.25",
    ]
    ended = RunResult(Path("runs/a"), 7, None, None, True, True, {})
    assert len(str(ended).splitlines()) == 3
