"""A run that prints nothing for a while says where it is, on one process alone."""

import threading

import pytest

from maxtext_lite.config.phases import PhaseClock, StatusLine


@pytest.mark.parametrize(
    ("phase", "step", "said"),
    [
        ("start-up", 0, "tokenizing"),
        ("compile", 1, "compiling"),
        ("step", 7, "step 7"),
        ("save", 100, "saving step 100"),
        ("rollout", 3, "step 3"),
    ],
)
def test_silence_is_broken_by_what_the_run_does(phase, step, said):
    clock = PhaseClock(observers=[])
    clock.enter(phase, step)
    line, lines, spoken = StatusLine(0.01, clock), [], threading.Event()

    def say(text):
        lines.append(text)
        spoken.set()

    with line.shown():
        line.say, line.is_first = say, True
        assert spoken.wait(10)
    assert said in lines[0]
    assert not line.is_first


def test_the_other_processes_of_a_run_say_nothing():
    line, lines = StatusLine(0.001, PhaseClock(observers=[])), []
    with line.shown():
        line.say = lines.append
        threading.Event().wait(0.05)
    assert not lines
