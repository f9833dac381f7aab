import re
from html.parser import HTMLParser

import pytest

from maxtext_lite.reporting.charts import BOTTOM, LEFT, RIGHT, TOP, make_board
from maxtext_lite.reporting.run_data import read_runs
from maxtext_lite.reporting.svg import band_path, chart_svg, color_class, dots_path, line_path, stepped_path
from tests.run_directories import eval_line, step_line, write_metrics


def test_a_line_has_a_point_for_each_value_and_a_gap_for_each_that_is_missing():
    assert line_path([0, 1, 2, 3], [5, 6, None, 8]) == "M0.0,5.0L1.0,6.0M3.0,8.0h0"
    assert line_path([0, None, 2, 3], [5, 6, 7, 8]) == "M0.0,5.0h0M2.0,7.0L3.0,8.0"
    assert line_path([], []) == line_path([1], [None]) == ""


def test_a_stepped_line_takes_each_value_at_the_position_before_it():
    assert stepped_path([0, 1, 2], [5, 5, 9]) == "M0.0,5.0V5.0H1.0V9.0H2.0"
    assert stepped_path([0, 1, 2], [5, None, 9]) == "M0.0,5.0h0M2.0,9.0h0"


def test_a_band_goes_along_the_highs_and_back_along_the_lows():
    assert band_path([0, 1], [5, 6], [1, 2]) == "M0.0,1.0L1.0,2.0L1.0,6.0L0.0,5.0Z"
    assert band_path([0, 1, 2], [5, None, 7], [1, None, 3]).count("Z") == 2


def test_dots():
    assert dots_path([0, 1, 2], [5, None, 7]) == "M0.0,5.0h0M2.0,7.0h0"


def test_colours_are_of_series_in_one_run_and_of_runs_in_several():
    assert color_class(0, 1, 1) == "c1 s1"
    assert color_class(3, 1, 5) == "c3 s1"
    assert color_class(9, 0, 12) == "c1 s0 again"


class Paths(HTMLParser):
    """The paths of an SVG by class, and the texts of its axes."""

    def __init__(self, svg):
        super().__init__()
        self.paths, self.marks = {}, []
        self.feed(svg)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "path" and "data-line" in attributes:
            self.paths[attributes["class"].split()[0], int(attributes["data-line"])] = attributes["d"]
        if tag == "g" and "data-grid" in attributes:
            self.marks.append(attributes)


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path)]


@pytest.fixture
def board(tmp_path):
    lines = [
        step_line(step, loss=None if step in (5, 6) else 10.0 - step, skipped=step in (5, 6)) for step in range(1, 11)
    ]
    lines += [eval_line(5, 6.5), eval_line(10, 1.0)]
    return make_board(read_runs([write_metrics(tmp_path / "r", lines)]))


def test_the_loss_is_drawn_where_its_values_are(board):
    drawn = Paths(chart_svg(board.charts[0], board))
    y, x = board.charts[0].y, board.x["step"]
    training = points(drawn.paths["line", 0])
    steps = [1, 2, 3, 4, 7, 8, 9, 10]
    assert drawn.paths["line", 0].count("M") == 2
    assert len(training) == 8
    for (found_x, found_y), step in zip(training, steps, strict=True):
        # Axis arithmetic by hand: linear from LEFT to RIGHT, and from BOTTOM up to TOP.
        assert found_x == pytest.approx(LEFT + (step - x.low) / (x.high - x.low) * (RIGHT - LEFT), abs=0.06)
        assert found_y == pytest.approx(BOTTOM - (10 - step - y.low) / (y.high - y.low) * (BOTTOM - TOP), abs=0.06)
    assert len(points(drawn.paths["line", 1])) == len(points(drawn.paths["dots", 1])) == 2
    assert ("band", 0) not in drawn.paths


def test_skipped_steps_are_marked_at_their_place(board):
    marks = Paths(chart_svg(board.charts[0], board)).marks
    assert [(mark["data-grid"], mark["data-index"]) for mark in marks] == [("0", "4"), ("0", "5")]
    assert marks[0]["transform"] == f"translate({board.x['step'].pixel(5):.1f},0)"


@pytest.mark.parametrize("axis", ["step", "examples_seen", "tokens_seen"])
def test_every_axis_draws_every_point_within_the_frame(board, axis):
    for chart in board.charts:
        for path in Paths(chart_svg(chart, board, axis)).paths.values():
            for x, y in points(path):
                assert LEFT - 0.1 <= x <= RIGHT + 0.1
                assert TOP - 0.1 <= y <= BOTTOM + 0.1


def test_an_svg_names_itself_and_refers_to_nothing_outside(board):
    svg = chart_svg(board.charts[0], board)
    assert 'aria-label="Loss, nats per target token, or per pair in DPO, over steps"' in svg
    assert "http" not in svg
    assert "href" not in svg
