"""A pipeline's timetable as text for a terminal or as SVG for a file."""

import itertools
from pathlib import Path

import jinja2

from maxtext_lite.analysis.timetable import Work, timetable
from maxtext_lite.batching.topology import PipelineShape, Schedule
from maxtext_lite.config.errors import counted

_MOST_TICKS_OF_TEXT = 24
_MOST_TICKS_OF_SVG = 96


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
