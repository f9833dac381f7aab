"""Whole runs: their files, and what ends, skips or blocks them.

That splits and resumptions change nothing: tests/invariance.
"""

import errno
import json
import os
import re
import signal
import threading
import time
import warnings

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import example_ids, examples_hash, token_stream
from maxtext_lite.training import NonFiniteLoss, opening, saving, train
from maxtext_lite.training.callbacks import Callback
from maxtext_lite.training.feed_steps import FeedSteps, HeldOutLoss
from maxtext_lite.training.goodput import Goodput
from maxtext_lite.training.metrics import JsonLines
from tests.prepared import byte_shards, write_prepared
from tests.training.conftest import TINY

RUN = [
    *TINY,
    "steps=6",
    "warmup_steps=2",
    "eval_interval=3",
    "eval_fraction=0.05",
    "checkpoint_period=3",
    "learning_rate=0.01",
    "global_batch_size=8",
    "gradient_accumulation_steps=-1",
    "per_device_batch_size=1",
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ragged documents, so that packed rows hold several and the last row is padded."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    path.write_text(
        "".join(
            json.dumps({"text": " ".join(rng.choice(words, rng.integers(1, 40)))}) + "\n"
            for _ in range(120)
        )
    )
    return path


def _train(tmp_path, documents, *overrides, **objects):
    config = load_config(
        None,
        [
            *RUN,
            f"base_output_directory={tmp_path}",
            f"dataset_path={documents}",
            *overrides,
        ],
    )
    return train(config, **objects)


def _records(result):
    lines = [
        json.loads(line)
        for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if "loss" in line], [
        line for line in lines if "eval_loss" in line
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, documents):
    """An uninterrupted run on the 8 devices."""
    return _train(tmp_path_factory.mktemp("runs"), documents, "run_name=whole", "profiler_steps=1")


