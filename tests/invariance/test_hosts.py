"""Whole runs, split over processes and devices, ramped, killed after any step and resumed: all are one run.

The single steps of the matrix are those of test_matrix.py.
"""

import shutil

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.invariance.conftest import MODEL, TABLE
from tests.processes import RunFiles, in_turn, quick_python, run_launched, train_in_turn

STEPS = 5
RUN = [
    *MODEL,
    f"steps={STEPS}",
    "base_num_decoder_layers=4",
    "mtp_num_layers=1",
    "eval_interval=5",
    "eval_fraction=0.1",
    "checkpoint_period=1",
    "max_num_checkpoints_to_keep=10",
    "enable_rampup_batch_size=true",
    "global_rampup_samples=16",
    "global_batch_size=16",
    "gradient_accumulation_steps=-1",
]
KINDS = {
    "rows": [
        "packing=false",
        "optimizer=sgd",
        "sgd_momentum=0.9",
        "schedule_unit=tokens",
    ],
    "packed": ["schedule_unit=steps"],
}
GROUPS = TABLE["runs"]
WAYS = {name: way for group in GROUPS.values() for name, way in group.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, documents):
    """All runs of the table; the four processes are refused in the end.

    What each process of two and of four opened of the data is returned too.
    """
    directory = tmp_path_factory.mktemp("runs")
    text = "dataset_path={}/{}/documents.jsonl".format(documents, "{process}")

    def named(name, *keys, ramp, equals="rows", text=text):
        mode, per_device = ramp
        sizes = [
            f"per_device_batch_size_{end}={per_device / 2}"
            for end in ("start", "increment")
        ]
        about = [f"rampup_mode={mode}", f"per_device_batch_size={per_device}", *sizes]
        return [
            *RUN,
            *KINDS[equals],
            *about,
            text,
            f"base_output_directory={directory}",
            f"run_name={name}",
            *keys,
        ]

    def words(group):
        found = []
        for name, way in GROUPS[group].items():
            if "after" in way:
                whole, step = way["after"]
                killed(directory / whole, step, directory / name)
            found.append(
                named(name, *way["keys"], ramp=way["ramp"], equals=way["equals"])
            )
        return found

    def alone(group):
        for each in words(group):
            train(load_config(None, [word.replace("{process}", "0") for word in each]))

    alone(1)
    opened = {2: train_in_turn(words(2), processes=2, devices=2, watched=documents)}
    alone("1 again")
    nowhere = named(
        "nothing",
        "expansion_factor_real_data=2",
        ramp=["per_device_batch_size", 1],
        text=f"dataset_path={documents}/nowhere.jsonl",
    )
    refused, opened[4] = in_turn(
        [*words(4), nowhere], processes=4, devices=2, watched=documents
    )
    return lambda name: RunFiles(directory / name), opened, refused


def killed(whole, step, directory):
    """Leaves what a kill after a step would: its checkpoint, none of a later step, and lines of later ones too."""
    shutil.copytree(whole, directory)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(directory / "checkpoints" / str(later))
    assert RunFiles(directory).checkpoints == list(range(1, step + 1))


def test_a_step_is_replayed_to_the_bit_by_as_many_processes(runs):
    words = ["-m", "maxtext_lite.replay", str(runs[0]("rows-2").directory), "--step=2"]
    result = run_launched([*quick_python(), *words], processes=2, devices=2)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("equal to the bit") == 1


OTHERS = [name for name, way in WAYS.items() if name != way["equals"]]


@pytest.mark.parametrize("name", OTHERS)
def test_counts_hashes_and_learning_rates_are_those_of_one_process(name, runs):
    run, one = runs[0], runs[0](WAYS[name]["equals"])
    exact = (
        "step",
        "examples",
        "examples_hash",
        "target_tokens",
        "examples_seen",
        "tokens_seen",
        "learning_rate",
        "global_batch_to_train",
        "epoch",
    )
    assert run(name).sequence(*exact) == one.sequence(*exact)
    assert one.sequence("global_batch_to_train") == [(8,), (8,), (16,), (16,), (16,)]
    assert len(set(one.sequence("target_tokens"))) > 2  # ragged
    assert run(name).checkpoints == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", OTHERS)
