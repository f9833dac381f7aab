"""A pytest plugin that prints the ten slowest test files and how many programs XLA compiled for each.

`.ci/run` loads it with `-p tests.slowest_files`, so that growth is seen. A program read from the persistent cache
counts too: it was traced and lowered. Processes that tests start are not counted.
"""

import collections
import sys
from typing import Any

import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
KEY = "compilations"

seconds: collections.Counter[str] = collections.Counter()
compilations: collections.Counter[str] = collections.Counter()
_running = [""]


def _count(event: str, duration: float, **_: Any) -> None:
    if event == COMPILED:
        compilations[_running[0]] += 1


def pytest_collection_finish() -> None:
    """Listens to jax, once collection has imported it; a run without jax compiles nothing."""
    if "jax" in sys.modules:
        import jax

        jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Names the file that compiles from here on."""
    _running[0] = nodeid.partition("::")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up a file's setups, calls and teardowns."""
    seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands a worker's counts to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[KEY] = dict(compilations)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the counts of a worker that has ended."""
    compilations.update(getattr(node, "workeroutput", {}).get(KEY, {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table."""
    terminalreporter.section("slowest files")
    terminalreporter.write_line(f"{'seconds':>8} {KEY:>13}  file")
    for file, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:8.1f} {compilations[file]:13}  {file}")
    total = sum(seconds.values())
    terminalreporter.write_line(
        f"{total:8.1f} {sum(compilations.values()):13}  all {len(seconds)} files"
    )
