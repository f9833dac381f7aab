"""Who holds a run up is found from what each process says of itself, and from whose word has stopped coming."""

import pytest

from maxtext_lite.process.progress import Seen, Stamp, Verdict, coordinator_lost, judge, limit_of


def stamp(host="a", phase="step", step=7, position=20, seconds=1.0, limit=300.0, code=0):
    return Stamp(host, phase, step, position, seconds, limit, 5, code)


def verdict(*seen):
    stamps = [each if isinstance(each, Seen) else Seen(each, 0.0) for each in seen]
    return judge(dict(enumerate(stamps)), silent_after=300, grace=10)


def test_the_one_that_is_behind_is_named_with_its_phase_and_those_that_wait_are_not():
    waiting = stamp(position=21, seconds=900)
    found = verdict(waiting, waiting, stamp("c", "reading", seconds=301), waiting)
    text = "nothing moves: process 2 on c in reading of step 7 for 301 s, more than 300 s; the others wait"
    assert found == Verdict(text, 76)


@pytest.mark.parametrize("seen", [
    [stamp(seconds=299), stamp()],
    [stamp(seconds=900, position=21), stamp("b", seconds=10)],  # the first waits for the second, which has time left
    [stamp(seconds=900), stamp("b", seconds=10)],  # at the same place, of which one has not been there for long
    [Seen(stamp(), 299.0), stamp()],
    [Seen(None, 299.0), stamp(seconds=900)],  # it is yet to come
    [Seen(stamp(phase="end"), 5000.0), stamp()],  # has ended well
    [Seen(stamp(phase="end", code=75), 5000.0), stamp()],
    [Seen(stamp(phase="end", code=2), 9.0), stamp()],  # the others may be about to fail alike
    [Seen(stamp(phase="end"), 5000.0)],
])  # fmt: skip
def test_a_run_that_may_move_yet_is_left_alone(seen):
    assert verdict(*seen) is None


def test_all_are_named_that_are_in_the_same_place_and_eight_at_most():
    assert verdict(*[stamp(seconds=400)] * 11).text == (
        "nothing moves: process 0 (coordinator) on a in step 7 for 400 s, "
        + ", ".join(f"process {i} on a in step 7 for 400 s" for i in range(1, 8))
        + " and 3 more, more than 300 s"
    )


def test_time_goes_on_for_a_stamp_that_is_not_new():
    assert verdict(Seen(stamp(seconds=295), 4.0)) is None
    assert "for 301 s" in verdict(Seen(stamp(seconds=295), 6.0)).text


def test_one_that_says_nothing_any_more_is_named_with_where_it_was_last():
    found = verdict(stamp(seconds=900), Seen(stamp("b", "compile"), 301.0))
    assert found == Verdict("process 1 on b does not answer, 301 s since it was in compile of step 7", 76)
    assert verdict(stamp(), Seen(None, 301.0)).text == "process 1 has not come"


def test_one_that_has_been_silent_for_a_while_is_not_said_to_hang():
    found = verdict(stamp(position=21), Seen(stamp("b", "reading", seconds=290), 11.0))
    assert found.text == "process 1 on b does not answer, 11 s since it was in reading of step 7"


def test_one_that_has_failed_gives_the_others_its_exit_code_so_that_none_is_restarted():
    found = verdict(stamp(), Seen(stamp("b", "end", code=2), 11.0))
    assert found == Verdict("process 1 on b has failed with exit code 2", 2)


def test_without_the_coordinator_it_is_named_unless_it_has_said_why_it_ends():
    assert coordinator_lost(None) == Verdict("process 0 (coordinator) does not answer", 76)
    assert coordinator_lost(stamp(phase="save")).text == (
        "process 0 (coordinator) on a does not answer, last in save of step 7"
    )
    assert coordinator_lost(stamp(phase="end", code=1)) == Verdict(
        "process 0 (coordinator) on a has failed with exit code 1", 1
    )


@pytest.mark.parametrize(("longest", "limit"), [(None, 1200), (0.0, 300), (75.0, 300), (200.0, 800)])
def test_a_limit_is_four_times_what_a_phase_has_taken_and_never_below_the_least(longest, limit):
    assert limit_of(longest, 300) == limit


@pytest.mark.parametrize(("phase", "step", "where"), [
    ("step", 3, "step 3"), ("step", 0, "step"), ("start-up", 0, "start-up"), ("save", 3, "save of step 3"),
])  # fmt: skip
def test_where_is_said_in_words(phase, step, where):
    assert stamp(phase=phase, step=step).where == where
