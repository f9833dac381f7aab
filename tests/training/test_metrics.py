"""metrics.jsonl holds each step once; FLOPs and MFU are those of the formulas."""

import json
import math

import pytest

from maxtext_lite.training.metrics import MetricsLog, Speed, Terminal, peak_tflops


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_after_the_restored_step_and_a_broken_one_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 2, 3, 4)) + '{"step": 5, "lo'
    )
    log = MetricsLog(tmp_path, after_step=3)
    log.write({"step": 4, "loss": math.nan, "skipped": False, "name": "x"})
    log.close()
    assert _steps(path) == [1, 2, 2, 3, 4]  # step 2 has its evaluation's line too
    assert json.loads(path.read_text().splitlines()[-1])["loss"] is None


def test_a_new_run_starts_an_empty_log(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsLog(tmp_path, after_step=0).close()
    assert _steps(tmp_path / "metrics.jsonl") == []


def test_speed_and_mfu():
    speed = Speed(flops_per_example=1e12, num_devices=4, peak=50.0)
    assert speed.of(num_examples=40, target_tokens=1000, step_seconds=0.5) == {
        "tokens_per_second": 2000.0,
        "tflops_per_device": 20.0,
        "mfu": pytest.approx(0.4),
    }
    assert Speed(1e12, 4, None).of(40, 1000, 0.5)["mfu"] is None


def test_peaks_are_known_by_device_and_dtype():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.0
    assert peak_tflops("TPU v5 lite", "bfloat16") == 197.0
    assert peak_tflops("TPU v5", "bfloat16") == 459.0
    assert peak_tflops("TPU v5 lite", "float32") is None
    assert peak_tflops("cpu", "float32") is None


def test_plain_lines_every_period_and_at_the_end(capsys):
    terminal = Terminal(log_period=2, quiet=False)
    terminal.start(0, 5)
    record = {
        "loss": 1.5,
        "step_seconds": 0.5,
        "tokens_per_second": 1234.5,
        "tflops_per_device": 0.25,
        "mfu": 0.5,
        "learning_rate": 1e-3,
        "grad_norm": 2.0,
        "global_batch_to_train": 16,
    }
    for step in range(1, 6):
        terminal.step({"step": step, **record})
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


def test_other_processes_are_silent(capsys):
    Terminal(log_period=1, quiet=True).say("hello")
    assert capsys.readouterr().out == ""
