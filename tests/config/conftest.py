"""Another table of what a config reaches by name."""

import pytest

from maxtext_lite.config import registry


@pytest.fixture
def table(monkeypatch):
    """A function that puts kinds of our own into the registry's table."""

    def put(**kinds):
        monkeypatch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, **kinds})
        registry._targets.cache_clear()

    yield put
    monkeypatch.undo()
    registry._targets.cache_clear()
