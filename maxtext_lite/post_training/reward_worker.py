"""The process that runs reward functions. It answers requests on a connection to its parent.

The first request names the functions and the arguments that they may have, {"names": [...], "pattern": ..., "given":
[...]}; its answer lists the problems with them, {"problems": [...]}. Each further one calls a function, {"name": ...,
"arguments": {argument: [...]}}; the answer is {"rewards": [...]}, where a response has a number, None if the function
skips it, or a text that says what is wrong; or, where the whole call failed, {"error": ..., "traceback": ...}.
Both texts are the end of a sentence that begins with the function's name.

The functions' output goes to stderr. The process ends when the connection does, and so with its parent process; it
kills the processes that functions started and did not end.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import inspect
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from multiprocessing.connection import Connection
from typing import Any

from maxtext_lite.post_training.reward_functions import shipped

_SECONDS_TO_END = 2.0  # for a running function after the end of the input
_LONGEST_TEXT = 300  # of a function's text in our messages
_LARGEST = 1e12  # of a reward; times the largest weight, its square is finite in float32


class Functions:
    """Reward functions by name.

    Args:
      pattern: the regular expression of `format`.
      given: the names of the arguments that a call has.
    Attributes:
      problems: why functions cannot be called; sentences for the user.
    """

    def __init__(self, names: Sequence[str], pattern: str, given: Sequence[str]) -> None:
        self.problems: list[str] = []
        self._functions: dict[str, tuple[Callable[..., Any], frozenset[str] | None]] = {}
        for name in names:
            try:
                function = _imported(name) if ":" in name else shipped(name, pattern=pattern)
                wanted = _parameters(function, given)
            except _NoFunction as error:
                self.problems.append(f"reward_functions={name}: {error}")
            except ImportError:
                self.problems.append(
                    f"reward_functions={name} needs the package math-verify, which is not installed: "
                    "pip install -e '.[math]' in your clone."
                )
            else:
                self._functions[name] = function, wanted

    def rewards(self, name: str, arguments: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        """The answer to a call of a function."""
        function, wanted = self._functions[name]
        count = len(arguments["completions"])  # before the call, because the function may change the list
        if wanted is not None:
            arguments = {key: value for key, value in arguments.items() if key in wanted}
        try:
            returned: Any = function(**arguments)
            if inspect.isawaitable(returned):  # an async function, such as one that asks a server
                returned = _event_loop().run_until_complete(returned)
            return _rewards(returned, count)
        except BaseException as error:  # noqa: BLE001  (including SystemExit: a user's bug must not end the run)
            return {"error": f"raised {_described(error)}", "traceback": _traceback(error)}


def _rewards(returned: Any, count: int) -> dict[str, Any]:
    is_list = hasattr(returned, "__len__") and hasattr(returned, "__getitem__")
    if not is_list or isinstance(returned, str | bytes | Mapping):
        return {"error": f"returned {_short(repr(returned))}, not a list of numbers", "traceback": ""}
    if len(returned) != count:
        return {"error": f"returned {len(returned)} numbers for {count} pairs", "traceback": ""}
    return {"rewards": [_as_number(value) for value in returned]}


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all calls: what an async function keeps, such as connections, belongs to its first call's loop."""
    return asyncio.new_event_loop()


class _NoFunction(Exception):
    """A name without a function that can be called."""


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _NoFunction(f"importing {module_name} raised {_described(error)}.") from None
        raise _NoFunction(f"there is no module '{error.name}', in {os.getcwd()!r} or installed.") from None  # noqa: PTH109
    except BaseException as error:  # noqa: BLE001  (a module's import may raise anything)
        raise _NoFunction(f"importing {module_name} raised {_described(error)}.") from None
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            if module_name == "__main__":
                hint = (
                    " Functions run in another process than the notebook or program that trains: write this one to a "
                    f"file, such as rewards.py, and state rewards:{path}."
                )
            raise _NoFunction(f"{module_name} has no '{path}'.{hint}")
        found = getattr(found, part)
    if not callable(found) or inspect.isclass(found):
        raise _NoFunction(f"'{path}' of {module_name} is not a function.")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise _NoFunction(f"'{path}' of {module_name} yields its rewards. It must return them as a list.")
    return found


def _parameters(function: Callable[..., object], given: Sequence[str]) -> frozenset[str] | None:
    """The names of a function's parameters; None if it takes any.

    Raises:
      _NoFunction: it needs an argument that is not given, or not by name.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # for some functions in C
        return None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise _NoFunction(f"it takes '{parameter.name}' by position only. Arguments are given by name.")
        if parameter.name not in given and parameter.default is parameter.empty:
            near = get_close_matches(parameter.name, given, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise _NoFunction(
                f"it needs the argument '{parameter.name}', which nobody gives. Given are {', '.join(given)}.{hint}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _as_number(value: Any) -> float | str | None:
    """A response's reward, None if the function gives none, or what is wrong with it."""
    if value is None:
        return None
    not_a_number = f"returned a {type(value).__name__}, not a number"
    if isinstance(value, str | bytes) or "complex" in str(getattr(value, "dtype", "")):
        return not_a_number
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # noqa: BLE001  (a user's class, such as torch's tensors, may raise anything)
        return not_a_number
    if not math.isfinite(number):
        return f"returned {number}"
    return number if abs(number) <= _LARGEST else f"returned a number beyond {_LARGEST:g}, the largest in size"


def _described(error: BaseException) -> str:
    """The exception as Python prints it, and the place where it was raised."""
    text = _short(" ".join("".join(traceback.format_exception_only(error)).split()))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if len(frames) > 1 else ""  # noqa: PTH119
    return text + place


def _traceback(error: BaseException) -> str:
    """The exception and the user's lines, as Python prints them."""
    begin = error.__traceback__.tb_next if error.__traceback__ else None  # without our own line
    return "".join(traceback.format_exception(type(error), error, begin)).rstrip()


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _leave_signals_to_the_parent() -> None:
    """Ignores SIGINT and SIGTERM, which may reach every process: the training loop decides what to do about them."""
    own = os.getpid()

    def handle(number: int, _: object) -> None:
        if os.getpid() != own:  # a process that a function forked must end as usual
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # Not SIG_IGN, which programs started by a function would inherit.
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _receive(connection: Connection, inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Passes requests on. After the last one, kills a function that does not return, and the processes it started."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    inbox.put(None)
    time.sleep(_SECONDS_TO_END)
    os.killpg(0, signal.SIGKILL)


def _end_group(own: int) -> None:
    """Kills this process and those that functions started; does nothing in a process that a function forked."""
    if os.getpid() == own:
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answers all requests on the connection whose file descriptor is the only argument."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    # Before the functions' modules register theirs, so after those.
    atexit.register(_end_group, os.getpid())
    _leave_signals_to_the_parent()
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    # Functions run in the main thread, the only one in which Python allows alarms.
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    functions: Functions | None = None
    while (request := inbox.get()) is not None:
        if functions is None:
            functions = Functions(**request)
            connection.send({"problems": functions.problems})
        else:
            connection.send(functions.rewards(**request))


if __name__ == "__main__":
    main()
