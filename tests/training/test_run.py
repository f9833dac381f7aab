"""A run before its first step: early refusals, the schedule's units, and where it starts."""

import json

import jax
import numpy as np
import optax
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.models import Decoder
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.state import OwnParts

TINY = [
    "vocab_size=300", "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8",
    "base_mlp_dim=24", "base_num_decoder_layers=1", "max_target_length=32", "dataset_type=synthetic", "steps=6",
    "eval_interval=-1", "learning_rate=0.01", "learning_rate_schedule=linear", "warmup_steps=2",
    "learning_rate_final_fraction=0",
]  # fmt: skip


def run_of(tmp_path, *overrides):
    return open_run(load_config(None, [*TINY, f"base_output_directory={tmp_path}", "run_name=here", *overrides]))


def test_a_run_that_cannot_be_leaves_no_directory(tmp_path):
    with pytest.raises(UserError, match="load_parameters_path"):
        run_of(tmp_path, f"load_parameters_path={tmp_path}/nowhere")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "here").write_text("a file")
    run = run_of(tmp_path)
    with pytest.raises(UserError, match="run_name=here cannot be made a directory"), run.opened(print):
        pytest.fail("it was opened")


def test_a_run_holds_its_directory_with_and_without_checkpoints(tmp_path):
    run, other = run_of(tmp_path), run_of(tmp_path, "enable_checkpointing=false")
    for one, two in ((run, other), (other, run)):
        with one.opened(print):
            with pytest.raises(UserError, match=r"here is in use: process \d+ on host"), two.opened(print):
                pytest.fail("both were opened")
            assert (tmp_path / "here" / "lease").is_dir()
        assert not (tmp_path / "here" / "lease").exists()
        two.failures = one.failures = Failures()  # else they would end on the refusal


