"""A signal is a request, the second one has its usual effect, and handlers are restored."""

import os
import signal

import pytest

from maxtext_lite.console import command_signals
from maxtext_lite.training.stopping import Signals, watch_signals

DEFAULT = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


def handlers():
    return {number: signal.getsignal(number) for number in DEFAULT}


@pytest.fixture(autouse=True)
def _handlers():
    """Each signal has its default handler at first, whatever was inherited; the session's own come back."""
    before = handlers()
    for number, handler in DEFAULT.items():
        signal.signal(number, handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.fast
def test_each_signal_is_a_request_the_first_time_and_the_next_has_the_default():
    with watch_signals(Signals()) as signals:
        assert signals.received is None
        for number in DEFAULT:
            os.kill(os.getpid(), number)
            assert signals.received is number
            assert signal.getsignal(number) == DEFAULT[number]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_request_outlives_the_restart_of_a_run():
    signals = Signals()
    with watch_signals(signals):
        os.kill(os.getpid(), signal.SIGTERM)
    with watch_signals(signals) as again:
        assert again.received is signal.SIGTERM


@pytest.mark.parametrize("ends", ["after a signal", "with an error"])
def test_handlers_are_handed_back(ends):
    mine = {number: lambda number, frame: None for number in DEFAULT}
    for number, handler in mine.items():
        signal.signal(number, handler)
    try:
        with watch_signals(Signals()) as signals:
            assert {*handlers().values()} == {signals}
            if ends == "after a signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if ends == "with an error":
                raise RuntimeError
    except RuntimeError:
        pass
    assert handlers() == mine


def test_in_a_command_a_signal_is_a_request_only_once_there_is_something_to_save(
    monkeypatch,
):
    asked = []
    monkeypatch.setattr(command_signals, "installed", True)
    monkeypatch.setattr(command_signals, "ask", asked.append)
    monkeypatch.setattr(
        command_signals, "_ask", lambda number: None
    )  # an earlier run's
    before = handlers()
    with watch_signals(Signals()) as signals:
        assert not asked
        assert handlers() == before
        signals.take_requests()
    (request,) = asked
    request(signal.SIGINT)
    assert signals.received is signal.SIGINT
    with watch_signals(Signals()):
        assert command_signals._ask is None, "until the next run has something to save"
