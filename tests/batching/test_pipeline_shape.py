"""Timetables by their rules: each piece passes the stages in order, one at a time, and backwards after forwards."""

from fractions import Fraction

import pytest

from maxtext_lite.analysis.pipeline_view import Work, timetable
from maxtext_lite.batching.topology import PipelineShape

SHAPES = [
    (2, 2, 1, 1),
    (2, 8, 1, 3),
    (4, 4, 1, 2),
    (4, 8, 1, 1),
    (2, 2, 2, 2),
    (4, 8, 3, 1),
    (3, 3, 2, 2),
]


def ticks_of(shape, schedule):
    """Tick of each (direction, stage, piece, round); every one of them must be done once."""
    found = {}
    for stage, row in enumerate(timetable(shape, schedule)):
        for tick, work in enumerate(row):
            for direction in ("forward", "backward"):
                piece = getattr(work, direction)
                if piece is not None:
                    key = direction, stage, piece.number, piece.round
                    assert key not in found, "done twice"
                    found[key] = tick
    return found


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        *((sizes, "gpipe") for sizes in SHAPES),
        *((sizes, "1f1b") for sizes in SHAPES if sizes[2] == 1),  # it goes round once
    ],
)
def test_every_piece_passes_every_stage_in_order_and_comes_back(sizes, schedule):
    shape = PipelineShape(*sizes)
    stages, microbatches, rounds, accumulation = sizes
    ticks = ticks_of(shape, schedule)
    assert len(ticks) == 2 * stages * microbatches * rounds * accumulation
    for number in range(microbatches * accumulation):
        way = [
            ticks["forward", stage, number, turn]
            for turn in range(rounds)
            for stage in range(stages)
        ]
        back = [
            ticks["backward", stage, number, turn]
            for turn in range(rounds)
            for stage in range(stages)
        ]
        assert way == sorted(set(way))
        assert back[::-1] == sorted(set(back))
        assert way[-1] <= back[-1]


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_bubble_is_the_share_of_ticks_without_work(sizes):
    shape = PipelineShape(*sizes)
    for row in timetable(shape, "gpipe"):
        waiting = sum(work == Work(None, None) for work in row)
        assert Fraction(waiting, len(row)) == shape.bubble_fraction("gpipe")
        assert all(work.forward is None or work.backward is None for work in row)
    if shape.num_repeats == 1:
        for row in timetable(shape, "1f1b"):
            missing = sum(
                (work.forward is None) + (work.backward is None) for work in row
            )
            assert Fraction(missing, 2 * len(row)) == shape.bubble_fraction("1f1b")
