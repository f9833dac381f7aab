"""Whole runs of reinforcement learning: their files, their resumption, and that chunks and meshes change nothing."""

import json
import shutil
import threading

import jax
import numpy as np
import pytest

from maxtext_lite.analysis.replay import replayed
from maxtext_lite.config import UserError
from maxtext_lite.data.order import example_ids
from maxtext_lite.post_training import rollout_steps
from maxtext_lite.post_training.pairs import group_advantages
from maxtext_lite.post_training.prompts import open_prompts
from maxtext_lite.post_training.recorded import recorded_paths
from maxtext_lite.post_training.rewards import RewardError
from maxtext_lite.post_training.rollout import LocalEngine
from maxtext_lite.post_training.rollout_steps import ChunkedStep, train_rl
from maxtext_lite.train_rl import main
from maxtext_lite.training import Callback, loop, stopping
from tests.processes import RunFiles
from tests.rl.conftest import BATCH, MESH, RUN, WHOLE, evaluations, steps, timeless
from tests.run_directories import lines_of


def parameters(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.params)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config_of):
    """An uninterrupted run, whose trainer and sampler share the 8 devices."""
    words = [*WHOLE, "record_rollouts=5"]
    return train_rl(config_of(tmp_path_factory.mktemp("rl"), *words))


FILES = """
config.yml plan.json metrics.jsonl rollouts.jsonl timeline.jsonl checkpoints reference environment.json memory.json
goodput.json tensorboard rollouts-5.npz
"""


def test_writes_what_the_interface_promises(whole):
    found = {path.name for path in whole.run_directory.iterdir()}
    assert found == set(FILES.split())
    found = steps(whole.run_directory)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluations(whole.run_directory)] == [0, 3, 6]
    sampled = found[::2]  # of each batch the first step
    assert [line["prompts_seen"] for line in sampled] == [4, 8, 12]
    assert found[-1]["epoch"] == pytest.approx(12 / 90)
    for line in sampled:
        assert line["rewards/low_bytes"] == line["reward"]
        # Ratios are 1.
        assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0
        assert line["rollout_mismatch"] < 1e-5
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[1]["kl"] > 0
    hashes = [line["examples_hash"] for line in found]
    assert hashes[0] == hashes[1] != hashes[2]


def test_every_pair_is_written_down(whole):
    pairs = lines_of(whole.run_directory, "rollouts.jsonl")
    assert [pair["step"] for pair in pairs] == [1] * 16 + [3] * 16 + [5] * 16
    for first in range(0, len(pairs), 4):
        group = pairs[first : first + 4]
        assert len({pair["prompt"] for pair in group}) == 1
        rewards = np.array([pair["reward"] for pair in group], np.float64)
        assert [pair["advantage"] for pair in group] == pytest.approx(
            group_advantages(rewards, 4, "group"), abs=1e-6
        )
    rewards = np.array([pair["reward"] for pair in pairs[:16]], np.float64)
    found = steps(whole.run_directory)[0]
    assert found["reward"] == pytest.approx(np.nanmean(rewards))
    assert found["unscored_fraction"] == np.mean(np.isnan(rewards)) > 0
    tokens = [pair["tokens"] for pair in pairs[:16] if pair["reward"] is not None]
    assert found["target_tokens"] == sum(tokens)


@pytest.mark.parametrize("step", [5, 6])
def test_a_step_is_repeated_to_the_bit_with_its_rows(whole, step, tmp_path):
    """Step 5 on its recorded batch; step 6 from before that batch, whose responses are sampled again."""
    run = shutil.copytree(whole.run_directory, tmp_path / "copy")
    if step == 6:
        shutil.rmtree(run / "checkpoints" / "5")
        (run / "rollouts-5.npz").unlink()
    before = [(path, path.stat().st_mtime_ns) for path in sorted(run.rglob("*"))]
    with pytest.MonkeyPatch.context() as patch:
        if step == 5:
            patch.setattr(LocalEngine, "generate", None)
        found = replayed(run, step, [], tolerance=None, with_rows=True, say=print)
    assert (found.elsewhere, found.tolerance, found.first_difference) == ("", 0, None)
    assert found.after == 4
    line = steps(run)[step - 1]
    assert found.fields["grad_norm"] == (line["grad_norm"], line["grad_norm"], True)
    assert len(found.rows) == 16
    loss, counted = (
        sum(getattr(row, name) for row in found.rows)
        for name in ("loss_sum", "num_counted")
    )
    assert loss / counted == pytest.approx(line["loss"], abs=1e-6)
    assert before == [
        (path, path.stat().st_mtime_ns) for path in sorted(run.rglob("*"))
    ]


