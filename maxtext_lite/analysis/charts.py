"""The charts of a report, in the order of the page, and the metrics that they need."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    """One chart, which is left out where no run has a value for it.

    Attributes:
      lines: metrics of the steps or of the evaluations, with their names in the chart; one line for each run.
      by_source: an object of metrics by source; each source is a line.
      may_be_log: the y-axis is logarithmic where the values span a wide range.
      needs: only runs with this metric are drawn.
      unless: the chart is left out where every run has this metric.
      marks_skipped: marks the steps whose update was skipped.
      units: the unit of runs with a metric, where it is not `unit`.
    """

    title: str
    unit: str
    lines: Mapping[str, str]
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


CHARTS = (
    ChartSpec("Reward", "mean over responses: sampled in training, possibly greedy on held-out prompts",
              {"reward": "training", "eval_reward": "held out", "reward_std": "within groups"}),
    ChartSpec("Held-out accuracy", "fraction of correct responses to held-out prompts",
              {"eval_accuracy": "held out"}),
    ChartSpec("Loss", "nats per target token", {"loss": "training", "eval_loss": "held out"},
              from_zero=False, marks_skipped=True,
              units={"reward_accuracy": "nats per pair", "reward": "objective of the policy"}),
    ChartSpec("Held-out loss by source", "nats per target token", {}, from_zero=False, by_source="eval_losses"),
    ChartSpec("Responses", "mean tokens of a response", {"response_tokens": "tokens"}),
    ChartSpec("Responses that teach less",
              "fraction of prompts without two different rewards, fraction of responses cut off, or without a reward",
              {"equal_reward_groups": "equal rewards", "truncated_responses": "cut off",
               "unscored_fraction": "unscored"}),
    ChartSpec("Divergence and uncertainty", "nats per response token",
              {"token_nll": "-log-probability", "kl": "KL to the reference"}),
    ChartSpec("Clipped ratios", "fraction of response tokens",
              {"clip_fraction_low": "from below", "clip_fraction_high": "from above"}),
    ChartSpec("Rewards of answers", "beta times the log-probability ratio to the reference",
              {"reward_chosen": "chosen", "reward_rejected": "rejected"}, from_zero=False),
    ChartSpec("Pairs whose chosen answer has the larger reward", "fraction of a step's pairs",
              {"reward_accuracy": "accuracy"}),
    ChartSpec("Batch size", "examples per step, global_batch_to_train", {"global_batch_to_train": "global batch"}),
    ChartSpec("Gradient noise scale and batch", "examples",
              {"gradient_noise_scale": "noise scale, with its 68 % interval",
               "global_batch_to_train": "global batch"}, may_be_log=True, needs="gradient_noise_scale"),
    ChartSpec("Learning rate", "", {"learning_rate": "learning rate"}),
    ChartSpec("Throughput", "target tokens per second", {"tokens_per_second": "tokens/s"}),
    ChartSpec("Model FLOP utilization", "fraction of the devices' peak", {"mfu": "MFU"}),
    ChartSpec("Model FLOPs", "TFLOP/s per device", {"tflops_per_device": "TFLOP/s"}, unless="mfu"),
    ChartSpec("Time of a step", "seconds", {"step_seconds": "whole step", "data_seconds": "waiting for data"},
              may_be_log=True),
    ChartSpec("Rollout, rewards, training", "busy seconds of a step",
              {"rollout_seconds": "rollout", "train_seconds": "training", "reward_seconds": "rewards"},
              may_be_log=True),
    ChartSpec("Overlap", "fraction of training that ran during a rollout", {"overlap_fraction": "overlap"}),
    ChartSpec("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, may_be_log=True, marks_skipped=True),
    ChartSpec("Parameter norm", "", {"param_norm": "parameter norm"}, from_zero=False),
    ChartSpec("Loss scale", "float16", {"loss_scale": "loss scale"}, may_be_log=True),
    ChartSpec("Auxiliary losses", "", {"moe_balance_loss": "expert balance", "z_loss": "z-loss"}, may_be_log=True),
    ChartSpec("Epochs", "passes over the data", {"epoch": "epoch"}),
    ChartSpec("Epochs by source", "passes over each source", {}, by_source="source_epochs"),
    ChartSpec("Target tokens by source", "share since the mixture last changed", {}, by_source="source_token_shares"),
)  # fmt: skip
"""All charts, in the order of the page."""

NOISE_SCALE_BAND = ("gradient_noise_scale_low", "gradient_noise_scale_high")
"""The ends of the noise scale's interval, of which the high one may be missing."""

STEP_METRICS = (
    "examples_seen", "tokens_seen", "gradient_noise_scale_error", *NOISE_SCALE_BAND,
    *dict.fromkeys(metric for spec in CHARTS for metric in spec.lines if metric not in EVALUATION_METRICS),
)  # fmt: skip
"""The numbers that a report reads from a step's line in metrics.jsonl."""

STEPS_BY_SOURCE = ("source_epochs",)
"""The objects of numbers by source that a report reads from a step's line."""
