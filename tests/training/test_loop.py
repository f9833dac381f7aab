"""Whole runs: what they write, how they resume, and that the split of a batch shows nowhere."""

import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import NonFiniteLoss, train
from tests.training.conftest import TINY

RUN = [*TINY, "steps=6", "warmup_steps=2", "eval_interval=3", "eval_fraction=0.05", "checkpoint_period=3",
       "learning_rate=0.01",
       "global_batch_size=8", "gradient_accumulation_steps=-1", "per_device_batch_size=1"]  # fmt: skip


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ragged documents, so that packed rows hold several and the last row is padded."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    path.write_text(
        "".join(json.dumps({"text": " ".join(rng.choice(words, rng.integers(1, 40)))}) + "\n" for _ in range(120))
    )
    return path


def _train(tmp_path, documents, *overrides):
    return train(
        load_config(None, [*RUN, f"base_output_directory={tmp_path}", f"dataset_path={documents}", *overrides])
    )


def _records(result):
    lines = [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, documents):
    """An uninterrupted run on the 8 devices."""
    return _train(tmp_path_factory.mktemp("runs"), documents, "run_name=whole", "profiler_steps=1")


def test_writes_what_the_interface_promises(whole):
    names = {path.name for path in whole.run_directory.iterdir()}
    assert names == {"config.yml", "plan.json", "metrics.jsonl", "tensorboard", "checkpoints", "environment.json"}
    assert list((whole.run_directory / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb"))  # the traced step
    steps, evaluations = _records(whole)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert {"step", "loss", "grad_norm", "param_norm", "learning_rate", "examples", "target_tokens", "examples_seen",
            "tokens_seen", "epoch", "per_device_batch_size", "gradient_accumulation_steps", "global_batch_to_train",
            "step_seconds", "data_seconds", "tokens_per_second", "tflops_per_device", "mfu", "skipped",
            "examples_hash"} <= set(steps[0])  # fmt: skip
    assert set(evaluations[0]) == {"step", "eval_loss", "eval_target_tokens"}
    assert [record["examples_seen"] for record in steps] == [8, 16, 24, 32, 40, 48]
    assert steps[-1]["tokens_seen"] == sum(record["target_tokens"] for record in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert whole.loss == steps[-1]["loss"]
    assert whole.eval_loss == evaluations[-1]["eval_loss"]
    plan = json.loads((whole.run_directory / "plan.json").read_text())
    assert plan["global_batch_to_train"] == 8
    assert plan["steps_per_epoch"] > 1
    again = load_config(whole.run_directory / "config.yml")
    assert again.global_batch_size == 8


@pytest.mark.parametrize("split", [
    ["per_device_batch_size=0.5", "ici_fsdp_parallelism=1", "ici_data_parallelism=8"],  # 4 rows in 8 slots
    ["per_device_batch_size=0.25", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_data_parallelism=2"],
], ids=["A=2 on data 8", "A=4 on data 2 fsdp 2 tensor 2"])  # fmt: skip
def test_the_split_of_a_batch_shows_nowhere(split, whole, tmp_path, documents):
    other = _train(tmp_path, documents, *split)
    (steps, evaluations), (want, want_evaluations) = _records(other), _records(whole)
    assert steps[0]["gradient_accumulation_steps"] != want[0]["gradient_accumulation_steps"]
    for exact in ("examples_hash", "target_tokens", "examples_seen", "tokens_seen", "learning_rate"):
        assert [record[exact] for record in steps] == [record[exact] for record in want]
    for close in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[close] for r in steps[:5]], [r[close] for r in want[:5]], rtol=1e-5)
    np.testing.assert_allclose(
        [r["eval_loss"] for r in evaluations], [r["eval_loss"] for r in want_evaluations], rtol=1e-5
    )
    assert [r["eval_target_tokens"] for r in evaluations] == [r["eval_target_tokens"] for r in want_evaluations]


def test_stopped_and_resumed_equals_whole_to_the_bit(whole, tmp_path, documents, capsys):
    first = _train(tmp_path, documents, "steps=3", "learning_rate_schedule=constant")
    resumed = _train(tmp_path, documents, "learning_rate_schedule=constant")
    assert "after step 3" in capsys.readouterr().out
    assert first.step == 3
    assert resumed.step == 6
    straight = _train(tmp_path, documents, "run_name=straight", "learning_rate_schedule=constant")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(straight.state))
    keep = lambda records: [(r["step"], r["loss"], r["examples_hash"]) for r in records]  # noqa: E731
    assert keep(_records(resumed)[0]) == keep(_records(straight)[0])

    # Again, with nothing left to do: nothing is touched.
    before = (resumed.run_directory / "metrics.jsonl").read_text()
    assert _train(tmp_path, documents, "learning_rate_schedule=constant").step == 6
    assert (resumed.run_directory / "metrics.jsonl").read_text() == before


def test_resumed_on_another_mesh_and_accumulation_the_run_goes_on_as_it_would_have(whole, tmp_path, documents):
    """Three steps as A = 1 on 8 devices, three more as A = 2 on data 2, fsdp 2, tensor 2."""
    constant = "learning_rate_schedule=constant"
    _train(tmp_path, documents, "steps=3", constant)
    moved = _train(tmp_path, documents, constant, "per_device_batch_size=0.5", "ici_fsdp_parallelism=2",
                   "ici_tensor_parallelism=2", "ici_data_parallelism=2")  # fmt: skip
    straight = _train(tmp_path, documents, constant, "run_name=straight")
    got, want = (_records(result)[0] for result in (moved, straight))
    assert [record["gradient_accumulation_steps"] for record in got] == [1, 1, 1, 2, 2, 2]
    assert [record["examples_hash"] for record in got] == [record["examples_hash"] for record in want]
    np.testing.assert_allclose([r["loss"] for r in got], [r["loss"] for r in want], rtol=1e-5)


def test_resuming_another_model_is_refused(whole, documents):
    with pytest.raises(UserError, match=r"base_mlp_dim=48 contradicts the checkpoint of step 6 in .*base_mlp_dim=24"):
        _train(whole.run_directory.parent, documents, "run_name=whole", "base_mlp_dim=48", "steps=9")


def test_a_run_with_checkpoints_is_not_started_over_without_them(whole, documents):
    with pytest.raises(UserError, match=r"enable_checkpointing=false would start .* over, which holds checkpoints"):
        _train(whole.run_directory.parent, documents, "run_name=whole", "enable_checkpointing=false")


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "adafactor"])
def test_bfloat16_weights_train_and_resume(optimizer, tmp_path, documents):
    narrow = ("weight_dtype=bfloat16", "dtype=bfloat16", f"optimizer={optimizer}", "eval_interval=-1")
    _train(tmp_path, documents, *narrow, "steps=3")
    resumed = _train(tmp_path, documents, *narrow)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(resumed.state.params)} == {"bfloat16"}
    wide = {leaf.dtype.name for leaf in jax.tree.leaves(resumed.state.opt_state) if leaf.size > 1}
    assert wide == {"float32"}
    losses = [record["loss"] for record in _records(resumed)[0]]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_a_signal_stops_after_the_step_and_saves(tmp_path, documents):
    run = tmp_path / "default"

    def interrupt_after_two_steps():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists() and '"step": 2' in (run / "metrics.jsonl").read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=interrupt_after_two_steps)
    watcher.start()
    result = _train(tmp_path, documents, "steps=100000", "checkpoint_period=100000", "eval_interval=-1")
    watcher.join()
    assert result.interrupted
    assert 2 <= result.step < 100000
    assert (run / "checkpoints" / str(result.step)).is_dir()
    assert [record["step"] for record in _records(result)[0]] == list(range(1, result.step + 1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # handed back


def test_parameters_of_another_run_start_a_new_one(whole, tmp_path, documents):
    fresh = _train(tmp_path, documents, f"load_parameters_path={whole.run_directory}", "steps=2")
    assert _records(fresh)[0][0]["loss"] < _records(whole)[0][0]["loss"] - 0.1


def test_a_loss_that_is_no_number_stops_the_run_and_saves_nothing(tmp_path, documents):
    with pytest.raises(NonFiniteLoss, match=r"step 1 left param_norm inf"):
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


@pytest.mark.parametrize(("override", "key"), [
    ("ici_pipeline_parallelism=2", "ici_pipeline_parallelism"),
    ("ici_context_parallelism=2", "ici_context_parallelism"),
])  # fmt: skip
def test_what_cannot_be_trained_yet_is_refused_by_name(override, key, tmp_path, documents):
    with pytest.raises(UserError, match=key):
        _train(tmp_path, documents, override, "num_pipeline_microbatches=2" if "pipeline" in key else "log_period=1")
