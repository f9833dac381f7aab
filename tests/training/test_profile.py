"""Traced steps: those that the config names, and those that a file asks for."""

from types import SimpleNamespace

import jax
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.operations import profiler as module
from maxtext_lite.operations.profiler import ProfileHook
from maxtext_lite.training.checkpoint import TrainProgress


@pytest.mark.fast
@pytest.mark.parametrize(
    ("asked", "first", "demands", "expected"),
    [
        ("99", 11, {}, [[13, 20]]),
        ("12-14", 13, {}, [[13, 14]]),
        (
            "0",
            1,
            {5: "no number", 10: "2\n", 15: "9" * 5000, 19: "5"},
            [[5, 7], [10, 11], [15, 17], [19, 20]],
        ),
    ],
)
def test_the_steps_that_are_asked_for_are_traced_up_to_the_last(
    asked, first, demands, expected, tmp_path, monkeypatch
):
    traces = []
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda directory: traces.append([step, None])
    )
    monkeypatch.setattr(
        jax.profiler, "stop_trace", lambda: traces[-1].__setitem__(1, step - 1)
    )
    files = SimpleNamespace(directory=tmp_path)
    config = load_config(None, [f"profiler_steps={asked}"])
    run = SimpleNamespace(is_first=True, files=files, directory=tmp_path, config=config)
    profile = ProfileHook()
    profile.start(run, None, TrainProgress(step=first - 1), print)
    for step in range(first, 21):
        if step in demands:
            (tmp_path / "profile").write_text(demands[step])
        profile.before_step(step)
    step = 21
    profile.close()
    assert traces == expected
    assert not (tmp_path / "profile").exists()
