"""Lines of JSON are read one by one: an unreadable line is noted and does not affect the others."""

import json
import math

import pytest

from maxtext_lite.config.records import Steps, json_text, read_records, record_text


def read(path):
    notes = []
    return list(read_records(path, notes)), notes


def test_every_line_that_holds_a_step_is_read_and_the_others_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = [
        b"{",
        b"[1]",
        b'{"step": "3"}',
        b'{"step": true}',
        b'{"step": -1}',
        b"\xff",
        b'{"loss": 1}',
    ]
    path.write_bytes(
        b"".join(b'{"step": %d}\n%s\n' % (step, text) for step, text in enumerate(bad))
        + b'\n{"step": 7, "l'
    )
    records, notes = read(path)
    assert records == [{"step": step} for step in range(7)]
    assert len(notes) == 2
    assert "7 of 16 lines" in notes[1]
    assert ": 2, 4, 6, 8, 10" in notes[1]


@pytest.mark.fast
def test_a_record_is_written_as_json_has_it():
    record = {
        "step": 1,
        "loss": float("nan"),
        "phases": [["train", float("inf"), 0.5]],
        "name": "é",
    }
    assert json.loads(record_text(record), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "phases": [["train", None, 0.5]],
        "name": "é",
    }
    assert json_text({"a": [math.inf, (math.nan, 1.5)]}) == '{"a": [null, [null, 1.5]]}'
    assert record_text({"step": 1, "loss": 0.1}) == '{"step": 1, "loss": 0.1}\n'


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        (range(1, 10), ""),
        ([1, 2, 2, 1, 3, 4, 5, 6, 7, 8, 9, 12], ""),
        ([2, 4, 5, 9], "step 1, 3, 6 to 8"),
    ],
)
def test_steps_that_are_missing_are_named(steps, missing):
    found = Steps()
    for step in steps:
        found.add(step)
    assert found.missing(9) == missing
