"""A pipeline's timetable as a picture: text for a terminal, SVG for a file."""

import math
from collections.abc import Sequence

from maxtext_lite.batching.pipeline_shape import Piece, PipelineShape, Schedule, Work

_MOST_TICKS_OF_TEXT = 24
_MOST_TICKS_OF_SVG = 96
_DARK, _WHITE = "#222222", "#ffffff"
_COLORS = (
    ("#4477aa", _WHITE), ("#66ccee", _DARK), ("#228833", _WHITE), ("#ccbb44", _DARK), ("#ee6677", _DARK),
    ("#aa3377", _WHITE),
)  # fmt: skip
"""Of rounds or micro-batches in turn; the Bright palette of P. Tol, told apart by colour-blind readers too. Beside each
stands the colour of numbers on it, of the two that which is easier to read there."""
_CHARACTER_EM = 0.56
"""Width of a character of a sentence, on average, in a wide sans-serif; SVG cannot ask for that of the reader's."""


def pipeline_text(shape: PipelineShape, schedule: Schedule) -> str:
    """A line for each stage, a column for each tick: F3 is microbatch 3 forwards, B3 backwards, a dot a wait."""
    rows = shape.timetable(schedule)
    shown = [row[:_MOST_TICKS_OF_TEXT] for row in rows]
    several = shape.num_repeats > 1
    cells = [[_cell(work, several) for work in row] for row in shown]
    width = max(len(cell) for row in cells for cell in row)
    left = len(rows[0]) - len(shown[0])
    more = f" ... and {left} tick{'' if left == 1 else 's'} more" if left else ""
    lines = [
        f"stage {stage:<3} {' '.join(cell.ljust(width) for cell in row).rstrip()}{more}"
        for stage, row in enumerate(cells)
    ]
    return "\n".join([heading(shape, schedule), *lines])


def heading(shape: PipelineShape, schedule: Schedule) -> str:
    """The schedule, its ticks and the share of them that a stage waits."""
    bubble, ticks = shape.bubble_fraction(schedule), len(shape.timetable(schedule)[0])
    what = "forwards or backwards" if schedule == "gpipe" else "forwards and backwards"
    return (
        f"{schedule}: {ticks} ticks {what} in a step of {shape.gradient_accumulation_steps} micro-batch"
        f"{'' if shape.gradient_accumulation_steps == 1 else 'es'} x {shape.num_microbatches} microbatches, "
        f"{float(bubble):.1%} of them waiting"
    )


def _cell(work: Work, several_rounds: bool) -> str:
    parts = [
        f"{letter}{piece.number}{_round_letter(piece) if several_rounds else ''}"
        for letter, piece in (("F", work.forward), ("B", work.backward))
        if piece is not None
    ]
    return "".join(parts) or "."


def _round_letter(piece: Piece) -> str:
    """A for the first round, b for the second."""
    return chr(ord("a") + piece.round % 26)


def pipeline_svg(shape: PipelineShape, schedule: Schedule) -> str:
    """The timetable as a whole SVG document: forward boxes full, backward boxes hollow, a colour for each round."""
    timetable = shape.timetable(schedule)
    rows = [row[:_MOST_TICKS_OF_SVG] for row in timetable]
    box, lane, left, top = 26, 44, 74, 34
    sentences = [(heading(shape, schedule), 13), (_legend(shape, len(timetable[0]) - len(rows[0])), 11)]
    text_width = max(16 + math.ceil(_CHARACTER_EM * size * len(sentence)) for sentence, size in sentences)
    width, height = max(left + box * len(rows[0]) + 12, text_width), top + lane * len(rows) + 26
    (title, title_size), (legend, legend_size) = sentences
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="{legend_size}">',
        f'<rect width="{width}" height="{height}" fill="{_WHITE}"/>',
        f'<text x="8" y="20" font-size="{title_size}" fill="{_DARK}">{title}</text>',
    ]
    for stage, row in enumerate(rows):
        y = top + lane * stage
        parts.append(f'<text x="8" y="{y + 22}" fill="{_DARK}">stage {stage}</text>')
        for tick, work in enumerate(row):
            parts += _boxes(shape, work, left + box * tick, y, box - 2)
    parts.append(f'<text x="8" y="{height - 8}" fill="#555555">{legend}</text></svg>')
    return "".join(parts)


def _legend(shape: PipelineShape, num_ticks_left_out: int) -> str:
    """What boxes, numbers and colours mean, and how much is not shown."""
    parts = ["full: forwards, hollow: backwards, empty: waiting; numbers are pipeline microbatches of the step"]
    if shape.num_repeats > 1:
        parts.append("colours are rounds")
    elif shape.gradient_accumulation_steps > 1:
        parts.append("colours are micro-batches")
    if num_ticks_left_out:
        parts.append(f"{num_ticks_left_out} tick{'' if num_ticks_left_out == 1 else 's'} more to the right")
    return ", ".join(parts)


def _boxes(shape: PipelineShape, work: Work, x: int, y: int, size: int) -> Sequence[str]:
    found = []
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