@pytest.mark.fast
def test_writes_what_the_interface_promises(whole):
    names = {path.name for path in whole.run_directory.iterdir()}
    assert names == {
        "config.yml",
        "plan.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "environment.json",
        "memory.json",
        "goodput.json",
    }
    (trace,) = (whole.run_directory / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [
        event
        for plane in planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    # jax 0.12's binding makes a type without __module__, and aborts the process where that is an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [dict(event.stats)["step_num"] for event in events] == [
            3
        ]  # the traced step, as xprof finds it
    steps, evaluations = _records(whole)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert {
        "step",
        "loss",
        "grad_norm",
        "param_norm",
        "learning_rate",
        "examples",
        "target_tokens",
        "examples_seen",
        "tokens_seen",
        "epoch",
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "global_batch_to_train",
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "tflops_per_device",
        "mfu",
        "skipped",
        "examples_hash",
    } <= set(steps[0])
    assert set(evaluations[0]) == {"step", "eval_loss", "eval_target_tokens"}
    assert [record["examples_seen"] for record in steps] == [8, 16, 24, 32, 40, 48]
    assert steps[-1]["tokens_seen"] == sum(record["target_tokens"] for record in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(0 < record["training_seconds"] < record["run_seconds"] for record in steps)
    parts = json.loads((whole.run_directory / "environment.json").read_text())["start_up_seconds"]
    assert list(parts) == ["data", "init", "compile", "first step"]
    assert whole.loss == steps[-1]["loss"]
    assert whole.eval_loss == evaluations[-1]["eval_loss"]
    plan = json.loads((whole.run_directory / "plan.json").read_text())
    assert plan["global_batch_to_train"] == 8
    assert plan["steps_per_epoch"] > 1
    again = load_config(whole.run_directory / "config.yml")
    assert again.global_batch_size == 8


SGD, MOMENTUM = "optimizer=sgd", "sgd_momentum=0.9"
"""The optimizer that compiles fastest, where it does not matter which it is, and what gives it a state."""

CONSTANT = "learning_rate_schedule=constant"
"""The schedule of a run that ends early is then that of the whole run, and so is what is compiled."""


def test_recording_a_step_at_once_or_while_the_next_one_runs_gives_the_same_run(
    whole, tmp_path, documents, monkeypatch
):
    assert FeedSteps.ahead
    monkeypatch.setattr(FeedSteps, "ahead", False)
    at_once = _train(tmp_path, documents)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(at_once.state),
        jax.device_get(whole.state),
    )

    def keep(records):
        return [
            {key: r[key] for key in r if "second" not in key and "tflops" not in key}
            for r in records
        ]

    (got, got_evaluations), (want, want_evaluations) = (
        _records(at_once),
        _records(whole),
    )
    assert keep(got) == keep(want)
    assert got_evaluations == want_evaluations


@pytest.mark.parametrize("override", ["base_mlp_dim=48", "enable_checkpointing=false"])
def test_a_run_goes_on_as_the_model_that_it_was_and_is_not_started_over(override, whole, documents):
    with pytest.raises(UserError, match=override):
        _train(whole.run_directory.parent, documents, "run_name=whole", override, "steps=9")


def test_a_signal_breaks_off_an_evaluation_and_the_next_start_makes_up_for_it_also_after_the_last_step(
    whole, tmp_path, documents, monkeypatch, capsys
):
    class Interrupt(Callback):
        def after_step(self, step, record, state):
            if step == 5:  # while step 6 runs
                os.kill(os.getpid(), signal.SIGTERM)

    def of(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    evaluate = HeldOutLoss.of
    with monkeypatch.context() as patch:
        patch.setattr(HeldOutLoss, "of", of)
        stopped = _train(tmp_path, documents)
    assert (stopped.interrupted, stopped.step, stopped.eval_loss) == (True, 3, None)
    assert "step 3/6  no evaluation, as the run stops" in capsys.readouterr().out
    assert [path.name for path in (stopped.run_directory / "checkpoints").iterdir()] == ["3"]
    resumed = _train(tmp_path, documents, callbacks=[Interrupt()])
    assert (resumed.interrupted, resumed.step, resumed.eval_loss) == (True, 6, None)
    parts = json.loads((resumed.run_directory / "environment.json").read_text())["start_up_seconds"]
    assert list(parts) == ["data", "restore", "evaluation", "compile", "first step"]
    (steps, evaluations), (all_steps, all_evaluations) = (
        _records(resumed),
        _records(whole),
    )
    assert [step["loss"] for step in steps] == [step["loss"] for step in all_steps]
    assert [each["eval_loss"] for each in evaluations] == [
        each["eval_loss"] for each in all_evaluations[:1]
    ]
    assert (resumed.run_directory / "checkpoints" / "6").is_dir()
    assert "stopped by SIGTERM after step 6, saved" in capsys.readouterr().out
    ended = _train(tmp_path, documents)
    assert (ended.interrupted, ended.step, ended.eval_loss) == (
        False,
        6,
        whole.eval_loss,
    )
    assert [each["eval_loss"] for each in _records(ended)[1]] == [
        each["eval_loss"] for each in all_evaluations
    ]
    assert "nothing to do" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # restored
    # Again, with nothing left to do: nothing is touched.
    before = (ended.run_directory / "metrics.jsonl").read_text()
    assert _train(tmp_path, documents).eval_loss is None
    assert "nothing to do" in capsys.readouterr().out
    assert (ended.run_directory / "metrics.jsonl").read_text() == before


def test_a_non_finite_loss_stops_the_run_and_saves_nothing(tmp_path, documents):
    with pytest.raises(NonFiniteLoss, match=r"step 1 .*param_norm"):
        _train(
            tmp_path,
            documents,
            "optimizer=sgd",
            "learning_rate=1e30",
            "gradient_clipping_threshold=0",
            "warmup_steps=0",
            "checkpoint_period=6",
        )
    assert not [p for p in (tmp_path / "default" / "checkpoints").glob("*") if p.name.isdigit()]


RAMP = (
    "enable_rampup_batch_size=true",
    "global_batch_size=0",
    "gradient_accumulation_steps=1",
    "per_device_batch_size=2",
    "per_device_batch_size_start=1",
    "per_device_batch_size_increment=0.5",
    "global_rampup_samples=44",
    "ici_data_parallelism=2",
    "steps=7",
    "eval_interval=-1",
    SGD,
)


def test_a_ramp_of_three_stages_has_the_schedule_of_a_run_without_one(tmp_path, documents, capsys):
    """Batches of 8, 12 and 16 on 8 devices: shares of 22 samples are 3 steps of 8 and 2 of 12."""
    ramped = _train(tmp_path, documents, *RAMP, "schedule_unit=examples")
    # 8 rows in 8 slots, then 12 in 16 and 16 in 16: two executables for three stages.
    said = capsys.readouterr().out
    assert said.count("compiled the train step of the next stage") == 1
    assert (
        "from step 4: global_batch_to_train=12 = 1.5 per device x 8 devices x 1 accumulation"
        in said
    )
    steps, _ = _records(ramped)
    assert [step["examples"] for step in steps] == [8, 8, 8, 12, 12, 16, 16]
    assert [step["global_batch_to_train"] for step in steps] == [
        8,
        8,
        8,
        12,
        12,
        16,
        16,
    ]
    assert [step["per_device_batch_size"] for step in steps] == [
        1.0,
        1.0,
        1.0,
        1.5,
        1.5,
        2.0,
        2.0,
    ]
    # At the peak after 2 x 16 examples, at its end after 80.
    assert steps[3]["learning_rate"] > steps[2]["learning_rate"]  # 36 examples against 24
    assert steps[-1]["learning_rate"] == pytest.approx(0.1 * 0.01, rel=1e-5)
    assert steps[0]["learning_rate"] == pytest.approx(8 / 32 * 0.01, rel=1e-5)


class Poisoned:
    """Examples, of which some have NaN weights, some weights of 1e15, and some are missing."""

    fingerprint = "poisoned"
    fields = ("tokens", "targets", "segments", "positions", "weights")
    num_tokens = 32
    num_target_tokens = 3200
    notes = ()

    def __init__(self, *poisoned, without=(), huge=()):
        self.kept = [number for number in range(100) if number not in without]
        self.weights = dict.fromkeys(poisoned, np.nan) | dict.fromkeys(huge, 1e15)

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, example_id):
        number = self.kept[example_id]
        tokens = np.random.default_rng(number).integers(0, 264, 33, dtype=np.int32)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segments": np.ones(32, np.int32),
            "positions": np.arange(32, dtype=np.int32),
            "weights": np.full(32, self.weights.get(number, 1), np.float32),
        }

    def documents(self, example_ids):
        return None


