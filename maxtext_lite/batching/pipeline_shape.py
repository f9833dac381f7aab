"""The pipeline of one step: its ticks, and how long stages wait."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from maxtext_lite.config import Config

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Orders of the work of a train step on a pipeline, described in `parallel.pipeline`."""


def num_repeats(config: Config, num_stages: int) -> int:
    """The rounds of a micro-batch through the stages; 1 without a pipeline."""
    return config.num_stacked_layers // (num_stages * config.num_layers_per_pipeline_stage) if num_stages > 1 else 1


@dataclass(frozen=True)
class PipelineShape:
    """A pipeline and the work of one step.

    Attributes:
      num_stages: S.
      num_microbatches: M, microbatches of one micro-batch.
      num_repeats: R, rounds through the stages.
      gradient_accumulation_steps: A, micro-batches of a step.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    gradient_accumulation_steps: int

    def bubble_fraction(self, schedule: Schedule) -> Fraction:
        """The share of a stage's ticks without work; `1f1b` needs one round.

        With gpipe it is (S - 1) / (R M + S - 1) of each micro-batch, in the forward and in the backward pass. With
        1f1b, where a tick runs one microbatch forward and one backward, it is 2 (S - 1) / (A M + 2 (S - 1)) of a step.
        """
        idle = (self.num_stages - 1) * (1 if schedule == "gpipe" else 2)
        return Fraction(idle, self.num_ticks(schedule))

    def num_ticks(self, schedule: Schedule) -> int:
        """Times that all stages run: with gpipe for a micro-batch, forward or backward; with 1f1b for a step."""
        idle = self.num_stages - 1
        if schedule == "gpipe":
            return self.num_repeats * self.num_microbatches + idle
        return self.gradient_accumulation_steps * self.num_microbatches + 2 * idle
