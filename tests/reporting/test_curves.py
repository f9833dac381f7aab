import random
import re
from xml.etree import ElementTree

import pytest

from maxtext_lite.reporting.curves import FRAME, chart_svg, color_class, downsample, make_board, make_buckets
from maxtext_lite.reporting.run_data import read_runs
from tests.run_directories import eval_line, step_line, write_metrics


def board_of(tmp_path, *runs):
    return make_board(read_runs([write_metrics(tmp_path / str(number), lines) for number, lines in enumerate(runs)]))


def chart(board, title):
    (found,) = [chart for chart in board["charts"] if chart["title"] == title]
    return found


def titles(board):
    return [chart["title"] for chart in board["charts"]]


@pytest.mark.parametrize(("num_rows", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (17, 5), (200_000, 500), (999, 500)])
def test_buckets_cover_every_row_once_and_are_equal_but_for_one(num_rows, most):
    buckets = make_buckets(num_rows, most)
    assert [row for bucket in buckets for row in bucket] == list(range(num_rows))
    assert len(buckets) == min(num_rows, most)
    sizes = {len(bucket) for bucket in buckets}
    assert len(sizes) == 0 or max(sizes) - min(sizes) <= 1


def test_a_bucket_without_a_value_is_a_gap():
    column = [1.0, 5.0, None, 3.0, None, None]
    assert downsample(column, [range(4), range(4, 6)], sum) == [9.0, None]
    assert downsample(column, [range(4), range(4, 6)], max) == [5.0, None]


def test_charts_without_a_value_are_left_out(tmp_path):
    plain = [
        "Loss", "Batch size", "Learning rate", "Throughput", "Model FLOPs", "Time of a step", "Gradient norm",
        "Parameter norm", "Epochs",
    ]  # fmt: skip
    assert titles(board_of(tmp_path, [step_line(1), step_line(2)])) == plain
    with_more = [step_line(1, mfu=0.4, loss_scale=1024.0, gradient_noise_scale=30.0, z_loss=0.1)]
    assert titles(board_of(tmp_path, with_more)) == [
        "Loss", "Batch size", "Gradient noise scale and batch", "Learning rate", "Throughput",
        "Model FLOP utilization", "Time of a step", "Gradient norm", "Parameter norm", "Loss scale",
        "Auxiliary losses", "Epochs",
    ]  # fmt: skip
    pairs = [step_line(1, reward_chosen=-0.5, reward_rejected=-1.0, reward_margin=0.5, reward_accuracy=0.75)]
    dpo = ["Loss", "Rewards of answers", "Pairs whose chosen answer has the larger reward", "Batch size"]
    assert titles(board_of(tmp_path, pairs))[:4] == dpo
    rl = [step_line(1, reward=0.5, token_nll=0.4), {"step": 1, "eval_accuracy": 0.5}]
    assert titles(board_of(tmp_path, rl))[:4] == ["Reward", "Held-out accuracy", "Loss", "Divergence and uncertainty"]
    assert titles(board_of(tmp_path, [])) == []
    assert titles(board_of(tmp_path, [{"step": 3}])) == []


def test_metrics_by_source_have_a_line_for_each(tmp_path):
    lines = [step_line(step, source_epochs={"web": step / 4, "c/d": step / 2}) for step in (1, 2)]
    lines[1]["source_epochs"]["new"] = 0.25  # joined later
    shares = {"web": 0.75, "c/d": 0.25}
    lines += [eval_line(2, 2.5) | {"eval_losses": {"web": 3.0, "c/d": None}, "source_token_shares": shares}]
    board = board_of(tmp_path, lines)
    found = {title: {line["label"]: line["mean"] for line in chart(board, title)["lines"]} for title in titles(board)}
    assert found["Epochs by source"] == {"web": [0.25, 0.5], "c/d": [0.5, 1.0], "new": [None, 0.25]}
    assert found["Held-out loss by source"] == {"web": [3.0]}
    assert found["Target tokens by source"] == {"web": [0.75], "c/d": [0.25]}
    assert not any(line["noisy"] for title in found if "by source" in title for line in chart(board, title)["lines"])
    both = chart(board_of(tmp_path, lines, lines[:1]), "Epochs by source")["lines"]
    assert [line["name"] for line in both] == ["0, web", "0, c/d", "0, new", "1, web", "1, c/d"]


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
    assert "low" not in training
    assert (held_out["mean"], board["grids"][held_out["grid"]]["step"]) == ([2.5], [300])
    assert held_out["dots"]
    assert not training["dots"]


def test_a_long_run_is_downsampled_to_500_buckets_that_keep_a_spike(tmp_path):
    lines = [step_line(step, loss=50.0 if step == 777 else 2.0) for step in range(1, 2001)]
    board = board_of(tmp_path, lines)
    (loss,) = chart(board, "Loss")["lines"]
    assert len(loss["mean"]) == 500
    # Four steps a bucket; step 777 is row 776, in bucket 194: steps 777 to 780, which its second step stands for.
    assert loss["high"][194] == 50.0
    assert loss["mean"][194] == (50 + 3 * 2) / 4
    assert [board["grids"][0][name][194] for name in ("first", "step", "last")] == [777, 778, 780]


