"""Whole runs of reinforcement learning: their files, their resumption, and that chunks and meshes change nothing."""

import json
import shutil
import threading

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.rl import rollout_steps
from maxtext_lite.rl.rewards import RewardError
from maxtext_lite.rl.rollout import LocalEngine
from maxtext_lite.rl.rollout_steps import train_rl
from maxtext_lite.training import Callback, kernel_truth, loop
from maxtext_lite.training.loss import cross_entropy
from maxtext_lite.training.step import ChunkedStep
from tests.rl.conftest import evaluations, lines, steps, timeless

# Two updates on each batch, a reference and importance weights: all that a batch can need after a restart.
WHOLE = ("num_iterations=2", "grpo_beta=0.05", "rollout_correction=truncated", "ici_data_parallelism=2",
         "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "rollout_fsdp_parallelism=2")  # fmt: skip


def parameters(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.params)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config_of):
    """An uninterrupted run, whose trainer and sampler share the 8 devices."""
    return train_rl(config_of(tmp_path_factory.mktemp("rl"), *WHOLE))


def test_writes_what_the_interface_promises(whole):
    assert {"config.yml", "plan.json", "metrics.jsonl", "rollouts.jsonl", "timeline.jsonl", "checkpoints", "reference",
            "environment.json", "memory.json", "goodput.json", "tensorboard"} == {
            path.name for path in whole.run_directory.iterdir()}  # fmt: skip
    found = steps(whole.run_directory)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluations(whole.run_directory)] == [0, 3, 6]
    sampled = found[::2]  # of each batch the first step
    assert [line["prompts_seen"] for line in sampled] == [4, 8, 12]
    assert all("reward" not in line for line in found[1::2])
    assert [line["examples_seen"] for line in found] == [16, 32, 48, 64, 80, 96]
    assert found[-1]["epoch"] == pytest.approx(12 / 90)
    for line in sampled:
        assert line["rewards/low_bytes"] == line["reward"]
        assert line["loss"] == pytest.approx(0, abs=1e-5) or line["kl"] > 0
        assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0  # ratios are 1
        assert line["token_nll"] > 0
        assert line["rollout_mismatch"] < 1e-5
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[1]["kl"] > 0
    assert found[0]["examples_hash"] == found[1]["examples_hash"] != found[2]["examples_hash"]


def test_what_is_not_computed_plainly_is_checked_before_the_first_gradient(tmp_path, config_of, monkeypatch):
    config = config_of(tmp_path, "num_vocab_tiling=2", "steps=2", "num_iterations=2", "eval_interval=-1")

    def off(*arguments):
        loss, sums = cross_entropy(*arguments)
        return 1.2 * loss, sums

    with monkeypatch.context() as patch:
        patch.setattr(kernel_truth, "cross_entropy", off)
        with pytest.raises(UserError, match=r"num_vocab_tiling=2 is further .* in result and dx and dhead"):
            train_rl(config)
    result = train_rl(config)  # nothing was trained before
    assert [line["step"] for line in steps(result.run_directory)] == [1, 2]
    (errors,) = json.loads((result.run_directory / "environment.json").read_text())["kernels"].values()
    assert errors.keys() == {"result", "dx", "dhead"}
    assert all(error <= bound for error, bound in errors.values())


def test_every_pair_is_written_down(whole):
    pairs = lines(whole.run_directory, "rollouts.jsonl")
    assert [pair["step"] for pair in pairs] == [1] * 16 + [3] * 16 + [5] * 16
    for first in range(0, len(pairs), 4):
        group = pairs[first : first + 4]
        assert len({pair["prompt"] for pair in group}) == 1
        rewards = np.array([pair["reward"] for pair in group])
        spread = rewards.std(ddof=1) + 1e-4
        expected = (rewards - rewards.mean()) / spread if len(set(rewards)) > 1 else np.zeros(4)
        assert [pair["advantage"] for pair in group] == pytest.approx(expected, abs=1e-6)
    found = steps(whole.run_directory)
    assert found[0]["reward"] == pytest.approx(np.mean([pair["reward"] for pair in pairs[:16]]))
    assert found[0]["response_tokens"] == np.mean([pair["tokens"] for pair in pairs[:16]])


