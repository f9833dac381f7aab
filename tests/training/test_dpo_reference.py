"""DPO runs: the reference comes from the first parameters, is computed once, stored, and the same after a restart."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.evaluate import main as evaluate
from maxtext_lite.post_training import dpo
from maxtext_lite.post_training.dpo import FILE
from maxtext_lite.training import train
from tests.prepared import flipped
from tests.run_directories import lines_of, write_lines
from tests.training.conftest import TINY

pytestmark = pytest.mark.usefixtures("one_device_for_all")


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """A function that returns the config of a run of 8 pairs a step, all in one directory."""
    directory = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(60):
        prompt, chosen, rejected = (
            "".join(rng.choice(list("abc "), rng.integers(1, 12))) for _ in range(3)
        )
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": f"{rejected}!"})
    write_lines(directory / "pairs.jsonl", pairs)
    keys = """
    dataset_type=dpo steps=4 optimizer=sgd learning_rate=1 learning_rate_schedule=constant eval_interval=4
    eval_fraction=0.2 packing=false global_batch_size=8 gradient_accumulation_steps=-1 dpo_beta=0.5
    per_device_batch_size=8
    """
    words = [*TINY, *keys.split(), f"dataset_path={directory / 'pairs.jsonl'}"]
    words.append(f"base_output_directory={directory}")
    return lambda name, *overrides: load_config(
        None, [*words, f"run_name={name}", *overrides]
    )


@pytest.fixture(scope="module")
def trained(config_of):
    """A function that trains and returns the run and its lines of metrics.jsonl."""

    def run(name, *overrides):
        result = train(config_of(name, *overrides))
        return result, lines_of(result.run_directory)

    return run


def tables_of(result):
    """The reference's log-probabilities of a run, the smaller table first."""
    with np.load(result.run_directory / FILE) as tables:
        return sorted(tables.values(), key=len)


@pytest.fixture(scope="module")
def whole(trained):
    return trained("whole")


def test_the_first_step_prefers_nothing_and_later_ones_the_chosen(whole):
    _, (*steps, evaluation) = whole
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert abs(steps[0]["reward_margin"]) < 1e-5
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (
        [line["pairs"] for line in steps]
        == [line["examples"] for line in steps]
        == [8] * 4
    )
    assert evaluation["eval_pairs"] == 12
    assert evaluation["eval_loss"] < np.log(2)


def test_a_resume_keeps_the_reference_of_the_first_parameters(trained, whole):
    first = whole[0].run_directory
    shutil.copytree(first, first.with_name("again"))
    resumed, lines = trained("again", "steps=5", "eval_interval=5")
    assert (resumed.run_directory / FILE).read_bytes() == (first / FILE).read_bytes()
    assert lines[:5] == whole[1]
    assert (
        lines[5]["reward_margin"] > 1e-3
    )  # of new parameters as their own reference it would be 0
    assert lines[6]["eval_loss"] < whole[1][4]["eval_loss"]


def test_with_adapters_the_reference_is_the_model_without_them_and_packed_pairs_have_the_same(
    trained, whole
):
    words = "lora_rank=2 packing=true per_device_batch_size=2 steps=2 warmup_steps=0"
    result, lines = trained("adapters", *words.split())
    assert lines[0]["pairs"] > 8 == lines[0]["examples"]
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert lines[-1]["eval_pairs"] == 12
    for packed, apart in zip(
        *(tables_of(each) for each in (result, whole[0])), strict=True
    ):
        np.testing.assert_allclose(
            packed, apart, rtol=1e-5
        )  # of the same pairs by the same seed


def test_each_of_several_held_out_sets_has_its_reference_and_its_loss(
    trained, whole, capsys
):
    """Of the pairs that the other run holds out, once more under two names; and of their file by the command."""
    first = whole[0].run_directory
    path = first.parent / "last.jsonl"
    lines = (first.parent / "pairs.jsonl").read_text().splitlines()
    path.write_text("\n".join(lines[-12:]))
    sets = f"[{{path: {path}, name: one}}, {{path: {path}, name: two}}]"
    words = ["steps=1", "eval_interval=1", "warmup_steps=0"]
    words += [f"eval_dataset_path={sets}", f"load_parameters_path={first}"]
    result, (*_, evaluation) = trained("sets", *words)
    loss = pytest.approx(evaluation["eval_loss"], rel=1e-12)
    assert evaluation["eval_losses"] == {"one": loss, "two": loss}
    assert evaluation["eval_pairs"] == 24
    assert evaluate([str(result.run_directory), f"data={path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["loss"] == pytest.approx(evaluation["eval_loss"], rel=1e-6)
    assert found["loss"] != pytest.approx(np.log(2), rel=1e-3)
    assert found["examples"] == 12
    assert 2 * found["target_tokens"] == evaluation["eval_target_tokens"]
    with pytest.raises(UserError, match="load_parameters_path"):
        evaluate([str(first), f"data={path}"])


@pytest.mark.fast
def test_a_reference_that_is_missing_damaged_or_of_other_data_is_refused(tmp_path):
    source = SimpleNamespace(fingerprint="pairs")
    run = SimpleNamespace(
        directory=tmp_path, files=SimpleNamespace(directory=tmp_path), is_first=True
    )
    with pytest.raises(UserError, match=FILE):
        dpo._read(run, [source])
    table = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    np.savez(tmp_path / FILE, allow_pickle=False, pairs=table)
    with pytest.raises(UserError, match="dataset_path"):
        dpo._read(run, [source, SimpleNamespace(fingerprint="others")])
    whole = (tmp_path / FILE).read_bytes()
    (found,) = dpo._read(run, [source]).values()
    np.testing.assert_array_equal(found, table)
    for text in (flipped(whole), whole[:-1], b"", bytes(len(whole))):
        (tmp_path / FILE).write_bytes(text)
        with pytest.raises(UserError):
            dpo._read(run, [source])
