import pytest

from maxtext_lite.reporting.charts import CHARTS, make_board
from maxtext_lite.reporting.run_data import EVALUATION_METRICS, STEP_METRICS, read_runs
from tests.run_directories import eval_line, step_line, write_metrics


def board_of(tmp_path, *runs):
    return make_board(read_runs([write_metrics(tmp_path / str(number), lines) for number, lines in enumerate(runs)]))


def chart(board, key):
    (found,) = [chart for chart in board.charts if chart.spec.key == key]
    return found


def keys(board):
    return [chart.spec.key for chart in board.charts]


def test_every_line_is_of_a_metric_that_is_read():
    metrics = {line.metric for spec in CHARTS for line in spec.lines} | {need for spec in CHARTS for need in spec.needs}
    assert metrics <= {*STEP_METRICS, *EVALUATION_METRICS}
    assert len({spec.key for spec in CHARTS}) == len(CHARTS)


def test_charts_without_a_value_are_left_out(tmp_path):
    plain = ["loss", "batch", "learning-rate", "throughput", "tflops", "seconds", "grad-norm", "param-norm", "epoch"]
    assert keys(board_of(tmp_path, [step_line(1), step_line(2)])) == plain
    with_more = [step_line(1, mfu=0.4, loss_scale=1024.0, gradient_noise_scale=30.0, z_loss=0.1)]
    assert keys(board_of(tmp_path, with_more)) == [
        "loss", "batch", "noise", "learning-rate", "throughput", "mfu", "seconds", "grad-norm", "param-norm",
        "loss-scale", "balance", "epoch",
    ]  # fmt: skip
    pairs = [step_line(1, reward_chosen=-0.5, reward_rejected=-1.0, reward_margin=0.5, reward_accuracy=0.75)]
    assert keys(board_of(tmp_path, pairs))[:4] == ["loss", "rewards", "reward-accuracy", "batch"]
    assert keys(board_of(tmp_path, [])) == []
    assert keys(board_of(tmp_path, [{"step": 3}])) == []


def test_the_numbers_of_a_short_run_are_those_of_the_file(tmp_path):
    lines = [step_line(step) for step in range(1, 301)]
    data = board_of(tmp_path, [*lines, eval_line(300, 2.5)]).to_json()
    assert data["grids"][0]["step"] == list(range(1, 301))
    assert data["grids"][0]["tokens_seen"] == [800 * step for step in range(1, 301)]
    assert "first" not in data["grids"][0]
    training, held_out = data["charts"][0]["lines"]
    assert training["mean"] == pytest.approx([line["loss"] for line in lines], rel=1e-7)
    assert "low" not in training
    assert (held_out["mean"], data["grids"][held_out["grid"]]["step"]) == ([2.5], [300])


def test_a_long_run_is_downsampled_to_500_buckets_that_keep_a_spike(tmp_path):
    lines = [step_line(step, loss=50.0 if step == 777 else 2.0) for step in range(1, 2001)]
    data = board_of(tmp_path, lines).to_json()
    (loss,) = data["charts"][0]["lines"]
    assert len(loss["mean"]) == 500
    # Four steps a bucket; step 777 is row 776, in bucket 194: steps 777 to 780.
    assert loss["high"][194] == 50.0
    assert loss["mean"][194] == (50 + 3 * 2) / 4
    assert (data["grids"][0]["first"][194], data["grids"][0]["last"][194]) == (777, 780)
    assert data["charts"][0]["y"]["high"] > 50


def test_a_batch_size_is_never_the_mean_of_two(tmp_path):
    lines = [step_line(step, global_batch_to_train=8 if step < 1001 else 16) for step in range(1, 1504)]
    (batch,) = board_of(tmp_path, lines).to_json()["charts"][1]["lines"]
    assert set(batch["mean"]) == {8, 16}


def test_stages_are_marked_where_the_batch_size_changes(tmp_path):
    sizes = [8, 8, 16, 16, 32]
    board = board_of(
        tmp_path, [step_line(step, global_batch_to_train=size) for step, size in enumerate(sizes, start=1)]
    )
    marks = chart(board, "batch").marks
    assert [(mark.kind, mark.index, mark.label) for mark in marks] == [("stage", 2, "16"), ("stage", 4, "32")]
    assert marks[0].title == "step 3: global batch 16"
    assert [mark.index for mark in chart(board, "learning-rate").marks] == [2, 4]