def stopped_after(monkeypatch, num_steps):
    """Makes every run stop after `num_steps` steps."""

    class StopAfter:
        def __init__(self, mesh, _):
            self.left = 0 if mesh is None else num_steps  # without a mesh: for callbacks, of which there are none

        def after_this_step(self):
            self.left -= 1
            return self.left == 0

        def between_steps(self):
            return False

        def break_off(self):
            """Never: the evaluations of these runs come to their end."""

    monkeypatch.setattr(loop, "Stop", StopAfter)


def test_stopped_after_any_step_a_run_continues_to_the_same_bits(whole, tmp_path, config_of, monkeypatch, capsys):
    for here, after in ((1, 1), (1, 2), (1, 3), (9, 6)):  # within a batch, between batches, within the next
        stopped_after(monkeypatch, here)
        result = train_rl(config_of(tmp_path, *WHOLE))
        assert result.step == after
        assert result.interrupted == (after < 6)
    assert capsys.readouterr().out.count("random weights") == 1  # of the first start alone
    assert timeless(steps(result.run_directory)) == timeless(steps(whole.run_directory))
    assert evaluations(result.run_directory) == evaluations(whole.run_directory)
    assert lines(result.run_directory, "rollouts.jsonl") == lines(whole.run_directory, "rollouts.jsonl")
    assert all(np.array_equal(a, b) for a, b in zip(parameters(result), parameters(whole), strict=True))


