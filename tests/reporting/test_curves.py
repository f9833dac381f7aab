import pytest

from maxtext_lite.reporting.curves import make_board, make_buckets
from maxtext_lite.reporting.run_data import read_runs
from tests.run_directories import eval_line, step_line, write_metrics


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


@pytest.mark.parametrize(("num_rows", "most"), [(0, 5), (5, 5), (17, 5), (999, 500)])
def test_buckets_cover_every_row_once_and_are_equal_but_for_one(num_rows, most):
    buckets = make_buckets(num_rows, most)
    assert [row for bucket in buckets for row in bucket] == list(range(num_rows))
    assert len(buckets) == min(num_rows, most)
    sizes = {len(bucket) for bucket in buckets}
    assert len(sizes) == 0 or max(sizes) - min(sizes) <= 1


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


def test_runs_share_a_chart_and_have_an_axis_only_if_it_has_values(tmp_path):
    board = board_of(tmp_path, [{"step": 5, "loss": 1.0}], [{"step": 6, "loss": 2.0}])
    assert [(line["run"], line["mean"]) for line in chart(board, "Loss")["lines"]] == [
        (0, [1.0]),
        (1, [2.0]),
    ]
    assert [*board["grids"][0]] == ["step"]


def test_metrics_by_source_have_a_line_for_each(tmp_path):
    lines = [
        step_line(step, source_epochs={"web": step / 4, "c/d": step / 2})
        for step in (1, 2)
    ]
    lines[1]["source_epochs"]["new"] = 0.25  # joined later
    shares = {"web": 0.75, "c/d": 0.25}
    lines += [
        eval_line(2, 2.5)
        | {"eval_losses": {"web": 3.0, "c/d": None}, "source_token_shares": shares}
    ]
    board = board_of(tmp_path, lines)
    found = {
        one["title"]: {line["label"]: line["mean"] for line in one["lines"]}
        for one in board["charts"]
    }
    assert found["Epochs by source"] == {
        "web": [0.25, 0.5],
        "c/d": [0.5, 1.0],
        "new": [None, 0.25],
    }
    assert found["Held-out loss by source"] == {"web": [3.0]}
    assert found["Target tokens by source"] == {"web": [0.75], "c/d": [0.25]}


@pytest.mark.fast
def test_the_numbers_of_a_short_run_are_those_of_the_file(tmp_path):
    lines = [step_line(step) for step in range(1, 301)]
    board = board_of(tmp_path, [*lines, eval_line(300, 2.5)])
    assert board["grids"][0] == {
        "step": list(range(1, 301)),
        "examples_seen": [8 * step for step in range(1, 301)],
        "tokens_seen": [800 * step for step in range(1, 301)],
    }
    training, held_out = chart(board, "Loss")["lines"]
    assert training["mean"] == pytest.approx([line["loss"] for line in lines], rel=1e-7)
    assert (held_out["mean"], board["grids"][held_out["grid"]]["step"]) == (
        [2.5],
        [300],
    )


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
    board = board_of(tmp_path, lines)
    assert [
        (mark["kind"], mark["at"]["step"], mark["size"]) for mark in board["marks"]
    ] == [
        ("stage", 3, 16),
        ("stage", 5, 32),
    ]
    assert board["marks"][0]["at"] == {
        "step": 3,
        "examples_seen": 24,
        "tokens_seen": 2400,
    }
    assert {*chart(board, "Batch size")["lines"][0]["mean"]} == {*sizes}


def test_skipped_steps_of_one_bucket_are_one_mark_that_counts_them(tmp_path):
    lines = [
        step_line(step, skipped=step in (9, 11, 12, 1500)) for step in range(1, 2001)
    ]
    board = board_of(tmp_path, lines)
    assert [
        (mark["kind"], mark["at"]["step"], mark["title"]) for mark in board["marks"]
    ] == [
        ("skip", 11, "3 skipped: step 9, 11, 12"),
        ("skip", 1500, "1 skipped: step 1500"),
    ]


NOISE = {"gradient_noise_scale": 40.0, "gradient_noise_scale_error": 0.25}


def test_the_noise_scale_has_a_band_of_one_standard_error_beside_the_batch(tmp_path):
    board = board_of(tmp_path, [step_line(1), step_line(2, **NOISE)])
    scale, batch = chart(board, "Gradient noise scale and batch")["lines"]
    assert (scale["mean"], scale["low"], scale["high"]) == (
        [None, 40.0],
        [None, 30.0],
        [None, 50.0],
    )
    assert batch["mean"] == [8, 8]


def test_an_interval_takes_the_place_of_the_error_and_may_have_no_end(tmp_path):
    known = NOISE | {
        "gradient_noise_scale_low": 20.0,
        "gradient_noise_scale_high": 90.0,
    }
    endless = NOISE | {
        "gradient_noise_scale_low": 20.0,
        "gradient_noise_scale_high": None,
    }
    neither = NOISE | {
        "gradient_noise_scale_low": None,
        "gradient_noise_scale_high": None,
    }
    lines = [
        step_line(step, **values)
        for step, values in enumerate((known, endless, neither), start=1)
    ]
    line = chart(board_of(tmp_path, lines), "Gradient noise scale and batch")["lines"][
        0
    ]
    assert (line["low"], line["high"][0], line["high"][2]) == (
        [20.0, 20.0, None],
        90.0,
        None,
    )
    assert [
        line["high"][row] >= line["interval"] * line["mean"][row] for row in (0, 1)
    ] == [
        False,
        True,
    ]
