"""The pictures of a timetable show every piece of work, and the idle ticks."""

import re
from xml.etree import ElementTree

from maxtext_lite.analysis.pipeline_view import pipeline_svg, pipeline_text
from maxtext_lite.batching.topology import PipelineShape

ONCE, TWICE = PipelineShape(2, 2, 1, 2), PipelineShape(2, 2, 2, 1)


def test_text_by_hand():
    assert pipeline_text(ONCE, "1f1b").splitlines()[1:] == [
        "stage 0   F0   F1   F2B0 F3B1 B2   B3",
        "stage 1   .    F0B0 F1B1 F2B2 F3B3 .",
    ]
    assert pipeline_text(TWICE, "gpipe").splitlines()[1:] == [
        "stage 0   F0a F1a F0b F1b .   .   B1b B0b B1a B0a",
        "stage 1   .   F0a F1a F0b F1b B1b B0b B1a B0a .",
    ]


def test_the_svg_has_a_box_for_each_piece_of_work():
    for shape, schedule in ((ONCE, "1f1b"), (ONCE, "gpipe"), (TWICE, "gpipe")):
        picture = pipeline_svg(shape, schedule)
        ElementTree.fromstring(picture)
        pieces = (
            shape.num_microbatches
            * shape.gradient_accumulation_steps
            * shape.num_repeats
        )
        assert (
            len(re.findall(r"<rect [^>]*rx=", picture)) == 2 * shape.num_stages * pieces
        )
