"""A signal is a request, the second one has its usual effect, and handlers are restored."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.process.signals import command_signals
from maxtext_lite.training import stopping
from maxtext_lite.training.stopping import BrokenOff, Signals, Stop, watch_signals

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@pytest.fixture(autouse=True)
def _handlers():
    """Restores the test session's own handlers after each test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@BOTH
def test_the_first_signal_is_a_request_and_the_next_has_the_default(number):
    with watch_signals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received is number
        default = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        assert signal.getsignal(number) == default[number]


def test_a_second_interrupt_is_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), watch_signals() as signals:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_each_signal_has_a_first_time_of_its_own():
    with watch_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is signal.SIGINT


@pytest.mark.parametrize("received", [False, True])
def test_handlers_are_handed_back(received):
    mine = {number: lambda number, frame: None for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in mine.items():
        signal.signal(number, handler)
    with watch_signals() as signals:
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signals
        if received:
            os.kill(os.getpid(), signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in mine} == mine


def test_handlers_are_handed_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), watch_signals():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_signals_stay_with_whoever_has_them():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def watch():
        with watch_signals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.received))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_process_stops_after_the_step_in_which_it_was_asked(setup):
    signals = Signals()
    stop = Stop(setup().mesh, lambda: signals.received is not None)
    assert not stop.after_this_step()
    stop.break_off()
    signals(signal.SIGTERM, None)
    assert stop.after_this_step()
    assert stop.after_this_step()  # and does not forget
    with pytest.raises(BrokenOff):
        stop.break_off()


def test_several_hosts_agree_a_step_later_or_at_once_where_no_step_is_under_way(setup, monkeypatch):
    mesh, asked = setup().mesh, []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(stopping, "make_any_host", lambda _: lambda here: jnp.asarray(here or bool(asked)))
    stop = Stop(mesh, lambda: False)
    assert not stop.after_this_step()
    assert not stop.between_steps()
    asked.append("on the other host")
    assert not stop.after_this_step()
    assert stop.between_steps()
    assert stop.after_this_step()


def test_in_a_command_a_signal_is_a_request_only_once_there_is_something_to_save(monkeypatch):
    asked = []
    monkeypatch.setattr(command_signals, "installed", True)
    monkeypatch.setattr(command_signals, "ask", asked.append)
    monkeypatch.setattr(command_signals, "_ask", lambda number: None)  # an earlier run's
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with watch_signals() as signals:
        assert not asked
        assert {number: signal.getsignal(number) for number in before} == before
        signals.take_requests()
    (request,) = asked
    request(signal.SIGINT)
    assert signals.received is signal.SIGINT
    with watch_signals():
        assert command_signals._ask is None, "until the next run has something to save"
