"""Charts: which there are, and their values over the x-axes, downsampled to what a screen can show."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from maxtext_lite.reporting.downsample import (
    Bucket,
    Points,
    at_middles,
    changes,
    downsample,
    make_buckets,
    running_median,
)
from maxtext_lite.reporting.records import EVALUATION_METRICS
from maxtext_lite.reporting.run_data import Column, Run
from maxtext_lite.reporting.scales import Scale, short_number, value_scale

LEFT, RIGHT, TOP, BOTTOM = 52, 468, 12, 206
"""The frame that lines are drawn in, in the pixels of svg.py."""

AXES = {"step": "steps", "examples_seen": "examples", "tokens_seen": "tokens"}
"""The columns that can be the x-axis, and their names."""

_MOST_BUCKETS = 500  # of one run; each is drawn with two extremes and a mean
_MOST_BUCKETS_OF_ALL = 1500
_FEWEST_BUCKETS = 40
_BEYOND = 1e3
_FEWEST_SMOOTHED = 20
_MOST_LABELLED_STAGES = 8
_MOST_MARKED_STAGES = 32


@dataclass(frozen=True)
class LineSpec:
    """One line of a chart for each run.

    Attributes:
      metric: a column of the steps or of the evaluations.
      bounds: the columns of an interval's ends, drawn as a band; a high end of None has no bound.
      error: the column of its relative standard error, drawn as a band where there are no bounds.
      is_noisy: a running median is drawn over the values, which are drawn faintly.
      stepped: a value holds for the whole step that it stands at, and changes at once.
    """

    metric: str
    label: str
    bounds: tuple[str, str] | None = None
    error: str | None = None
    stepped: bool = False
    is_noisy: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """One chart; left out where no run has a value for it.

    Attributes:
      needs: only runs that have one of these columns are drawn; default: those of the lines.
      unless: left out, too, where every run has this one.
      marks: what is marked besides: "skipped" steps, "stages" of the batch size with their sizes.
    """

    key: str
    title: str
    unit: str
    lines: tuple[LineSpec, ...]
    from_zero: bool = True
    may_be_log: bool = False
    needs: tuple[str, ...] = ()
    unless: str = ""
    marks: tuple[str, ...] = ("stages",)


CHARTS = (
    ChartSpec(
        "accuracy",
        "Held-out accuracy",
        "fraction of the responses to held-out prompts that are correct",
        (LineSpec("eval_accuracy", "held out"),),
    ),
    ChartSpec(
        "reward",
        "Reward",
        "mean over responses; training draws them, the held-out ones may be the likeliest",
        (
            LineSpec("reward", "training", is_noisy=True),
            LineSpec("eval_reward", "held out"),
            LineSpec("reward_std", "within groups"),
        ),
    ),
    ChartSpec(
        "responses",
        "Responses",
        "mean tokens of a response",
        (LineSpec("response_tokens", "tokens"),),
    ),
    ChartSpec(
        "lost-responses",
        "Responses from which less is learned",
        "fraction: of prompts whose responses are all as good, of responses that were cut off",
        (LineSpec("equal_reward_groups", "all as good"), LineSpec("truncated_responses", "cut off")),
    ),
    ChartSpec(
        "policy",
        "Divergence and uncertainty",
        "nats per response token",
        (LineSpec("token_nll", "-log-probability"), LineSpec("kl", "KL to the reference")),
    ),
    ChartSpec(
        "clipped",
        "Clipped ratios",
        "fraction of response tokens",
        (LineSpec("clip_fraction_low", "from below"), LineSpec("clip_fraction_high", "from above")),
    ),
    ChartSpec(
        "phases",
        "Sampling, judging, training",
        "seconds of a step that each was busy",
        (
            LineSpec("rollout_seconds", "rollout"),
            LineSpec("train_seconds", "training"),
            LineSpec("reward_seconds", "rewards"),
        ),
        may_be_log=True,
    ),
    ChartSpec(
        "overlap",
        "Overlap",
        "fraction of training that ran beside a rollout",
        (LineSpec("overlap_fraction", "overlap"),),
    ),
    ChartSpec(
        "loss",
        "Loss",
        "nats per target token, or per pair in DPO",
        (LineSpec("loss", "training"), LineSpec("eval_loss", "held out")),
        from_zero=False,
        marks=("stages", "skipped"),
    ),
    ChartSpec(
        "rewards",
        "Rewards of answers",
        "beta times the log-probability's ratio to the reference's",
        (LineSpec("reward_chosen", "chosen"), LineSpec("reward_rejected", "rejected")),
        from_zero=False,
    ),
    ChartSpec(
        "reward-accuracy",
        "Pairs whose chosen answer has the larger reward",
        "fraction of the pairs of a step",
        (LineSpec("reward_accuracy", "accuracy"),),
    ),
    ChartSpec(
        "batch",
        "Batch size",
        "examples per step, global_batch_to_train",
        (LineSpec("global_batch_to_train", "global batch", stepped=True),),
        marks=("stages", "sizes"),
    ),
    ChartSpec(
        "noise",
        "Gradient noise scale and batch",
        "examples",
        (
            LineSpec(
                "gradient_noise_scale",
                "noise scale, and where it lies in 68 of 100 runs",
                bounds=("gradient_noise_scale_low", "gradient_noise_scale_high"),
                error="gradient_noise_scale_error",  # of runs that have no bounds yet
            ),
            LineSpec("global_batch_to_train", "global batch", stepped=True),
        ),
        may_be_log=True,
        needs=("gradient_noise_scale",),
    ),
    ChartSpec("learning-rate", "Learning rate", "", (LineSpec("learning_rate", "learning rate"),)),
    ChartSpec(
        "throughput",
        "Throughput",
        "target tokens per second; of each step, and the median of those around it",
        (LineSpec("tokens_per_second", "tokens/s", is_noisy=True),),
    ),
    ChartSpec(
        "mfu", "Model FLOP utilisation", "fraction of the devices' peak", (LineSpec("mfu", "MFU", is_noisy=True),)
    ),
    ChartSpec(
        "tflops",
        "Model FLOPs",
        "TFLOP/s per device",
        (LineSpec("tflops_per_device", "TFLOP/s", is_noisy=True),),
        unless="mfu",
    ),
    ChartSpec(
        "seconds",
        "Time of a step",
        "seconds",
        (LineSpec("step_seconds", "whole step", is_noisy=True), LineSpec("data_seconds", "waiting for data")),
        may_be_log=True,
    ),
    ChartSpec(
        "grad-norm",
        "Gradient norm",
        "before clipping",
        (LineSpec("grad_norm", "gradient norm", is_noisy=True),),
        may_be_log=True,
        marks=("stages", "skipped"),
    ),
    ChartSpec("param-norm", "Parameter norm", "", (LineSpec("param_norm", "parameter norm"),), from_zero=False),
    ChartSpec(
        "loss-scale",
        "Loss scale",
        "float16",
        (LineSpec("loss_scale", "loss scale", stepped=True),),
        may_be_log=True,
    ),
    ChartSpec(
        "balance",
        "Auxiliary losses",
        "",
        (LineSpec("moe_balance_loss", "expert balance"), LineSpec("z_loss", "z-loss")),
        may_be_log=True,
    ),
    ChartSpec("epoch", "Epochs", "passes over the data", (LineSpec("epoch", "epoch"),)),
)
"""All charts, in the order of the page."""


@dataclass(frozen=True)
class Grid:
    """The buckets of a run's steps, or of its evaluations, that all of its lines share."""

    run: int
    buckets: Sequence[Bucket]
    positions: dict[str, list[float | None]]
    first_steps: list[float | None]
    last_steps: list[float | None]

    def to_json(self) -> dict[str, Any]:
        """For the script; first and last steps only where a bucket holds several."""
        exact = self.first_steps == self.last_steps
        return {**self.positions, **({} if exact else {"first": self.first_steps, "last": self.last_steps})}


