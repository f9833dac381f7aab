"""Which charts a report has, in the order of the page, and so which numbers of a run it reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from maxtext_lite.reporting.records import EVALUATION_BY_SOURCE, EVALUATION_METRICS

AXES = {"step": "steps", "examples_seen": "examples", "tokens_seen": "tokens"}
"""The columns that can be the x-axis, and their names."""

STEPPED = ("global_batch_to_train", "loss_scale")
"""Metrics that hold for the whole step that they stand at, and change at once."""

EXACT = (
    *STEPPED, *EVALUATION_METRICS, *EVALUATION_BY_SOURCE, "learning_rate", "param_norm", "epoch", "source_epochs",
    "gradient_noise_scale",
)  # fmt: skip
"""Metrics that are not smoothed: they have no noise, are few, or are means over many steps already."""


@dataclass(frozen=True)
class ChartSpec:
    """One chart; left out where no run has a value for it.

    Attributes:
      lines: a metric of the steps or of the evaluations, and its name in the chart; one line for each run.
      by_source: an object of such metrics by the name of a source, each of which is a line.
      may_be_log: the y-axis is logarithmic where the values span a wide range.
      needs: only runs that have this metric are drawn.
      unless: left out where every run has this metric.
      marks_skipped: steps whose update was skipped are marked.
    """

    title: str
    unit: str
    lines: Mapping[str, str]
    from_zero: bool = True
    may_be_log: bool = False
    needs: str = ""
    unless: str = ""
    marks_skipped: bool = False
    by_source: str = ""

    def lines_of(self, columns: Iterable[str]) -> Mapping[str, str]:
        """`lines`, with those by source that are among the columns."""
        named = ((name, *name.partition("/")) for name in columns)
        return {**self.lines, **{name: source for name, metric, _, source in named if metric == self.by_source}}


CHARTS = (
    ChartSpec("Reward", "mean over responses; training draws them, the held-out ones may be the likeliest",
              {"reward": "training", "eval_reward": "held out", "reward_std": "within groups"}),
    ChartSpec("Held-out accuracy", "fraction of the responses to held-out prompts that are correct",
              {"eval_accuracy": "held out"}),
    ChartSpec("Loss", "nats per target token, or per pair in DPO", {"loss": "training", "eval_loss": "held out"},
              from_zero=False, marks_skipped=True),
    ChartSpec("Held-out loss by source", "nats per target token", {}, from_zero=False, by_source="eval_losses"),
    ChartSpec("Responses", "mean tokens of a response", {"response_tokens": "tokens"}),
    ChartSpec("Responses from which less is learned",
              "fraction: of prompts whose responses are all as good, of responses that were cut off",
              {"equal_reward_groups": "all as good", "truncated_responses": "cut off"}),
    ChartSpec("Divergence and uncertainty", "nats per response token",
              {"token_nll": "-log-probability", "kl": "KL to the reference"}),
    ChartSpec("Clipped ratios", "fraction of response tokens",
              {"clip_fraction_low": "from below", "clip_fraction_high": "from above"}),
    ChartSpec("Rewards of answers", "beta times the log-probability's ratio to the reference's",
              {"reward_chosen": "chosen", "reward_rejected": "rejected"}, from_zero=False),
    ChartSpec("Pairs whose chosen answer has the larger reward", "fraction of the pairs of a step",
              {"reward_accuracy": "accuracy"}),
    ChartSpec("Batch size", "examples per step, global_batch_to_train", {"global_batch_to_train": "global batch"}),
    ChartSpec("Gradient noise scale and batch", "examples",
              {"gradient_noise_scale": "noise scale, and where it lies in 68 of 100 runs",
               "global_batch_to_train": "global batch"}, may_be_log=True, needs="gradient_noise_scale"),
    ChartSpec("Learning rate", "", {"learning_rate": "learning rate"}),
    ChartSpec("Throughput", "target tokens per second", {"tokens_per_second": "tokens/s"}),
    ChartSpec("Model FLOP utilisation", "fraction of the devices' peak", {"mfu": "MFU"}),
    ChartSpec("Model FLOPs", "TFLOP/s per device", {"tflops_per_device": "TFLOP/s"}, unless="mfu"),
    ChartSpec("Time of a step", "seconds", {"step_seconds": "whole step", "data_seconds": "waiting for data"},
              may_be_log=True),
    ChartSpec("Sampling, judging, training", "seconds of a step that each was busy",
              {"rollout_seconds": "rollout", "train_seconds": "training", "reward_seconds": "rewards"},
              may_be_log=True),
    ChartSpec("Overlap", "fraction of training that ran beside a rollout", {"overlap_fraction": "overlap"}),
    ChartSpec("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, may_be_log=True, marks_skipped=True),
    ChartSpec("Parameter norm", "", {"param_norm": "parameter norm"}, from_zero=False),
    ChartSpec("Loss scale", "float16", {"loss_scale": "loss scale"}, may_be_log=True),
    ChartSpec("Auxiliary losses", "", {"moe_balance_loss": "expert balance", "z_loss": "z-loss"}, may_be_log=True),
    ChartSpec("Epochs", "passes over the data", {"epoch": "epoch"}),
    ChartSpec("Epochs by source", "passes over each source", {}, by_source="source_epochs"),
    ChartSpec("Target tokens by source", "share since the mixture last changed", {}, by_source="source_token_shares"),
)  # fmt: skip
"""All charts, in the order of the page."""

NOISE_SCALE_BAND = ("gradient_noise_scale_low", "gradient_noise_scale_high", "gradient_noise_scale_error")
"""The ends of the noise scale's interval, of which the high one may be none, and its relative standard error."""

STEP_METRICS = (
    "examples_seen", "tokens_seen", *NOISE_SCALE_BAND,
    *dict.fromkeys(metric for spec in CHARTS for metric in spec.lines if metric not in EVALUATION_METRICS),
)  # fmt: skip
"""The numbers of a step's line in metrics.jsonl that a report reads."""

STEPS_BY_SOURCE = ("source_epochs",)
"""Its objects of numbers by the name of a source."""
