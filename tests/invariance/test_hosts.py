"""Runs of several processes: whoever reads and however the devices are split, the run is that of one process."""

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL
from tests.processes import RunFiles, in_turn, train_in_turn

# Batches of 8, 8, 16, 16, 16, in either mode of the ramp and on any number of devices.
RUN = [*MODEL, "steps=5", "eval_interval=5", "eval_fraction=0.1", "checkpoint_period=5", "async_checkpointing=false",
       "schedule_unit=examples", "enable_rampup_batch_size=true", "global_rampup_samples=16", "global_batch_size=16",
       "gradient_accumulation_steps=-1"]  # fmt: skip


def ramp(mode, per_device):
    keys = (f"{key}={per_device / 2}" for key in ("per_device_batch_size_start", "per_device_batch_size_increment"))
    return [f"rampup_mode={mode}", f"per_device_batch_size={per_device}", *keys]


def rows_of_documents(*overrides):
    return ["packing=false", "optimizer=sgd", "schedule_unit=tokens", *overrides]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, documents):
    """Two runs by one process with 8 devices, both by two and the second by four with 2 each, which are then refused.

    The second also with tokens split over both, and with `dcn` axes: in parts of one process each. Some balance
    the rows of each step over shards, where all hosts know the rows or two of four do.
    """
    directory = tmp_path_factory.mktemp("runs")
    text = "dataset_path={}/{}/documents.jsonl".format(documents, "{process}")

    def named(name, *overrides):
        return [*RUN, f"base_output_directory={directory}", f"run_name={name}", text, *overrides]

    for one in (
        named("packed", *ramp("per_device_batch_size", 1), "ici_data_parallelism=2", "eval_per_device_batch_size=1"),
        named("rows", *rows_of_documents(*ramp("per_device_batch_size", 2))),
    ):
        train(load_config(None, [override.replace("{process}", "0") for override in one]))
    opened = {
        2: train_in_turn(
            [
                named("packed-2", *ramp("gradient_accumulation_steps", 2), "expansion_factor_real_data=0.5",
                      "ici_data_parallelism=2", "eval_per_device_batch_size=0.5", "balance_attention=true"),
                named("rows-2", *rows_of_documents(*ramp("per_device_batch_size", 1)), "ici_tensor_parallelism=4",
                      "expansion_factor_real_data=2"),
                named("rows-context", *rows_of_documents(*ramp("gradient_accumulation_steps", 2)),
                      "ici_context_parallelism=4", "context_parallel_strategy=ring"),
                named("rows-dcn-data", *rows_of_documents(*ramp("gradient_accumulation_steps", 2)),
                      "dcn_data_parallelism=2", "ici_fsdp_parallelism=2"),
                named("rows-dcn-stages", *rows_of_documents(*ramp("gradient_accumulation_steps", 2)),
                      "dcn_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "pipeline_schedule=1f1b"),
                named("rows-dcn-context", *rows_of_documents(*ramp("gradient_accumulation_steps", 2)),
                      "dcn_context_parallelism=2", "ici_tensor_parallelism=2", "context_parallel_strategy=all_gather"),
            ],
            processes=2, devices=2, watched=documents,
        ),
    }  # fmt: skip
    four = [
        named("rows-4", *rows_of_documents(*ramp("gradient_accumulation_steps", 1)), "expansion_factor_real_data=2",
              "dcn_data_parallelism=2", "dcn_pipeline_parallelism=2", "ici_fsdp_parallelism=2",
              "balance_attention=true"),
        [*RUN, *ramp("per_device_batch_size", 1), "expansion_factor_real_data=2", "run_name=nothing",
         f"base_output_directory={directory}", f"dataset_path={documents}/nowhere.jsonl"],
    ]  # fmt: skip
    refused, opened[4] = in_turn(four, processes=4, devices=2, watched=documents)
    return lambda name: RunFiles(directory / name), opened, refused


WAYS = [("packed", "packed-2"), *(("rows", f"rows-{how}") for how in (
    "2", "context", "dcn-data", "dcn-stages", "dcn-context", "4"
))]  # fmt: skip


@pytest.mark.parametrize(("one", "several"), WAYS)
def test_counts_hashes_and_learning_rates_are_those_of_one_process(one, several, runs):
    run, *_ = runs
    exact = ("step", "examples_hash", "target_tokens", "examples_seen", "tokens_seen", "learning_rate",
             "global_batch_to_train")  # fmt: skip
    assert run(several).sequence(*exact) == run(one).sequence(*exact)
    assert [step["global_batch_to_train"] for step in run(one).steps] == [8, 8, 16, 16, 16]
    assert len({step["target_tokens"] for step in run(one).steps}) > 2  # ragged


@pytest.mark.parametrize(("one", "several"), WAYS)
def test_losses_agree(one, several, runs):
    run, *_ = runs
    for key in ("loss", "grad_norm"):
        got, want = ([step[key] for step in run(name).steps] for name in (several, one))
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_shards_of_balanced_rows_wait_less_for_each_other(runs):
    """Both have 4 shards of rows; what it would be otherwise is in the other run's metrics."""
    run, *_ = runs
    for balanced, other in (("packed-2", "packed"), ("rows-4", "rows-dcn-data")):
        after, before = (
            np.mean([step["attention_imbalance"] for step in run(name).steps]) for name in (balanced, other)
        )
        assert after < 0.7 * before


@pytest.mark.parametrize(("one", "several"), WAYS)
def test_evaluations_agree_whatever_their_batch(one, several, runs):
    run, *_ = runs
    (got,), (want,) = run(several).evaluations, run(one).evaluations
    assert got["eval_target_tokens"] == want["eval_target_tokens"]
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(("one", "several"), [way for way in WAYS if way[0] == "rows"])
def test_parameters_after_5_steps_of_sgd_agree(one, several, runs):
    run, *_ = runs
    got, want = (run(name).parameters(5) for name in (several, one))
    norms = {path: np.linalg.norm(b.astype(float)) for path, b in jax.tree.leaves_with_path(want)}
    whole = np.linalg.norm(list(norms.values()))
    for path, difference in jax.tree.leaves_with_path(jax.tree.map(lambda a, b: a.astype(float) - b, got, want)):
        assert np.linalg.norm(difference) <= 1e-5 * norms[path] + 1e-7 * whole, path


@pytest.mark.parametrize(("name", "processes", "savers"), [("rows-2", 2, {0, 1}), ("rows-4", 4, {0, 2})])
def test_each_process_writes_the_checksums_of_what_it_saved(name, processes, savers, runs):
    """Of small arrays the first replica saves all, the other replica's processes nothing."""
    run, *_ = runs
    checkpoint = run(name).directory / "checkpoints" / "5"
    parts = [checkpoint / f"sha256.{process}-of-{processes}" for process in range(processes)]
    assert sorted(checkpoint.glob("sha256.*")) == parts
    for process, part in enumerate(parts):
        named = [line.split("  ")[1] for line in part.read_text().splitlines()[:-1]]
        assert any(f"process_{process}/" in name for name in named) == (process in savers)
        assert not any(f"process_{other}/" in name for name in named for other in range(processes) if other != process)


def test_only_hosts_that_load_open_the_data(runs, documents):
    """Of four processes with a factor of 2, two; of two with a factor of 0.5, and then 2, both and then one."""
    _, opened, _ = runs
    files = [[str(documents / host / "documents.jsonl")] for host in ("0", "1")]
    assert opened == {2: files, 4: [*files, [], []]}


def test_data_that_a_loading_host_misses_ends_all_processes_with_2_and_one_message(documents, runs):
    """Hosts 0 and 1 find nothing; hosts 2 and 3 would not have looked."""
    run, _, refused = runs
    assert refused.returncode == 2
    said = [line.partition("] ")[2] for line in refused.stderr.splitlines()]
    assert len(said) == 4
    assert len(set(said)) == 1
    assert said[0].startswith(f"error: dataset_path='{documents}/nowhere.jsonl': there is no such file")
    before, saved, after = refused.stdout.partition("saved step 5")
    assert (saved, "compiled" in before, "compiled" in after) == ("saved step 5", True, False)
    assert not run("nothing").directory.exists()
