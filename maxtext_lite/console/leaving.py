"""The end of a command while a thread still does work that nobody needs, such as a compilation: none can be stopped.

Python joins the threads of executors before it ends. A compilation may take minutes, and schedulers kill sooner. Daemon
threads are not joined, but one that returns from XLA while the interpreter shuts down aborts the process.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from maxtext_lite.console.output import StdoutLost

_unneeded: list[Future[Any]] = []


def abandon(work: Iterable[Future[Any]]) -> None:
    """Notes that nobody will ask for the results of this work, so that `leave` does not wait for it."""
    _unneeded.extend(each for each in work if not each.done())


def leave(code: int) -> None:
    """Ends this process with `code` if abandoned work is still running; returns otherwise. A command calls it last."""
    if all(each.done() for each in _unneeded):
        return
    # jax leaves the other processes there.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, StdoutLost):
            stream.flush()
    os._exit(code)
