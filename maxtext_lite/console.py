"""A command's process before slow imports: its signals, its streams, and how it leaves. Only the standard library.

Python runs signal handlers in the main thread, between two bytecode instructions. That is too late while XLA compiles,
and an exception raised by a handler inside a callback from C is printed and dropped. So no handler raises: a thread
receives each signal (`signal.set_wakeup_fd`) and acts on it.
"""

import atexit
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
"""The exit code after a signal with nothing to save yet, or after a second signal."""

NUMBERS = (signal.SIGINT, signal.SIGTERM)

_CONSOLE_SCRIPT = "maxtext-lite"


def runs_a_command(words: Sequence[str]) -> bool:
    """Whether the interpreter's own command line runs one of our commands.

    Args:
      words: as in `sys.orig_argv`.
    """
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return os.path.basename(word) == _CONSOLE_SCRIPT  # noqa: PTH119  (pathlib is slow to import)
        if word in ("-X", "-W"):
            next(rest, None)
        elif word.startswith("-c"):
            return False
        elif "m" in word and not word.startswith(("-X", "-W", "--")):  # in short options such as -Im NAME
            package, _, command = (word.partition("m")[2] or next(rest, "")).partition(".")
            return package == "maxtext_lite" and "." not in command
    return False


class CommandSignals:
    """The effect of a signal, which changes over the life of a command."""

    def __init__(self) -> None:
        self._ask: Callable[[int], None] | None = None
        self._asked: set[int] = set()
        self._code = EXIT_INTERRUPTED
        self._last_words = b""
        self._reason = b""
        self.installed = False

    def install(self) -> None:
        """Makes a signal end the process with exit code 130. Call it in the main thread."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.installed = True
        self.handle()
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=self._leave_to_the_parent)
        atexit.register(self._ignore)  # registered first, so it runs last

    def handle(self) -> None:
        """Takes the signals back from other code, such as `jax.distributed`, which handles SIGTERM."""
        if self.installed:
            for number in NUMBERS:
                signal.signal(number, _wake)

    def ask(self, ask: Callable[[int], None]) -> None:
        """Makes the first SIGINT and the first SIGTERM call `ask` in a thread; the next one ends the process.

        Args:
          ask: takes the signal's number; must not raise.
        """
        self._ask = ask
        self._reason = b""

    def reset(self) -> None:
        """Makes a signal end the process as before the first `ask`: another run begins, with nothing to save yet.

        Ends it now if the previous run was asked to stop and failed first.
        """
        self._ask = None
        if self._asked:
            self._end()

    def finish(self, code: int) -> None:
        """Makes a signal end the process with `code`: the work is done."""
        self._code, self._ask = code, None
        self._reason = b""

    def explain(self, reason: str) -> None:
        """Sets a line that stderr gets if a signal ends the process before the next `ask` or `finish`."""
        self._reason = f"{reason}\n".encode()

    def say_at_the_end(self, last_words: bytes) -> None:
        """Sets bytes, such as a terminal escape sequence, that stdout gets before a signal ends the process."""
        self._last_words = last_words

    def came(self, number: int) -> None:
        """Acts on a signal."""
        if self._ask is not None and number not in self._asked:
            self._asked.add(number)
            self._ask(number)
        else:
            self._end()

    def _end(self) -> None:
        for stream, text in ((1, self._last_words), (2, self._reason)):
            if text:
                with contextlib.suppress(OSError):
                    os.write(stream, text)
        os._exit(self._code)

    def _watch(self, read: int) -> None:
        while True:
            for number in os.read(read, 64):
                if number in NUMBERS:
                    self.came(number)

    def _ignore(self) -> None:
        """Ignores signals while Python shuts down, which would restore the default handlers."""
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _leave_to_the_parent(self) -> None:
        """Detaches a fork, which shares the pipe: its signals must not reach the parent."""
        self.installed = False
        signal.set_wakeup_fd(-1)
        for number in NUMBERS:
            signal.signal(number, signal.SIG_DFL)


def _wake(number: int, frame: object) -> None:
    """Does nothing: without a Python handler the signal would not reach the thread."""


command_signals = CommandSignals()
"""The signals of this process; installed only if it runs one of our commands, never by an import."""


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
            complain(f"warning: stdout is no longer writable ({error.strerror}); training continues without it")
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


complaints: list[str] = []
"""The lines of `complain` so far."""


def complain(line: str) -> None:
    """Prints a line on stderr if stderr can be written; a failure would have no reader."""
    complaints.append(line)
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python reports the failed flush at exit


def report_absent_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook of a command: one line and exit code 2 where a package of the library has been deleted."""
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if absent is None or not absent.startswith("maxtext_lite."):
        sys.__excepthook__(kind, error, trace)
        return
    complain(f"error: this command needs {absent}, which is not installed.")
    os._exit(2)


_unneeded: list[Future[Any]] = []


def abandon(work: Iterable[Future[Any]]) -> None:
    """Marks work whose results nobody needs: `leave` does not wait for it."""
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
