"""The picture of a timeline: every phase is a bar in its line, as long as it took."""

import re
from xml.etree import ElementTree as XML

import pytest

from maxtext_lite.reporting.run_data import TimelineStep
from maxtext_lite.reporting.timeline_view import timeline_svg

STEPS = (
    TimelineStep(
        7, (("rollout", 0, 0.0, 1.0), ("rollout", 1, 1.0, 2.0), ("train", 0, 1.0, 1.5), ("reward", 0, 0.9, 1))
    ),
    TimelineStep(8, (("rollout", 0, 0.0, 4.0), ("train", 12, 3.0, 4.0))),
)


def bars(svg):
    """(class, x, y, width) of each bar."""
    return [
        (bar.get("class"), *(float(bar.get(name)) for name in ("x", "y", "width")))
        for bar in XML.fromstring(svg).iter("rect")
    ]


def test_bars_are_as_long_as_their_phases_and_stand_in_the_line_of_their_kind():
    found = bars(timeline_svg(STEPS))
    assert [bar[0] for bar in found] == ["c0", "c0", "c1", "c2", "c0", "c2"]
    second = found[4][3] / 4  # the longest phase takes 4 seconds
    assert [bar[3] / second for bar in found] == pytest.approx([1, 1, 0.1, 0.5, 4, 1], rel=0.01)
    assert found[0][2] == found[1][2] < found[2][2] < found[3][2] < found[4][2] < found[5][2]
    assert found[1][1] - found[0][1] == pytest.approx(second, rel=0.01)


def test_chunks_and_steps_are_named():
    svg = timeline_svg(STEPS)
    assert re.findall(r">(step \d+)<", svg) == ["step 7", "step 8"]
    assert "chunk 12: training 1 s" in svg


def test_a_step_without_phases_is_drawn():
    assert bars(timeline_svg([TimelineStep(1, ())])) == []
