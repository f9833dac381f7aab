"""The standard streams of a command: opens closed ones, and keeps a failing stdout apart from other errors."""

import errno
import io
import logging
import os
import sys
from typing import Any

_RAISE_WHAT_THEY_LOG = ("gcsfs", "s3fs", "fsspec", "google", "aiohttp", "aiobotocore", "botocore")


def open_closed_streams() -> None:
    """Opens streams that the caller closed (`>&-`) on /dev/null: the next file opened would take their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # takes the lowest free number
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class StdoutLost(Exception):
    """Stdout cannot be written any more.

    Attributes:
      reason: why; "" when its reader, such as head, closed it.
    """

    def __init__(self, error: OSError) -> None:
        self.reason = "" if error.errno == errno.EPIPE else error.strerror
        super().__init__(str(error))


class Stdout(io.FileIO):
    """The file behind stdout: its first failure raises StdoutLost or prints a warning, then output goes to /dev/null.

    Attributes:
      is_needed: False when the process has other work than to write there.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_needed = True

    def write(self, data: Any) -> int | None:
        """Writes bytes; returns how many."""
        try:
            return super().write(data)
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            if self.is_needed:
                raise StdoutLost(error) from None
            complain(f"warning: stdout cannot be written any more ({error.strerror}); training goes on without it")
            return len(data)


_stdout: Stdout | None = None


def watch_stdout() -> None:
    """Makes a failure of the process's own stdout raise StdoutLost."""
    global _stdout
    own = sys.stdout
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper):  # captured by code in this process
        return
    own.flush()
    _stdout = Stdout(own.fileno())
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_stdout),
        encoding=own.encoding,
        errors=own.errors,
        line_buffering=own.line_buffering,
        write_through=own.write_through,
    )


def go_on_without_stdout() -> None:
    """Makes a failure of stdout a warning on stderr."""
    if _stdout is not None:
        _stdout.is_needed = False


def log_real_warnings() -> None:
    """Shows the warnings and errors that libraries log, except absl's warnings and all of the clients of buckets.

    Orbax uses absl to log routine work, such as the removal of a killed save's files. Real problems it raises, and so
    do the clients of buckets, which also log a traceback of each.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.name != "absl" or record.levelno >= logging.ERROR)
    handler.addFilter(lambda record: record.name.partition(".")[0] not in _RAISE_WHAT_THEY_LOG)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(name)s: %(message)s", handlers=[handler])


def complain(line: str) -> None:
    """Prints a line on stderr if stderr can be written; a failure would have no reader."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python reports the failed flush at exit
