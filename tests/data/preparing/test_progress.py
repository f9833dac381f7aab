"""The progress of prepare as lines: work done, speed, and remaining time."""

import pytest

from maxtext_lite.data.manifest import Shard
from maxtext_lite.data.preparing import progress
from maxtext_lite.data.preparing.progress import Progress
from maxtext_lite.data.preparing.shards import Entry
from maxtext_lite.data.preparing.tasks import Task
from maxtext_lite.data.preparing.workers import Made


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_forecast_is_by_the_tokens_of_the_tasks_that_are_done(clock):
    said = []
    shown = Progress([Task(number, (), 1000) for number in range(4)], say=said.append, before=2)
    with shown:
        clock[0] = 10.0
        shown.made(Made(300, 8.0, None))
        assert shown.text() == "0 of 4 tasks, 300 tokens, 38 tokens/s/core"
        shown.made(Made(100, 2.0, Entry(1, Shard("a", 1, 400, "", ""), 0, 0, ())))
        # A tenth of a megabyte in 10 seconds; 1,200 tokens are left, at 40 a second.
        assert shown.text() == "1 of 4 tasks, 400 tokens, 40 tokens/s/core, about 30 seconds left"
        assert said == ["2 of 6 tasks were already done; continuing with the others"]
        clock[0] = 31.0
        shown.made(Made(400, 10.0, None))
        assert said[1:] == ["1 of 4 tasks, 800 tokens, 40 tokens/s/core, about 31 seconds left"]
        for number in (0, 2, 3):
            shown.made(Made(0, 0.0, Entry(number, None, 0, 0, ())))
    assert shown.text() == "4 of 4 tasks, 800 tokens, 40 tokens/s/core"