def test_a_run_that_its_data_end_says_how_high_the_rate_still_is(tmp_path, capsys):
    """40 rows of a, half of all, last until example 80: 2 of 6 steps of 32; of an own optimizer no rate is known."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "one row of {name}"}}\n' * 40)
    sources = f"{{path: {tmp_path}/a.jsonl, weight: 1, max_epochs: 1}}, {{path: {tmp_path}/b.jsonl, weight: 1}}"
    keys = [*TINY, f"base_output_directory={tmp_path}", f"dataset_path=[{sources}]", "dataset_type=text",
            "packing=none", "eval_fraction=0", "mixture_exhausted=stop", "per_device_batch_size=4",
            "warmup_steps=0"]  # fmt: skip
    for own, said in ((OwnParts(), 1), (OwnParts(optimizer=optax.sgd(0.1)), 0)):
        run = open_run(load_config(None, [*keys, f"run_name=said_{said}"]), own=own)
        with run.opened(print):
            run._mix(Counts())
            run.introduce(Terminal(log_period=1, quiet=False), Counts())
        assert capsys.readouterr().out.count("the rate is then still about 66.7% of its peak, not 0.0%") == said


@pytest.mark.parametrize("name", ["config.yml", "plan.json", "environment.json", "memory.json"])
def test_what_cannot_be_written_at_the_start_is_one_sentence(name, tmp_path):
    (tmp_path / "here" / name).mkdir(parents=True)
    run = run_of(tmp_path, "enable_checkpointing=false")
    with run.opened(print), pytest.raises(UserError, match=rf"{name} cannot be written: Is a directory") as refusal:
        run.introduce(Terminal(log_period=1, quiet=False), Counts())
    assert len(refusal.value.problems) == 1


def test_without_checkpointing_a_run_with_checkpoints_is_not_started_over(tmp_path):
    (tmp_path / "here" / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"would start .* over"):
        run_of(tmp_path, "enable_checkpointing=false")


@pytest.mark.parametrize("unit", ["steps", "examples", "tokens"])
def test_the_schedule_ends_at_its_end_in_every_unit(unit, tmp_path):
    """Peak after two of six steps of the target batch, 0 after the last; synthetic examples are full of targets."""
    run = run_of(tmp_path, f"schedule_unit={unit}", "enable_checkpointing=false")
    state, counts = run.restore_or_init()
    batch, length = run.plan.global_batch_to_train, run.config.max_target_length
    progress, rates = state.progress, []
    for update in range(1, 7):
        progress = progress.plus(np.int32(batch), np.int32(batch * length))
        rates.append(float(run.schedule(counts)(np.int32(update), progress)))
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.0075, 0.005, 0.0025, 0], atol=1e-7)


def test_a_new_run_starts_from_its_seed_and_says_what_it_is(tmp_path, capsys):
    run = run_of(tmp_path, "enable_checkpointing=false", "seed=5")
    state, counts = run.restore_or_init()
    assert counts == Counts()
    again, _ = run_of(tmp_path, "enable_checkpointing=false", "seed=5").restore_or_init()
    other, _ = run_of(tmp_path, "enable_checkpointing=false", "seed=6").restore_or_init()
    table, same, different = (np.asarray(s.params["embedding"]["table"]) for s in (state, again, other))
    np.testing.assert_array_equal(table, same)
    assert np.abs(table - different).max() > 0
    with run.opened(print):
        run.introduce(Terminal(log_period=1, quiet=False), counts)
    said = capsys.readouterr().out
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert f"{parameters:,} parameters on {jax.device_count()} x cpu" in said
    assert json.loads((run.directory / "plan.json").read_text()) == json.loads(json.dumps(run.plan.to_json()))
    assert {"config.yml", "environment.json"} <= {path.name for path in run.directory.iterdir()}


@pytest.mark.parametrize("own", [False, True])
def test_a_resume_with_another_batch_moves_the_end_of_the_schedule_to_that_of_the_run(own, tmp_path, capsys):
    """64 rows: after 4 steps of 8, two of 16 are left. An optimizer made with the schedule has the same one."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n' * 64)
    keys = [*TINY, f"base_output_directory={tmp_path}", "run_name=here", f"dataset_path={tmp_path}/rows.jsonl",
            "dataset_type=text", "packing=none", "eval_fraction=0", "warmup_steps=0", "num_epochs=1", "steps=-1",
            "per_device_batch_size=-1"]  # fmt: skip
    given = []

    def factory(rate, axes):
        given.append(rate)
        return optax.sgd(rate)

    parts, rates, ends = OwnParts(optimizer=factory if own else None), [], []
    done = ((Counts(), 8), (Counts(step=4, examples_seen=32), 16), (Counts(step=5, examples_seen=48), 16))
    for (counts, batch), (following, _) in zip(done, [*done[1:], done[0]], strict=True):
        run = open_run(load_config(None, [*keys, f"global_batch_size={batch}"]), own=parts)
        with run.opened(print):
            state, found = run.restore_or_init()
            assert (found.step, found.examples_seen) == (counts.step, counts.examples_seen)
            run.introduce(Terminal(log_period=1, quiet=False), found)
            ends.append(json.loads((tmp_path / "here" / "plan.json").read_text())["steps"])
            schedule = run.schedule(counts)
            rates.append([float(given[-1](step) if own else schedule.rate(step + 1)) / 0.01 for step in (3, 4, 5)])
            run.save(state, following)
    out = capsys.readouterr().out
    assert ends == [8, 6, 6]
    assert "\nsteps                        6: 64 examples" in out
    assert "\nalready done                 4: 32 examples, 1024 tokens; 2 steps and 32 examples are left\n" in out
    np.testing.assert_allclose(rates, [[4 / 8, 3 / 8, 2 / 8], [2 / 6, 1 / 6, 0], [2 / 6, 1 / 6, 0]], atol=1e-6)
    said = "schedule ends with this run, at step 6 instead of 8: after step 4 the rate is about 33.3% of its peak"
    assert out.count(said) == 1


def test_parts_of_ones_own_are_what_a_run_goes_on_with(tmp_path):
    """By name alone: what a function or a class does cannot be compared."""
    config = load_config(None, [*TINY, f"base_output_directory={tmp_path}", "run_name=here"])
    own = OwnParts(lambda shape, pipeline: Decoder(shape, pipeline), None, optax.sgd(0.1))
    runs = open_run(config), open_run(config, own=own)
    with runs[1].opened(print):
        runs[1].save(runs[1].restore_or_init()[0], Counts(step=1))
    with runs[0].opened(print), pytest.raises(UserError) as refused:
        runs[0].restore_or_init()
    for problem, name in zip(refused.value.problems, ("model", "optimizer"), strict=True):
        assert problem.endswith(f"began with {name}=... passed from Python. Pass it again, or use another run_name.")
    with runs[1].opened(print):
        assert runs[1].restore_or_init()[1].step == 1
