"""A pipeline's timetable as text for a terminal or as SVG for a file."""

import math

from maxtext_lite.batching.pipeline_shape import PipelineShape, Schedule, Work
from maxtext_lite.config.errors import counted

_MOST_TICKS_OF_TEXT = 24
_MOST_TICKS_OF_SVG = 96
_DARK, _WHITE = "#222222", "#ffffff"
_COLORS = (
    ("#4477aa", _WHITE), ("#66ccee", _DARK), ("#228833", _WHITE), ("#ccbb44", _DARK), ("#ee6677", _DARK),
    ("#aa3377", _WHITE),
)  # fmt: skip
"""Colors of successive rounds or micro-batches, with the text color for each; the Bright palette of P. Tol."""
_CHARACTER_EM = 0.56  # average width of a character in a wide sans-serif, as the reader's font is unknown


def pipeline_text(shape: PipelineShape, schedule: Schedule) -> str:
    """A line for each stage, a column for each tick: F3b is microbatch 3 forward in the second round, a dot is idle."""
    rows = shape.timetable(schedule)
    cells: list[list[str]] = []
    for row in rows:
        cells.append([_cell(shape, work) for work in row[:_MOST_TICKS_OF_TEXT]])
    width = max(len(each) for row in cells for each in row)
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
    """The schedule, its number of ticks, and the share of them in which a stage is idle."""
    ticks = len(shape.timetable(schedule)[0])
    accumulation = shape.gradient_accumulation_steps
    batches = "micro-batch" if accumulation == 1 else "micro-batches"
    return (
        f"{schedule}: {ticks} ticks forwards {'or' if schedule == 'gpipe' else 'and'} backwards in a step of "
        f"{accumulation} {batches} x {shape.num_microbatches} microbatches, "
        f"{float(shape.bubble_fraction(schedule)):.1%} of them waiting"
    )


def pipeline_svg(shape: PipelineShape, schedule: Schedule) -> str:
    """The timetable as an SVG document: forward boxes are filled, backward boxes hollow, each round has a color."""
    rows = [row[:_MOST_TICKS_OF_SVG] for row in shape.timetable(schedule)]
    legend = ["filled: forward, hollow: backward, empty: idle; numbers are pipeline microbatches of the step"]
    if shape.num_repeats > 1 or shape.gradient_accumulation_steps > 1:
        legend.append(f"colors are {'rounds' if shape.num_repeats > 1 else 'micro-batches'}")
    if more := _more(len(shape.timetable(schedule)[0]) - len(rows[0])):
        legend.append(f"{more} to the right")
    box, lane, left, top = 26, 44, 74, 34
    title, below = heading(shape, schedule), ", ".join(legend)
    text_width = max(16 + math.ceil(_CHARACTER_EM * size * len(text)) for text, size in ((title, 13), (below, 11)))
    width, height = max(left + box * len(rows[0]) + 12, text_width), top + lane * len(rows) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="{_WHITE}"/>',
        f'<text x="8" y="20" font-size="13" fill="{_DARK}">{title}</text>',
    ]
    for stage, row in enumerate(rows):
        y = top + lane * stage
        parts.append(f'<text x="8" y="{y + 22}" fill="{_DARK}">stage {stage}</text>')
        for tick, work in enumerate(row):
            parts += _boxes(shape, work, left + box * tick, y, box - 2)
    parts.append(f'<text x="8" y="{height - 8}" fill="#555555">{below}</text></svg>')
    return "".join(parts)


def _boxes(shape: PipelineShape, work: Work, x: int, y: int, size: int) -> list[str]:
    found: list[str] = []
    for piece, dy, full in ((work.forward, 0, True), (work.backward, 19, False)):
        if piece is None:
            continue
        group = piece.round if shape.num_repeats > 1 else piece.number // shape.num_microbatches
        color, text_on_it = _COLORS[group % len(_COLORS)]
        fill, text = (color, text_on_it) if full else (_WHITE, _DARK)
        found.append(
            f'<rect x="{x}" y="{y + dy}" width="{size}" height="17" rx="2" fill="{fill}" stroke="{color}"/>'
            f'<text x="{x + size / 2:g}" y="{y + dy + 12.5:g}" text-anchor="middle" fill="{text}">{piece.number}</text>'
        )
    return found
