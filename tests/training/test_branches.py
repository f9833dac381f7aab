"""A branch continues a run's checkpoint on the examples that the run would see next, and does not change the run."""

import json
from fractions import Fraction

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError
from maxtext_lite.training.branches import Branches
from tests.run_directories import eval_line, step_line, write_run

ADAM = ["per_device_batch_size=4", "gradient_accumulation_steps=2", "steps=6", "adam_b2=0.9"]
LINES = [step_line(step, gradient_accumulation_steps=2, per_device_batch_size=4.0) for step in (1, 2, 3)]


@pytest.fixture
def run(tmp_path):
    """A function of more keys: a run of batches of 8 with a checkpoint of step 2."""

    def made(*words):
        directory = write_run(tmp_path / "run", [*LINES[:2], eval_line(2, 3.9), LINES[2]], [*ADAM, *words])
        (directory / "checkpoints" / "2").mkdir(parents=True)
        (directory / "checkpoints" / "2" / "array").write_text("of step 2")
        return directory

    return made


def branches(run, *, step=2, steps=8, factors=(1, 2), rule=None):
    return Branches(run, step, [Fraction(factor) for factor in factors], steps, rule, run.parent / "out")


@pytest.mark.parametrize(("words", "rule", "wanted"), [
    ((), None, "sqrt"),
    (("optimizer=sgd",), None, "linear"),
    (("learning_rate_scaling=linear", "base_global_batch_size=4"), None, "linear"),
    (("optimizer=sgd",), "none", "none"),
])  # fmt: skip
def test_the_learning_rate_follows_the_batch_by_the_rule_from_that_of_the_step(words, rule, wanted, run):
    found = branches(run(*words), rule=rule)
    assert (found.rule, found.batch) == (wanted, 8)
    for branch, batch, steps in zip(found.all, (8, 16), (8, 4), strict=True):
        config = branch.config
        assert (config.global_batch_size, config.steps, config.base_global_batch_size) == (batch, 2 + steps, 8)
        assert (config.learning_rate, config.learning_rate_schedule, config.warmup_steps) == (0.002, "constant", 0)
        assert config.learning_rate_scaling == wanted
        assert config.eval_per_device_batch_size == 4  # the same held-out rows in each


def test_what_the_run_scaled_stays_scaled(run):
    scaled = ("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true")
    config = branches(run(*scaled)).all[0].config
    assert config.adam_b2 == pytest.approx(1 - 2 * 0.1)


def test_in_a_ramp_adam_keeps_the_decays_of_the_run_which_are_those_of_its_full_batch(run):
    scaled = ("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true")
    ramp = ("per_device_batch_size=8", "enable_rampup_batch_size=true", "per_device_batch_size_start=4",
            "per_device_batch_size_increment=4", "global_rampup_samples=64")  # fmt: skip
    first, second = (branch.config for branch in branches(run(*scaled, *ramp)).all)
    assert first.adam_b2 == second.adam_b2 == pytest.approx(1 - 4 * 0.1)
    assert make_plan(second, num_devices=1).adam_b2 == pytest.approx(1 - 2 * 4 * 0.1)


@pytest.mark.parametrize(("words", "rule"), [
    (("num_epochs=1", "steps=-1", "last_batch=train"), None),
    (("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true"), "linear"),
    (("learning_rate_scaling=sqrt", "base_global_batch_size=4", "scale_adam_with_batch=true"), "none"),
])  # fmt: skip
def test_what_only_the_run_can_have_is_left_to_it(words, rule, run):
    for branch in branches(run(*words), rule=rule).all:
        assert make_plan(branch.config, num_devices=1).global_batch_to_train == branch.sizes.batch


def test_a_batch_that_no_float_holds_is_evaluated_as_it_is(run, tmp_path):
    lines = [step_line(step, examples=2, examples_seen=2 * step, global_batch_to_train=2, gradient_accumulation_steps=1,
                       per_device_batch_size=2 / 3) for step in (1, 2)]  # fmt: skip
    directory = write_run(
        tmp_path / "thirds",
        lines,
        ["per_device_batch_size=2/3", "steps=2", "ici_fsdp_parallelism=1", "ici_data_parallelism=-1"],
        num_devices=3,
    )
    (directory / "checkpoints" / "2").mkdir(parents=True)
    config = branches(directory).all[0].config
    assert config.eval_per_device_batch_size == Fraction(2, 3)
    assert make_plan(config, num_devices=3).global_batch_to_train == 2


