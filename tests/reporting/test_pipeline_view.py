"""The timetable's pictures hold every piece of work, and say what waits."""

import re
from xml.etree import ElementTree

from maxtext_lite.batching.pipeline_shape import PipelineShape
from maxtext_lite.reporting.pipeline_view import heading, pipeline_svg, pipeline_text

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


def test_what_does_not_fit_on_a_line_is_counted():
    text = pipeline_text(PipelineShape(4, 32, 1, 2), "1f1b")
    assert text.count(" ... and 46 ticks more") == 4  # 2 x 32 + 2 x 3 ticks, of which 24 are shown
    assert max(map(len, text.splitlines())) < 240


def test_the_heading_counts_ticks_and_waits():
    assert heading(ONCE, "1f1b") == (
        "1f1b: 6 ticks forwards and backwards in a step of 2 micro-batches x 2 microbatches, 33.3% of them waiting"
    )
    assert heading(TWICE, "gpipe").startswith("gpipe: 10 ticks forwards or backwards in a step of 1 micro-batch x 2 ")


def test_the_svg_has_a_box_for_each_piece_of_work():
    for shape, schedule in ((ONCE, "1f1b"), (ONCE, "gpipe"), (TWICE, "gpipe")):
        picture = pipeline_svg(shape, schedule)
        ElementTree.fromstring(picture)
        pieces = shape.num_microbatches * shape.gradient_accumulation_steps * shape.num_repeats
        assert len(re.findall(r"<rect [^>]*rx=", picture)) == 2 * shape.num_stages * pieces
        assert heading(shape, schedule) in picture


def test_the_svg_is_as_wide_as_its_sentences_and_says_what_it_leaves_out():
    for shape, meaning in ((ONCE, ", colors are micro-batches"), (TWICE, ", colors are rounds")):
        picture = pipeline_svg(shape, "gpipe")
        width = float(ElementTree.fromstring(picture).attrib["width"])
        assert width > 8 + 0.5 * 13 * len(heading(shape, "gpipe"))  # half an em a character
        assert meaning + "<" in picture
    long = pipeline_svg(PipelineShape(4, 32, 1, 4), "1f1b")
    assert ", 38 ticks more to the right<" in long  # 4 x 32 + 2 x 3 ticks, of which 96 are shown
    assert pipeline_svg(PipelineShape(4, 64, 1, 1), "1f1b").count("more to the right") == 0


def test_numbers_can_be_read_on_every_color():
    """Contrasts of WCAG 2, worked out here: at least 4.5 to 1."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    picture = pipeline_svg(PipelineShape(2, 2, 1, 6), "gpipe")
    found = set(re.findall(r'rx="2" fill="(#\w+)" stroke="#\w+"/><text [^>]*fill="(#\w+)"', picture))
    assert len(found) == 7
    for pair in found:
        light, dark = sorted(map(luminance, pair), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair
