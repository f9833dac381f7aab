"""The charts of a report, in the order of the page, and the metrics that they need."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from maxtext_lite.config.records import EVALUATION_BY_SOURCE, EVALUATION_METRICS

AXES = {"step": "steps", "examples_seen": "examples", "tokens_seen": "tokens"}
"""The columns that can be the x-axis, and their names."""

STEPPED = ("global_batch_to_train", "loss_scale")
"""Metrics that are constant within a step and jump between steps."""

EXACT = (
    *STEPPED, *EVALUATION_METRICS, *EVALUATION_BY_SOURCE, "learning_rate", "param_norm", "epoch", "source_epochs",
    "gradient_noise_scale",
)  # fmt: skip
"""Metrics that are not smoothed: they have no noise, have few values, or are averages over many steps already."""


@dataclass(frozen=True)
class ChartSpec:
    """One chart; there is none where no run has a value for it.

    Attributes:
      lines: metrics of the steps or of the evaluations, with their names in the chart; one line for each run.
      by_source: an object of metrics by source; each source is a line.
      may_be_log: the y-axis is logarithmic where the values span a wide range.
      needs: only runs with this metric are drawn.
      unless: there is no chart where every run has this metric.
      marks_skipped: marks the steps whose update was skipped.
      units: the unit of runs with a metric, where it is not `unit`.
    """

    title: str
    unit: str = ""
    lines: Mapping[str, str] = field(default_factory=dict[str, str])
    from_zero: bool = True
    may_be_log: bool = False
    needs: str = ""
    unless: str = ""
    marks_skipped: bool = False
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    by_source: str = ""

    def lines_of(self, columns: Iterable[str]) -> Mapping[str, str]:
        """`lines`, and the lines by source that are among the columns."""
        found = dict(self.lines)
        for name in columns:
            metric, _, source = name.partition("/")
            if metric == self.by_source:
                found[name] = source
        return found


CHARTS = tuple(
    ChartSpec(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
)
"""All charts, in the order of the page."""

NOISE_SCALE_BAND = ("gradient_noise_scale_low", "gradient_noise_scale_high")
"""The ends of the noise scale's interval; the high one may be missing."""

_LINES = dict.fromkeys(itertools.chain.from_iterable(spec.lines for spec in CHARTS))
STEP_METRICS = (
    "examples_seen", "tokens_seen", "gradient_noise_scale_error", *NOISE_SCALE_BAND,
    *(metric for metric in _LINES if metric not in EVALUATION_METRICS),
)  # fmt: skip
"""The numbers that a report reads from a step's line in metrics.jsonl."""

STEPS_BY_SOURCE = ("source_epochs",)
"""The objects of numbers by source that a report reads from a step's line."""
