"""Rewards of responses: those of each function, the failures, and the weighted sum.

A function may leave a response out (None) or fail for it. A response that every function leaves out, or for which one
fails, is unscored, unless reward_error says otherwise.

Functions run in one process of their own (`reward_worker`): one that hangs or crashes can be killed while the run, its
devices and its collectives continue.

A process pool with time-outs does less: pebble's (5.2) leaves processes alive that a function started, takes 4 seconds
to end one that ignores SIGTERM after a second, and lets functions print to the run's own stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import number_text
from maxtext_lite.post_training.keys import RewardConfig, reward_names, reward_weights
from maxtext_lite.post_training.prompts import ARGUMENTS, Prompt

_START_SECONDS = 300.0  # to import functions and their dependencies from a slow disk
_SECONDS_TO_END = 5.0


def start_seconds(config: RewardConfig) -> float:
    """The longest time to start the functions' process, and of all its restarts during one call of `Rewards.of`."""
    return max(_START_SECONDS, config.reward_timeout_seconds)


def longest_seconds(config: RewardConfig) -> float:
    """The longest time of a call of `Rewards.of`: each function called again after a failure, and all restarts."""
    return 2 * len(reward_names(config)) * config.reward_timeout_seconds + start_seconds(config)


class RewardError(UserError):
    """A reward function failed, and reward_error=stop; or all did, for every response of two batches in a row."""


class Completion(NamedTuple):
    """A response as reward functions see it.

    Attributes:
      text: without the token that ended it.
      marked_text: the text with the special tokens in it, for `format`.
      token_ids: with the token that ended it.
    """

    text: str
    marked_text: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Scores:
    """The rewards of N pairs.

    Attributes:
      total: weighted sum over the functions that gave a reward, float64 [N]; NaN where the response is unscored.
      by_name: the rewards of each function, float64 [N]; NaN where it gave none.
      has_failed: whether a function failed for the response, bool [N].
      errors: the number of failed rewards, over all functions and pairs.
      messages: a sentence for each function and kind of failure.
      traceback: of the first exception; "" without one.
    """

    total: np.ndarray
    by_name: dict[str, np.ndarray]
    has_failed: np.ndarray
    errors: int
    messages: list[str]
    traceback: str = ""

    @property
    def is_scored(self) -> np.ndarray:
        """Whether a response has a reward, bool [N]."""
        return ~np.isnan(self.total)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The scores of the pairs of all parts, of which there is at least one, in order."""
        by_name = {name: np.concatenate([part.by_name[name] for part in parts]) for name in parts[0].by_name}
        return cls(
            total=np.concatenate([part.total for part in parts]),
            by_name=by_name,
            has_failed=np.concatenate([part.has_failed for part in parts]),
            errors=sum(part.errors for part in parts),
            messages=[message for part in parts for message in part.messages],
            traceback=next((part.traceback for part in parts if part.traceback), ""),
        )

    def to_json(self) -> dict[str, Any]:
        """The argument of `from_json`."""
        by_name = {name: values.tolist() for name, values in self.by_name.items()}
        arrays = {"total": self.total.tolist(), "has_failed": self.has_failed.tolist()}
        return {**vars(self), **arrays, "by_name": by_name}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The scores of which `to_json` returned these fields."""
        by_name = {name: np.array(values, np.float64) for name, values in fields["by_name"].items()}
        arrays = {"total": np.array(fields["total"], np.float64), "has_failed": np.array(fields["has_failed"], bool)}
        return cls(**{**fields, **arrays, "by_name": by_name})


