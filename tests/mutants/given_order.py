"""A pytest plugin that runs tests in the order in which a file names them, whatever a conftest sorts them by."""

import os
from pathlib import Path

import pytest

FILE = "TESTS_IN_ORDER"
"""An environment variable: the path of that file, a test a line."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests."""
    names = Path(os.environ[FILE]).read_text().splitlines()
    places = {name: place for place, name in enumerate(names)}
    items.sort(key=lambda item: places.get(item.nodeid, len(places)))
