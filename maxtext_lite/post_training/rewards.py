"""Rewards of responses: those of each function, the failures, and the weighted sum.

A function may skip a response (None) or fail for it. A response that every function skips, or for which one fails, is
unscored, unless reward_error says otherwise.

Functions run in one process of their own (`reward_worker`): one that hangs or crashes can be killed while the run, its
devices and its collectives continue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
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
        """The scores of the pairs of all parts, at least one, in order."""
        by_name: dict[str, np.ndarray] = {}
        for name in parts[0].by_name:
            by_name[name] = np.concatenate([part.by_name[name] for part in parts])
        return cls(
            total=np.concatenate([part.total for part in parts]),
            by_name=by_name,
            has_failed=np.concatenate([part.has_failed for part in parts]),
            errors=sum(part.errors for part in parts),
            messages=[message for part in parts for message in part.messages],
            traceback=next((part.traceback for part in parts if part.traceback), ""),
        )

    def part(self, pairs: slice) -> Self:
        """The scores of some of the pairs; the first part also has the messages and the number of errors."""
        total = self.total[pairs]
        by_name = {name: values[pairs] for name, values in self.by_name.items()}
        has_failed = self.has_failed[pairs]
        if pairs.start == 0:
            return dataclasses.replace(self, total=total, by_name=by_name, has_failed=has_failed)
        return type(self)(total, by_name, has_failed, 0, [])


class Rewards:
    """The reward functions of a config, which threads may share.

    Args:
      field_names: the keys of the prompts' lines, each an argument of the functions.
    Raises:
      UserError: a name cannot be imported, is not a function, or needs another argument; lists every such problem.
    """

    def __init__(self, config: RewardConfig, field_names: Sequence[str]) -> None:
        self._config = config
        self._names = reward_names(config)
        self._field_names = field_names
        self._failed_reward = 0.0 if config.reward_error == "zero" else np.nan
        self._lock = threading.Lock()
        self._traceback = ""
        self._worker: _Worker | None = None
        self._start(start_seconds(config))

    def of(self, prompts: Sequence[Prompt], completions: Sequence[Completion], unit: int | None = None) -> Scores:
        """The rewards of N pairs: completion i answers prompt i.

        Args:
          unit: adjacent pairs that fail together if a call for them alone fails; None: all.
        Raises:
          RewardError: a function fails and reward_error=stop.
        """
        by_name: dict[str, np.ndarray] = {}
        has_failed = np.zeros(len(prompts), bool)
        errors = 0
        messages: list[str] = []
        with self._lock:
            self._restart_seconds = start_seconds(self._config)
            self._traceback = ""
            for name in self._names:
                outcomes = self._ask(name, prompts, completions, unit or len(prompts)) if prompts else []
                by_name[name] = np.array([self._number(outcome) for outcome in outcomes], np.float64)
                failures = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
                for what, count in failures.items():
                    messages.append(f"Reward function {name} {what}: no reward for {count} of {len(prompts)} pairs.")
                has_failed |= np.array([isinstance(outcome, str) for outcome in outcomes], bool)
                errors += failures.total()
                if failures and self._config.reward_error == "stop":
                    raise RewardError(f"{message} Mend it, or set reward_error=unscored." for message in messages)
            traceback = self._traceback
        total = np.zeros(len(prompts))
        is_scored = np.zeros(len(prompts), bool)
        for weight, rewards in zip(reward_weights(self._config), by_name.values(), strict=True):
            total += weight * np.nan_to_num(rewards)
            is_scored |= ~np.isnan(rewards)
        if self._config.reward_error != "zero":
            is_scored &= ~has_failed
        return Scores(np.where(is_scored, total, np.nan), by_name, has_failed, errors, messages, traceback)

    def close(self) -> None:
        """Ends the functions' process, after the current call."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _start(self, seconds: float) -> None:
        """Starts a process and imports the functions in it.

        Raises:
          UserError: they cannot be imported, or not in so many seconds.
        """
        worker = _Worker()
        arguments = [*ARGUMENTS, *self._field_names]
        request = {"names": self._names, "pattern": self._config.reward_format, "given": arguments}
        try:
            problems = worker.ask(request, seconds)["problems"]
        except _Lost as error:
            why = error.reason or f"took more than {number_text(seconds)} seconds"
            problems = [f"reward_functions={','.join(self._names)}: importing them {why}."]
        if problems:
            worker.kill()
            raise UserError(problems)
        self._worker = worker

    def _number(self, outcome: float | str | None) -> float:
        if outcome is None:
            return np.nan
        return self._failed_reward if isinstance(outcome, str) else outcome

    def _ask(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[Completion], unit: int
    ) -> list[float | str | None]:
        """For each pair one function's reward, None if the function skips it, or what went wrong.

        A call that fails is repeated in parts of `unit` pairs: only the parts that fail have no reward, however many
        pairs a call has. All parts together may take as long as one call.
        """
        count = len(prompts)
        limit = self._config.reward_timeout_seconds
        found = self._call(name, prompts, completions, limit)
        if isinstance(found, list):
            return found
        if self._config.reward_error == "stop" or count <= unit:
            return [found] * count
        outcomes: list[float | str | None] = []
        seconds_left = limit
        for first in range(0, count, unit):
            part = slice(first, first + unit)
            parts_left = -(-(count - first) // unit)
            started = time.monotonic()
            restart_seconds = self._restart_seconds
            found = self._call(name, prompts[part], completions[part], seconds_left / parts_left)
            restarting = restart_seconds - self._restart_seconds
            seconds_left = max(seconds_left - (time.monotonic() - started - restarting), 0.0)
            outcomes += found if isinstance(found, list) else [found] * len(prompts[part])
        return outcomes

    def _call(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[Completion], seconds: float
    ) -> list[float | str | None] | str:
        """One call: for each pair the outcome, or what went wrong with the call.

        It restarts a process that has ended. All restarts of one `of` may take as long as one start.
        """
        if self._worker is None:
            began = time.monotonic()
            try:
                self._start(max(self._restart_seconds, 0.0))
            except UserError as error:
                return f"could not be started again: {' '.join(error.problems).removesuffix('.')}"
            finally:
                self._restart_seconds -= time.monotonic() - began
        assert self._worker is not None
        fields = {key: [prompt.fields.get(key) for prompt in prompts] for key in self._field_names}  # None: lacks it
        arguments = fields | {
            "prompts": [prompt.text for prompt in prompts],
            "completions": [each.marked_text if name == "format" else each.text for each in completions],
            "prompt_ids": [list(prompt.token_ids) for prompt in prompts],
            "completion_ids": [list(each.token_ids) for each in completions],
        }
        worker, self._worker = self._worker, None  # if an exception such as Ctrl-C ends the wait, its answer is late
        try:
            reply = worker.ask({"name": name, "arguments": arguments}, seconds)
        except _Lost as error:
            limit = number_text(self._config.reward_timeout_seconds)
            return error.reason or f"did not return within its share of reward_timeout_seconds={limit}"
        self._worker = worker
        if "error" in reply:
            self._traceback = self._traceback or reply["traceback"]
            return reply["error"]
        return reply["rewards"]


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
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "maxtext_lite.post_training.reward_worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=os.environ | own,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a process group of its own, to be killed as a whole
        )
        theirs.close()

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request; without one within `seconds`, the process is killed.

        Raises:
          _Lost: the process has ended.
        """
        try:
            self._connection.send(request)
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (OSError, EOFError):
            self.kill()
            code = self._process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise _Lost(f"ended its process ({how})") from None
        except BaseException:
            self.kill()
            raise
        self.kill()
        raise _Lost("")

    def close(self) -> None:
        """Lets the process end by itself, and kills it if it does not."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        """Kills the process, and the processes that functions started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
