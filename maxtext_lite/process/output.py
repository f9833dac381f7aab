"""The standard streams of a command: closed ones are opened, and a failing stdout is not taken for other errors."""

import errno
import io
import logging
import os
import sys
from typing import Any


def open_closed_streams() -> None:
    """Opens what the caller has closed (`>&-`) on /dev/null: a file that is opened next would take its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)  # the lowest number that is free
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class StdoutLost(Exception):
    """Nothing can be written to stdout any more.

    Attributes:
      reason: why; "" where its reader, such as head, has seen enough.
    """

    def __init__(self, error: OSError) -> None:
        self.reason = "" if error.errno == errno.EPIPE else error.strerror
        super().__init__(str(error))


class Stdout(io.FileIO):
    """The file of stdout, whose first failure raises StdoutLost, or is a line on stderr; then all goes to /dev/null.

    Attributes:
      is_needed: False where the process has more to do than to write there.
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
    """From here on a failure of the process's own stdout raises StdoutLost."""
    global _stdout
    own = sys.stdout
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper):  # somebody reads it in this process
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
    """From here on its failure is a line on stderr."""
    if _stdout is not None:
        _stdout.is_needed = False


def log_real_warnings() -> None:
    """Shows what libraries log as warnings and errors, but for absl's warnings.

    Orbax logs through absl what it does of its own accord and nobody can do anything about, such as that it removes
    what a killed save has left; what goes wrong it raises.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.name != "absl" or record.levelno >= logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(name)s: %(message)s", handlers=[handler])


def complain(line: str) -> None:
    """Prints a line on stderr, where that can be written: nobody would see that it cannot."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or Python would complain when it flushes at exit
