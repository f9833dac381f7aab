"""Stopping a run after a step, because of a signal or a callback: all hosts stop after the same one."""

import contextlib
import enum
import signal
from collections.abc import Generator
from types import FrameType

import jax
from jax.sharding import Mesh

from maxtext_lite.console import NUMBERS, command_signals
from maxtext_lite.parallel import devices_share_threads, make_largest_of_hosts


class Signals:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step; the second has its usual effect.

    In a command, a signal before `take_requests`, and a second one after it, end the process with exit code 130.
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

    A request from an earlier block, which a restart of the run has ended, still counts. A command keeps its handlers.
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


class Reason(enum.IntEnum):
    """Why a run stops; the largest of several reasons counts."""

    NONE = 0
    CALLBACK = 1
    SIGNAL = 2


class Stop:
    """The reason why all hosts stop, though only one of them may have been asked to.

    With several hosts a request takes effect one poll later: to wait for the others would leave the devices idle.

    Attributes:
      reason: what the hosts have agreed on.
    """

    def __init__(self, mesh: Mesh, signals: Signals):
        self.reason = Reason.NONE
        self._signals = signals
        self._largest = make_largest_of_hosts(mesh) if jax.process_count() > 1 else None
        self._polled: jax.Array | None = None

    def poll(self, is_end_requested: bool) -> Reason:
        """Updates the reason after a step or a batch. All hosts call it, at the same ones.

        Args:
          is_end_requested: a callback of this host has asked for the end.
        """
        request = self._request(is_end_requested)
        if self._largest is not None:
            previous = self._polled
            self._polled = self._largest(request)
            if devices_share_threads():
                jax.block_until_ready(self._polled)
            request = 0 if previous is None else int(previous)
        self.reason = max(self.reason, Reason(request))
        return self.reason

    def poll_blocking(self, is_end_requested: bool) -> Reason:
        """Like `poll`, but with this moment's requests: call it between steps, when no device is busy."""
        request = self._request(is_end_requested)
        if self._largest is not None:
            request = int(self._largest(request))
        self.reason = max(self.reason, Reason(request))
        return self.reason

    def _request(self, is_end_requested: bool) -> Reason:
        if self._signals.received is not None:
            return Reason.SIGNAL
        return Reason.CALLBACK if is_end_requested else Reason.NONE
