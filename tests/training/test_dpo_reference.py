"""DPO runs: the reference comes from the first parameters, is computed once, stored, and the same after a restart."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training import dpo_reference, train
from maxtext_lite.training.dpo_reference import FILE, add_reference
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def lines():
    rng = np.random.default_rng(0)
    texts = [["".join(rng.choice(list("abc "), rng.integers(1, 12))) for _ in range(3)] for _ in range(60)]
    return [{"prompt": prompt, "chosen": chosen, "rejected": f"{rejected}!"} for prompt, chosen, rejected in texts]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory, lines):
    """A function that returns the config of a run, all in one directory."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = [
        *TINY, "dataset_type=dpo", f"dataset_path={directory / 'pairs.jsonl'}", f"base_output_directory={directory}",
        "steps=4", "learning_rate_schedule=constant", "eval_interval=4", "eval_fraction=0.2", "packing=false",
        "global_batch_size=8", "gradient_accumulation_steps=-1", "dpo_beta=0.5",
    ]  # fmt: skip

    return lambda name, *overrides: load_config(None, [*keys, f"run_name={name}", *overrides])


@pytest.fixture(scope="module")
def runs(config_of):
    """A function that trains and returns the run and its lines of metrics.jsonl."""

    def run(name, *overrides):
        result = train(config_of(name, *overrides))
        return result, [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]

    return run


def tables_of(result):
    """The reference's log-probabilities of a run, the smaller table first."""
    with np.load(result.run_directory / FILE) as tables:
        return sorted(tables.values(), key=len)


ONE = "per_device_batch_size=1"  # 8 pairs on 8 devices


@pytest.fixture(scope="module")
def whole(runs):
    return runs("whole", ONE)


def test_the_first_step_prefers_nothing_and_later_ones_the_chosen(whole):
    _, (*steps, evaluation) = whole
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert abs(steps[0]["reward_margin"]) < 1e-5
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["pairs"] for line in steps] == [line["examples"] for line in steps] == [8] * 4
    for line in steps:
        assert line["reward_margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"], abs=1e-6)
    assert evaluation["eval_pairs"] == 12
    assert evaluation["eval_reward_accuracy"] * 12 == pytest.approx(round(evaluation["eval_reward_accuracy"] * 12))
    assert evaluation["eval_loss"] < np.log(2)


def test_stopped_and_resumed_equals_whole_to_the_bit(runs, whole, capsys):
    first, _ = runs("again", ONE, "steps=2")
    reference = (first.run_directory / FILE).read_bytes()
    capsys.readouterr()
    resumed, lines = runs("again", ONE)
    assert "after step 2" in capsys.readouterr().out
    assert (first.run_directory / FILE).read_bytes() == reference
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(whole[0].state))
    for name in ("loss", "reward_margin", "examples_hash", "eval_loss", "eval_reward_margin"):
        found, want = ({line["step"]: line[name] for line in each if name in line} for each in (lines, whole[1]))
        assert {step: found[step] for step in want} == want


def test_a_run_that_goes_back_before_its_first_checkpoint_keeps_the_reference(config_of, whole):
    """The search for guilty rows and the steps after it both begin at step 0, with one source."""
    run = open_run(config_of("back", ONE, "enable_checkpointing=false"))
    with jax.set_mesh(run.mesh), run.opened(print):
        for _ in range(2):
            add_reference(run, *run.restore_or_init(), Terminal(log_period=1, quiet=True))
            for found, want in zip((run.eval_source.reference, run.source.reference), tables_of(whole[0]), strict=True):
                np.testing.assert_array_equal(found, want)
        assert (run.directory / FILE).read_bytes() == (whole[0].run_directory / FILE).read_bytes()