def test_losses_agree_and_up_to_the_kill_they_are_the_same_lines(name, runs):
    run, one, start = runs[0], WAYS[name]["equals"], WAYS[name].get("after")
    for key in ("loss", "mtp_loss", "grad_norm"):
        np.testing.assert_allclose(
            run(name).sequence(key), run(one).sequence(key), rtol=1e-5
        )
    if start:
        before, step = start
        about = ("gradient_accumulation_steps", "loss", "step_seconds")
        assert run(name).sequence(*about)[:step] == run(before).sequence(*about)[:step]
        later = run(name).sequence("step_seconds")[step:]
        assert not set(later) & set(run(before).sequence("step_seconds"))


@pytest.mark.parametrize("name", OTHERS)
def test_evaluations_agree_whatever_their_batch(name, runs):
    (got,), (want,) = (
        runs[0](name).evaluations,
        runs[0](WAYS[name]["equals"]).evaluations,
    )
    assert got["eval_target_tokens"] == want["eval_target_tokens"]
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in OTHERS if WAYS[name]["equals"] == "rows"]
)
def test_parameters_after_5_steps_of_sgd_agree(name, runs):
    got, want = (runs[0](each).parameters(STEPS) for each in (name, "rows"))
    norms = {
        path: np.linalg.norm(b.astype(float))
        for path, b in jax.tree.leaves_with_path(want)
    }
    whole = np.linalg.norm(list(norms.values()))
    difference = jax.tree.map(
        lambda a, b: a.astype(float).reshape(b.shape) - b, got, want
    )
    for path, each in jax.tree.leaves_with_path(difference):
        assert np.linalg.norm(each) <= 1e-5 * norms[path] + 1e-7 * whole, path


def test_shards_of_balanced_rows_wait_less_for_each_other(runs):
    """Both have 2 shards of rows; what it would be otherwise is in the other run's metrics."""
    after, before = (
        np.mean([step["attention_imbalance"] for step in runs[0](name).steps])
        for name in ("packed-2", "packed")
    )
    assert after < 0.7 * before


@pytest.mark.parametrize(
    ("name", "processes", "savers"), [("rows-2", 2, {0, 1}), ("rows-4", 4, {0, 2})]
)
def test_each_process_writes_the_checksums_of_what_it_saved(
    name, processes, savers, runs
):
    """Of small arrays the first replica saves all, the other replica's processes nothing."""
    checkpoint = runs[0](name).directory / "checkpoints" / str(STEPS)
    parts = [
        checkpoint / f"sha256.{process}-of-{processes}" for process in range(processes)
    ]
    assert sorted(checkpoint.glob("sha256.*")) == parts
    for process, part in enumerate(parts):
        named = [line.split("  ")[1] for line in part.read_text().splitlines()[:-1]]
        assert any(f"process_{process}/" in name for name in named) == (
            process in savers
        )
        assert not any(
            f"process_{other}/" in name
            for name in named
            for other in range(processes)
            if other != process
        )


def test_only_hosts_that_load_open_the_data(runs, documents):
    """Of four processes with a factor of 2, two; of two with a factor of 0.5, and then 2, both and then one."""
    _, opened, _ = runs
    files = [[str(documents / host / "documents.jsonl")] for host in ("0", "1")]
    assert opened == {2: files, 4: [*files, [], []]}


def test_data_that_a_loading_host_misses_ends_all_processes_with_2_and_one_message(
    documents, runs
):
    """Hosts 0 and 1 find nothing; hosts 2 and 3 would not have looked."""
    run, _, refused = runs
    assert refused.returncode == 2
    said = [line for line in refused.stderr.splitlines() if "] error: " in line]
    assert sorted(line[:3] for line in said) == ["[0]", "[1]", "[2]", "[3]"]
    assert all(f"dataset_path='{documents}/nowhere.jsonl'" in line for line in said)
    before, saved, after = refused.stdout.partition("saved step 5")
    assert (saved, "compiled" in before, "compiled" in after) == (
        "saved step 5",
        True,
        False,
    )
    assert not run("nothing").directory.exists()
