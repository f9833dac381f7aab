"""goodput.json: one start's entry, and how the next start continues it."""

import json

from maxtext_lite.training import goodput as module
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.goodput import FILE, Goodput
from tests.process.test_phases import Clock


def starts(directory):
    return json.loads((directory / FILE).read_text())["starts"]


def test_a_start_is_written_as_it_goes_on_and_the_next_one_adds_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_SECONDS", -1)
    clock = Clock()
    first = Goodput(tmp_path, Failures(), clock)
    assert starts(tmp_path)[0]["began"] == 100
    first.resume(0)
    clock.passes(3, "compile")
    for step in (1, 2, 3, 4):
        clock.passes(2, "step", step)
        first.note({"step": step})
    first.note({"step": 2})  # an evaluation's line, of a step before
    assert first.record(4) == {"run_seconds": 11, "training_seconds": 8}
    assert starts(tmp_path) == [
        {"began": 100, "ended": 111, "first_step": 0, "last_step": 4, "kept_step": 4,
         "seconds": {"start-up": 0, "compile": 3, "step": 8}}
    ]  # fmt: skip
    clock.passes(9)  # killed: nobody wrote these down
    clock.restart()
    second = Goodput(tmp_path, Failures(), clock)
    assert len(starts(tmp_path)) == 1
    second.resume(3)
    clock.passes(4, "step", 4)
    second.note({"step": 4})
    assert second.record(4) == {"run_seconds": 24, "training_seconds": 10}
    assert second.close() == (
        "goodput 41.7%: 10.0 s of 24.0 in 2 starts were spent on steps that count; the rest, in seconds: down 9.0, "
        "compile 3.0, repeated 2.0"
    )
    assert [(each["first_step"], each["kept_step"]) for each in starts(tmp_path)] == [(0, 3), (3, 4)]


def test_lines_of_one_second_are_written_once(tmp_path):
    written = Goodput(tmp_path, Failures(), Clock())
    for step in range(1, 5):
        written.note({"step": step})
    assert starts(tmp_path)[0]["last_step"] == 0
    written.write()
    assert starts(tmp_path)[0]["last_step"] == 4


def test_a_run_that_has_lost_its_directory_does_not_write_over_the_accounts_of_the_next(tmp_path):
    suspended = Goodput(tmp_path, Failures(), Clock())
    suspended.write()
    following = Goodput(tmp_path, Failures(), Clock())
    following.resume(7)
    following.write()
    suspended.close()
    assert [each["first_step"] for each in starts(tmp_path)] == [0, 7]


def test_what_is_half_written_is_begun_anew_and_a_full_disk_ends_the_run(tmp_path):
    (tmp_path / FILE).write_text('{"starts": [')
    failures = Failures()
    Goodput(tmp_path, failures, Clock()).write()
    assert len(starts(tmp_path)) == 1
    assert not failures.found
    Goodput(tmp_path / "nowhere", failures, Clock()).write()
    assert failures.found
