"""SIGINT and SIGTERM of a command: they end it at once while there is nothing to save, and ask it to stop later on.

Python runs a signal's handler in its main thread, between two of its own instructions. That is too late while XLA
compiles, and what a handler raises inside a callback from C is printed and dropped. So nothing is raised here: a thread
is told of each signal (`signal.set_wakeup_fd`) and acts on it.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Sequence

EXIT_INTERRUPTED = 130
"""The exit code after a signal that came before there was anything to save, or for the second time."""

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
            return os.path.basename(word) == _CONSOLE_SCRIPT  # noqa: PTH119  (pathlib takes its time to import)
        if word in ("-X", "-W"):
            next(rest, None)
        elif word.startswith("-c"):
            return False
        elif "m" in word and not word.startswith(("-X", "-W", "--")):  # the last of short options, as in -Im NAME
            package, _, command = (word.partition("m")[2] or next(rest, "")).partition(".")
            return package == "maxtext_lite" and "." not in command
    return False


class CommandSignals:
    """What becomes of a signal, now and from some moment on."""

    def __init__(self) -> None:
        self._ask: Callable[[int], None] | None = None
        self._asked: set[int] = set()
        self._code = EXIT_INTERRUPTED
        self._last_words = b""
        self.installed = False

    def install(self) -> None:
        """From here on a signal ends the process with exit code 130. Call it in the main thread."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.installed = True
        self.handle()
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=self._leave_to_the_parent)
        atexit.register(self._ignore)  # first, so that it runs last

    def handle(self) -> None:
        """Takes the signals back from whoever took them, as `jax.distributed` does with SIGTERM."""
        if self.installed:
            for number in NUMBERS:
                signal.signal(number, _wake)

    def ask(self, ask: Callable[[int], None]) -> None:
        """From here on the first SIGINT, and the first SIGTERM, calls `ask` in a thread; the next one ends the process.

        Args:
          ask: is passed the signal's number; it must not raise.
        """
        self._ask = ask

    def finish(self, code: int) -> None:
        """From here on a signal ends the process with `code`: everything is done that it is about."""
        self._code, self._ask = code, None

    def say_at_the_end(self, last_words: bytes) -> None:
        """What a signal that ends the process writes to stdout first, such as a terminal's escape sequence."""
        self._last_words = last_words

    def came(self, number: int) -> None:
        """Acts on a signal that has come."""
        if self._ask is not None and number not in self._asked:
            self._asked.add(number)
            self._ask(number)
            return
        if self._last_words:
            os.write(1, self._last_words)
        os._exit(self._code)

    def _watch(self, read: int) -> None:
        while True:
            for number in os.read(read, 64):
                if number in NUMBERS:
                    self.came(number)

    def _ignore(self) -> None:
        """What is left of the process is Python's own end, during which a handler would be set back to the default."""
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _leave_to_the_parent(self) -> None:
        """A fork shares the pipe: what comes to it must not be taken for a signal to us."""
        self.installed = False
        signal.set_wakeup_fd(-1)
        for number in NUMBERS:
            signal.signal(number, signal.SIG_DFL)


def _wake(number: int, frame: object) -> None:
    """Does nothing: a signal has to have a handler in Python for the thread to be told of it."""


command_signals = CommandSignals()
"""Those of this process; installed where it is one of our commands, and never by a mere import."""
