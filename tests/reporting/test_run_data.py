import json

import pytest

from maxtext_lite.analysis.run_data import read_runs
from tests.run_directories import eval_line, step_line, write_metrics


def read(directory):
    (run,) = read_runs([directory])
    return run


@pytest.mark.fast
def test_every_column_is_that_of_the_file(tmp_path):
    lines = [
        step_line(1),
        step_line(2, loss=None, grad_norm=None, skipped=True),
        step_line(3, gradient_noise_scale=40.5),
    ]
    run = read(write_metrics(tmp_path / "r", lines))
    assert run.steps["step"] == [1, 2, 3]
    assert run.steps["loss"] == [3.99, None, 3.97]
    assert run.steps["gradient_noise_scale"] == [None, None, 40.5]
    assert run.skipped == [False, True, False]
    assert "mfu" not in run.steps, "null in every line"
    assert "loss_scale" not in run.steps, "in no line"


def test_evaluations_have_the_counts_of_their_step(tmp_path):
    lines = [
        step_line(1),
        step_line(2),
        eval_line(2, 3.5),
        step_line(3),
        eval_line(9, 3.25),
    ]
    run = read(write_metrics(tmp_path / "r", lines))
    assert run.evaluations == {
        "step": [2, 9],
        "eval_loss": [3.5, 3.25],
        "eval_target_tokens": [999, 999],
        "examples_seen": [16, None],
        "tokens_seen": [1600, None],
    }


@pytest.mark.parametrize("value", ["null", '"text"', "[1]"])
def test_what_is_no_number_is_a_gap(value, tmp_path):
    directory = write_metrics(tmp_path / "r", [step_line(1), step_line(2, loss="HERE")])
    path = directory / "metrics.jsonl"
    path.write_text(path.read_text().replace('"HERE"', value))
    assert read(directory).steps["loss"] == [3.99, None]


def test_a_step_that_stands_twice_counts_as_the_later_line_has_it(tmp_path):
    run = read(
        write_metrics(
            tmp_path / "r", [step_line(1), step_line(2), step_line(1, loss=9.0)]
        )
    )
    assert (run.steps["step"], run.steps["loss"]) == ([1, 2], [9.0, 3.98])


def test_files_that_are_missing_or_damaged_are_noted(tmp_path):
    directory = write_metrics(tmp_path / "r", [])
    (directory / "plan.json").write_text('{"steps": 4')
    (directory / "config.yml").write_text("a: [")
    run = read(directory)
    assert run.plan == run.environment == run.settings == {}
    assert run.steps == {"step": []}
    (directory / "metrics.jsonl").unlink()
    (directory / "goodput.json").write_text('{"starts": [{"began": null}]}')
    text = " ".join(read(directory).notes)
    for name in (
        "plan.json",
        "config.yml",
        "environment.json",
        "metrics.jsonl",
        "goodput.json",
    ):
        assert name in text


def test_a_run_of_reinforcement_learning_has_accuracies_from_step_0_and_a_timeline(
    tmp_path,
):
    lines = [
        {"step": 0, "eval_accuracy": 0.25},
        step_line(1, reward=0.75),
        {"step": 1, "eval_accuracy": 0.5},
    ]
    directory = write_metrics(tmp_path / "rl", lines)
    phases = [["rollout", 0, 0.0, 1.5], ["train", 0, 1.5, 2]]
    timeline = [{"step": step, "phases": phases} for step in range(1, 6)]
    (directory / "timeline.jsonl").write_text("\n".join(map(json.dumps, timeline)))
    run = read(directory)
    assert run.steps["reward"] == [0.75]
    assert run.evaluations["eval_accuracy"] == [0.25, 0.5]
    assert run.evaluations["examples_seen"] == [0, 8]
    assert [*run.timeline] == [3, 4, 5]
    assert run.timeline[3] == [tuple(phase) for phase in phases]
