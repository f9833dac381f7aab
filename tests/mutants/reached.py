"""Which functions of the library each test reaches, in its own process and in those that it starts.

`instrument` adds a line to every function of a copy of the source. The line calls `note`, which writes the function's
name once for each test. This file is copied into the instrumented package; it is also the pytest plugin that says
which test is running. What happens while a fixture of a module or a session is set up is written down as the
fixture's, and read as reached by every test that requests it.
"""

import ast
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG = os.environ.get("REACHED_LOG", "")
LABEL = "REACHED_BY"
"""An environment variable, so that processes started by a test have it too."""

_seen: set[str] = set()
_label = ""


def note(function: str) -> None:
    """Writes down that a function has been called, once for each test or fixture."""
    global _label
    label = os.environ.get(LABEL, "")
    if label != _label:
        _label = label
        _seen.clear()
    if function in _seen or not label:
        return
    _seen.add(function)
    _write({"reached": function, "by": label})


def _write(record: dict[str, Any]) -> None:
    if not LOG:
        return
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(record).encode() + b"\n")
    os.close(descriptor)


# ---- The plugin ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """Names what runs in the block."""
    before = os.environ.get(LABEL)
    os.environ[LABEL] = label
    try:
        yield
    finally:
        if before is None:
            del os.environ[LABEL]
        else:
            os.environ[LABEL] = before


def fixture_label(fixture: Any) -> str:
    """A shared fixture's name and the module, or the folder, that declares it."""
    return f"fixture {fixture.baseid}::{fixture.argname}"


try:
    import pytest
except ImportError:
    pass  # a process that was started without the test extra only notes
else:

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: Any) -> Iterator[None]:
        """Names the test, and writes down the shared fixtures that it requests."""
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        shared = sorted(
            fixture_label(fixture)
            for fixture in fixtures
            if fixture.scope != "function"
        )
        _write({"test": item.nodeid, "fixtures": shared})
        with labelled(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
        """Names the fixture, where other tests share it."""
        if fixturedef.scope == "function":
            return (yield)
        with labelled(fixture_label(fixturedef)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: Any) -> Iterator[Any]:
        """Writes down how a test ended and how long each part of it took."""
        report = yield
        _write(
            {
                "ended": item.nodeid,
                "when": report.when,
                "seconds": report.duration,
                "outcome": report.outcome,
            }
        )
        return report


# ---- The copy ------------------------------------------------------------------------------------------------------


def functions(
    source: str,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The qualified name and the syntax of each function of a module."""
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
            waiting.append((name, child))


def _instrumented(source: str, path: str) -> str:
    lines = source.splitlines(keepends=True)
    added: list[tuple[int, str]] = []
    for name, function in functions(source):
        body = function.body
        first = body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and len(body) > 1
        ):
            first = body[1]
        begins = min(
            [
                first.lineno,
                *(each.lineno for each in getattr(first, "decorator_list", [])),
            ]
        )
        if not lines[begins - 1][: first.col_offset].isspace():
            continue  # the whole function stands on one line
        call = f'__import__("maxtext_lite._reached", fromlist=["note"]).note("{path}:{name}")'
        added.append((begins - 1, " " * first.col_offset + call + "\n"))
    for index, text in sorted(added, reverse=True):
        lines.insert(index, text)
    return "".join(lines)


def instrument(root: Path) -> None:
    """Adds the line to every function under ROOT/maxtext_lite."""
    for path in sorted((root / "maxtext_lite").rglob("*.py")):
        path.write_text(
            _instrumented(path.read_text(), path.relative_to(root).as_posix())
        )
    shutil.copy(__file__, root / "maxtext_lite" / "_reached.py")
