"""metrics.jsonl has each step once; FLOPs and MFU follow the formulas."""

import contextlib
import io
import json
import math
import re

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.metrics import MetricsLog, Speed, Terminal, lacks_evaluation


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_after_the_restored_step_and_a_broken_one_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 2, 3, 4)) + '{"step": 5, "lo'
    )
    log = MetricsLog(tmp_path, 3, Failures())
    assert log.notes == ()
    log.write({"step": 4, "loss": math.nan, "skipped": False, "name": "x"})
    log.close()
    assert _steps(path) == [1, 2, 2, 3, 4]  # step 2 has its evaluation's line too
    assert json.loads(path.read_text().splitlines()[-1])["loss"] is None


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        ([{"step": 2, "eval_loss": 1.0}, {"step": 3}], True),
        ([{"step": 3}, {"step": 3, "eval_loss": 1.0}, {"step": 4}], False),
        ([{"step": 2}], False),  # the line of the step is gone
        ([{"step": 3}, {"step": 4, "eval_loss": 1.0}], True),
        ([], False),
    ],
)
def test_a_step_that_lacks_its_evaluation_has_a_line_and_no_evaluation_of_its_own(lines, lacks, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lacks_evaluation(tmp_path / "metrics.jsonl", 3) == lacks


@pytest.mark.parametrize("damaged", [
    b"{", b"[1]", b'"step"', b'{"step": "3"}', b'{"step": 2.5}', b'{"step": true}', b'{"step": -1}', b"\xff\xfe\x00",
    b'{"step": 3, "name": "\xff"}', b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": 1' + b"0" * 50 + b"}", b"[" * 100000,
    b"null", b"\x00\x00",
], ids=lambda text: repr(text[:24]))  # fmt: skip
def test_a_damaged_line_in_the_middle_costs_no_other_line_and_is_told(damaged, tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 / step}).encode() for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]) + b"\n")
    log = MetricsLog(tmp_path, 5, Failures())
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join([*lines[:2], *lines[3:5]]) + b"\n"
    assert log.notes == (
        "metrics.jsonl: 1 of 6 lines have no step and are left out: 3.",
        "metrics.jsonl holds no step 3 any more.",
    )


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    text = '{"step": 1, "loss": NaN, "kl": -Infinity, "huge": 1e999, "phases": [[1e999]], "big": 1' + "0" * 400 + "}\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    MetricsLog(tmp_path, 1, Failures()).close()
    kept = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert kept == {"step": 1, "loss": None, "kl": None, "huge": None, "phases": [[None]], "big": 10**400}


def test_lines_that_are_gone_are_told(tmp_path):
    with contextlib.closing(MetricsLog(tmp_path, 9, Failures())) as log:
        assert log.notes == ("metrics.jsonl holds no step 1 to 9 any more.",)
        log.write({"step": 9, "loss": 1.0})
    with contextlib.closing(MetricsLog(tmp_path, 9, Failures())) as log:
        assert log.notes == ("metrics.jsonl holds no step 1 to 8 any more.",)


@pytest.mark.parametrize("instead", [{"step": 2, "loss": 9.0}, {"step": 7, "loss": 9.0}, {"step": 3, "eval_loss": 1.0}])
def test_a_step_whose_line_is_another_now_is_told(instead, tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in range(1, 9)]
    lines[2] = instead
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with contextlib.closing(MetricsLog(tmp_path, 8, Failures())) as log:
        assert log.notes == ("metrics.jsonl holds no step 3 any more.",)


def test_what_is_no_file_of_lines_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    failures = Failures()
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be \S+: Is a directory. What is safe: "):
        failures.on_first_host(tmp_path, lambda: MetricsLog(tmp_path, 0, failures))


def test_a_full_disk_is_kept_for_the_run_to_end_on(tmp_path, monkeypatch):
    failures = Failures()
    log = MetricsLog(tmp_path, 0, failures)
    log._file.close()
    monkeypatch.setattr(log, "_file", open("/dev/full", "w"))  # noqa: SIM115, PTH123
    for step in (1, 2):
        log.write({"step": step, "loss": 1.0})
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: No space left on device. What is safe:"):
        failures.raise_together()
    log.close()