@pytest.fixture
def reads(monkeypatch):
    """A function that makes all runs from here on read a source."""

    def replace(source):
        monkeypatch.setattr(opening, "open_sources_on_hosts", lambda *_, **__: (source, None))

    return replace


SKIP = (
    "data_shuffle_seed=-1",
    CONSTANT,
    SGD,
    MOMENTUM,
    "warmup_steps=4",
    "eval_interval=-1",
    "ici_data_parallelism=4",
    "steps=6",
)


def test_a_skipped_step_leaves_no_trace_but_in_the_log(tmp_path, documents, reads):
    """Example 19 of file order is poisoned: with batches of 8 it is in step 3, on one of the 8 devices."""
    skipping = (*SKIP, "skip_nonfinite_updates=true")
    reads(Poisoned(19))
    skipped = _train(tmp_path, documents, *skipping, "run_name=skipped")
    reads(Poisoned(without=range(16, 24)))
    clean = _train(tmp_path, documents, *skipping, "run_name=clean", "steps=5")
    (got, _), (want, _) = _records(skipped), _records(clean)
    assert [record["skipped"] for record in got] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert got[2]["loss"] is None
    assert got[2]["examples_seen"] == 24  # the data move on
    assert got[2]["param_norm"] == got[1]["param_norm"]
    del got[2]
    for same in ("loss", "grad_norm", "param_norm", "learning_rate", "target_tokens"):
        assert [record[same] for record in got] == [record[same] for record in want]
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((skipped.state.params, skipped.state.opt_state)),
        jax.device_get((clean.state.params, clean.state.opt_state)),
    )


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_named(tmp_path, documents, reads):
    """With A = 2, examples 19 and 21 of step 3 are in micro-batch 1, after 16 and 18 in micro-batch 0.

    Step 4 is already running when step 3 is checked; its update would leave parameters that make everything infinite.
    """
    reads(Poisoned(19, 21, huge=range(24, 32)))
    message = r"step 3 .*micro-batch 1, example ids 19, 21, .*embedding\.table"
    with pytest.raises(NonFiniteLoss, match=message):
        _train(
            tmp_path,
            documents,
            *SKIP,
            "per_device_batch_size=0.5",
            "checkpoint_period=2",
            "gradient_clipping_threshold=0",
            "sgd_momentum=0",
        )
    assert {path.name for path in (tmp_path / "default" / "checkpoints").iterdir()} == {"2"}


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, documents, reads):
    """Steps 2, 3 and then 5, 6, 7 hold a poisoned example: the third in a row is one too many, even after a resume."""
    reads(Poisoned(8, 16, 32, 40, 48))
    keys = (
        *SKIP,
        "skip_nonfinite_updates=true",
        "max_skipped_updates=3",
        "checkpoint_period=1",
    )
    _train(tmp_path, documents, *keys, "steps=6")
    with pytest.raises(NonFiniteLoss, match=r"step 7 .*example ids 48,"):
        _train(tmp_path, documents, *keys, "steps=9")
    assert int(max(path.name for path in (tmp_path / "default" / "checkpoints").iterdir())) == 6