def test_skipped_steps_of_one_bucket_are_one_mark_that_counts_them(tmp_path):
    lines = [step_line(step, skipped=step in (11, 12, 1500)) for step in range(1, 2001)]
    marks = chart(board_of(tmp_path, lines), "grad-norm").marks
    assert [(mark.kind, mark.index, mark.title) for mark in marks] == [
        ("skip", 2, "2 skipped: step 11, 12"),
        ("skip", 374, "1 skipped: step 1500"),
    ]


def test_the_noise_scale_has_a_band_of_one_standard_error_beside_the_batch(tmp_path):
    noise = {"gradient_noise_scale": 40.0, "gradient_noise_scale_error": 0.25}
    found = chart(board_of(tmp_path, [step_line(1), step_line(2, **noise)]), "noise")
    scale, batch = found.lines
    assert (scale.points.mean, scale.points.low, scale.points.high) == ([None, 40.0], [None, 30.0], [None, 50.0])
    assert batch.points.mean == [8, 8]


def test_a_wild_error_bar_does_not_flatten_the_line(tmp_path):
    noise = {"gradient_noise_scale": 40.0, "gradient_noise_scale_error": 30.0}
    assert chart(board_of(tmp_path, [step_line(1, **noise)]), "noise").y.high < 100


def test_an_interval_takes_the_place_of_the_error_and_may_have_no_end(tmp_path):
    noise = {"gradient_noise_scale": 40.0, "gradient_noise_scale_error": 0.25}
    known = noise | {"gradient_noise_scale_low": 20.0, "gradient_noise_scale_high": 90.0}
    endless = noise | {"gradient_noise_scale_low": 20.0, "gradient_noise_scale_high": None}
    neither = noise | {"gradient_noise_scale_low": None, "gradient_noise_scale_high": None}
    lines = [step_line(step, **values) for step, values in enumerate((known, endless, neither), start=1)]
    found = chart(board_of(tmp_path, lines), "noise")
    points = found.lines[0].points
    assert points.low[:2] == [20.0, 20.0]
    assert points.high[0] == 90.0
    assert points.high[1] > 10 * found.y.high
    assert points.low[2] is points.high[2] is None
    said = found.lines[0].to_json()
    assert [said["high"][row] >= said["open"] * said["mean"][row] for row in (0, 1)] == [False, True]


def test_throughput_is_drawn_with_a_median_that_a_pause_does_not_move(tmp_path):
    speeds = [1000.0 + (step % 3) for step in range(200)]
    speeds[100] = 3.0
    lines = [step_line(step, tokens_per_second=speed) for step, speed in enumerate(speeds, start=1)]
    (line,) = chart(board_of(tmp_path, lines), "throughput").lines
    assert line.points.mean == speeds
    assert len(line.smooth) == 200
    assert all(1000 <= value <= 1002 for value in line.smooth)
    assert line.to_json()["smooth"] == line.smooth


def test_a_short_run_and_a_metric_without_noise_are_not_smoothed(tmp_path):
    lines = [step_line(step) for step in range(1, 60)]
    assert "smooth" not in chart(board_of(tmp_path, lines), "learning-rate").lines[0].to_json()
    assert "smooth" not in chart(board_of(tmp_path, lines[:10]), "throughput").lines[0].to_json()


def test_a_run_without_a_noise_scale_is_not_in_its_chart(tmp_path):
    found = chart(board_of(tmp_path, [step_line(1, gradient_noise_scale=9.0)], [step_line(1)]), "noise")
    assert {line.run for line in found.lines} == {0}


def test_runs_share_the_axes_and_no_stage_is_marked(tmp_path):
    short = [step_line(step) for step in range(1, 4)]
    long = [step_line(step, global_batch_to_train=8 * step) for step in range(1, 41)]
    board = board_of(tmp_path, short, long)
    assert (board.x["step"].low, board.x["step"].high) == (0, 40)
    assert board.x["tokens_seen"].high == 40 * 800
    found = chart(board, "loss")
    assert [(line.run, line.name) for line in found.lines] == [(0, "0, training"), (1, "1, training")]
    assert not any(mark.kind == "stage" for each in board.charts for mark in each.marks)


@pytest.mark.parametrize(("num_runs", "buckets"), [(1, 500), (3, 500), (5, 300), (60, 40)])
def test_many_runs_have_fewer_points_each(tmp_path, num_runs, buckets):
    lines = [{"step": step, "loss": 1.0} for step in range(1, 601)]
    board = board_of(tmp_path, *[lines] * num_runs)
    assert {len(grid.buckets) for grid in board.grids[::2]} == {buckets}


def test_an_axis_that_no_run_has_is_left_out(tmp_path):
    board = board_of(tmp_path, [{"step": 5, "loss": 1.0}])
    assert list(board.x) == ["step"]
    assert board.x["step"].low < 5 < board.x["step"].high
