"""Failed writes: the first is kept, and raised by every host with a sentence on what is safe."""

import errno

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training import failures
from maxtext_lite.training.failures import Failures


def full(path):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_first_failure_is_kept_and_says_what_is_safe():
    found = Failures()
    found.raise_together()
    assert not found.found
    found.newest = 40
    for name in ("metrics.jsonl", "tensorboard"):
        with found.of_writing(f"run/{name}"):
            full(name)
    found.newest = 60  # its save was under way, and ended well
    assert found.found
    with pytest.raises(UserError) as raised:
        found.raise_together()
    assert raised.value.problems == (
        "run/metrics.jsonl cannot be written: No space left on device. What is safe: the checkpoint of step 60, from "
        "which the same command goes on.",
    )


def test_what_another_host_could_not_write_is_raised_here_too(monkeypatch):
    nothing, of_step_8 = (
        "What is safe: nothing, as there is no checkpoint yet.",
        "What is safe: the checkpoint of step 8, ",
    )
    for newest, unwritten, text in ((None, True, nothing), (8, True, of_step_8), (8, False, "$")):
        theirs = [True, ["host 1's problem", unwritten]]
        monkeypatch.setattr(failures, "exchange", lambda mine, theirs=theirs: [mine, theirs, [False, None]])
        found = Failures()
        found.newest = newest
        with pytest.raises(UserError, match=rf"^host 1's problem ?{text}"):
            found.raise_together()
        assert found.found  # else a host that is fine would wait in its part of a save for one that has ended
    monkeypatch.setattr(failures, "exchange", lambda mine: [mine, [True, None]])
    assert Failures().raise_together() is True


def test_only_the_first_host_writes_and_all_raise(monkeypatch):
    assert Failures().on_first_host("path", lambda: 5) == 5
    with pytest.raises(UserError, match=r"path cannot be written: No space left on device. What is safe: nothing, as"):
        Failures().on_first_host("path", lambda: full("path"))
    monkeypatch.setattr(failures.jax, "process_index", lambda: 1)
    assert Failures().on_first_host("path", lambda: 5) is None