def test_one_spike_among_200_000_steps_survives():
    rng = random.Random(0)
    column = [rng.random() for _ in range(200_000)]
    column[123_456], column[7] = 99.0, -99.0
    buckets = make_buckets(len(column), 500)
    assert max(downsample(column, buckets, max)) == 99.0
    assert min(downsample(column, buckets, min)) == -99.0


def test_a_band_that_could_not_be_seen_is_left_out(tmp_path):
    lines = [step_line(step, grad_norm=1 + step % 4) for step in range(1, 2001)]
    board = board_of(tmp_path, lines)
    (rate,), (norm,) = (chart(board, title)["lines"] for title in ("Learning rate", "Gradient norm"))
    assert "low" not in rate, "four steps of 2,000 that go straight up"
    assert (norm["low"][0], norm["mean"][0], norm["high"][0]) == (1, 2.5, 4)


def test_a_batch_size_is_never_the_mean_of_two(tmp_path):
    lines = [step_line(step, global_batch_to_train=8 if step < 1001 else 16) for step in range(1, 1504)]
    (batch,) = chart(board_of(tmp_path, lines), "Batch size")["lines"]
    assert {*batch["mean"]} == {8, 16}
    assert batch["stepped"]


def test_stages_are_marked_where_the_batch_size_changes(tmp_path):
    sizes = [8, 8, 16, 16, 32]
    lines = [step_line(step, global_batch_to_train=size) for step, size in enumerate(sizes, start=1)]
    board = board_of(tmp_path, lines)
    assert [(mark["kind"], mark["at"]["step"], mark["size"]) for mark in board["marks"]] == [
        ("stage", 3, 16), ("stage", 5, 32),
    ]  # fmt: skip
    assert board["marks"][0]["title"] == "step 3: global batch 16"
    assert board["marks"][0]["at"] == {"step": 3, "examples_seen": 24, "tokens_seen": 2400}
    assert [one["title"] for one in board["charts"] if one["sizes"]] == ["Batch size"]


def test_skipped_steps_of_one_bucket_are_one_mark_that_counts_them(tmp_path):
    lines = [step_line(step, skipped=step in (9, 11, 12, 1500)) for step in range(1, 2001)]
    board = board_of(tmp_path, lines)
    assert [(mark["kind"], mark["at"]["step"], mark["title"]) for mark in board["marks"]] == [
        ("skip", 11, "3 skipped: step 9, 11, 12"),
        ("skip", 1500, "1 skipped: step 1500"),
    ]
    assert [one["title"] for one in board["charts"] if one["skipped"]] == ["Loss", "Gradient norm"]


NOISE = {"gradient_noise_scale": 40.0, "gradient_noise_scale_error": 0.25}


def test_the_noise_scale_has_a_band_of_one_standard_error_beside_the_batch(tmp_path):
    scale, batch = chart(board_of(tmp_path, [step_line(1), step_line(2, **NOISE)]), "Gradient noise scale and batch")[
        "lines"
    ]
    assert (scale["mean"], scale["low"], scale["high"]) == ([None, 40.0], [None, 30.0], [None, 50.0])
    assert batch["mean"] == [8, 8]


def test_an_interval_takes_the_place_of_the_error_and_may_have_no_end(tmp_path):
    known = NOISE | {"gradient_noise_scale_low": 20.0, "gradient_noise_scale_high": 90.0}
    endless = NOISE | {"gradient_noise_scale_low": 20.0, "gradient_noise_scale_high": None}
    neither = NOISE | {"gradient_noise_scale_low": None, "gradient_noise_scale_high": None}
    lines = [step_line(step, **values) for step, values in enumerate((known, endless, neither), start=1)]
    line = chart(board_of(tmp_path, lines), "Gradient noise scale and batch")["lines"][0]
    assert (line["low"], line["high"][0], line["high"][2]) == ([20.0, 20.0, None], 90.0, None)
    assert [line["high"][row] >= line["interval"] * line["mean"][row] for row in (0, 1)] == [False, True]


def test_noisy_metrics_may_be_smoothed_and_exact_ones_not(tmp_path):
    board = board_of(tmp_path, [step_line(1), eval_line(1, 2.0)])
    noisy = {line["metric"] for one in board["charts"] for line in one["lines"] if line["noisy"]}
    assert {"loss", "tokens_per_second", "grad_norm", "step_seconds"} <= noisy
    assert not {"eval_loss", "learning_rate", "global_batch_to_train", "epoch"} & noisy


