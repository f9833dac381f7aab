"""metrics.jsonl has each step once, goodput.json each start; failed writes end the run on all hosts; FLOPs and MFU."""

import contextlib
import errno
import json
import math

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training import failures as failures_module
from maxtext_lite.training import goodput as goodput_module
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.goodput import FILE, Goodput
from maxtext_lite.training.metrics import MetricsLog, Speed, Terminal
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
    with contextlib.closing(MetricsLog(tmp_path, step, Failures())) as log:
        return log.notes, path.read_bytes().splitlines()


def test_lines_after_the_restored_step_and_a_broken_one_are_removed(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 2, 3, 4)]
    notes, kept = log_after(tmp_path, [*lines, b'{"step": 5, "lo'], 3)
    assert notes == ()
    assert [json.loads(line)["step"] for line in kept] == [
        1,
        2,
        2,
        3,
    ]  # step 2 has its evaluation's line too
    with contextlib.closing(MetricsLog(tmp_path, 3, Failures())) as log:
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
        b"{",
        b"[1]",
        b'{"step": "3"}',
        b'{"step": 2.5}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 3, "a": "\xff"}',
        b'{"step": 1' + b"0" * 5000 + b"}",
        b"[" * 100000,
        b"\x00\x00",
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


@pytest.mark.parametrize(
    ("lines", "gone"),
    [
        ([], "1 to 3"),
        ([{"step": 3}], "1 to 2"),
        ([{"step": 1}, {"step": 2}, {"step": 7}], "3"),
        ([{"step": 1}, {"step": 2}, {"step": 3, "eval_loss": 1.0}], "3"),
    ],
)
def test_steps_that_are_gone_or_have_another_line_now_are_told(lines, gone, tmp_path):
    lines = [
        {"loss": 1.0, **line} if "eval_loss" not in line else line for line in lines
    ]
    assert log_after(tmp_path, lines, 3)[0] == (
        f"metrics.jsonl holds no step {gone} any more.",
    )


def test_speed_and_mfu():
    speed = Speed(flops_per_example=1e12, num_devices=4, peak=50.0)
    found = speed.of(num_examples=40, target_tokens=1000, step_seconds=0.5)
    assert found == {
        "tokens_per_second": 2000.0,
        "tflops_per_device": 20.0,
        "mfu": pytest.approx(0.4),
    }
    assert Speed(1e12, 4, None).of(40, 1000, 0.5)["mfu"] is None


# ---- The terminal ------------------------------------------------------------------------------

RECORD = {
    "loss": 1.5,
    "step_seconds": 0.5,
    "tokens_per_second": 1234.5,
    "tflops_per_device": 0.25,
    "mfu": 0.5,
    "learning_rate": 1e-3,
    "grad_norm": 2.0,
    "global_batch_to_train": 16,
}


def test_plain_lines_have_the_speed_since_the_last_one_but_for_the_first_step_of_a_start(
    capsys, monkeypatch
):
    """512 tokens in 9 s, not counted, 0.25 and 0.75 s; then in 1 and 3 s."""
    monkeypatch.setenv("COLUMNS", "40")  # of no terminal
    terminal = Terminal(log_period=3, quiet=False)
    terminal.start(0, 5)
    for step, seconds in enumerate((9.0, 0.25, 0.75, 1.0, 3.0), start=1):
        speed = {
            "tokens_per_second": 512 / seconds,
            "tflops_per_device": 3 / seconds,
            "mfu": 0.06 / seconds,
        }
        terminal.step({"step": step, **RECORD, **speed, "step_seconds": seconds})
    terminal.close()
    Terminal(log_period=1, quiet=True).say("hello")  # of another process
    first, second = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert first[:-1] == [
        "step 3/5",
        "loss 1.5000",
        "1,024 tokens/s",
        "6 TFLOP/s/device",
        "MFU 12.0%",
        "lr 0.001",
        "grad 2",
        "batch 16",
    ]
    assert second[:1] + second[2:5] == [
        "step 5/5",
        "256 tokens/s",
        "1.5 TFLOP/s/device",
        "MFU 3.0%",
    ]
    Terminal(log_period=1, quiet=False).step(
        {"step": 1, **RECORD, "learning_rate": math.nan}
    )
    assert "lr" not in capsys.readouterr().out


# ---- Goodput -----------------------------------------------------------------------------------


def starts(directory):
    return json.loads((directory / FILE).read_text())["starts"]


def test_a_start_is_written_as_it_goes_on_and_the_next_one_adds_to_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(goodput_module, "_EVERY_SECONDS", -1)
    clock = Clock()
    first = Goodput(tmp_path, Failures(), clock)
    first.resume(0)
    clock.passes(3, "compile")
    for step in (1, 2, 3, 4):
        clock.passes(2, "step", step)
        first.note({"step": step})
    first.note({"step": 2})  # an evaluation's line, of a step before
    assert first.record(4) == {"run_seconds": 11, "training_seconds": 8}
    seconds = {"start-up": 0, "compile": 3, "step": 8}
    assert starts(tmp_path) == [
        {
            "began": 100,
            "ended": 111,
            "first_step": 0,
            "last_step": 4,
            "kept_step": 4,
            "seconds": seconds,
        }
    ]
    clock.passes(9)  # killed: nobody wrote these down
    clock.restart()
    second = Goodput(tmp_path, Failures(), clock)
    second.resume(3)
    clock.passes(4, "step", 4)
    second.note({"step": 4})
    assert second.record(4) == {"run_seconds": 24, "training_seconds": 10}
    said = second.close()
    for part in (
        "41.7%",
        "10.0 s of 24.0 in 2 starts",
        "down 9.0, compile 3.0, repeated 2.0",
    ):
        assert part in said
    assert [(each["first_step"], each["kept_step"]) for each in starts(tmp_path)] == [
        (0, 3),
        (3, 4),
    ]


# ---- Failed writes -----------------------------------------------------------------------------


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.fast
def test_the_first_failure_is_kept_and_says_what_is_safe():
    found = Failures()
    found.raise_together()
    found.newest = 40
    for name in ("metrics.jsonl", "tensorboard"):
        with found.of_writing(f"run/{name}"):
            full()
    found.newest = 60  # its save was under way, and ended well
    assert found.found
    with pytest.raises(
        UserError, match=r"^run/metrics.jsonl .*safe: the checkpoint of step 60"
    ):
        found.raise_together()


def test_what_another_host_could_not_write_is_raised_here_too(monkeypatch):
    cases = (
        (None, True, "safe: nothing"),
        (8, True, "safe: the checkpoint of step 8"),
        (8, False, "$"),
    )
    for newest, unwritten, text in cases:
        theirs = [True, ["host 1's problem", unwritten]]
        monkeypatch.setattr(
            failures_module,
            "exchange",
            lambda mine, theirs=theirs: [mine, theirs, [False, None]],
        )
        found = Failures()
        found.newest = newest
        with pytest.raises(UserError, match=f"^host 1's problem.*{text}"):
            found.raise_together()
        assert found.found  # else a host that is fine would wait in its part of a save for one that has ended
    monkeypatch.setattr(failures_module, "exchange", lambda mine: [mine, [True, None]])
    assert Failures().raise_together() is True


def test_only_the_first_host_writes_and_all_raise(monkeypatch):
    assert Failures().on_first_host("path", lambda: 5) == 5
    with pytest.raises(UserError, match="path cannot be written"):
        Failures().on_first_host("path", full)
    monkeypatch.setattr(failures_module.jax, "process_index", lambda: 1)
    assert Failures().on_first_host("path", full) is None