def test_epochs_train_on_each_example_once_down_to_the_last(tmp_path, documents, capsys):
    """289 examples in batches of 64: five steps, the last with 33; then a second epoch, as without a stop."""
    keys = (
        "num_epochs=1",
        "last_batch=train",
        "global_batch_size=64",
        "per_device_batch_size=4",
        "eval_interval=-1",
        "schedule_unit=tokens",
        "steps=-1",
        SGD,
    )
    once = _train(tmp_path, documents, *keys)
    (records, _) = _records(once)
    assert [record["examples"] for record in records] == [64, 64, 64, 64, 33]
    assert records[-1]["epoch"] == 1.0
    assert records[-1]["learning_rate"] == pytest.approx(0.1 * 0.01, rel=1e-6)
    assert records[-1]["tokens_seen"] == sum(record["target_tokens"] for record in records)
    plan = json.loads((once.run_directory / "plan.json").read_text())
    assert (plan["steps"], plan["epochs"], plan["last_batch_examples"]) == (5, 1, 33)
    assert "nothing to do" not in capsys.readouterr().out
    twice = _train(tmp_path, documents, *keys, "num_epochs=2")
    (records, _) = _records(twice)
    assert [record["examples"] for record in records] == [64, 64, 64, 64, 33] * 2
    hashes = [
        examples_hash(example_ids(0, 289, num_examples=289, seed=0)[i : i + 64])
        for i in range(0, 289, 64)
    ]
    assert [record["examples_hash"] for record in records[:5]] == hashes
    assert records[-1]["tokens_seen"] == 2 * records[4]["tokens_seen"]


def test_the_learning_rate_scales_with_the_batch(tmp_path, documents):
    scaled = _train(
        tmp_path,
        documents,
        "learning_rate_scaling=sqrt",
        "base_global_batch_size=2",
        "steps=1",
        "warmup_steps=0",
        CONSTANT,
        "scale_adam_with_batch=true",
        "eval_interval=-1",
    )
    assert _records(scaled)[0][0]["learning_rate"] == pytest.approx(0.02)
    # m = 8 / 2: after one step the moments are (1 - b) g with 1 - b = 4 x 0.1 and 4 x 0.05, so their ratio tells b.
    moments = scaled.state.opt_state.inner_opt_state[1]
    mu, nu = (
        np.asarray(jax.tree.leaves(tree)[-1], np.float64) for tree in (moments.mu, moments.nu)
    )
    big = np.abs(mu) > np.abs(mu).max() / 10
    np.testing.assert_allclose((mu**2 / nu)[big], (4 * 0.1) ** 2 / (4 * 0.05), rtol=1e-4)