class Rewards:
    """The reward functions of a config; a context manager that threads may share.

    Args:
      field_names: the keys of the prompts' lines, each an argument of the functions.
    Raises:
      UserError: a name cannot be imported, is not a function, or needs another argument; lists every such problem.
    """

    def __init__(self, config: RewardConfig, field_names: Sequence[str]) -> None:
        self._names, self._weights = reward_names(config), reward_weights(config)
        self._stops, self._field_names = config.reward_error == "stop", field_names
        self._of_failed = 0.0 if config.reward_error == "zero" else np.nan
        self._seconds, self._start_seconds = config.reward_timeout_seconds, start_seconds(config)
        given = [*ARGUMENTS, *field_names]
        self._asked = {"names": self._names, "pattern": config.reward_format, "given": given}
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False
        self._start(self._start_seconds)

    def of(self, prompts: Sequence[Prompt], completions: Sequence[Completion], unit: int | None = None) -> Scores:
        """The rewards of N pairs: completion i answers prompt i.

        Args:
          unit: adjacent pairs that fail together if a call for them alone fails; None: all.
        Raises:
          RewardError: a function fails and reward_error=stop.
          ValueError: the numbers of prompts and completions differ, or `close` was called.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
        by_name: dict[str, np.ndarray] = {}
        has_failed = np.zeros(len(prompts), bool)
        problems: list[tuple[int, str]] = []
        with self._lock:
            if self._is_closed:
                raise ValueError("these rewards are closed")
            self._left_to_start, self._traceback = self._start_seconds, ""
            for name in self._names if prompts else ():
                outcomes = self._ask(name, prompts, completions, unit or len(prompts))
                by_name[name] = np.array([self._number(each) for each in outcomes], np.float64)
                has_failed |= [isinstance(each, str) for each in outcomes]
                of_name = _problems(name, outcomes)
                problems += of_name
                if of_name and self._stops:
                    raise RewardError(f"{problem} Mend it, or set reward_error=unscored." for _, problem in of_name)
            traceback = self._traceback
        for name in self._names:
            by_name.setdefault(name, np.zeros(0))
        total = np.zeros(len(prompts))
        is_scored = np.zeros(len(prompts), bool)
        for weight, rewards in zip(self._weights, by_name.values(), strict=True):
            total += weight * np.nan_to_num(rewards)
            is_scored |= ~np.isnan(rewards)
        if np.isnan(self._of_failed):
            is_scored &= ~has_failed
        return Scores(
            total=np.where(is_scored, total, np.nan),
            by_name=by_name,
            has_failed=has_failed,
            errors=sum(count for count, _ in problems),
            messages=[problem for _, problem in problems],
            traceback=traceback,
        )

    def close(self) -> None:
        """Ends the functions' process, after the current call."""
        with self._lock:
            self._is_closed = True
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, seconds: float) -> None:
        """Starts a process and imports the functions in it.

        Raises:
          UserError: they cannot be imported, or not in so many seconds.
        """
        worker = _Worker()
        try:
            problems = worker.asked(self._asked, seconds)["problems"]
        except _Lost as error:
            why = error.reason or f"took more than {number_text(self._start_seconds)} seconds in all"
            problems = [f"reward_functions={','.join(self._names)}: importing them {why}."]
        except BaseException:
            worker.kill()
            raise
        if problems:
            worker.kill()
            raise UserError(problems)
        self._worker = worker

    def _number(self, outcome: float | str | None) -> float:
        if outcome is None:
            return np.nan
        return self._of_failed if isinstance(outcome, str) else outcome

    def _ask(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[Completion], unit: int
    ) -> list[float | str | None]:
        """For each pair one function's reward, None if it is left out, or what went wrong.

        A call that fails is repeated in parts of `unit` pairs, so that only the parts that fail have no reward,
        however many pairs a call has. All parts together may take as long as one call, and all restarts as long as one
        start, lest hanging parts add up.
        """
        count, said = len(prompts), number_text(self._seconds)
        late = f"did not return within reward_timeout_seconds={said}"
        found = self._restarted() or self._call(name, prompts, completions, self._seconds, late)
        if isinstance(found, list):
            return found
        if self._stops or count <= unit:
            return [found] * count
        late = f"did not return within its share of reward_timeout_seconds={said}"
        left, outcomes = self._seconds, list[float | str | None]()
        for first in range(0, count, unit):
            part = slice(first, first + unit)
            if wrong := self._restarted():
                return [*outcomes, *[wrong] * (count - first)]
            started, seconds = time.monotonic(), left / -(-(count - first) // unit)
            found = self._call(name, prompts[part], completions[part], seconds, late)
            left = max(left - (time.monotonic() - started), 0.0)
            outcomes += found if isinstance(found, list) else [found] * len(prompts[part])
        return outcomes

    def _restarted(self) -> str:
        """Starts the process if it has ended; returns what went wrong, "" if nothing."""
        if self._worker is not None:
            return ""
        if self._left_to_start <= 0:
            return f"could not be started again: restarts took {number_text(self._start_seconds)} seconds already"
        began = time.monotonic()
        try:
            self._start(self._left_to_start)
        except UserError as error:  # a function can no longer be imported
            return f"could not be started again: {' '.join(error.problems).removesuffix('.')}"
        finally:
            self._left_to_start -= time.monotonic() - began
        return ""

    def _call(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[Completion], seconds: float, late: str
    ) -> list[float | str | None] | str:
        """One call: for each pair the outcome, or what went wrong with the call.

        Args:
          late: what goes wrong if it takes more than `seconds`.
        """
        assert self._worker is not None, "a call needs a process"
        try:
            request = {"name": name, "arguments": self._arguments(name, prompts, completions)}
            reply: dict[str, Any] = self._worker.asked(request, seconds)
        except _Lost as error:
            self._worker = None
            return error.reason or late
        except BaseException:  # such as Ctrl-C: a late answer must not be taken for the next call's
            self._worker.kill()
            self._worker = None
            raise
        if "error" in reply:
            self._traceback = self._traceback or reply["traceback"]
            return reply["error"]
        return reply["rewards"]

    def _arguments(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """The ARGUMENTS of a call and the prompts' fields; None where a line lacks one."""
        fields = {key: [prompt.fields.get(key) for prompt in prompts] for key in self._field_names}
        return fields | {
            "prompts": [prompt.text for prompt in prompts],
            "completions": [each.marked_text if name == "format" else each.text for each in completions],
            "prompt_ids": [list(prompt.token_ids) for prompt in prompts],
            "completion_ids": [list(each.token_ids) for each in completions],
        }


def _problems(name: str, outcomes: Sequence[float | str | None]) -> list[tuple[int, str]]:
    """For each kind of failure the number of pairs and a sentence."""
    wrong = Counter(each for each in outcomes if isinstance(each, str))
    return [
        (failed, f"Reward function {name} {what}: no reward for {failed} of {len(outcomes)} pairs.")
        for what, failed in wrong.items()
    ]


class _Lost(Exception):
    """The functions' process ended without an answer.

    Attributes:
      reason: how it ended; "" if it was killed for running out of time.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class _Worker:
    """A process that runs `reward_worker`."""

    def __init__(self) -> None:
        # Functions that import jax must not take the accelerator that this process holds. They can import whatever this
        # process can, and modules in the working directory, which -m puts first.
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "maxtext_lite.post_training.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | own,
            bufsize=0,
            start_new_session=True,  # a process group of its own, to be killed as a whole
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._to, self._from = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    def asked(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request; without one within `seconds`, the process is killed.

        Raises:
          _Lost: the process has ended.
        """
        deadline = time.monotonic() + seconds
        unsent = memoryview((json.dumps(request) + "\n").encode())
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            selector.register(self._to, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                ready = {key.fd for key, _ in selector.select(max(deadline - time.monotonic(), 0))}
                if not ready:
                    self.kill()
                    raise _Lost("")
                try:
                    if self._from in ready:
                        piece = os.read(self._from, 2**20)
                        if not piece:
                            raise BrokenPipeError
                        received += piece
                    if self._to in ready:
                        unsent = unsent[os.write(self._to, unsent) :]
                        if not unsent:
                            selector.unregister(self._to)
                except BrokenPipeError:
                    raise _Lost(self._how_it_ended()) from None
        return json.loads(received)

    def close(self) -> None:
        """Lets the process end by itself, and kills it if it does not, and the processes that functions started."""
        self._close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def kill(self) -> None:
        """Kills the process, and the processes that functions started."""
        # Before it is waited for: until then its number cannot be reused.
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._close_pipes()

    def _how_it_ended(self) -> str:
        self.kill()  # the processes that it started; its own exit code stays
        code = self._popen.returncode
        return f"ended its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def _close_pipes(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
