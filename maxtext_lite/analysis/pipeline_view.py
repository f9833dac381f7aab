"""The timetable of a pipeline, what each stage does in each tick: as text for a terminal or as SVG for a file."""

import itertools
from pathlib import Path
from typing import NamedTuple

import jinja2

from maxtext_lite.batching.topology import PipelineShape, Schedule
from maxtext_lite.config.errors import counted

_MOST_TICKS_OF_TEXT = 24
_MOST_TICKS_OF_SVG = 96


class Piece(NamedTuple):
    """A pipeline microbatch in one of its rounds; both count from 0, microbatches over the whole step."""

    number: int
    round: int


class Work(NamedTuple):
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


def pipeline_text(shape: PipelineShape, schedule: Schedule) -> str:
    """A line per stage, a column per tick: F3b is microbatch 3 forward in round two, a dot is idle."""
    rows = timetable(shape, schedule)
    cells: list[list[str]] = []
    for row in rows:
        cells.append([_cell(shape, work) for work in row[:_MOST_TICKS_OF_TEXT]])
    width = max(map(len, itertools.chain.from_iterable(cells)))
    more = _more(len(rows[0]) - len(cells[0]))
    lines = [heading(shape, schedule)]
    for stage, row in enumerate(cells):
        line = f"stage {stage:<3} {' '.join(each.ljust(width) for each in row).rstrip()}"
        lines.append(f"{line} ... and {more}" if more else line)
    return "\n".join(lines)


def _cell(shape: PipelineShape, work: Work) -> str:
    text = ""
    for letter, piece in (("F", work.forward), ("B", work.backward)):
        if piece:
            text += f"{letter}{piece.number}"
            text += chr(ord("a") + piece.round % 26) if shape.num_repeats > 1 else ""
    return text or "."


def _more(num_ticks: int) -> str:
    return f"{counted(num_ticks, 'tick')} more" if num_ticks else ""


def heading(shape: PipelineShape, schedule: Schedule) -> str:
    """The schedule, its number of ticks, and a stage's share of idle ticks."""
    ticks = len(timetable(shape, schedule)[0])
    accumulation = shape.gradient_accumulation_steps
    batches = "micro-batch" if accumulation == 1 else "micro-batches"
    return (
        f"{schedule}: {ticks} ticks forwards {'or' if schedule == 'gpipe' else 'and'} backwards in a step of "
        f"{accumulation} {batches} x {shape.num_microbatches} microbatches, "
        f"{float(shape.bubble_fraction(schedule)):.1%} of them waiting"
    )


def pipeline_svg(shape: PipelineShape, schedule: Schedule) -> str:
    """The timetable as an SVG document: forward boxes are filled, backward boxes hollow, each round has a color."""
    rows = [row[:_MOST_TICKS_OF_SVG] for row in timetable(shape, schedule)]
    legend = ["filled: forward, hollow: backward, empty: idle; numbers are pipeline microbatches of the step"]
    if shape.num_repeats > 1 or shape.gradient_accumulation_steps > 1:
        legend.append(f"colors are {'rounds' if shape.num_repeats > 1 else 'micro-batches'}")
    if more := _more(len(timetable(shape, schedule)[0]) - len(rows[0])):
        legend.append(f"{more} to the right")
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    drawing = pages.get_template("pipeline.svg")
    return drawing.render(shape=shape, rows=rows, title=heading(shape, schedule), legend=", ".join(legend))