def test_a_damaged_record_ends_the_run_which_is_saved_and_goes_on_once_it_is_repaired(
    tmp_path,
):
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 8000))
    write_prepared(
        tmp_path / "data",
        byte_shards([text], 1),
        tokens_per_record=1024,
        options="group_size:1,uncompressed",
    )
    keys = [
        "dataset_type=array_record",
        "data_shuffle_seed=-1",
        "run_name=damaged",
        "eval_interval=-1",
        "steps=20",
        "checkpoint_period=100",
        SGD,
    ]
    num_tokens = load_config(None, [*RUN]).max_target_length
    damaged_step = (
        1024 * 2 // num_tokens - 1
    ) // 8 + 1  # whose last target is the third record's first token
    assert 4 < damaged_step < 20
    shard = tmp_path / "data" / "00000.array_record"
    content = shard.read_bytes()
    at = content.index(np.array(list(text[2300:2340].encode()), "<u2").tobytes())
    shard.write_bytes(content[:at] + b"?" + content[at + 1 :])
    with pytest.raises(UserError) as caught:
        _train(tmp_path, tmp_path / "data", *keys)
    saved_step = damaged_step - 2  # when two more batches have been read
    assert re.search(rf"{shard}.* record 2 .* after step {saved_step}\b", str(caught.value))
    shard.write_bytes(content)
    token_stream._reader.cache_clear()  # another process would not have it
    result = _train(tmp_path, tmp_path / "data", *keys)
    steps, _ = _records(result)
    assert [record["step"] for record in steps] == list(range(1, 21))
    ids = [np.arange(8 * step, 8 * step + 8) % (-(-8000 // num_tokens)) for step in range(20)]
    assert [record["examples_hash"] for record in steps] == [
        examples_hash(numbers) for numbers in ids
    ]


def test_what_cannot_be_read_from_the_start_trains_nothing(tmp_path):
    write_prepared(
        tmp_path / "data",
        byte_shards(["x" * 20_000], 1),
        options="group_size:1,uncompressed",
    )
    shard = tmp_path / "data" / "00000.array_record"
    content = shard.read_bytes()
    shard.write_bytes(content[:5000] + b"?" + content[5001:])
    keys = [
        "dataset_type=array_record",
        "data_shuffle_seed=-1",
        "eval_interval=-1",
        "run_name=unread",
        SGD,
    ]
    with pytest.raises(UserError, match="record 0 "):
        _train(tmp_path, tmp_path / "data", *keys)
    assert not list((tmp_path / "unread" / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "lease", "checkpoints"])
def test_what_stands_in_the_way_of_an_output_is_named(name, tmp_path, documents):
    path = tmp_path / "blocked" / name
    path.parent.mkdir()
    path.mkdir() if "." in name else path.write_text("x")
    with pytest.raises(UserError, match=f"blocked/{name}") as refusal:
        _train(tmp_path, documents, "run_name=blocked", "eval_interval=-1")
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize(("of", "close"), [(JsonLines, "close"), (Goodput, "close")])
def test_a_file_that_is_full_only_as_it_is_closed_ends_the_run_too(
    of, close, tmp_path, documents, monkeypatch
):
    closes = getattr(of, close)

    def full(self):
        with self._failures.of_writing(self._path):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return closes(self)

    monkeypatch.setattr(of, close, full)
    with pytest.raises(UserError, match="checkpoint of step 2,"):
        _train(tmp_path, documents, "run_name=full", "eval_interval=-1", "steps=2")


def test_a_full_disk_is_told_with_the_checkpoint_whose_save_was_under_way(
    tmp_path, documents, monkeypatch
):
    """The line of step 4 cannot be written while the checkpoint of step 3 waits for its checksums."""
    fails, write, write_part = threading.Event(), JsonLines.write, saving.write_part

    def writes(self, record):
        if record["step"] == 4:
            with self._failures.of_writing(self._path):
                fails.set()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, record)

    def hashes(*about):
        assert fails.wait(60)
        time.sleep(1)
        return write_part(*about)

    monkeypatch.setattr(JsonLines, "write", writes)
    monkeypatch.setattr(saving, "write_part", hashes)
    with pytest.raises(UserError, match=r"metrics.jsonl .* checkpoint of step 3,"):
        _train(tmp_path, documents, "run_name=under_way", "eval_interval=-1")
