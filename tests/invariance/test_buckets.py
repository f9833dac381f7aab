"""A run whose directory is in a bucket is the run on a file system, also when it is cut off and goes on there."""

import os
import signal
import subprocess
import sys

import pytest

from maxtext_lite import report
from maxtext_lite.config import load_config
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.training import Callback, train
from maxtext_lite.training.parameter_files import checkpoints_in
from maxtext_lite.training.run_files import RunFiles
from tests.invariance.conftest import MODEL
from tests.processes import environment
from tests.run_directories import lines_of

RUN = [
    *MODEL,
    "steps=6",
    "eval_interval=-1",
    "eval_fraction=0",
    "checkpoint_period=2",
    "async_checkpointing=false",
    "per_device_batch_size=1",
]


class CutOff(Exception):
    pass


class CutOffAfter(Callback):
    def __init__(self, step: int):
        self.step = step

    def after_step(self, step, record, state):
        if step == self.step:
            raise CutOff


@pytest.mark.usefixtures("one_device")
def test_cut_off_and_resumed_in_a_bucket_equals_whole_on_disk(
    bucket, tmp_path, documents, monkeypatch, capsys
):
    words = [*RUN, "run_name=run", f"dataset_path={documents}/0/documents.jsonl"]
    train(load_config(None, [*words, f"base_output_directory={tmp_path}"]))
    whole = lines_of(tmp_path / "run")
    there = load_config(None, [*words, f"base_output_directory={bucket}"])
    with monkeypatch.context() as patch:
        patch.setattr(
            RunFiles, "close", lambda self: None
        )  # nobody uploads anything after a kill
        with pytest.raises(CutOff):
            train(there, callbacks=[CutOffAfter(5)])
    run = bucket / "run"
    found = [line["step"] for line in lines_of(run)]
    assert found == [
        1,
        2,
        3,
        4,
    ]  # those of the newest checkpoint, without the step after it
    # As a kill leaves a checkpoint: begun, and damaged for whoever took it for one.
    (run / "checkpoints" / "unfinished-6").write_text("-")
    (run / "checkpoints" / "6" / "params").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "6" / "params" / "manifest.ocdbt").write_text("half")
    result = train(there)
    assert str(result.run_directory) == str(run)
    assert f"resuming {run} after step 4" in capsys.readouterr().out
    exact = ("step", "loss", "grad_norm", "param_norm", "examples_hash", "tokens_seen")
    assert [[line[key] for key in exact] for line in lines_of(run)] == [
        [line[key] for key in exact] for line in whole
    ]
    assert [path.name for path in checkpoints_in(str(run), "key")] == ["6", "4", "2"]
    assert not any(
        path.name.startswith("unfinished") for path in (run / "checkpoints").iterdir()
    )
    assert not list((run / "lease").glob("*"))

    copy = local_copy(str(run), "RUN_DIR")  # what readers read
    assert directory_config(copy, "").steps == 6
    assert checkpoints_in(copy, "key")[0] == run / "checkpoints" / "6"
    assert report.main([str(run)]) == 0
    assert f"wrote {run}/report.html" in capsys.readouterr().out
    assert "<h1>run</h1>" in (run / "report.html").read_text()

    (run / "checkpoints" / "6" / "about" / "metadata").write_text("{}")
    train(there)
    said = capsys.readouterr().out
    assert (
        "checkpoint of step 6 is damaged: about/metadata is not as it was written. It is set aside as gs://"
        in said
    )
    assert f"resuming {run} after step 4" in said
    assert [line["loss"] for line in lines_of(run)] == [line["loss"] for line in whole]


def test_a_bucket_that_stops_answering_ends_the_run_with_76(bucket, bucket_environment):
    words = [
        "dataset_type=synthetic",
        "steps=100000",
        "hang_timeout_seconds=10",
        "max_num_checkpoints_to_keep=1000",
    ]
    command = [
        sys.executable,
        "-m",
        "maxtext_lite.train",
        *RUN,
        *words,
        f"base_output_directory={bucket}",
        "run_name=run",
    ]
    pipe, server = subprocess.PIPE, int(bucket_environment["BUCKET_PROCESS"])
    with subprocess.Popen(
        command, env=environment(1), stdout=pipe, stderr=pipe, text=True
    ) as run:
        assert any("saved step 4" in line for line in run.stdout)
        os.kill(server, signal.SIGSTOP)
        try:
            _, errors = run.communicate(timeout=300)
        finally:
            os.kill(server, signal.SIGCONT)
    assert run.returncode == 76
    assert "in save of step" in errors
    assert "Stacks of process 0" in errors