def test_a_new_run_starts_an_empty_log(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsLog(tmp_path, 0, Failures()).close()
    assert _steps(tmp_path / "metrics.jsonl") == []


def test_speed_and_mfu():
    speed = Speed(flops_per_example=1e12, num_devices=4, peak=50.0)
    assert speed.of(num_examples=40, target_tokens=1000, step_seconds=0.5) == {
        "tokens_per_second": 2000.0,
        "tflops_per_device": 20.0,
        "mfu": pytest.approx(0.4),
    }
    assert Speed(1e12, 4, None).of(40, 1000, 0.5)["mfu"] is None


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


def test_plain_lines_every_period_and_at_the_end(capsys):
    terminal = Terminal(log_period=2, quiet=False)
    terminal.start(0, 5)
    for step in range(1, 6):
        terminal.step({"step": step, **RECORD})
    terminal.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    for part in (
        "loss 1.5000",
        "1,234 tokens/s",
        "0.25 TFLOP/s/device",
        "MFU 50.0%",
        "lr 0.001",
        "grad 2",
        "batch 16",
        "ETA",
    ):
        assert part in lines[0]


def test_a_line_has_the_speed_since_the_last_one_but_for_the_first_step_of_a_start(capsys):
    """512 tokens in 9 s, not counted, 0.25 and 0.75 s; then in 1 and 3 s."""
    terminal = Terminal(log_period=3, quiet=False)
    terminal.start(0, 5)
    for step, seconds in enumerate((9.0, 0.25, 0.75, 1.0, 3.0), start=1):
        speed = {"tokens_per_second": 512 / seconds, "tflops_per_device": 3 / seconds, "mfu": 0.06 / seconds}
        terminal.step({"step": step, **RECORD, **speed, "step_seconds": seconds})
    first, second = capsys.readouterr().out.splitlines()
    assert "  1,024 tokens/s  6 TFLOP/s/device  MFU 12.0%  " in first
    assert "  256 tokens/s  1.5 TFLOP/s/device  MFU 3.0%  " in second


def test_a_learning_rate_that_is_not_known_is_not_shown(capsys):
    Terminal(log_period=1, quiet=False).step({"step": 1, **RECORD, "learning_rate": math.nan})
    assert "lr" not in capsys.readouterr().out


def test_other_processes_are_silent(capsys):
    Terminal(log_period=1, quiet=True).say("hello")
    assert capsys.readouterr().out == ""


def on_a_terminal(columns, record, monkeypatch):
    """The lines of a run of 3 steps on a terminal, and the width of the widest."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "25")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(log_period=1, quiet=False)
    terminal.start(99_997, 100_000)
    terminal.say("word " * 40)
    for step in range(99_998, 100_001):
        terminal.step({"step": step, **record})
    terminal.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    "more", [{}, {"reward": 0.5, "loss": -2e-9}, {"pairs": 8, "reward_accuracy": 0.5, "reward_margin": 1.0}]
)
@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_terminals_lines_fit_its_width_and_the_bar_keeps_its_eta(columns, more, monkeypatch):
    lines = on_a_terminal(columns, RECORD | more, monkeypatch)
    said = "word " * 40
    assert said.rstrip() in lines  # the terminal's to wrap, which a copy of it then is not
    shown = [line for line in lines if line != said.rstrip()]
    assert max(map(len, shown)) <= columns
    steps = [line for line in shown if line.startswith("step 99998/100000  loss ")]
    assert len(steps) == 1
    assert "-0.0" not in steps[0]
    bars = [line for line in shown if "━" in line]
    assert bars
    assert all("ETA" in bar for bar in bars)
    assert re.search(r"step 100000/100000 .* ETA 0:00:00$", bars[-1])


def test_what_a_wide_terminal_shows_is_the_whole_line(monkeypatch, capsys):
    (wide,) = [line for line in on_a_terminal(300, RECORD, monkeypatch) if line.startswith("step 99998/100000  ")]
    assert len(wide.split("  ")) == 9


def test_without_a_terminal_lines_are_whole_whatever_columns_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal(log_period=1, quiet=False)
    terminal.start(0, 1)
    terminal.step({"step": 1, **RECORD})
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line.split("  ")) == 9
