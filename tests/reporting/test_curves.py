import pytest

from maxtext_lite.analysis.curves import make_board
from maxtext_lite.analysis.run_data import read_runs
from tests.run_directories import step_line, write_metrics


def board_of(tmp_path, *runs):
    return make_board(
        read_runs(
            [
                write_metrics(tmp_path / str(number), lines)
                for number, lines in enumerate(runs)
            ]
        )
    )


def chart(board, title):
    (found,) = [chart for chart in board["charts"] if chart["title"] == title]
    return found


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["Loss", "Batch size", "Learning rate"]),
        (
            {"gradient_noise_scale": 30.0},
            ["Loss", "Batch size", "Gradient noise scale and batch"],
        ),
        (
            {"reward": 0.5, "token_nll": 0.4},
            ["Reward", "Loss", "Divergence and uncertainty"],
        ),
    ],
)
def test_charts_are_of_metrics_that_have_a_value(tmp_path, changed, expected):
    board = board_of(tmp_path, [step_line(1, **changed), step_line(2, **changed)])
    assert [one["title"] for one in board["charts"]][:3] == expected
    assert "pair" not in chart(board, "Loss")["unit"]  # of DPO


def test_a_long_run_is_downsampled_to_500_buckets_that_keep_a_spike(tmp_path):
    lines = [
        step_line(step, loss=50.0 if step == 777 else 2.0) for step in range(1, 2001)
    ]
    board = board_of(tmp_path, lines)
    (loss,) = chart(board, "Loss")["lines"]
    assert len(loss["mean"]) == 500
    # Four steps per bucket; step 777 is row 776, in bucket 194: steps 777 to 780, represented by the second step.
    assert loss["high"][194] == 50.0
    assert loss["mean"][194] == (50 + 3 * 2) / 4
    assert [board["grids"][0][name][194] for name in ("first", "step", "last")] == [
        777,
        778,
        780,
    ]


def test_stages_are_marked_where_the_batch_size_changes(tmp_path):
    sizes = [8, 8, 16, 16, 32]
    lines = [
        step_line(step, global_batch_to_train=size)
        for step, size in enumerate(sizes, start=1)
    ]
    marks = board_of(tmp_path, lines)["marks"]
    assert [(mark["kind"], mark["size"]) for mark in marks] == [
        ("stage", 16),
        ("stage", 32),
    ]
    at = {"step": 3, "examples_seen": 24, "tokens_seen": 2400}
    assert marks[0]["at"] == at


def test_the_noise_scale_has_its_interval_as_a_band_which_may_have_no_end(
    tmp_path,
):
    low, high = "gradient_noise_scale_low", "gradient_noise_scale_high"
    noise = {"gradient_noise_scale": 40.0}
    ends = [{low: 20.0, high: 90.0}, {low: 20.0, high: None}, {low: None, high: None}]
    lines = [step_line(step, **noise, **each) for step, each in enumerate(ends, 1)]
    board = board_of(tmp_path, lines)
    scale, _ = chart(board, "Gradient noise scale and batch")["lines"]
    assert scale["low"] == [20.0, 20.0, None]
    bounded, endless, unknown = scale["high"]
    assert (bounded, unknown) == (90.0, None)
    assert endless >= scale["interval"] * 40.0 > bounded
