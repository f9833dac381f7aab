"""A pytest plugin that prints the ten slowest test files. `.ci/run` loads it with `-p tests.slowest_files`, so that
growth is seen."""

import collections
from typing import Any

import pytest

seconds: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up a file's setups, calls and teardowns."""
    seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table."""
    terminalreporter.section("slowest files")
    for file, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:8.1f}  {file}")
    terminalreporter.write_line(f"{seconds.total():8.1f}  all {len(seconds)} files")
