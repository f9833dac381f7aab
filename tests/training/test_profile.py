"""Traced steps: those of the config, and those on demand."""

import jax
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.shown import TracedSteps
from maxtext_lite.training import profile as module
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.profile import Profile


@pytest.fixture
def traced(monkeypatch):
    """The steps between a trace's start and its end, as those of `now`."""
    now, steps = [0], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: steps.append([now[0], None]))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: steps[-1].__setitem__(1, now[0] - 1))
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    return now, steps


def run_through(profile, now, first, last, before=lambda step: None):
    for step in range(first, last + 1):
        now[0] = step
        before(step)
        profile.before_step(step, step - first + 1)
    now[0] = last + 1
    profile.close()


@pytest.mark.parametrize(("asked", "first", "expected"), [
    (TracedSteps(0), 1, []),
    (TracedSteps(2), 1, [[3, 4]]),
    (TracedSteps(2), 11, [[13, 14]]),
    (TracedSteps(99), 11, [[13, 20]]),
    (TracedSteps(steps=(12, 14)), 1, [[12, 14]]),
    (TracedSteps(steps=(12, 14)), 13, [[13, 14]]),
    (TracedSteps(steps=(12, 14)), 15, []),
    (TracedSteps(steps=(1, 1)), 1, [[1, 1]]),
])  # fmt: skip
def test_the_steps_that_the_config_names(asked, first, expected, tmp_path, traced):
    now, steps = traced
    run_through(Profile(tmp_path, asked, Failures(), None), now, first, 20)
    assert steps == expected


def test_a_file_asks_for_the_steps_from_then_on_and_is_taken_away(tmp_path, traced):
    now, steps = traced
    asked = {5: "", 10: "2\n", 15: "no number", 19: "5"}

    def before(step):
        if step in asked:
            (tmp_path / "profile").write_text(asked[step])

    run_through(Profile(tmp_path, TracedSteps(), Failures(), tmp_path), now, 1, 20, before)
    assert steps == [[5, 7], [10, 11], [15, 17], [19, 20]]
    assert not (tmp_path / "profile").exists()


def test_it_is_looked_for_once_a_second(tmp_path, traced, monkeypatch):
    now, steps = traced
    monkeypatch.setattr(module, "_LOOK_SECONDS", 3600.0)
    profile = Profile(tmp_path, TracedSteps(), Failures(), tmp_path)
    profile._looked = module.time.monotonic()
    (tmp_path / "profile").touch()
    run_through(profile, now, 1, 3)
    assert steps == []
    assert (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_kept_for_the_run_to_end_on(tmp_path):
    """XLA writes it, and reports the operating system's errors in its own way."""
    (tmp_path / "tensorboard" / "plugins").mkdir(parents=True)
    (tmp_path / "tensorboard" / "plugins" / "profile").write_text("no directory")
    failures = Failures()
    profile = Profile(tmp_path, TracedSteps(1), failures, None)
    try:
        for step in (3, 4):
            profile.before_step(step, step)
    finally:
        jax._src.profiler._profile_state.reset()  # jax keeps a session whose trace it could not write
    with pytest.raises(UserError, match=r"tensorboard cannot be written: .*profile is not a directory\. What is safe"):
        failures.raise_together()


def test_an_error_of_the_profiler_itself_is_not_told_as_a_full_disk(tmp_path, monkeypatch, traced):
    def broken():
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: no session")

    now, _ = traced
    monkeypatch.setattr(jax.profiler, "stop_trace", broken)
    with pytest.raises(RuntimeError, match="no session"):
        run_through(Profile(tmp_path, TracedSteps(1), Failures(), None), now, 1, 5)