def odd(prompts, completions):
    """The same for all responses to even numbers."""
    shares = [sum(letter < "@" for letter in text) / 10 for text in completions]
    return [int(prompt[0]) % 2 * x for prompt, x in zip(prompts, shares, strict=True)]


DYNAMIC = "num_iterations=2 grpo_beta=0.05 dynamic_sampling=2 eval_interval=-1 steps=6"


def test_groups_of_equal_rewards_are_replaced_however_a_batch_is_split(
    tmp_path, config_of
):
    """The first four groups of odd numbers, of eight at most; what was read is in the checkpoint."""

    def run(name, *words):
        own = [f"run_name={name}", f"reward_functions={__name__}:odd"]
        return config_of(tmp_path, *DYNAMIC.split(), *own, *words)

    config = run("whole", "micro_batch_size=16", "record_rollouts=all")
    train_rl(config)
    train_rl(run("split", "micro_batch_size=4", *MESH.split()))
    whole, split = (steps(tmp_path / name) for name in ("whole", "split"))
    prompts, _ = open_prompts(config)
    first = 0
    for line, other in zip(whole[::2], split[::2], strict=True):
        numbers = example_ids(first, 8, num_examples=90, seed=config.data_shuffle_seed)
        is_odd = [int(prompts[number].text[0]) % 2 for number in numbers.tolist()]
        num_read = 8 if sum(is_odd) < 4 else int(np.cumsum(is_odd).searchsorted(4)) + 1
        first += num_read
        assert line["prompts_seen"] == other["prompts_seen"] == first
        assert line["epoch"] == first / 90
        share = sum(is_odd[:num_read]) / num_read
        assert line["equal_reward_groups"] == pytest.approx(1 - share)
        assert line["responses_hash"] == other["responses_hash"]
    assert {8} < {*np.diff([0, *(line["prompts_seen"] for line in whole[::2])])}
    for line, other in zip(whole, split, strict=True):
        for name in ("examples_hash", "target_tokens"):
            assert line[name] == other[name]
        for name in ("loss", "grad_norm", "kl"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for lost in (5, 6):
        shutil.rmtree(resumed / "checkpoints" / str(lost))
    train_rl(run("resumed", "micro_batch_size=16"))
    assert timeless(steps(resumed)) == timeless(whole)
    assert [path.name for path in recorded_paths(resumed)] == [
        "rollouts-1.npz",
        "rollouts-3.npz",
    ]
    found = replayed(
        tmp_path / "whole", 6, [], tolerance=None, with_rows=True, say=print
    )
    assert (found.tolerance, found.first_difference) == (0, None)


def stopped_after(monkeypatch, num_steps):
    """Makes every run stop after `num_steps` steps."""

    class StopAfter(stopping.Stop):
        left = num_steps

        def poll(self, _):
            self.left -= 1
            if self.left == 0:
                self.reason = stopping.Reason.SIGNAL
            return self.reason

    monkeypatch.setattr(loop, "Stop", StopAfter)


# A module of the working directory, as a user's own rewards are. The file `mute` says what it does instead.
JUDGE = """
import pathlib
def low_bytes(completions):
    text = pathlib.Path("mute").read_text() if pathlib.Path("mute").exists() else ""
    if text == "raise":
        raise RuntimeError("no opinion")
    if text == "none":
        return [None] * len(completions)
    return [sum(character < "@" for character in text) / max(len(text), 1) for text in completions]
"""


def test_a_batch_of_pairs_stays_as_the_run_began_it_and_a_restart_needs_the_reference(
    whole, tmp_path, config_of
):
    """The position in the prompts follows from the pairs so far. Step 5 is the first of two updates on its batch."""
    run = tmp_path / whole.run_directory.name
    shutil.copytree(whole.run_directory, run)
    words = ["num_generations=2", "num_iterations=1", "steps=8"]
    with pytest.raises(UserError) as refused:
        train_rl(config_of(tmp_path, *WHOLE, *words))
    asked = [problem.partition(" ")[0] for problem in refused.value.problems]
    assert asked == words[:2]
    shutil.rmtree(run / "checkpoints" / "6")
    with pytest.raises(UserError, match="between two updates on"):
        train_rl(config_of(tmp_path, *WHOLE, "micro_batch_size=4"))
    shutil.rmtree(run / "reference")
    with pytest.raises(UserError, match=r"grpo_beta=0\.05"):
        train_rl(config_of(tmp_path, *WHOLE))


def test_devices_of_their_own_sample_while_others_train_and_change_nothing(
    whole, tmp_path, config_of, monkeypatch
):
    """Each waits until the other is running: one after the other, they would deadlock."""
    sampling, training = threading.Event(), threading.Event()
    generate = LocalEngine.generate
    devices = {}

    def generate_beside(self, requests, **how):
        devices["sampler"] = set(self._mesh.devices.flat)
        if requests[0].key[:2] == (0, 1):  # the second chunk of the first batch
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

    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: two)
    monkeypatch.setattr(jax, "device_count", lambda *_: 2)
    monkeypatch.setattr(LocalEngine, "generate", generate_beside)
    monkeypatch.setattr(rollout_steps, "ChunkedStep", StepBeside)
    words = "steps=4 micro_batch_size=4 trainer_devices_fraction=0.5 sampler_devices_fraction=0.5"
    result = train_rl(config_of(tmp_path, *WHOLE[:3], *WHOLE[-2:], *words.split()))
    assert devices["trainer"] | devices["sampler"] == set(two)
    assert not devices["trainer"] & devices["sampler"]
    found = steps(result.run_directory)
    assert found[0]["overlap_fraction"] > 0
    assert evaluations(result.run_directory)[0] == evaluations(whole.run_directory)[0]
    for line, other in zip(found, steps(whole.run_directory), strict=False):
        assert line.get("responses_hash") == other.get("responses_hash")
        for name in ("loss", "grad_norm", "param_norm", "kl", "token_nll"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def failing(completions):
    """For invariance/test_rl_hosts.py."""
    raise RuntimeError("no opinion")


def test_a_batch_without_rewards_is_skipped_two_failures_end_the_run_and_with_lora_the_reference_is_the_frozen_model(
    tmp_path, config_of, monkeypatch, capsys, one_device
):
    """Rewards fail for one batch and leave out the next; later they fail for two batches. A long run writes the
    responses of the first batch, of those whose steps have a line on the terminal, and of the last. The kernels are
    checked before the first gradient."""
    monkeypatch.setattr(rollout_steps, "_EQUAL_BATCHES", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "mute").write_text("raise")
    seen, entered = [], []
    enter = rollout_steps.phases.enter

    def enter_seen(phase, step=0):
        entered.append((phase, step))
        enter(phase, step)

    monkeypatch.setattr(rollout_steps.phases, "enter", enter_seen)

    class Seen(Callback):
        def after_step(self, step, record, state):
            seen.append((step, record["loss"]))
            if step == 2:
                (tmp_path / "mute").write_text("none")
            if step == 4:
                (tmp_path / "mute").unlink()
            if step == 10:
                (tmp_path / "mute").write_text("raise")

    words = [*BATCH.split(), "lora_rank=2", "steps=14", "log_period=6"]
    words += ["eval_interval=-1", "enable_checkpointing=false", "num_vocab_tiling=2"]
    words.append("reward_functions=judge:low_bytes")
    config = config_of(tmp_path, *words)
    with pytest.raises(
        RewardError, match=r"two batches .*failed.*RuntimeError: no opinion"
    ):
        train_rl(config, callbacks=[Seen()])
    directory = tmp_path / config.run_name
    found = steps(directory)
    assert [line["step"] for line in found] == list(range(1, 13))
    for line, errors in ((found[0], 16), (found[2], 0)):
        assert line["reward"] is line["loss"] is line["kl"] is None
        assert (line["reward_errors"], line["target_tokens"]) == (errors, 0)
        assert line["unscored_fraction"] == line["equal_reward_groups"] == 1
    assert [line["step"] for line in found if line["skipped"]] == [1, 2, 3, 4, 11, 12]
    said = capsys.readouterr().out
    assert said.count("in the last 2 batches no two responses") == 1
    assert said.count("Traceback") == 1
    assert found[4]["kl"] == pytest.approx(0, abs=1e-7)
    assert 0 < found[5]["kl"] < found[7]["kl"]
    assert not (directory / "reference").exists()
    assert seen == [(line["step"], line["loss"]) for line in found]
    pairs = lines_of(directory, "rollouts.jsonl")
    assert {pair["step"] for pair in pairs} == {1, 5, 11, 13}
    about = json.loads((directory / "environment.json").read_text())
    (errors,) = about["kernels"].values()
    assert errors.keys() == {"result", "dx", "dhead"}
    assert next(iter(about["start_up_seconds"])) == "data"
    # The gradient is compiled with the first chunk, and the update after the last.
    first = ["rollout", "compile", "rollout", "compile"]
    assert [phase for phase, step in entered if step == 1] == first
    assert ("compile", 2) not in entered
    assert ("step", 2) in entered


def test_the_watchdog_ends_no_run_that_waits_for_rewards_within_their_limit(
    tmp_path, config_of, monkeypatch
):
    told = {}
    monkeypatch.setattr(rollout_steps.watchdog, "allow", told.__setitem__)
    monkeypatch.setattr(rollout_steps, "train_run", lambda *_: None)
    words = "reward_functions=exact_answer,numeric_answer reward_timeout_seconds=100"
    train_rl(config_of(tmp_path, *words.split()))
    # Each function twice, and all restarts of their process.
    assert told == dict.fromkeys(["start-up", "rollout", "evaluation"], 400 + 300)


def test_killed_and_stopped_a_run_continues_to_the_same_bits(
    whole, tmp_path, config_of, monkeypatch
):
    """As a run that was killed before its fifth step was saved; then stopped after one step more, so that one of its
    two starts is between batches and the other between two updates on one."""
    run = RunFiles(tmp_path / whole.run_directory.name)
    shutil.copytree(whole.run_directory, run.directory)
    for lost in (5, 6):
        shutil.rmtree(run.directory / "checkpoints" / str(lost))
    own = [*WHOLE, f"base_output_directory={tmp_path}"]
    stopped_after(monkeypatch, 1)
    assert main(["post_train/rl.yml", *RUN, *own]) == 75
    assert run.checkpoints[-1] == run.last_step == 5
    stopped_after(monkeypatch, 9)
    result = train_rl(config_of(tmp_path, *WHOLE))
    assert not result.interrupted
    directories = run.directory, whole.run_directory
    one, other = (timeless(steps(directory)) for directory in directories)
    assert one == other
    for read in (evaluations, lambda directory: lines_of(directory, "rollouts.jsonl")):
        assert read(directories[0]) == read(directories[1])
    for one, other in zip(parameters(result), parameters(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_schedule_counts_prompts_and_a_resume_in_the_middle_of_a_batch_continues_it(
    tmp_path, config_of
):
    """Batches of 2 prompts until 3 are seen, then of 4, with two updates on each; killed after step 3."""
    words = [*WHOLE, "micro_batch_size=8", "batch_schedule=[[0, 2], [3, 4]]"]
    words += ["checkpoint_period=3", "max_num_checkpoints_to_keep=9"]
    whole = train_rl(config_of(tmp_path, *words)).run_directory
    found = steps(whole)
    assert [line["global_batch_to_train"] for line in found] == [8] * 4 + [16] * 2
    assert [line["prompts_seen"] for line in found[::2]] == [2, 4, 8]
    assert [line["examples_seen"] for line in found] == [8, 16, 24, 32, 48, 64]
    killed = shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "6")
    train_rl(config_of(tmp_path, *words, "run_name=killed"))
    assert timeless(steps(killed)) == timeless(found)
    # 8 prompts are seen. The next batch, of 10, would pass the tenth prompt between its two updates.
    other = ["run_name=killed", "batch_schedule=[[0, 10], [10, 4]]", "steps=8"]
    with pytest.raises(
        UserError, match=r"batch_schedule=\[\[0, 2\], \[4, 4\]\] batch_size=4"
    ):
        train_rl(config_of(tmp_path, *words, *other))
