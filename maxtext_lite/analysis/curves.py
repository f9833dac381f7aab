"""The lines and marks of the charts that page.js draws, downsampled to the resolution of a screen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean, median_low
from typing import Any

from maxtext_lite.analysis.charts import AXES, CHARTS, EXACT, NOISE_SCALE_BAND, STEPPED, ChartSpec
from maxtext_lite.analysis.plan_view import short_number
from maxtext_lite.analysis.run_data import Column, Run
from maxtext_lite.config.records import is_of_evaluations

FRAME = {"width": 960, "left": 104, "right": 936, "top": 24, "bottom": 412}
"""The plotting area, in the units of a chart's SVG."""

_NUM_COLORS = 8  # in page.css; further runs repeat them
_MOST_BUCKETS = 500  # of a run
_FEWEST_BUCKETS = 20
_MOST_POINTS = 7_000  # of all lines: each takes about 25 bytes, and the page must stay below 300 kB
_SEEN = 0.005  # of a chart's height: a narrower band is invisible
_BEYOND = 1e3  # times the noise scale: the high end of an interval without one
_LOG_FROM_RATIO = 50
_MOST_DOTS = 60
_MOST_STAGES = 32

Json = dict[str, Any]
Buckets = Sequence[range]
"""Ranges of a table's rows; each is one point of a line."""


def make_board(runs: Sequence[Run]) -> Json:
    """All charts of these runs, in the form that page.js reads.

    grids: for each run's steps and then its evaluations, the position of each bucket on the axes, and its first and
      last step.
    charts: lines with the mean of each bucket of a grid and, where it is visible, its lowest and highest value.
    marks: skipped updates; for a single run, changes of the batch size.
    """
    tables: list[Mapping[str, Column]] = []
    for run in runs:
        tables += [run.steps, run.evaluations]
    num_lines = 1
    for spec in CHARTS:
        for table in tables:
            num_lines += len(spec.lines_of(table).keys() & table.keys())
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _MOST_POINTS // num_lines))
    buckets = [make_buckets(len(table["step"]), most) for table in tables]
    charts = [make_chart(spec, runs, buckets) for spec in CHARTS]
    marks: list[Json] = []
    for number, run in enumerate(runs):
        marks += _skips(run, number, buckets[2 * number], color_class(number, 0, len(runs)) if len(runs) > 1 else "")
    if len(runs) == 1:
        marks += _stages(runs[0])
    return {
        "frame": FRAME,
        "grids": [_grid(table, rows) for table, rows in zip(tables, buckets, strict=True)],
        "charts": [chart for chart in charts if chart is not None],
        "marks": marks,
    }


