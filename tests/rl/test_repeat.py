"""`equiv` on recorded batches: what comes from outside stays, and a split changes nothing of what is computed from it.

Faults are planted by tests/mutants.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from maxtext_lite.analysis import equiv
from maxtext_lite.analysis.equiv import Split, compare_splits
from maxtext_lite.analysis.replay import compared_fields
from maxtext_lite.config import UserError, load_config
from maxtext_lite.post_training.pairs import Chunk, Sampled, group_advantages
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.recorded import (
    path_of,
    read_batch,
    recorded_in,
    write_batch,
)
from maxtext_lite.post_training.repeat import PROMPTS
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rollout import Response
from tests.conftest import use_one_device
from tests.rl.conftest import RUN

KEYS = "grpo_beta=0.05 num_iterations=2 rollout_correction=truncated optimizer=sgd"
SPLITS = [
    Split("2 micro-batches", {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 2}, 2),
    Split("empty slots", {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}, 4),
]
TRAIN_ALL = equiv._train_all


def run_here(devices, path, runs, directory):
    """`equiv._run_on` in this process, which has 8 devices."""
    names = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
            patch.setenv(name, os.environ[name])
        if devices == 1:
            use_one_device(patch)
        TRAIN_ALL(devices, path, runs, directory, SimpleNamespace(send=names.append))
    yield from names


def test_splits_of_a_batch_agree_in_all_that_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(equiv, "_run_on", run_here)
    monkeypatch.setattr(equiv, "splits", lambda _: SPLITS)
    said = []
    words = [*RUN, *KEYS.split()]
    verdicts = [*compare_splits("post_train/rl.yml", words, tmp_path, said.append)]
    assert [(each.split, each.difference) for each in verdicts] == [
        (split.name, "") for split in SPLITS
    ]
    assert max(max(each.loss, each.parameters) for each in verdicts) < 1e-6
    assert "at random" in said[0]
    frozen, whole, split = (
        np.load(path_of(tmp_path / name, 3)) for name in ("frozen", "sgd/0", "sgd/2")
    )
    assert frozen["reward"].shape == (4 * PROMPTS,)
    assert np.isnan(frozen["reward"]).any()
    assert whole.keys() == split.keys() > frozen.keys()
    for name in frozen.keys() - {"prompt_number"}:
        np.testing.assert_array_equal(whole[name], frozen[name])
    # The reference is that of the start: after two updates it is no longer the policy.
    names = "old_log_probabilities", "reference_log_probabilities"
    old, reference = (whole[name] for name in names)
    assert old.shape == reference.shape == (4 * PROMPTS, 16)
    assert 1e-4 < np.abs(old - reference).max() < 1


def test_a_recorded_batch_is_cut_to_what_is_compared(tmp_path):
    """From 8 prompts with 9 responses of up to 10 tokens each, to 4 with 8."""
    config = load_config(
        "post_train/rl.yml", [*RUN, "num_generations=9", "micro_batch_size=-1"]
    )
    repeats = equiv.repeats_of(config)
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(number, "", (49, 43), {}) for number in range(8) for _ in range(9)
    ]
    lengths = rng.integers(1, 11, 72)
    responses = [Response([7] * length, [-1.0] * length, True) for length in lengths]
    keys = [(0, 40 + pair // 9, pair % 9) for pair in range(72)]
    rewards = rng.random(72)
    scores = Scores(rewards, {"m:f": rewards}, np.zeros(72, bool), 0, [])
    sampled = Sampled(prompts, responses, [""] * 72, keys)
    batch = Chunk.judged(sampled, scores, num_generations=9, scale_rewards="group")
    write_batch(path_of(tmp_path, 7), batch)
    (tmp_path / "config.yml").write_text("base: post_train/rl.yml\n")
    _, note = repeats.freeze(config, tmp_path, tmp_path)
    assert "rollouts-7.npz" in note
    first, second = (read_batch(path_of(tmp_path, step)) for step in (1, 2))
    kept = [pair for pair in range(36) if pair % 9 < 8]
    assert first.sampled.responses == [responses[pair] for pair in kept]
    np.testing.assert_array_equal(first.scores.total, rewards[kept])
    want = group_advantages(rewards[kept], 8, "group")
    np.testing.assert_array_equal(first.advantages, want)
    np.testing.assert_array_equal(second.advantages, want)  # the only batch, again
    assert second.sampled.keys[8] == (0, 5, 0)


@pytest.mark.fast
@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"none"])
def test_a_damaged_record_is_named(content, tmp_path):
    path = path_of(tmp_path, 1)
    path.write_bytes(content)
    with pytest.raises(UserError, match=path.name):
        recorded_in(tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("loss", "other", "agree"),
    [(1e-8, -3e-8, True), (1e-3, 1.1e-3, False)],
)
def test_the_loss_of_a_policy_is_compared_with_its_advantages(loss, other, agree):
    lines = ({"token_nll": 5.0, "loss": each} for each in (loss, other))
    assert compared_fields(*lines, 1e-5)["loss"][2] == agree