def test_an_axis_is_logarithmic_over_wide_ranges_only(tmp_path):
    def is_log(title, **changed):
        return chart(board_of(tmp_path, [step_line(1, **changed), step_line(2, grad_norm=1.0)]), title)["log"]

    assert is_log("Gradient norm", grad_norm=50.0)
    assert not is_log("Gradient norm", grad_norm=49.0)
    assert not is_log("Gradient norm", grad_norm=0.0)
    assert not is_log("Loss", loss=1e6)


def test_a_run_without_a_noise_scale_is_not_in_its_chart(tmp_path):
    board = board_of(tmp_path, [step_line(1, gradient_noise_scale=9.0)], [step_line(1)])
    assert {line["run"] for line in chart(board, "Gradient noise scale and batch")["lines"]} == {0}


def test_runs_share_a_chart_and_no_stage_is_marked(tmp_path):
    short = [step_line(step) for step in range(1, 4)]
    long = [step_line(step, global_batch_to_train=8 * step) for step in range(1, 41)]
    board = board_of(tmp_path, short, long)
    assert [(line["run"], line["name"]) for line in chart(board, "Loss")["lines"]] == [
        (0, "0, training"), (1, "1, training"),
    ]  # fmt: skip
    assert board["marks"] == []


@pytest.mark.parametrize(("num_runs", "buckets"), [(1, 500), (14, 500), (20, 350), (100, 70), (600, 20)])
def test_many_lines_have_fewer_points_each(tmp_path, num_runs, buckets):
    (run,) = read_runs([write_metrics(tmp_path, [{"step": step, "loss": 1.0} for step in range(1, 601)])])
    assert {len(grid["step"]) for grid in make_board([run] * num_runs)["grids"][::2]} == {buckets}


def test_an_axis_that_no_run_has_is_left_out(tmp_path):
    assert [*board_of(tmp_path, [{"step": 5, "loss": 1.0}])["grids"][0]] == ["step"]


def test_colours_are_of_series_in_one_run_and_of_runs_in_several():
    assert color_class(0, 1, 1) == "c1 s1"
    assert color_class(3, 1, 5) == "c3 s1"
    assert color_class(9, 0, 12) == "c1 s0 again"


@pytest.fixture
def board(tmp_path):
    lines = [
        step_line(step, loss=None if step in (5, 6, 8) else 10.0 - step, skipped=step in (5, 6))
        for step in range(1, 11)
    ]
    return board_of(tmp_path, [*lines, eval_line(5, 6.5), eval_line(10, 0.5)])


def drawn(svg):
    """For each line of a chart, its stretches of points."""
    return [
        [
            [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", part)]
            for part in path.get("d").split("M")[1:]
        ]
        for path in ElementTree.fromstring(svg).iter("path")
        if path.get("class").startswith("line ")
    ]


def test_the_loss_is_drawn_where_its_values_are(board):
    training, held_out = drawn(chart_svg(board["charts"][0], board["grids"]))
    assert [len(stretch) for stretch in training] == [4, 1, 2]
    steps = [1, 2, 3, 4, 7, 9, 10]
    # Axis arithmetic by hand: steps 1 to 10 from left to right, values 0 (step 10) to 9 (step 1) from the bottom up.
    for (x, y), step in zip([point for stretch in training for point in stretch], steps, strict=True):
        assert x == pytest.approx(FRAME["left"] + (step - 1) / 9 * (FRAME["right"] - FRAME["left"]), abs=0.6)
        assert y == pytest.approx(FRAME["bottom"] - (10 - step) / 9 * (FRAME["bottom"] - FRAME["top"]), abs=0.6)
    assert [len(stretch) for stretch in held_out] == [2]


def test_a_logarithmic_chart_is_drawn_by_decades(tmp_path):
    lines = [step_line(step, grad_norm=10.0**step) for step in range(4)]
    board = board_of(tmp_path, lines)
    ((stretch,),) = drawn(chart_svg(chart(board, "Gradient norm"), board["grids"]))
    height = (FRAME["bottom"] - FRAME["top"]) / 3
    assert [y for _, y in stretch] == pytest.approx([FRAME["bottom"] - height * step for step in range(4)], abs=0.6)


@pytest.mark.parametrize("lines", [[step_line(1)], [step_line(7, loss=0.0)], [step_line(1, loss=-3.0), step_line(2)]])
def test_every_chart_is_drawn_within_the_frame_one_of_a_single_value_too(lines, tmp_path):
    board = board_of(tmp_path, lines)
    for one in board["charts"]:
        for path in drawn(chart_svg(one, board["grids"])):
            for x, y in [point for stretch in path for point in stretch]:
                assert FRAME["left"] <= x <= FRAME["right"]
                assert FRAME["top"] <= y <= FRAME["bottom"]


def test_an_svg_names_itself_and_refers_to_nothing_outside(board):
    svg = chart_svg(board["charts"][0], board["grids"])
    assert 'aria-label="Loss, nats per target token, or per pair in DPO"' in svg
    assert "http" not in svg
    assert "href" not in svg