def make_buckets(num_rows: int, most: int) -> Buckets:
    """At most `most` ranges of rows, as equal as possible; one for each row where there are so few."""
    count = min(num_rows, most)
    return [range(index * num_rows // count, (index + 1) * num_rows // count) for index in range(count)]


def downsample(column: Column, buckets: Buckets, reduce: Callable[[list[float]], float]) -> Column:
    """One number for each bucket, reduced from its values; None where it has none."""
    reduced: list[float | None] = []
    for rows in buckets:
        values = [value for value in column[rows.start : rows.stop] if value is not None]
        reduced.append(reduce(values) if values else None)
    return reduced


def _grid(table: Mapping[str, Column], buckets: Buckets) -> dict[str, Column]:
    grid = {axis: downsample(table[axis], buckets, median_low) for axis in AXES if axis in table}
    if len(buckets) < len(table["step"]):
        grid["first"] = downsample(table["step"], buckets, min)
        grid["last"] = downsample(table["step"], buckets, max)
    return grid


def color_class(run: int, series: int, num_runs: int) -> str:
    """The classes of page.css for a line: each series has its color, or with several runs each run."""
    color = series if num_runs == 1 else run
    return f"c{color % _NUM_COLORS} s{series}{' again' if color >= _NUM_COLORS else ''}"


def make_chart(spec: ChartSpec, runs: Sequence[Run], buckets: Sequence[Buckets]) -> Json | None:
    """A chart of these runs; None where it has no line."""
    if spec.unless and all(spec.unless in run.steps for run in runs):
        return None
    drawn = spec.lines_of(chain.from_iterable((*run.steps, *run.evaluations) for run in runs))
    lines: list[Json] = []
    units: dict[str, None] = {}
    for number, run in enumerate(runs):
        of_run = [unit for metric, unit in spec.units.items() if metric in run.steps]
        units[of_run[0] if of_run else spec.unit] = None
        if spec.needs and spec.needs not in run.steps:
            continue
        for series, (metric, label) in enumerate(drawn.items()):
            if not run.rows(metric):
                continue
            grid = 2 * number + is_of_evaluations(metric)
            line = {
                "name": label if len(runs) == 1 else f"{run.label}, {label}",
                "label": label,
                "metric": metric,
                "series": series,
                "run": number,
                "color": color_class(number, series, len(runs)),
                "grid": grid,
            }
            lines.append(line | _line(metric, run, buckets[grid]))
    means = chain.from_iterable(line["mean"] for line in lines)
    values = [value for value in means if value is not None]
    if not values:
        return None
    return {
        "title": spec.title,
        "unit": " or ".join(units),
        "lines": lines,
        "log": spec.may_be_log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM_RATIO,
        "zero": spec.from_zero,
        "skipped": spec.marks_skipped,
        "sizes": [*spec.lines] == ["global_batch_to_train"],
    }


def _line(metric: str, run: Run, buckets: Buckets) -> Json:
    """The values of a line over the buckets, and its style."""
    column = run.column(metric)
    # The mean of two batch sizes is not a batch size, but their lower median is.
    means = downsample(column, buckets, median_low if metric in STEPPED else fmean)
    digits = 7 if len(buckets) == len(column) else 5
    line: Json = {
        "mean": _rounded(means, digits),
        "noisy": metric.partition("/")[0] not in EXACT,
        "stepped": metric in STEPPED,
        "dots": is_of_evaluations(metric) and len(buckets) <= _MOST_DOTS,
    }
    low = column
    high = column
    if metric == "gradient_noise_scale":
        low, high = _noise_interval(run)
        line["interval"] = _BEYOND / 10  # from this multiple of the line on, the interval has no high end
    lows = downsample(low, buckets, min)
    highs = downsample(high, buckets, max)
    pairs = [(low, high) for low, high in zip(lows, highs, strict=True) if low is not None and high is not None]
    widest = max((high - low for low, high in pairs), default=0)
    if widest > 0 and widest > _SEEN * (max(high for _, high in pairs) - min(low for low, _ in pairs)):
        line["low"] = _rounded(lows, digits - 1)
        line["high"] = _rounded(highs, digits - 1)
    return line


def _noise_interval(run: Run) -> tuple[Column, Column]:
    """The interval of the noise scale; a missing high end is beyond the chart."""
    scales = run.steps["gradient_noise_scale"]
    lows, ends = (run.steps.get(name, [None] * len(scales)) for name in NOISE_SCALE_BAND)
    highs: list[float | None] = []
    for scale, low, end in zip(scales, lows, ends, strict=True):
        if end is None and low is not None and scale is not None:
            end = _BEYOND * scale
        highs.append(end)
    return lows, highs


def _rounded(column: Column, digits: int) -> Column:
    return [float(f"{value:.{digits}g}") if isinstance(value, float) else value for value in column]


def _skips(run: Run, number: int, buckets: Buckets, color: str) -> Iterator[Json]:
    """A mark for each bucket with skipped updates, at the middle one."""
    for bucket in buckets:
        rows = [row for row in bucket if run.skipped[row]]
        if rows:
            steps = ", ".join(str(run.steps["step"][row]) for row in rows[:5])
            title = f"{len(rows)} skipped: step {steps}{' ...' if len(rows) > 5 else ''}"
            at = _position(run, rows[(len(rows) - 1) // 2])
            yield {"kind": "skip", "run": number, "color": color, "title": title, "at": at}


def _stages(run: Run) -> Iterator[Json]:
    """A mark for each change of the batch size of the only run, unless there are many."""
    sizes = run.rows("global_batch_to_train")
    changes = [after for before, after in pairwise(sizes) if after[1] != before[1]]
    if len(changes) <= _MOST_STAGES:
        for step, size in changes:
            title = f"step {step}: global batch {short_number(size)}"
            at = _position(run, run.steps["step"].index(step))
            yield {"kind": "stage", "run": 0, "color": "", "title": title, "at": at, "size": size}


def _position(run: Run, row: int) -> dict[str, float | None]:
    return {axis: run.steps[axis][row] for axis in AXES if axis in run.steps}
