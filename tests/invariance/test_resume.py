"""A ramped run killed after any step and continued on other processes and devices is the run that was not stopped."""

import shutil

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL
from tests.processes import RunFiles, train_in_turn

STEPS = 5
# Batches of 8, 8, 16, 16, 16 on any number of devices: the global batch is stated, and the accumulation follows.
RUN = [*MODEL, f"steps={STEPS}", "eval_interval=-1", "eval_fraction=0", "checkpoint_period=1",
       "max_num_checkpoints_to_keep=10", "enable_rampup_batch_size=true", "global_rampup_samples=16",
       "global_batch_size=16", "gradient_accumulation_steps=-1", "per_device_batch_size=1",
       "per_device_batch_size_start=0.5", "per_device_batch_size_increment=0.5"]  # fmt: skip
MODES = {
    "per_device_batch_size": ["rampup_mode=per_device_batch_size", "schedule_unit=steps"],
    "gradient_accumulation_steps": ["rampup_mode=gradient_accumulation_steps", "schedule_unit=examples"],
}
EXACT = ("step", "examples", "examples_hash", "learning_rate", "examples_seen", "tokens_seen", "target_tokens",
         "global_batch_to_train", "epoch")  # fmt: skip


def killed_after(step, whole, directory):
    """What a kill after a step leaves: its checkpoint, none of a later step, and lines that are in part later."""
    shutil.copytree(whole.directory, directory)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(directory / "checkpoints" / str(later))
    assert RunFiles(directory).checkpoints == list(range(1, step + 1))
    return RunFiles(directory)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, documents):
    """For each mode the run that was not stopped and, by step, those that were.

    One mode begins on one process with 8 devices and goes on on two with 2 each; the other goes the other way.
    """
    directory = tmp_path_factory.mktemp("runs")

    def named(name, mode):
        path = f"dataset_path={documents}/0/documents.jsonl"
        return [*RUN, *MODES[mode], path, f"base_output_directory={directory}", f"run_name={name}"]

    one_first, two_first = MODES
    whole = {mode: RunFiles(directory / mode) for mode in MODES}
    train(load_config(None, named(one_first, one_first)))
    killed = {one_first: {k: killed_after(k, whole[one_first], directory / f"one-{k}") for k in range(1, STEPS)}}
    resumed = [named(f"one-{k}", one_first) for k in range(1, STEPS)]
    train_in_turn([*resumed, named(two_first, two_first)], processes=2, devices=2)
    killed[two_first] = {k: killed_after(k, whole[two_first], directory / f"two-{k}") for k in range(1, STEPS)}
    for k in range(1, STEPS):
        train(load_config(None, named(f"two-{k}", two_first)))
    return whole, killed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", range(1, STEPS))
def test_killed_after_any_step_the_run_goes_on_as_it_would_have(step, mode, runs):
    whole, killed = (found[mode] for found in runs)
    assert whole.sequence("global_batch_to_train") == [(8,), (8,), (16,), (16,), (16,)]
    assert killed[step].sequence(*EXACT) == whole.sequence(*EXACT)
    # Up to the kill they are the same lines; after it the devices are others.
    split = ("gradient_accumulation_steps", "loss", "step_seconds")
    assert killed[step].sequence(*split)[:step] == whole.sequence(*split)[:step]
    steps = zip(killed[step].sequence(split[0])[step:], whole.sequence(split[0])[step:], strict=True)
    assert all(resumed != straight for resumed, straight in steps)
    for resumed, straight in zip(killed[step].steps, whole.steps, strict=True):
        assert resumed["loss"] == pytest.approx(straight["loss"], rel=1e-5)
    assert killed[step].checkpoints == list(range(1, STEPS + 1))