def test_chunks_and_meshes_change_nothing(whole, tmp_path, config_of):
    words = ["num_iterations=2", "grpo_beta=0.05", "rollout_correction=truncated", "micro_batch_size=-1",
             "ici_fsdp_parallelism=8"]  # fmt: skip
    one = train_rl(config_of(tmp_path, *words, "rollout_slots=8", "steps=4", "eval_interval=-1"))
    for line, other in zip(steps(one.run_directory), steps(whole.run_directory), strict=False):
        assert line.get("responses_hash") == other.get("responses_hash")
        for name in ("loss", "grad_norm", "param_norm", "kl", "token_nll"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_what_makes_a_batch_of_pairs_stays_what_the_run_began_with(whole, config_of):
    """The run's position in the prompts follows from the pairs so far."""
    with pytest.raises(UserError) as refused:
        train_rl(config_of(whole.run_directory.parent, *WHOLE, "num_generations=2", "num_iterations=1", "steps=8"))
    asked = [problem.partition(" contradicts ")[0] for problem in refused.value.problems]
    assert asked == ["num_generations=2", "num_iterations=1"]


def test_what_responses_are_written_down_follows_the_terminal(tmp_path, config_of):
    """The first batch, those whose steps have a line there, and the last."""
    words = ["num_iterations=2", "steps=10", "log_period=6", "eval_interval=-1", "ici_fsdp_parallelism=8"]
    seen = []

    class Seen(Callback):
        def after_step(self, step, record, state):
            seen.append((step, record["loss"]))

    config = config_of(tmp_path, *words, "enable_checkpointing=false", "profiler_steps=1")
    result = train_rl(config, callbacks=[Seen()])
    assert seen == [(line["step"], line["loss"]) for line in steps(result.run_directory)]
    assert {pair["step"] for pair in lines(result.run_directory, "rollouts.jsonl")} == {1, 5, 9}
    assert list((result.run_directory / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb"))


def test_within_a_batch_its_chunks_stay_as_they_are(whole, tmp_path, config_of):
    """Step 5 is the first of two updates on its batch."""
    run = tmp_path / whole.run_directory.name
    shutil.copytree(whole.run_directory, run)
    shutil.rmtree(run / "checkpoints" / "6")
    with pytest.raises(UserError, match=r"saved between two updates on one batch.*after that batch they may change"):
        train_rl(config_of(tmp_path, *WHOLE, "micro_batch_size=4"))


def test_devices_of_their_own_sample_while_others_train(tmp_path, config_of, monkeypatch):
    """Each waits until the other is running: one after the other, they would deadlock."""
    sampling, training = threading.Event(), threading.Event()
    generate = LocalEngine.generate
    devices = {}

    def generate_beside(self, requests, **how):
        devices["sampler"] = set(self._mesh.devices.flat)
        if requests[0].key[:2] == (0, 2):  # the second chunk of the first batch
            sampling.set()
            assert training.wait(120), "no training meanwhile"
        return generate(self, requests, **how)

    class StepBeside(ChunkedStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            add = self.add

            def add_beside(state, sums, rows):
                devices["trainer"] = set(rows["tokens"].sharding.mesh.devices.flat)
                training.set()
                assert sampling.wait(120), "no sampling meanwhile"
                return add(state, sums, rows)

            self.add = add_beside

    monkeypatch.setattr(LocalEngine, "generate", generate_beside)
    monkeypatch.setattr(rollout_steps, "ChunkedStep", StepBeside)
    result = train_rl(
        config_of(
            tmp_path, "trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5", "steps=2", "eval_interval=-1"
        )
    )
    assert devices["trainer"] | devices["sampler"] == set(jax.devices())
    assert not devices["trainer"] & devices["sampler"]
    first, _ = steps(result.run_directory)
    assert first["overlap_fraction"] > 0
    phases = {
        (name, chunk): (start, stop)
        for name, chunk, start, stop in lines(result.run_directory, "timeline.jsonl")[0]["phases"]
    }
    (train_start, train_stop), (start, stop) = phases["train", 0], phases["rollout", 1]
    assert max(train_start, start) < min(train_stop, stop)


def failing(completions):
    raise RuntimeError("no opinion")


def test_a_reward_that_fails_counts_nothing_or_ends_the_run(tmp_path, config_of, monkeypatch, capsys):
    monkeypatch.setattr(rollout_steps, "_EQUAL_BATCHES", 2)
    words = [
        "reward_functions=tests.rl.test_rollout_steps:failing",
        "steps=3",
        "eval_interval=-1",
        "ici_fsdp_parallelism=8",
    ]
    result = train_rl(config_of(tmp_path, *words))
    line, *_ = steps(result.run_directory)
    said = capsys.readouterr().out
    assert said.count("in the last 2 batches all responses to the same prompt had equal rewards") == 1
    assert said.count("the policy begins with random weights: load_parameters_path names no model") == 1
    assert (line["reward"], line["reward_errors"], line["equal_reward_groups"], line["grad_norm"]) == (0, 16, 1, 0)
    with pytest.raises(RewardError, match=r"failing.*no opinion"):
        train_rl(config_of(tmp_path, *words, "reward_error=stop", "run_name=stops"))


def test_with_lora_the_reference_is_the_frozen_model(tmp_path, config_of):
    words = ["lora_rank=2", "grpo_beta=0.1", "steps=3", "eval_interval=-1", "ici_fsdp_parallelism=8"]
    result = train_rl(config_of(tmp_path, *words))
    assert not (result.run_directory / "reference").exists()
    first, second, third = steps(result.run_directory)
    assert first["kl"] == pytest.approx(0, abs=1e-7)
    assert 0 < second["kl"] < third["kl"]


@pytest.mark.parametrize(("words", "seconds"), [
    (["reward_functions=exact_answer,numeric_answer", "reward_timeout_seconds=100"], 400),
    (["rollout_engine=http", "rollout_url=http://x/v1", "reward_timeout_seconds=10"], 1820),
])  # fmt: skip
def test_the_watchdog_ends_no_run_that_waits_for_rewards_or_a_server_within_their_limits(
    words, seconds, tmp_path, config_of, monkeypatch
):
    told = {}
    monkeypatch.setattr(rollout_steps.watchdog, "allow", told.__setitem__)
    monkeypatch.setattr(rollout_steps, "train_run", lambda *_: None)
    train_rl(config_of(tmp_path, *words))
    assert told == {"rollout": seconds, "evaluation": seconds}
