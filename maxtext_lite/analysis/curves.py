"""The values of the charts for page.js, downsampled to the resolution of a screen, and a first drawing as SVG."""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median_low
from typing import Any

from maxtext_lite.analysis.charts import AXES, CHARTS, EXACT, NOISE_SCALE_BAND, STEPPED, ChartSpec
from maxtext_lite.analysis.plan_view import short_number
from maxtext_lite.analysis.run_data import Column, Run
from maxtext_lite.config.records import is_of_evaluations

FRAME = {"width": 960, "left": 104, "right": 936, "top": 24, "bottom": 412}
"""The plotting area, in the units of a chart's SVG."""

_NUM_COLORS = 8  # in page.css; further runs repeat them
_MOST_BUCKETS, _FEWEST_BUCKETS = 500, 20  # of a run
_MOST_POINTS = 7_000  # of all lines: each takes about 25 bytes, and the page must stay below 300 kB
_SEEN = 0.005  # of a chart's height: a narrower band is invisible
_BEYOND = 1e3  # times the value: the high end of an interval without one
_LOG_FROM_RATIO = 50
_MOST_DOTS, _MOST_STAGES = 60, 32

Json = dict[str, Any]


def make_board(runs: Sequence[Run]) -> Json:
    """All charts of these runs, in the form that page.js reads.

    grids: for each run's steps and then its evaluations, the position of each bucket on the axes, and its first and
      last step.
    charts: lines with the mean of each bucket of a grid and, where it is visible, its lowest and highest value.
    marks: skipped updates; for a single run, changes of the batch size.
    """
    tables = [table for run in runs for table in (run.steps, run.evaluations)]
    num_lines = sum(metric in table for spec in CHARTS for table in tables for metric in spec.lines_of(table))
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _MOST_POINTS // max(num_lines, 1)))
    buckets = [make_buckets(len(table["step"]), most) for table in tables]
    grids: list[dict[str, Column]] = []
    for table, rows in zip(tables, buckets, strict=True):
        grids.append({axis: downsample(table[axis], rows, median_low) for axis in AXES if axis in table})
        if len(rows) < len(table["step"]):
            grids[-1] |= {"first": downsample(table["step"], rows, min), "last": downsample(table["step"], rows, max)}
    charts = [chart for spec in CHARTS if (chart := _chart(spec, runs, buckets))]
    marks = [mark for number, run in enumerate(runs) for mark in _marks(run, number, len(runs), buckets[2 * number])]
    return {"frame": FRAME, "grids": grids, "charts": charts, "marks": marks}


