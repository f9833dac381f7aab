"""Orderly stops: a signal becomes a request, which all hosts obey after the same step."""

import contextlib
import signal
from collections.abc import Callable, Generator
from types import FrameType

import jax
from jax.sharding import Mesh

from maxtext_lite.console import NUMBERS, command_signals
from maxtext_lite.parallel import devices_share_threads, make_any_host


class Signals:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step; the second has its usual effect.

    In a command, a signal before `take_requests`, and a second one after it, end the process with exit code 130: see
    `process.signals`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        del frame
        self.request(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def request(self, number: int) -> None:
        """Records a request to stop."""
        self.received = signal.Signals(number)

    def take_requests(self) -> None:
        """Makes signals requests in a command too: from now on there is something to save."""
        if command_signals.installed:
            command_signals.ask(self.request)


@contextlib.contextmanager
def watch_signals(signals: Signals) -> Generator[Signals]:
    """A block in which `signals` handles SIGTERM and SIGINT; the previous handlers are restored at its end.

    A request that they have from an earlier block, which a restart of the run has ended, still stands.

    A command keeps its handlers: once everything is saved, a signal no longer matters.
    """
    if command_signals.installed:
        command_signals.reset()
        yield signals
        return
    try:
        previous = {number: signal.signal(number, signals) for number in NUMBERS}
    except ValueError:  # not the main thread: its owner handles signals
        previous = {}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Stop:
    """Whether to stop after a step or a batch: all hosts agree, though a signal may reach only one of them.

    With several hosts the answer after a step is one call late; to wait for this one's would leave the devices idle.

    Args:
      mesh: None: no host is ever asked, so they exchange nothing.
    """

    def __init__(self, mesh: Mesh | None, is_asked: Callable[[], bool]):
        self._is_asked = is_asked
        self._any_host = make_any_host(mesh) if mesh is not None and jax.process_count() > 1 else None
        self._asked: jax.Array | None = None

    def after_this_step(self) -> bool:
        """Whether to stop. All hosts call it, at the same steps and batches."""
        received = self._is_asked()
        if self._any_host is None:
            return received
        before, self._asked = self._asked, self._any_host(received)
        if devices_share_threads():
            jax.block_until_ready(self._asked)
        return before is not None and bool(before)

    def between_steps(self) -> bool:
        """Whether to stop where no step is under way, and devices are idle. All hosts call it, at the same steps."""
        received = self._is_asked()
        return received if self._any_host is None else bool(self._any_host(received))
