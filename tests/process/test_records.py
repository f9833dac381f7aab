"""Lines of JSON are read one by one: an unreadable line is noted and does not affect the others."""

import json
import math
from fractions import Fraction

import pytest

from maxtext_lite.process.records import Steps, as_list, as_object, json_text, read_records, record_text, with_numbers


def read(path):
    notes = []
    return list(read_records(path, notes)), notes


def test_every_line_that_holds_a_step_is_read_and_the_others_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = [b"{", b"[1]", b'{"step": "3"}', b'{"step": true}', b'{"step": -1}', b"\xff", b'{"loss": 1}']
    path.write_bytes(
        b"".join(b'{"step": %d}\n%s\n' % (step, text) for step, text in enumerate(bad)) + b'\n{"step": 7, "l'
    )
    assert read(path) == (
        [{"step": step} for step in range(7)],
        [
            "metrics.jsonl ends with an incomplete line: the run was writing it, or was killed.",
            "metrics.jsonl: 7 of 16 lines have no step and are left out: 2, 4, 6, 8, 10 ....",
        ],
    )


def test_a_missing_file_has_no_lines_and_another_kind_is_an_error(tmp_path):
    assert read(tmp_path / "metrics.jsonl") == ([], [])
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


def test_a_record_is_written_as_json_has_it():
    record = {"step": 1, "loss": float("nan"), "phases": [["train", float("inf"), 0.5]], "name": "é"}
    assert json.loads(record_text(record), parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "phases": [["train", None, 0.5]], "name": "é"
    }  # fmt: skip
    assert record_text({"step": 1, "loss": 0.1}) == '{"step": 1, "loss": 0.1}\n'


@pytest.mark.parametrize(
    ("steps", "missing"),
    [([], "step 1 to 9"), (range(1, 10), ""), ([1, 2, 2, 1, 3, 4, 5, 6, 7, 8, 9, 12], ""),
     ([9, 3, 1, 4, 2], "step 5 to 8"), ([2, 4, 5, 9], "step 1, 3, 6 to 8")],
)  # fmt: skip
def test_steps_that_are_missing_are_named(steps, missing):
    found = Steps()
    for step in steps:
        found.add(step)
    assert found.missing(9) == missing


def test_json_of_another_form_is_empty():
    assert [as_object(value) for value in ({"a": 1}, [1], None, "x")] == [{"a": 1}, {}, {}, {}]
    assert [as_list(value) for value in ([1], {"a": 1}, None, "x")] == [[1], [], [], []]


def test_numbers_out_of_reach_become_null_at_any_depth():
    value = {"a": [1e301, -2, True, float("nan"), {"b": 10**400}], "c": "1e999"}
    assert with_numbers(value, 1e300) == {"a": [None, -2, True, None, {"b": None}], "c": "1e999"}


def test_json_has_no_number_that_is_not_finite():
    value = {"a": [math.inf, (math.nan, 1.5)], "b": Fraction(1, 4)}
    assert json_text(value, default=float) == '{"a": [null, [null, 1.5]], "b": 0.25}'