def make_buckets(num_rows: int, most: int) -> list[range]:
    """At most `most` ranges of rows, as equal as possible; one for each row where there are so few."""
    count = min(num_rows, most)
    return [range(index * num_rows // count, (index + 1) * num_rows // count) for index in range(count)]


def downsample(column: Column, buckets: Sequence[range], reduce: Callable[[list[float]], float]) -> Column:
    """One number for each bucket, reduced from its values; None where it has none."""
    found = ([value for value in column[rows.start : rows.stop] if value is not None] for rows in buckets)
    return [reduce(values) if values else None for values in found]


def color_class(run: int, series: int, num_runs: int) -> str:
    """The classes of page.css for a line: each series has its color, or with several runs each run."""
    color = series if num_runs == 1 else run
    return f"c{color % _NUM_COLORS} s{series}{' again' if color >= _NUM_COLORS else ''}"


def _chart(spec: ChartSpec, runs: Sequence[Run], buckets: Sequence[Sequence[range]]) -> Json | None:
    lines: list[Json] = []
    drawn = spec.lines_of(name for run in runs for table in (run.steps, run.evaluations) for name in table)
    for number, run in enumerate(runs):
        for series, (metric, label) in enumerate(drawn.items()):
            if run.rows(metric) and (not spec.needs or spec.needs in run.steps):
                grid = 2 * number + is_of_evaluations(metric)
                name = label if len(runs) == 1 else f"{run.label}, {label}"
                color = color_class(number, series, len(runs))
                about = {"name": name, "label": label, "metric": metric, "series": series}
                about |= {"run": number, "color": color, "grid": grid}
                lines.append(about | _line(metric, run, buckets[grid]))
    if not lines or (spec.unless and all(spec.unless in run.steps for run in runs)):
        return None
    values = [value for line in lines for value in line["mean"] if value is not None]
    is_log = spec.may_be_log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM_RATIO
    only_sizes = [*spec.lines] == ["global_batch_to_train"]
    flags = {"log": is_log, "zero": spec.from_zero, "skipped": spec.marks_skipped, "sizes": only_sizes}
    units = [next((unit for metric, unit in spec.units.items() if metric in run.steps), spec.unit) for run in runs]
    return {"title": spec.title, "unit": " or ".join(dict.fromkeys(units)), "lines": lines, **flags}


def _line(metric: str, run: Run, buckets: Sequence[range]) -> Json:
    """The values of a line over the buckets, and its style."""
    column = (run.evaluations if is_of_evaluations(metric) else run.steps)[metric]
    low, high = _interval(run) if metric == "gradient_noise_scale" else (column, column)
    lows, highs = downsample(low, buckets, min), downsample(high, buckets, max)
    pairs = [(low, high) for low, high in zip(lows, highs, strict=True) if low is not None and high is not None]
    height = max((high for _, high in pairs), default=0) - min((low for low, _ in pairs), default=0)
    # The mean of two batch sizes is not a batch size, but their lower median is.
    means = downsample(column, buckets, median_low if metric in STEPPED else fmean)
    digits = 7 if len(buckets) == len(column) else 5
    line: Json = {"mean": _rounded(means, digits)}
    if any(high - low > _SEEN * height for low, high in pairs):
        line |= {"low": _rounded(lows, digits - 1), "high": _rounded(highs, digits - 1)}
    if low is not column:
        line["interval"] = _BEYOND / 10  # from this multiple of the line on, the interval has no high end
    few = is_of_evaluations(metric) and len(buckets) <= _MOST_DOTS
    return line | {"noisy": metric.partition("/")[0] not in EXACT, "stepped": metric in STEPPED, "dots": few}


def _interval(run: Run) -> tuple[Column, Column]:
    """The interval of the noise scale; one standard error to either side where a run has no interval."""
    scales = run.steps["gradient_noise_scale"]
    none: Column = [None] * len(scales)
    lows, highs, errors = (run.steps.get(name, none) for name in NOISE_SCALE_BAND)
    rows: list[tuple[float | None, float | None]] = []
    for scale, low, high, error in zip(scales, lows, highs, errors, strict=True):
        if NOISE_SCALE_BAND[0] not in run.steps and scale is not None:
            rows.append((scale - abs(scale) * (error or 0), scale + abs(scale) * (error or 0)))
        else:  # an interval without a high end leaves the chart
            rows.append((low, _BEYOND * scale if high is None and low is not None and scale is not None else high))
    return [low for low, _ in rows], [high for _, high in rows]


def _rounded(column: Column, digits: int) -> Column:
    return [value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}") for value in column]


def _marks(run: Run, number: int, num_runs: int, buckets: Sequence[range]) -> Iterator[Json]:
    def mark(kind: str, row: int, title: str, **more: float) -> Json:
        at = {axis: run.steps[axis][row] for axis in AXES if axis in run.steps}
        color = "" if num_runs == 1 else color_class(number, 0, num_runs)
        return {"kind": kind, "run": number, "color": color, "title": title, "at": at, **more}

    for bucket in buckets:
        rows = [row for row in bucket if run.skipped[row]]
        if rows:
            steps = ", ".join(str(run.steps["step"][row]) for row in rows[:5]) + (" ..." if len(rows) > 5 else "")
            yield mark("skip", rows[(len(rows) - 1) // 2], f"{len(rows)} skipped: step {steps}")
    sizes = run.rows("global_batch_to_train")
    changes = [(step, size) for (_, before), (step, size) in pairwise(sizes) if size != before]
    if num_runs == 1 and len(changes) <= _MOST_STAGES:
        for step, size in changes:
            row = run.steps["step"].index(step)
            yield mark("stage", row, f"step {step}: global batch {short_number(size)}", size=size)


def chart_svg(chart: Json, grids: Sequence[dict[str, Column]]) -> str:
    """An SVG of the lines over the steps and the ends of the axes, for a page without a script; page.js redraws it."""
    of: Callable[[float], float] = math.log10 if chart["log"] else float
    columns: list[tuple[Column, Column]] = [(grids[line["grid"]]["step"], line["mean"]) for line in chart["lines"]]
    xs = sorted(step for steps, _ in columns for step in steps if step is not None)
    ys = sorted(value for _, values in columns for value in values if value is not None)
    if chart["zero"] and not chart["log"]:
        ys.insert(0, min(ys[0], 0))

    def x(step: float) -> int:
        return round(FRAME["left"] + (step - xs[0]) / (xs[-1] - xs[0] or 1) * (FRAME["right"] - FRAME["left"]))

    def y(value: float) -> int:
        share = (of(value) - of(ys[0])) / (of(ys[-1]) - of(ys[0]) or 1)
        return round(FRAME["bottom"] - share * (FRAME["bottom"] - FRAME["top"]))

    what = html.escape(f"{chart['title']}{', ' if chart['unit'] else ''}{chart['unit']}")
    parts = [f'<svg class="chart" viewBox="0 0 {FRAME["width"]} 460" role="img" tabindex="0" aria-label="{what}">']
    for value in (ys[0], ys[-1]):
        parts.append(f'<path class="rule" d="M{FRAME["left"]},{y(value)}H{FRAME["right"]}"/>')
        parts.append(f'<text class="y" x="{FRAME["left"] - 14}" y="{y(value) + 8}">{short_number(value)}</text>')
    for step in (xs[0], xs[-1]):
        parts.append(f'<text class="x" x="{x(step)}" y="{FRAME["bottom"] + 36}">{short_number(step)}</text>')
    for line, (steps, values) in zip(chart["lines"], columns, strict=True):
        d, before = "", None
        for step, value in zip(steps, values, strict=True):
            if step is not None and value is not None:
                d += f"M{x(step)},{y(value)}h0" if before is None else f"L{x(step)},{y(value)}"
            before = value
        parts.append(f'<path class="line {line["color"]}" d="{d}"/>')
    return "".join([*parts, "</svg>"])