@dataclass(frozen=True)
class Line:
    """A line to draw: its values over a grid."""

    spec: LineSpec
    name: str
    run: int
    series: int
    grid: int
    points: Points

    def to_json(self) -> dict[str, Any]:
        """For the script; low and high only where they differ from the mean."""
        extremes = (
            {} if self.points.is_exact else {"low": _rounded(self.points.low), "high": _rounded(self.points.high)}
        )
        plain = {"name": self.name, "grid": self.grid, "mean": _rounded(self.points.mean), **extremes}
        if self.smooth is not None:
            plain["smooth"] = _rounded(self.smooth)
        if self.spec.bounds:
            plain["open"] = _BEYOND / 10  # so far above the line an end is none
        return plain | ({"stepped": True} if self.spec.stepped else {})

    @property
    def smooth(self) -> Column | None:
        """The line that is drawn over the values; None where they are the line."""
        is_long = len(self.points.mean) >= _FEWEST_SMOOTHED
        return running_median(self.points.mean) if self.spec.is_noisy and is_long else None


@dataclass(frozen=True)
class Mark:
    """Something that happened at a bucket of a grid: a stage of the batch size began, or steps were skipped."""

    kind: str
    run: int
    grid: int
    index: int
    title: str
    label: str = ""
    height: float = TOP


