"""A branch continues a run's checkpoint on the examples that the run would see next, and does not change the run."""

from fractions import Fraction

import pytest

from maxtext_lite.analysis.branches import Branches
from maxtext_lite.config import UserError
from tests.run_directories import eval_line, step_line, write_lines, write_run

ADAM = [
    "per_device_batch_size=4",
    "gradient_accumulation_steps=2",
    "steps=6",
    "adam_b2=0.9",
]
LINES = [
    step_line(step, gradient_accumulation_steps=2, per_device_batch_size=4.0)
    for step in (1, 2, 3)
]


@pytest.fixture
def run(tmp_path):
    """A function of more keys: a run of batches of 8 with a checkpoint of step 2."""

    def made(*words):
        directory = write_run(
            tmp_path / "run", [*LINES[:2], eval_line(2, 3.9), LINES[2]], [*ADAM, *words]
        )
        (directory / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
        (directory / "checkpoints" / "2" / "array").write_text("of step 2")
        return directory

    return made


def branches(run, *, step=2, factors=(1, 2), rule=None):
    return Branches(
        run, step, [Fraction(factor) for factor in factors], 8, rule, run.parent / "out"
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "rule", "wanted"),
    [
        ((), None, "sqrt"),
        (("optimizer=sgd",), None, "linear"),
        (("optimizer=sgd",), "none", "none"),
    ],
)
def test_the_learning_rate_follows_the_batch_by_the_rule_from_that_of_the_step(
    words, rule, wanted, run
):
    found = branches(run(*words), rule=rule)
    assert (found.rule, found.batch) == (wanted, 8)
    for branch, batch, steps in zip(found.all, (8, 16), (8, 4), strict=True):
        config = branch.config
        assert (config.global_batch_size, config.base_global_batch_size) == (batch, 8)
        assert (config.steps, config.warmup_steps) == (2 + steps, 0)
        rate = config.learning_rate, config.learning_rate_schedule
        assert rate == (0.002, "constant")
        assert config.learning_rate_scaling == wanted
        assert config.eval_per_device_batch_size == 4  # the same held-out rows in each


def result(found, branch, losses, evaluation=()):
    """What is found of a branch whose steps, after step 2 of 16 examples, had these losses."""
    batch = branch.sizes.batch
    lines = []
    for number, loss in enumerate(losses, start=1):
        seen = {
            "examples": batch,
            "examples_seen": 16 + batch * number,
            "target_tokens": batch * number,
        }
        lines.append(step_line(2 + number, loss=loss, **seen))
    branch.directory.mkdir(parents=True, exist_ok=True)
    path = branch.directory / "metrics.jsonl"
    write_lines(path, [*LINES[:2], *lines, *evaluation])
    return found.result(branch)


def test_losses_are_means_over_the_same_last_examples_without_those_that_are_not_finite(
    run,
):
    """The last 16 of 64 examples: two steps of 8, of 56 and 64 target tokens, and one of 16."""
    found = branches(run())
    small, large = found.all
    first = result(
        found, small, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [eval_line(10, 3.5)]
    )
    assert first.loss == pytest.approx((7 * 56 + 8 * 64) / 120)
    assert (first.tokens, first.steps, first.eval_loss) == (8 * 36, 8, 3.5)
    second = result(found, large, [1.0, 2.0, 3.0, 4.0])
    assert (second.loss, second.tokens, second.steps) == (4, 16 * 10, 4)
    within = result(found, small, [9.0] * 6 + [1.0, None])
    assert (within.loss, within.left_out) == (1, 1)
    with pytest.raises(UserError, match="batch-8"):
        result(found, small, [None] * 8)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"step": 3}, r"--step=3.* Nearest that works: 2\."),
        ({"factors": (1, 3)}, r"--factors=3: .*: 2 \(16\) or 4 \(32\)\."),
    ],
)
def test_what_cannot_be_branched_is_refused(asked, error, run):
    with pytest.raises(UserError, match=error):
        branches(run(), **asked)
