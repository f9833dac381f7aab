"""Timetables of the pipeline: what each stage does in each tick of one step."""

from dataclasses import dataclass

from maxtext_lite.batching.topology import PipelineShape, Schedule


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


def timetable(shape: PipelineShape, schedule: Schedule) -> list[list[Work]]:
    """For each stage, its work in each tick of one step."""
    return _gpipe(shape) if schedule == "gpipe" else _one_forward_one_backward(shape)


def _gpipe(shape: PipelineShape) -> list[list[Work]]:
    microbatches = shape.num_microbatches
    passes = shape.num_repeats * microbatches
    stages: list[list[Work]] = []
    for stage in range(shape.num_stages):
        ticks: list[Work] = []
        for micro_batch in range(shape.gradient_accumulation_steps):
            forward: list[Work] = []
            for tick in range(shape.num_ticks("gpipe")):
                number = tick - stage
                working = 0 <= number < passes
                first = micro_batch * microbatches
                piece = Piece(first + number % microbatches, number // microbatches) if working else None
                forward.append(Work(piece, None))
            ticks += forward
            ticks += [Work(None, work.forward) for work in reversed(forward)]
        stages.append(ticks)
    return stages


def _one_forward_one_backward(shape: PipelineShape) -> list[list[Work]]:
    pieces = shape.gradient_accumulation_steps * shape.num_microbatches
    turn = shape.num_stages - 1

    def piece(number: int) -> Piece | None:
        return Piece(number, 0) if 0 <= number < pieces else None

    stages: list[list[Work]] = []
    for stage in range(shape.num_stages):
        ticks = range(shape.num_ticks("1f1b"))
        stages.append([Work(piece(tick - stage), piece(tick - 2 * turn + stage)) for tick in ticks])
    return stages
