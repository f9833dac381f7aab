"""Whole runs: their files, and what ends, skips or blocks them.

That splits and resumptions change nothing: tests/invariance.
"""

import errno
import json
import os
import signal
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import ExampleSource, example_ids, examples_hash
from maxtext_lite.training import NonFiniteLoss, opening, saving, train
from maxtext_lite.training.evaluation import HeldOutLoss
from maxtext_lite.training.metrics import JsonLines
from tests.run_directories import lines_of, write_lines
from tests.training.conftest import TINY

KEYS = """
steps=6 warmup_steps=2 eval_interval=3 eval_fraction=0.05 checkpoint_period=3 learning_rate=0.01 global_batch_size=8
gradient_accumulation_steps=-1 per_device_batch_size=1
"""
RUN = [*TINY, *KEYS.split()]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ragged documents, so that packed rows hold several and the last row is padded."""
    rng = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    texts = [" ".join(rng.choice(words, rng.integers(1, 40))) for _ in range(120)]
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    return write_lines(path, [{"text": text} for text in texts])


def _train(tmp_path, documents, *overrides, **objects):
    paths = f"base_output_directory={tmp_path}", f"dataset_path={documents}"
    return train(load_config(None, [*RUN, *paths, *overrides]), **objects)


def _records(result):
    """The lines of steps, and those of evaluations."""
    lines = lines_of(result.run_directory)
    return [line for line in lines if "loss" in line], [
        line for line in lines if "eval_loss" in line
    ]


SGD, MOMENTUM = "optimizer=sgd", "sgd_momentum=0.9"
"""The optimizer that compiles fastest, where it does not matter which it is, and what gives it a state."""

CONSTANT = "learning_rate_schedule=constant"
"""The schedule of a run that ends early is then that of the whole run, and so is what is compiled."""


@pytest.mark.fast
def test_a_signal_breaks_off_an_evaluation_which_the_next_start_makes_up_for_and_a_third_has_nothing_to_do(
    tmp_path, documents, monkeypatch, capsys, one_device
):
    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    def run():
        result = _train(tmp_path, documents, "steps=3", "profiler_steps=1", SGD)
        return result, capsys.readouterr().out

    evaluate = HeldOutLoss.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(HeldOutLoss, "evaluate", signalled)
        stopped, said = run()
    assert (stopped.interrupted, stopped.step, stopped.eval_loss) == (True, 3, None)
    assert "stopped by SIGTERM after step 3, saved" in said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # restored
    _has_what_the_interface_promises(stopped.run_directory)
    ended, said = run()
    assert (ended.interrupted, ended.step) == (False, 3)
    assert "nothing to do" not in said
    steps, (evaluation,) = _records(ended)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert evaluation["eval_loss"] == ended.eval_loss < steps[0]["loss"]
    before = (ended.run_directory / "metrics.jsonl").read_text()
    again, said = run()
    assert (again.eval_loss, again.was_complete, ended.was_complete) == (
        None,
        True,
        False,
    )
    assert "nothing to do" in said
    assert (ended.run_directory / "metrics.jsonl").read_text() == before


def _has_what_the_interface_promises(directory):
    """Its files, the traced step as xprof finds it, and the parts of the start-up."""
    names = "config.yml plan.json metrics.jsonl tensorboard checkpoints environment.json memory.json goodput.json"
    assert {path.name for path in directory.iterdir()} == set(names.split())
    (trace,) = (directory / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    lines = [line for plane in planes for line in plane.lines]
    events = [event for line in lines for event in line.events if event.name == "train"]
    # jax 0.12's binding makes a type without __module__, and aborts the process where that is an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [dict(event.stats)["step_num"] for event in events] == [3]
    about = json.loads((directory / "environment.json").read_text())
    assert list(about["start_up_seconds"]) == ["data", "init", "compile", "first step"]
    assert load_config(directory / "config.yml").global_batch_size == 8


class Poisoned(ExampleSource):
    """Examples, of which some have NaN weights, some weights of 1e15, and some cannot be read."""

    fingerprint = "poisoned"
    fields = ("tokens", "targets", "segments", "positions", "weights")
    num_tokens = 32
    num_target_tokens = 3200

    def __init__(self, *poisoned, damaged=(), huge=()):
        self.damaged = damaged
        self.weights = dict.fromkeys(poisoned, np.nan) | dict.fromkeys(huge, 1e15)

    def __len__(self):
        return 100

    def __getitem__(self, number):
        if number in self.damaged:
            raise UserError(f"record {number} is damaged.")
        tokens = np.random.default_rng(number).integers(0, 264, 33, dtype=np.int32)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segments": np.ones(32, np.int32),
            "positions": np.arange(32, dtype=np.int32),
            "weights": np.full(32, self.weights.get(number, 1), np.float32),
        }


@pytest.fixture
def reads(monkeypatch):
    """A function that makes all runs from here on read a source."""

    def replace(source):
        monkeypatch.setattr(
            opening, "open_sources_on_hosts", lambda *_, **__: (source, None)
        )

    return replace


_SKIP = "data_shuffle_seed=-1 warmup_steps=4 eval_interval=-1 steps=6"
MESH = "ici_data_parallelism=4"
SKIP = (*_SKIP.split(), CONSTANT, SGD, MOMENTUM)


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_named_and_its_step_is_in_the_trace(
    tmp_path, documents, reads
):
    """With A = 2, examples 19 and 21 of step 3 are in micro-batch 1, after 16 and 18 in micro-batch 0.

    Step 4 is already running when step 3 is checked; its update would leave parameters that make everything infinite.
    """
    reads(Poisoned(19, 21, huge=range(24, 32)))
    keys = """
    per_device_batch_size=0.5 checkpoint_period=2 gradient_clipping_threshold=0 sgd_momentum=0 profiler_steps=3-6
    """
    message = r"step 3 .*micro-batch 1, example ids 19, 21, .*embedding\.table"
    with pytest.raises(NonFiniteLoss, match=message):
        _train(tmp_path, documents, *SKIP, MESH, *keys.split())
    assert {path.name for path in (tmp_path / "default" / "checkpoints").iterdir()} == {
        "2"
    }
    (trace,) = (tmp_path / "default" / "tensorboard").rglob("*.xplane.pb")
    assert trace.stat().st_size > 0


def test_epochs_train_on_each_example_once_down_to_the_last(
    tmp_path, documents, one_device
):
    """Twice 289 examples in batches of 64, the last with 2."""
    keys = """
    num_epochs=2 last_batch=train global_batch_size=64 per_device_batch_size=4 eval_interval=-1
    enable_checkpointing=false schedule_unit=tokens steps=-1
    """
    run = _train(tmp_path, documents, *keys.split(), SGD)
    records, _ = _records(run)
    sizes = [64] * 9 + [2]
    assert [record["examples"] for record in records] == sizes
    assert records[-1]["epoch"] == 2.0
    assert records[-1]["learning_rate"] == pytest.approx(0.1 * 0.01, rel=1e-6)
    hashes = [
        examples_hash(example_ids(64 * step, size, num_examples=289, seed=0))
        for step, size in enumerate(sizes)
    ]
    assert [record["examples_hash"] for record in records] == hashes


def test_a_damaged_record_ends_the_run_which_is_saved_and_goes_on_once_it_is_repaired(
    tmp_path, documents, reads, one_device
):
    source = Poisoned(damaged=[8 * 3 + 5])  # of step 4
    reads(source)
    with pytest.raises(
        UserError, match=r"record 29 is damaged.* after step 3, saved\."
    ):
        _train(tmp_path, documents, *SKIP)
    source.damaged = []
    steps, _ = _records(_train(tmp_path, documents, *SKIP))
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    hashes = [examples_hash(np.arange(8 * step, 8 * step + 8)) for step in range(6)]
    assert [step["examples_hash"] for step in steps] == hashes


@pytest.mark.parametrize("full", ["metrics.jsonl", "checkpoint"])
def test_a_full_disk_ends_the_run_and_the_error_names_the_newest_checkpoint(
    full, tmp_path, documents, monkeypatch, one_device
):
    write, write_part = JsonLines.write, saving.write_checksums

    def write_line(log, record):
        if record["step"] == 4:
            log._file.close()
            log._file = Path("/dev/full").open("a")  # noqa: SIM115
        write(log, record)

    def write_checksums(directory, *arguments):
        if directory.name.endswith("-4"):
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        return write_part(directory, *arguments)

    if full == "checkpoint":
        monkeypatch.setattr(saving, "write_checksums", write_checksums)
    else:
        monkeypatch.setattr(JsonLines, "write", write_line)
    words = ["steps=30", "checkpoint_period=2", "eval_interval=-1", SGD]
    with pytest.raises(UserError, match="No space left on device") as refusal:
        _train(tmp_path, documents, *words)
    (problem,) = refusal.value.problems
    assert full in problem or "unfinished-4" in problem
    assert problem.endswith(
        "The checkpoint of step 2 is safe; run the same command to resume from it."
    )
    assert {path.name for path in (tmp_path / "default" / "checkpoints").iterdir()} <= {
        "2",
        "unfinished-4",
    }


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_what_stands_in_the_way_of_an_output_is_named(
    name, tmp_path, documents, one_device
):
    path = tmp_path / "blocked" / name
    path.parent.mkdir()
    path.mkdir() if "." in name else path.write_text("x")
    with pytest.raises(UserError, match=f"blocked/{name}") as refusal:
        _train(tmp_path, documents, "run_name=blocked", "eval_interval=-1")
    assert len(refusal.value.problems) == 1