@dataclass(frozen=True)
class Chart:
    """A chart with its values."""

    spec: ChartSpec
    lines: list[Line]
    marks: list[Mark]
    y: Scale

    def to_json(self) -> dict[str, Any]:
        """For the script."""
        y = {"low": self.y.low, "high": self.y.high, "log": self.y.is_log}
        return {"y": y, "lines": [line.to_json() for line in self.lines]}


@dataclass(frozen=True)
class Board:
    """All charts of a page over the same x-axes.

    Attributes:
      x: the scales of the axes that some run has.
      longest: the most steps that one point stands for.
    """

    x: dict[str, Scale]
    grids: list[Grid]
    charts: list[Chart]
    num_runs: int
    longest: int

    def to_json(self) -> dict[str, Any]:
        """Everything that the script needs to draw the charts again over another axis."""
        axes = {
            name: {"low": x.low, "high": x.high, "ticks": [[tick, short_number(tick)] for tick in x.ticks()]}
            for name, x in self.x.items()
        }
        return {
            "frame": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
            "axes": axes,
            "grids": [grid.to_json() for grid in self.grids],
            "charts": [chart.to_json() for chart in self.charts],
        }


def make_board(runs: Sequence[Run]) -> Board:
    """The charts of these runs."""
    most = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _MOST_BUCKETS_OF_ALL // len(runs)))
    grids = [_grid(number, table, most) for number, run in enumerate(runs) for table in (run.steps, run.evaluations)]
    charts = [chart for spec in CHARTS if (chart := _chart(spec, runs, grids))]
    x = {}
    for name in AXES:
        values = [value for grid in grids for value in grid.positions[name] if value is not None]
        if values:
            low = min(values)
            x[name] = Scale(0 if low < 0.2 * max(values) else low, max(values), LEFT, RIGHT)
            if x[name].low == x[name].high:
                x[name] = Scale(x[name].low - 1, x[name].high + 1, LEFT, RIGHT)
    longest = max((bucket.end - bucket.first for grid in grids for bucket in grid.buckets), default=1)
    return Board(x, grids, charts, len(runs), longest)


def _grid(run: int, table: Any, most: int) -> Grid:
    steps: Column = table["step"]
    buckets = make_buckets(len(steps), most)
    missing: Column = [None] * len(steps)
    return Grid(
        run,
        buckets,
        {name: at_middles(table.get(name, missing), buckets) for name in AXES},
        [steps[bucket.first] for bucket in buckets],
        [steps[bucket.end - 1] for bucket in buckets],
    )