def test_a_run_is_copied_up_to_the_step_once_and_stays_as_it_is(run):
    source = run()
    beside = {"reference.npz": b"of DPO", "excluded_rows.jsonl": b"", "hf/config.json": b"of its model"}
    (source / "hf").mkdir()
    for name, content in beside.items():
        (source / name).write_bytes(content)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    found = branches(source)
    (source.parent / "out" / ".batch-8" / "checkpoints").mkdir(parents=True)  # of a copy that was killed
    machine = {"num_devices": 1, "num_hosts": 1, "platform": "cpu"}
    found.prepare(machine)
    copied = found.all[0].directory
    assert (copied / "checkpoints" / "2" / "array").read_text() == "of step 2"
    assert {name: (copied / name).read_bytes() for name in beside} == beside
    steps = [json.loads(line)["step"] for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2]
    (copied / "mark").write_text("trained")
    branches(source).prepare(machine)
    assert (copied / "mark").exists()
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    with pytest.raises(UserError, match=r"--output=.*out holds branches of .*'rule': 'sqrt'"):
        branches(source, rule="none").prepare(machine)


def test_losses_are_means_over_the_same_last_examples(run):
    found = branches(run())
    small, large = found.all
    for branch, batch in ((small, 8), (large, 16)):
        branch.directory.mkdir(parents=True)
        lines = [step_line(2 + i, loss=float(i), examples=batch, examples_seen=16 + batch * i, target_tokens=batch * i)
                 for i in range(1, 64 // batch + 1)]  # fmt: skip
        lines = [*LINES[:2], *lines, eval_line(2 + 64 // batch, 3.5)]
        (branch.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = found.result(small), found.result(large)
    # The last 16 of 64 examples: two steps of 8, of 56 and 64 target tokens, and one of 16.
    assert first.loss == pytest.approx((7 * 56 + 8 * 64) / 120)
    assert second.loss == 4
    assert (first.tokens, second.tokens) == (8 * 36, 16 * 10)
    assert (first.steps, second.steps, first.eval_loss) == (8, 4, 3.5)


def test_a_step_without_a_finite_loss_is_left_out_and_counted(run):
    found = branches(run(), factors=(1,))
    (branch,) = found.all
    branch.directory.mkdir(parents=True)

    def result(*losses):
        lines = [step_line(3 + i, loss=loss, examples=8, examples_seen=24 + 8 * i, target_tokens=8)
                 for i, loss in enumerate([9.0] * (8 - len(losses)) + list(losses))]  # fmt: skip
        (branch.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return found.result(branch)

    before, within = result(None, 2.0, 4.0), result(1.0, None)  # the last 16 of 64 examples: two steps
    assert (before.loss, before.left_out, within.loss, within.left_out) == (3, 0, 1, 1)
    with pytest.raises(UserError, match=r"batch-8 has no finite loss in the last 16 examples\."):
        result(*[None] * 8)


def test_a_damaged_branch_json_is_refused(run):
    source = run()
    found = branches(source)
    (source.parent / "out").mkdir()
    (source.parent / "out" / "branch.json").write_text('{"run"')
    with pytest.raises(UserError, match=r"branch\.json is not JSON"):
        found.prepare({"num_devices": 1, "num_hosts": 1, "platform": "cpu"})


@pytest.mark.parametrize(("words", "asked", "error"), [
    ((), {"step": 3}, r"--step=3 is no checkpoint of RUN_DIR=.*run\. Nearest that works: 2\."),
    ((), {"factors": (1, 3)}, r"--factors=3: .* Nearest that work: 2 \(16\) or 4 \(32\)\."),
    (("enable_diloco=true", "ici_data_parallelism=-1", "ici_fsdp_parallelism=1"), {}, "covers neither"),
])  # fmt: skip
def test_what_cannot_be_branched_is_refused(words, asked, error, run):
    with pytest.raises(UserError, match=error):
        branches(run(*words), **asked)


@pytest.mark.parametrize(("rates", "said"), [
    ((0.2, 0.1, 0.0), r"is 0, at which no branch would train\. Nearest that works: 2\."),
    ((0.0, 0.1, 0.0), r"is 0, at which no branch would train\. Nearest that works: 2\."),
    ((0.0, 0.0, 0.0), r"is 0, at which no branch would train\. No checkpoint has another\."),
    ((None, None, None), r"is its own optimizer's, which is not known\. No checkpoint has another\."),
])  # fmt: skip
def test_nothing_branches_off_a_step_without_a_learning_rate(rates, said, tmp_path):
    """The newest checkpoint of a run whose schedule ends at 0 is one."""
    lines = [step_line(step, learning_rate=rate) for step, rate in enumerate(rates, start=1)]
    directory = write_run(tmp_path / "run", lines, ADAM)
    for step in (1, 2, 3):
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"--step=3: the learning rate of RUN_DIR=\S+ {said}"):
        branches(directory, step=3)
