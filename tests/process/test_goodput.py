"""How a run spent its time, by hand."""

import dataclasses

import pytest

from maxtext_lite.operations.goodput_records import (
    Start,
    goodput_text,
    spent,
    starts_of,
)

FIRST = Start(
    1000.0,
    1100.0,
    0,
    20,
    20,
    {"start-up": 10.0, "compile": 30.0, "step": 40.0, "save": 20.0},
)
"""20 steps of 2 s; it was killed, and the next one went on after step 15."""
SECOND = Start(
    1130.0, 1200.0, 15, 40, 40, {"start-up": 10.0, "step": 50.0, "evaluation": 10.0}
)


@pytest.mark.fast
def test_steps_that_were_done_again_count_once():
    starts = [FIRST.before(15), SECOND]
    found = spent(starts)
    assert found == {
        "training": 30.0 + 50.0,
        "start-up": 20.0,
        "compile": 30.0,
        "repeated": 10.0,
        "save": 20.0,
        "evaluation": 10.0,
        "down": 30.0,
    }
    assert sum(found.values()) == 1200 - 1000
    assert goodput_text(starts).startswith(
        "goodput 40.0%: 80.0 s of 200.0 in 2 starts "
    )


def test_sampling_responses_is_a_part_of_a_step():
    seconds = {"rollout": 60.0, "step": 20.0, "compile": 20.0}
    start = Start(0.0, 100.0, 0, 4, 4, seconds)
    assert spent([start])["training"] == 80
    again = spent([start.before(1)])
    assert (again["training"], again["repeated"]) == (20, 60)


@pytest.mark.parametrize("name", ["began", "last_step", "seconds"])
@pytest.mark.parametrize("wrong", [None, "soon", {"step": None}])
def test_a_start_with_anything_but_numbers_is_damaged(name, wrong):
    start = dataclasses.asdict(FIRST)
    assert starts_of({"starts": [start]}) == [FIRST]
    assert (
        starts_of({"starts": [start, start | {name: wrong}]})
        == starts_of({"starts": 3})
        == []
    )
