"""Which steps are traced, and that a trace which the run's end cuts short is written all the same."""

import jax
import pytest

from maxtext_lite.training.failures import Failures
from maxtext_lite.training.profile import Profile


@pytest.mark.parametrize(("num_steps", "steps", "calls"), [
    (0, 6, []),
    (1, 6, ["before 3", "before 4"]),
    (2, 6, ["before 3", "before 5"]),
    (2, 4, ["before 3", "at the end"]),
    (1, 2, []),
])  # fmt: skip
def test_steps_from_the_third_on_are_traced(num_steps, steps, calls, tmp_path, monkeypatch):
    now, found = "", []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: found.append((now, directory)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append((now, None)))
    profile = Profile(tmp_path, num_steps, Failures())
    for step in range(1, steps + 1):
        now = f"before {step}"
        profile.before_step(step)
    now = "at the end"
    profile.close()
    assert found == list(zip(calls, (str(tmp_path), None), strict=False))
