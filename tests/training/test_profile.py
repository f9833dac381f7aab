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
    """A function from an asked Profile and its first step to the first and last step of each trace, up to step 20."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)

    def run_through(profile, first, before=lambda step: None):
        traces = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: traces.append([step, None]))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traces[-1].__setitem__(1, step - 1))
        for step in range(first, 21):
            before(step)
            profile.before_step(step, step - first + 1)
        step = 21
        profile.close()
        return traces

    return run_through


@pytest.mark.parametrize(
    ("asked", "first", "expected"),
    [
        (TracedSteps(0), 1, []),
        (TracedSteps(2), 11, [[13, 14]]),
        (TracedSteps(99), 11, [[13, 20]]),
        (TracedSteps(steps=(12, 14)), 13, [[13, 14]]),
        (TracedSteps(steps=(12, 14)), 15, []),
        (TracedSteps(steps=(1, 1)), 1, [[1, 1]]),
    ],
)
def test_the_steps_that_the_config_names(asked, first, expected, tmp_path, traced):
    assert traced(Profile(tmp_path, asked, Failures(), None), first) == expected


def test_a_file_asks_for_the_steps_from_then_on_and_is_taken_away(tmp_path, traced):
    asked = {5: "", 10: "2\n", 15: "no number", 19: "5"}

    def before(step):
        if step in asked:
            (tmp_path / "profile").write_text(asked[step])

    profile = Profile(tmp_path, TracedSteps(), Failures(), tmp_path)
    assert traced(profile, 1, before) == [[5, 7], [10, 11], [15, 17], [19, 20]]
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("message", "error"),
    [("UNKNOWN: {}/plugins/profile is not a directory", UserError), ("FAILED_PRECONDITION: no session", RuntimeError)],
)
def test_a_trace_that_cannot_be_written_ends_the_run_but_a_bug_is_no_full_disk(message, error, tmp_path, monkeypatch):
    """XLA writes it, and reports the operating system's errors in its own way."""

    def broken():
        raise jax.errors.JaxRuntimeError(message.format(tmp_path / "tensorboard"))

    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", broken)
    failures = Failures()
    profile = Profile(tmp_path, TracedSteps(1), failures, None)
    profile.before_step(3, 3)
    with pytest.raises(error):  # noqa: PT012
        profile.before_step(4, 4)
        failures.raise_together()
