"""Splits agree with the whole; a planted bug, failed runs and impossible splits get verdicts of their own.

Bugs of every kind are planted by tests/mutants.
"""

import os
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.analysis import equiv as equivalence
from maxtext_lite.analysis.equiv import Split, compare_splits
from maxtext_lite.analysis.short_runs import SHORT_RUNS
from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import gradients
from tests.conftest import use_one_device
from tests.run_directories import write_lines

WAYS = {
    "fsdp 4 x data 2": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    "lost reduction": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    "no data": {"ici_fsdp_parallelism": 8, "dataset_path": "nowhere.txt"},
    "seven shards": {"ici_fsdp_parallelism": 7},
}
TRAIN_ALL, RUN_ON = equivalence._train_all, equivalence._run_on


def train_all(devices, path, runs, directory, ended):
    """`equivalence._train_all`; in the second split's run a replica's gradients are taken for those of all."""
    total = gradients.sum_over_replicas

    def first_alone(parts, sums, *others):
        own = jax.tree.map(
            lambda g_R: jnp.broadcast_to(g_R[:1], g_R.shape), sums.gradients
        )
        return total(parts, sums._replace(gradients=own), *others)

    for run in runs:
        with mock.patch.object(
            gradients, "sum_over_replicas", first_alone if run[0] == "2" else total
        ):
            TRAIN_ALL(devices, path, [run], directory, ended)


def run_on(devices, path, runs, directory):
    """`equivalence._run_on`; on one device in this process, which costs no imports."""
    if devices > 1:
        yield from RUN_ON(devices, path, runs, directory)
        return
    names = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
            patch.setenv(name, os.environ[name])
        use_one_device(patch)
        TRAIN_ALL(devices, path, runs, directory, SimpleNamespace(send=names.append))
    yield from names


def test_a_split_agrees_and_a_bug_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(equivalence, "_run_on", run_on)
    monkeypatch.setattr(equivalence, "_train_all", train_all)
    monkeypatch.setattr(
        equivalence,
        "splits",
        lambda config: [Split(name, keys) for name, keys in WAYS.items()],
    )
    # The refused one is known before any has run; the others follow as they end.
    refused, split, lost, missing = compare_splits(
        None, ["base_num_decoder_layers=2"], tmp_path, print
    )
    assert (split.agrees, split.refused, split.optimizer) == (True, "", "sgd")
    assert max(split.loss, split.parameters) < 1e-6
    assert not lost.agrees
    assert lost.difference.startswith(
        "step 1: grad_norm "
    )  # as the loss of step 1 is right
    assert missing.difference.startswith("it does not run: UserError: dataset_path=")
    assert not missing.agrees
    assert refused.agrees  # nothing ran
    assert "ici_fsdp_parallelism=7" in refused.refused


def _runs(directory, *losses):
    for name, each in enumerate(losses):
        (directory / str(name)).mkdir()
        lines = [{"step": at, "loss": loss} for at, loss in enumerate(each, start=1)]
        write_lines(directory / str(name) / "metrics.jsonl", lines)
    return equivalence._verdict("a split", "adamw", directory, "1")


@pytest.mark.parametrize(
    "words",
    [
        ["mup_base_emb_dim=64", "mup_base_num_layers=2"],
        ["optimizer_state_dtype=int8", "optimizer=lion"],
    ],
)
def test_what_one_optimizer_has_or_rounds_is_not_in_the_runs_with_sgd(words):
    config = load_config(None, words)
    keys = equivalence.shrunk(config) | SHORT_RUNS["sgd"]
    run = load_config(None, [*words, *equivalence.settings(config, keys)])
    assert (run.optimizer, run.optimizer_state_dtype) == ("sgd", "float32")
    assert run.mup_base_emb_dim == run.mup_base_num_layers == 0
    make_plan(run, num_devices=1, platform="cpu")


@pytest.mark.parametrize(
    ("whole", "split", "difference", "loss"),
    [
        ((2.0, None), (2.0, None), "", 0),  # skipped for a loss that is not finite
        ((2.0, 0.0), (2.0, 0.0), "", 0),  # without targets
        ((2.0, 0.0), (2.0, 0.5), "step 2: loss 0.0 and 0.5", 0.5),
        ((2.0, 1.0), (2.0, None), "step 2: loss 1.0 and None", 0),
        ((2.0, 1.0, 1.0), (2.0, 1.0), "the run ends after step 2, not 3", 0),
    ],
)
def test_losses_that_have_no_relative_difference_get_a_verdict(
    whole, split, difference, loss, tmp_path
):
    found = _runs(tmp_path, whole, split)
    assert (found.difference, found.loss) == (difference, loss)


def test_a_config_that_does_not_run_whole_is_refused_with_the_reason(
    tmp_path, monkeypatch
):
    ran = []

    def fail(devices, path, runs, directory):
        for run in runs:
            ran.append(run.name)
            (directory / run.name).mkdir(parents=True)
            (directory / run.name / "failed.txt").write_text(
                "ValueError: its reason\nand more"
            )
            yield run.name

    monkeypatch.setattr(equivalence, "_run_on", fail)
    with pytest.raises(UserError) as refused:
        next(compare_splits(None, [], tmp_path, print))
    assert ran == ["0"]  # the others need not run
    assert (
        str(refused.value)
        == "the shrunk config does not run with its batch whole: ValueError: its reason"
    )
