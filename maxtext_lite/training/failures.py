"""Failed reads and writes of a run: found by any thread on any host, raised by all hosts together."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.parallel import exchange, value_of_host

Result = TypeVar("Result")


class UnreadError(UserError):
    """A host cannot read examples; raised on all hosts."""


def raise_unread(problem: str | None, safe: str = "") -> None:
    """Raises the first host's problem with reading, followed by a sentence on what is safe. All hosts call it.

    Raises:
      UnreadError: on all hosts, if one cannot read its examples.
    """
    if problems := [each for each in exchange(problem) if each is not None]:
        raise UnreadError(f"{problems[0]} {safe}".rstrip())


class Failures:
    """The first failure of this host while the run writes.

    A host that raised it at once would leave the others waiting in a collective. So it is kept until all hosts check:
    when one of them is asked to stop, before a checkpoint, and at the end.

    Attributes:
      newest: on the first host, step of the newest checkpoint that counts, to say what is safe; None: there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, bool] | None = None  # with whether a sentence on what is safe follows
        self._unread: str | None = None
        self.newest: int | None = None

    @property
    def found(self) -> bool:
        """Whether something could not be written."""
        return self._first is not None

    @property
    def ends_run(self) -> bool:
        """Whether something could not be written or read."""
        return self._first is not None or self._unread is not None

    def add_unread(self, problem: str) -> None:
        """Records why the examples of a later step cannot be read: the run ends before that step, and is saved."""
        self._unread = self._unread or problem

    def raise_unread(self, safe: str) -> None:
        """Raises the problem recorded by `add_unread`, once the run is saved. All hosts call it.

        Args:
          safe: a sentence on what was saved.
        Raises:
          UnreadError: on all hosts, if one cannot read its examples.
        """
        raise_unread(self._unread, safe)

    def add(self, problem: str, *, is_unwritten: bool = False) -> None:
        """Records a problem, unless there is one already: later ones follow from the first."""
        with self._lock:
            self._first = self._first or (problem, is_unwritten)

    def add_unwritten(self, problem: str) -> None:
        """Records a problem with writing; the error adds what is safe by then."""
        self.add(problem, is_unwritten=True)

    @contextlib.contextmanager
    def of_writing(self, path: object) -> Generator[None]:
        """A block that writes `path`; its OSError is recorded."""
        try:
            with writing(str(path)):
                yield
        except UserError as error:
            self.add_unwritten(" ".join(error.problems))

    def on_first_host(self, path: object, write: Callable[[], Result]) -> Result | None:
        """The result of `write()` on the first host, the only one that calls it; None on the others. All hosts call it.

        Raises:
          UserError: `path` could not be written; on all hosts.
        """
        written = None
        with self.of_writing(path):
            written = write() if jax.process_index() == 0 else None
        self.raise_together()
        return written

    def raise_together(self, is_busy: bool = False) -> bool:
        """Raises a recorded problem on all hosts, or returns whether any host is busy. All hosts call it.

        Raises:
          UserError: the problem of the first host that has one.
        """
        of_hosts = exchange([is_busy, self._first])
        problems = [problem for _, problem in of_hosts if problem is not None]
        if problems:
            problem, is_unwritten = problems[0]
            self.add(problem, is_unwritten=is_unwritten)  # `found` on all: nobody waits for a host that has failed
            raise UserError(f"{problem} {self._safe()}" if is_unwritten else problem)
        return any(busy for busy, _ in of_hosts)

    def _safe(self) -> str:
        """A sentence on what is safe. All hosts call it, as only the first one knows when a checkpoint counts."""
        newest = value_of_host(0, self.newest)
        if newest is None:
            return "What is safe: nothing, as there is no checkpoint yet."
        return f"What is safe: the checkpoint of step {newest}, from which the same command goes on."