def _chart(spec: ChartSpec, runs: Sequence[Run], grids: Sequence[Grid]) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        if spec.needs and not any(metric in run.steps for metric in spec.needs):
            continue
        for series, line in enumerate(spec.lines):
            of_evaluations = line.metric in EVALUATION_METRICS
            column = (run.evaluations if of_evaluations else run.steps).get(line.metric, ())
            if any(value is not None for value in column):
                grid = 2 * number + of_evaluations
                name = line.label if len(runs) == 1 else f"{run.label}, {line.label}"
                points = _points(line, run, column, grids[grid].buckets)
                lines.append(Line(line, name, number, series, grid, points))
    superseded = bool(spec.unless) and all(spec.unless in run.steps for run in runs)
    if superseded or not lines:
        return None
    y = _value_scale(spec, lines)
    marks = [mark for number, run in enumerate(runs) for mark in _marks(spec, run, number, len(runs), grids, y)]
    return Chart(spec, lines, marks, y)


def _points(line: LineSpec, run: Run, column: Column, buckets: Sequence[Bucket]) -> Points:
    low = high = None
    if line.bounds and line.bounds[0] in run.steps:
        low = run.steps[line.bounds[0]]
        ends = run.steps.get(line.bounds[1], [None] * len(low))
        # One without a bound leaves the chart.
        high = [
            _BEYOND * value if end is None and at is not None and value is not None else end
            for at, end, value in zip(low, ends, column, strict=True)
        ]
    elif line.error and line.error in run.steps:
        errors = run.steps[line.error]
        low = [_with_error(value, error, -1) for value, error in zip(column, errors, strict=True)]
        high = [_with_error(value, error, 1) for value, error in zip(column, errors, strict=True)]
    points = downsample(column, buckets, low=low, high=high)
    # The mean of two batch sizes is none: such a line has the value of the row that its position is taken from.
    return Points(at_middles(column, buckets), points.low, points.high) if line.stepped else points


def _with_error(value: float | None, relative_error: float | None, side: int) -> float | None:
    if value is None or relative_error is None:
        return value
    return value + side * abs(value) * relative_error


def _value_scale(spec: ChartSpec, lines: Sequence[Line]) -> Scale:
    """The y-axis: over all extremes, but a wild error bar leaves it, lest it flattens the line."""
    values: list[float] = []
    for line in lines:
        means = [value for value in line.points.mean if value is not None]
        ends = [value for column in (line.points.low, line.points.high) for value in column if value is not None]
        if line.spec.error or line.spec.bounds:
            ends = [value for value in ends if min(means) / 2 <= value <= max(means) * 2]
        values += means + ends
    return value_scale(values, start=BOTTOM, end=TOP, from_zero=spec.from_zero, may_be_log=spec.may_be_log)


def _marks(spec: ChartSpec, run: Run, number: int, num_runs: int, grids: Sequence[Grid], y: Scale) -> Iterable[Mark]:
    buckets = grids[2 * number].buckets
    if "stages" in spec.marks:
        rows = changes(run.steps, "global_batch_to_train")
        for row in rows if num_runs == 1 and len(rows) <= _MOST_MARKED_STAGES else ():
            size = run.steps["global_batch_to_train"][row] or 0
            labelled = "sizes" in spec.marks and len(rows) <= _MOST_LABELLED_STAGES
            yield Mark(
                "stage",
                number,
                2 * number,
                _bucket_of(row, buckets),
                f"step {run.steps['step'][row]}: global batch {short_number(size)}",
                short_number(size) if labelled else "",
                y.pixel(size) if labelled else TOP,
            )
    if "skipped" in spec.marks:
        for index, bucket in enumerate(buckets):
            rows = [row for row in range(bucket.first, bucket.end) if run.skipped[row]]
            if rows:
                steps = ", ".join(str(run.steps["step"][row]) for row in rows[:5]) + (" ..." if len(rows) > 5 else "")
                title = f"{len(rows)} skipped: step {steps}"
                yield Mark("skip", number, 2 * number, index, title, height=TOP + 7 + 9 * (number % 4))


def _bucket_of(row: int, buckets: Sequence[Bucket]) -> int:
    return next(index for index, bucket in enumerate(buckets) if row < bucket.end)


def _rounded(column: Column) -> list[float | None]:
    """Seven digits: what float32 holds."""
    return [value if value is None or isinstance(value, int) else float(f"{value:.7g}") for value in column]