@pytest.mark.parametrize("split", [
    ["per_device_batch_size=0.5", "ici_fsdp_parallelism=2", "ici_data_parallelism=2", "ici_tensor_parallelism=2"],
    ["per_device_batch_size=0.25", "ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_pipeline_parallelism=2",
     "pipeline_schedule=1f1b"],
], ids=["A=2 on data 2 fsdp 2 tensor 2", "A=4 on data 2 fsdp 2 stages 2"])  # fmt: skip
def test_the_split_of_a_batch_changes_nothing(split, runs, whole):
    _, lines = runs(f"split{len(split)}", *split)
    for line, want in zip(lines, whole[1], strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & set(want):
            assert line[name] == pytest.approx(want[name], rel=2e-5), name
        for name in {"pairs", "target_tokens", "examples_hash", "eval_pairs"} & set(want):
            assert line[name] == want[name]


def test_with_adapters_the_reference_is_the_model_without_them(runs, whole):
    result, lines = runs("adapters", ONE, "lora_rank=2", "steps=6")
    for adapted, plain in zip(*(tables_of(each) for each in (result, whole[0])), strict=True):
        np.testing.assert_allclose(adapted, plain, rtol=1e-5)  # the same seed
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert lines[-1]["eval_loss"] < np.log(2)
    resumed, lines = runs("adapters", ONE, "lora_rank=2", "steps=7")
    assert (resumed.step, [line["step"] for line in lines if "loss" in line]) == (7, [*range(1, 8)])


def test_packed_pairs_are_all_there(runs, whole):
    result, lines = runs("packed", "packing=true", "per_device_batch_size=0.25", "steps=1", "warmup_steps=0")
    plan = json.loads((result.run_directory / "plan.json").read_text())
    assert (plan["global_batch_to_train"], plan["rows_per_example"], plan["tokens_per_step"]) == (8, 2, 8 * 2 * 32)
    assert lines[0]["pairs"] > 8 == lines[0]["examples"]
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert lines[-1]["eval_pairs"] == 12
    # The same pairs have the same reference, whatever row they are in.
    for packed, apart in zip(*(tables_of(each) for each in (result, whole[0])), strict=True):
        np.testing.assert_allclose(packed, apart, rtol=1e-5)


def test_a_run_goes_on_with_the_pairs_and_the_reference_that_it_began_with(runs, whole, lines, tmp_path):
    kept = whole[0].run_directory
    moved = tmp_path / "reference"
    shutil.move(kept / FILE, moved)
    try:
        with pytest.raises(
            UserError, match=r"reference.npz is gone, which holds the reference of the run\. Use another"
        ):
            runs("whole", ONE, "steps=6")
        whole_file = moved.read_bytes()
        for damaged in (whole_file[:-30], whole_file[:200] + b"?" + whole_file[201:], b"PK"):
            (kept / FILE).write_bytes(damaged)
            with pytest.raises(UserError, match=r"reference.npz is damaged \(.*\. Use another"):
                runs("whole", ONE, "steps=6")
    finally:
        shutil.move(moved, kept / FILE)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines[:20]))
    with pytest.raises(UserError, match="dataset_path"):
        runs("whole", ONE, "steps=6", f"dataset_path={other}")
    # Other held-out pairs, which a checkpoint does not mind: their reference is gone with the first parameters.
    runs("apart", ONE, "steps=2", f"eval_dataset_path={other}", "eval_interval=-1")
    other.write_text(json.dumps(lines[1]))
    with pytest.raises(UserError, match="holds the reference of other pairs"):
        runs("apart", ONE, "steps=3", f"eval_dataset_path={other}", "eval_interval=-1")


def test_whatever_bit_flips_in_its_file_the_reference_is_as_it_was_or_refused(tmp_path):
    source = SimpleNamespace(fingerprint="pairs")
    run = SimpleNamespace(directory=tmp_path, files=SimpleNamespace(directory=tmp_path), is_first=True)
    table = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    dpo_reference._write(tmp_path / FILE, {"pairs": table})
    whole, refused = (tmp_path / FILE).read_bytes(), 0
    changed = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    for text in [*changed, whole[:50], whole[:-1], b"", b"PK", bytes(len(whole))]:
        (tmp_path / FILE).write_bytes(text)
        try:
            np.testing.assert_array_equal(dpo_reference._read(run, [source])["pairs"], table)
        except UserError as error:
            assert re.search("is damaged|of other pairs", str(error))  # noqa: PT017
            refused += 1
    assert refused > len(whole) / 2
