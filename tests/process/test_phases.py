"""Seconds of phases add up to the time since the start, by a clock that the test moves."""

import pytest

from maxtext_lite.config.phases import Observer, PhaseClock


class Watched(Observer):
    def __init__(self):
        self.told = []

    def enter(self, phase, step):
        self.told.append((phase, step))

    def advance(self):
        self.told.append("advance")


class Clock(PhaseClock):
    def __init__(self):
        self.now, self.watched = 100.0, Watched()
        super().__init__(lambda: self.now, [self.watched])

    def passes(self, seconds, phase=None, step=0):
        """So many seconds, of a phase that begins with them."""
        if phase:
            self.enter(phase, step)
        self.now += seconds


@pytest.mark.fast
def test_each_phase_has_what_passed_while_it_was_on_and_observers_are_told():
    clock = Clock()
    clock.passes(4)
    clock.passes(1, "reading", 1)
    clock.passes(5, "step", 1)
    clock.passes(2, "reading", 2)
    clock.passes(6, "step", 2)
    clock.passes(0.5, "step", 3)
    assert clock.seconds == {"start-up": 4, "reading": 3, "step": 11.5}
    assert (clock.began, sum(clock.seconds.values())) == (100, 18.5)
    entered = [
        ("start-up", 0),
        ("reading", 1),
        ("step", 1),
        ("reading", 2),
        ("step", 2),
        ("step", 3),
    ]
    assert clock.watched.told == entered


@pytest.mark.parametrize(
    ("again", "seconds"), [(PhaseClock.begin, 1), (PhaseClock.fold, 3)]
)
def test_steps_on_the_way_back_are_start_up_and_have_the_limit_of_a_start(
    again, seconds
):
    """A restored checkpoint and a compilation may take longer than any step."""
    clock = Clock()
    clock.passes(2, "step", 7)
    again(clock)
    clock.passes(1)
    assert clock.seconds == {"start-up": seconds}
    assert clock.watched.told[-1] == ("start-up", 0)
