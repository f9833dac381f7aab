"""Who holds a run up is found from what each process says of itself, and from whose word has stopped coming."""

import pytest

from maxtext_lite.operations.watchdog import Seen, Stamp, judge


def stamp(
    host="a",
    phase="step",
    step=7,
    position=20,
    seconds=1.0,
    limit=300.0,
    code=0,
    reason="",
):
    return Stamp(host, phase, step, position, seconds, limit, 5, code, reason)


def verdict(*seen):
    stamps = [each if isinstance(each, Seen) else Seen(each, 0.0) for each in seen]
    return judge(dict(enumerate(stamps)), silent_after=300, grace=10)


def test_the_one_that_is_behind_is_named_with_its_phase_and_those_that_wait_are_not():
    waiting = stamp(position=21, seconds=900)
    found = verdict(waiting, waiting, stamp("c", "reading", seconds=301), waiting)
    assert found.code == 76
    assert found.text.startswith(
        "no progress: process 2 on c in reading of step 7 for 301 s"
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    "seen",
    [
        [stamp(seconds=299), stamp()],
        [
            stamp(seconds=900, position=21),
            stamp("b", seconds=10),
        ],  # the first waits for the second, which has time left
        [
            stamp(seconds=900),
            stamp("b", seconds=10),
        ],  # at the same place, of which one has not been there for long
        [Seen(None, 299.0), stamp(seconds=900)],  # it is yet to come
        [Seen(stamp(phase="end"), 5000.0), stamp()],  # has ended well
        [
            Seen(stamp(phase="end", code=2), 1.0),
            stamp(),
        ],  # the others may be about to fail alike
    ],
)
def test_a_run_that_may_move_yet_is_left_alone(seen):
    assert verdict(*seen) is None


@pytest.mark.parametrize(
    ("last", "silent", "named", "code"),
    [
        (
            stamp(seconds=295),
            4.0,
            None,
            None,
        ),  # time goes on for a stamp that is not new
        (stamp(seconds=295), 6.0, "in step 7 for 301 s", 76),
        (stamp(phase="compile"), 301.0, "compile of step 7", 76),
        (
            stamp(phase="reading", seconds=290),
            11.0,
            "does not answer",
            76,
        ),  # it is not said to hang
        (
            stamp("node7", phase="end", code=2, reason="the disk is full."),
            3.0,
            "on node7 has failed with exit code 2: the disk is full.",
            2,
        ),  # so that none is restarted
        (None, 301.0, "has not joined", 76),
    ],
)
def test_one_that_says_nothing_any_more_is_named_with_where_it_was_last(
    last, silent, named, code
):
    found = verdict(stamp(position=21), Seen(last, silent))
    if named is None:
        assert found is None
        return
    assert found.code == code
    assert "process 1" in found.text
    assert named in found.text
