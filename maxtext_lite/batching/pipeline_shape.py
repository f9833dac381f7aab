"""Timetables of the pipeline: what each stage does in each tick, and how long stages wait."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from maxtext_lite.config import Config

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Orders of the work of a train step on a pipeline, described in `parallel.Pipeline`."""


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
        """The share of its ticks in which a stage has no work; `1f1b` needs one round.

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

    def timetable(self, schedule: Schedule) -> list[list["Work"]]:
        """For each stage, its work in each tick of one step."""
        return self._gpipe() if schedule == "gpipe" else self._one_forward_one_backward()

    def _gpipe(self) -> list[list["Work"]]:
        M = self.num_microbatches
        S = self.num_stages
        passes = self.num_repeats * M
        stages: list[list[Work]] = []
        for stage in range(S):
            ticks: list[Work] = []
            for micro_batch in range(self.gradient_accumulation_steps):
                forward: list[Work] = []
                for tick in range(self.num_ticks("gpipe")):
                    number = tick - stage
                    working = 0 <= number < passes
                    piece = Piece(micro_batch * M + number % M, number // M) if working else None
                    forward.append(Work(piece, None))
                ticks += forward
                ticks += [Work(None, work.forward) for work in reversed(forward)]
            stages.append(ticks)
        return stages

    def _one_forward_one_backward(self) -> list[list["Work"]]:
        pieces = self.gradient_accumulation_steps * self.num_microbatches
        turn = self.num_stages - 1

        def piece(number: int) -> Piece | None:
            return Piece(number, 0) if 0 <= number < pieces else None

        return [
            [Work(piece(tick - stage), piece(tick - 2 * turn + stage)) for tick in range(self.num_ticks("1f1b"))]
            for stage in range(self.num_stages)
        ]


@dataclass(frozen=True)
class Piece:
    """A pipeline microbatch in one of its rounds; both count from 0, microbatches over the whole step."""

    number: int
    round: int


@dataclass(frozen=True)
class Work:
    """The work of a stage in a tick; None where it has none."""

    forward: Piece | None
    backward: Piece | None
