"""A chart as SVG, whole without a script; page.js draws the same paths again over another x-axis."""

import html
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from maxtext_lite.reporting.charts import AXES, BOTTOM, LEFT, RIGHT, TOP, Board, Chart, Line, Mark
from maxtext_lite.reporting.records import EVALUATION_METRICS
from maxtext_lite.reporting.run_data import Column
from maxtext_lite.reporting.scales import Scale, short_number

WIDTH, HEIGHT = 480, 236
NUM_COLORS = 8
"""Colours of page.css; further runs repeat them."""

_MOST_DOTS = 60
_MOST_WIDTHS = 4
Pixels = Sequence[float | None]


def color_class(run: int, series: int, num_runs: int) -> str:
    """The classes of page.css for a line: of one run, each series has its colour; of several, each run has."""
    color = series if num_runs == 1 else run
    again = " again" if color >= NUM_COLORS else ""
    return f"c{color % NUM_COLORS} s{series}{again}"


def chart_svg(chart: Chart, board: Board, axis: str = "step") -> str:
    """The chart as an svg element; its paths have one point for each value, and a gap for each that is missing."""
    x = board.x[axis]
    title = f"{chart.spec.title}{', ' + chart.spec.unit if chart.spec.unit else ''}, over {AXES[axis]}"
    clip = f"clip-{chart.spec.key}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<clipPath id="{clip}"><rect x="{LEFT - 3}" y="{TOP - 3}" width="{RIGHT - LEFT + 6}" '
        f'height="{BOTTOM - TOP + 6}"/></clipPath>',
        *_y_axis(chart.y),
        f'<g class="x-axis">{"".join(_x_axis(x))}</g>',
        f'<g class="marks">{"".join(_mark_svg(mark, board, axis) for mark in chart.marks if mark.kind == "stage")}</g>',
        f'<g clip-path="url(#{clip})">',
    ]
    for index, line in enumerate(chart.lines):
        positions = _pixels(board.grids[line.grid].positions[axis], x.pixel)
        classes = color_class(line.run, line.series, board.num_runs)
        mean = _pixels(line.points.mean, chart.y.pixel)
        if not line.points.is_exact:
            low, high = (_pixels(column, chart.y.pixel) for column in (line.points.low, line.points.high))
            parts.append(f'<path class="band {classes}" data-line="{index}" d="{band_path(positions, low, high)}"/>')
        make = stepped_path if line.spec.stepped else line_path
        width = _width(line, board.num_runs)
        raw = "raw" if line.smooth is not None else "line"
        parts.append(f'<path class="{raw} {classes}" data-line="{index}"{width} d="{make(positions, mean)}"/>')
        if line.smooth is not None:
            smooth = _pixels(line.smooth, chart.y.pixel)
            parts.append(f'<path class="line {classes}" data-line="{index}" d="{line_path(positions, smooth)}"/>')
        if line.spec.metric in EVALUATION_METRICS and len(mean) <= _MOST_DOTS:
            parts.append(f'<path class="dots {classes}" data-line="{index}" d="{dots_path(positions, mean)}"/>')
    skips = [_mark_svg(mark, board, axis) for mark in chart.marks if mark.kind == "skip"]
    parts += ["</g>", f'<g class="marks">{"".join(skips)}</g>']
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" hidden=""/></svg>')
    return "".join(parts)


def _width(line: Line, num_runs: int) -> str:
    """Batch sizes of several runs are often equal: each is drawn narrower than the one that it lies upon."""
    below = min(num_runs, _MOST_WIDTHS) - 1 - line.run
    return (
        f' style="stroke-width:{1.7 + 1.4 * below:.1f}"' if line.spec.stepped and line.series == 0 and below > 0 else ""
    )


def _y_axis(y: Scale) -> Iterable[str]:
    for tick in y.ticks():
        at = _px(y.pixel(tick))
        yield f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text class="y" x="{LEFT - 7}" y="{at}" dy=".32em">{short_number(tick)}</text>'


def _x_axis(x: Scale) -> Iterable[str]:
    for tick in x.ticks():
        at = _px(x.pixel(tick))
        yield f'<line class="tick" x1="{at}" x2="{at}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>'
        yield f'<text class="x" x="{at}" y="{BOTTOM + 18}">{short_number(tick)}</text>'


def _mark_svg(mark: Mark, board: Board, axis: str) -> str:
    position = board.grids[mark.grid].positions[axis][mark.index]
    hidden = ' display="none"' if position is None else ""
    at = _px(board.x[axis].pixel(position or 0))
    color = "" if board.num_runs == 1 else color_class(mark.run, 0, board.num_runs)
    if mark.kind == "skip":
        shape = f'<path class="skip" d="M-3.5,{mark.height - 3.5}l7,7m0,-7l-7,7"/>'
    else:
        shape = f'<line class="stage" y1="{TOP}" y2="{BOTTOM}"/>'
        if mark.label:
            shape += f'<text class="size" x="6" y="{_px(mark.height + 14)}">{mark.label}</text>'
    return (
        f'<g class="mark {color}" data-grid="{mark.grid}" data-index="{mark.index}" '
        f'transform="translate({at},0)"{hidden}>{shape}<title>{html.escape(mark.title)}</title></g>'
    )


def _pixels(column: Column, pixel: Callable[[float], float]) -> list[float | None]:
    return [None if value is None else pixel(value) for value in column]


def _px(value: float) -> str:
    return f"{value:.1f}"


def _unbroken(*columns: Pixels) -> Iterable[list[tuple[float, ...]]]:
    """The stretches over which all columns have values."""
    rows = zip(*columns, strict=True)
    for whole, stretch in groupby(rows, key=lambda row: None not in row):
        if whole:
            yield [tuple(value for value in row if value is not None) for row in stretch]


def line_path(xs: Pixels, ys: Pixels) -> str:
    """A path with a point for each value; a lone one is a dot."""
    path = ""
    for stretch in _unbroken(xs, ys):
        path += "M" + "L".join(f"{_px(x)},{_px(y)}" for x, y in stretch) + ("h0" if len(stretch) == 1 else "")
    return path


def stepped_path(xs: Pixels, ys: Pixels) -> str:
    """A path that reaches each value at once, at the position before it."""
    path = ""
    for stretch in _unbroken(xs, ys):
        (x, y), *rest = stretch
        path += f"M{_px(x)},{_px(y)}" + ("" if rest else "h0")
        path += "".join(f"V{_px(y)}H{_px(x)}" for x, y in rest)
    return path


def band_path(xs: Pixels, lows: Pixels, highs: Pixels) -> str:
    """Closed paths along the highs and back along the lows."""
    path = ""
    for stretch in _unbroken(xs, lows, highs):
        there = [f"{_px(x)},{_px(high)}" for x, _, high in stretch]
        back = [f"{_px(x)},{_px(low)}" for x, low, _ in reversed(stretch)]
        path += "M" + "L".join(there + back) + "Z"
    return path


def dots_path(xs: Pixels, ys: Pixels) -> str:
    """A dot for each value."""
    return "".join(f"M{_px(x)},{_px(y)}h0" for stretch in _unbroken(xs, ys) for x, y in stretch)
