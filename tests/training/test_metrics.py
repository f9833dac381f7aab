"""metrics.jsonl has each step once, goodput.json each start; FLOPs and MFU."""

import contextlib
import json
import math
import types

import pytest

from maxtext_lite.operations import goodput as goodput_module
from maxtext_lite.operations.goodput import FILE, GoodputHook
from maxtext_lite.training.metrics import METRICS, JsonLines
from maxtext_lite.training.step_log import open_lines
from tests.process.test_phases import Clock


def log_after(tmp_path, lines, step):
    """What the log says of a file of these lines, or of these bytes, and the lines that it keeps of it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b"\n".join(
            each if isinstance(each, bytes) else json.dumps(each).encode()
            for each in lines
        )
    )
    files = types.SimpleNamespace(directory=tmp_path)
    run = types.SimpleNamespace(is_first=True, is_read_only=False, files=files)
    notes = []
    with contextlib.closing(open_lines(run, METRICS, step, notes.append)):
        return notes, path.read_bytes().splitlines()


def test_lines_after_the_restored_step_and_a_broken_one_are_removed(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 2, 3, 4)]
    notes, kept = log_after(tmp_path, [*lines, b'{"step": 5, "lo'], 3)
    assert notes == []
    assert [json.loads(line)["step"] for line in kept] == [
        1,
        2,
        2,
        3,
    ]  # step 2 has its evaluation's line too
    with contextlib.closing(JsonLines(tmp_path / METRICS, 3)) as log:
        log.write({"step": 4, "loss": math.nan, "skipped": False, "name": "x"})
    assert (
        json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        is None
    )
    assert log_after(tmp_path, lines, 0)[1] == []


@pytest.mark.fast
@pytest.mark.parametrize(
    "damaged",
    [
        b'{"step": 3, "a": "\xff"}',
        b'{"step": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_a_damaged_line_in_the_middle_costs_no_other_line_and_is_told(
    damaged, tmp_path
):
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 7)]
    notes, kept = log_after(tmp_path, [*lines[:2], damaged, *lines[3:]], 5)
    assert [json.loads(line) for line in kept] == [*lines[:2], *lines[3:5]]
    assert ["1 of 6 lines" in notes[0], "no step 3 any more" in notes[1]] == [
        True,
        True,
    ]


# ---- Goodput -----------------------------------------------------------------------------------


def starts(directory):
    return json.loads((directory / FILE).read_text())["starts"]


def goodput_of(tmp_path, clock, step):
    files = types.SimpleNamespace(directory=tmp_path)
    hook = GoodputHook(clock)
    hook.opened(types.SimpleNamespace(is_first=True, files=files))
    hook.start(None, None, types.SimpleNamespace(step=step), print)
    return hook


def test_a_start_is_written_as_it_goes_on_and_the_next_one_adds_to_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(goodput_module, "_EVERY_SECONDS", -1)
    clock = Clock()
    first = goodput_of(tmp_path, clock, 0)
    clock.passes(3, "compile")
    for step in (1, 2, 3, 4):
        clock.passes(2, "step", step)
        first.written({"step": step})
    first.written({"step": 2})  # an evaluation's line, of a step before
    assert first.entries(4) == {"run_seconds": 11, "training_seconds": 8}
    (start,) = starts(tmp_path)
    assert (start["began"], start["ended"], start["kept_step"]) == (100, 111, 4)
    assert start["seconds"] == {"start-up": 0, "compile": 3, "step": 8}
    clock.passes(9)  # killed: nobody wrote these down
    clock.restart()
    second = goodput_of(tmp_path, clock, 3)
    clock.passes(4, "step", 4)
    second.written({"step": 4})
    assert second.entries(4) == {"run_seconds": 24, "training_seconds": 10}
    said = second.saved()
    assert "41.7%" in said
    assert "repeated 2.0" in said
    assert [(each["first_step"], each["kept_step"]) for each in starts(tmp_path)] == [
        (0, 3),
        (3, 4),
    ]
