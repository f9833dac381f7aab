"""Rewards of responses: what each function says, what failed, and the weighted sum.

Functions run in one process of their own (`reward_worker`), so that one that hangs or crashes can be ended, and the
run, its devices and its collectives go on.

A process pool with time-outs does less: pebble's (5.2) leaves alive what a function started, takes 4 seconds to end one
that ignores SIGTERM after a second, and what functions print goes to the run's own stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import number_text
from maxtext_lite.config.rl_rules import reward_names, reward_weights
from maxtext_lite.config.rl_sections import RewardConfig
from maxtext_lite.data.prompts import Prompt

_START_SECONDS = 300.0  # to import functions, and what they import, from a slow disk
_SECONDS_TO_END = 5.0


class RewardError(UserError):
    """A reward function failed, and reward_error=stop."""


@dataclass(frozen=True)
class Scores:
    """What the functions say of N pairs.

    Attributes:
      total: weighted sum of all functions, float64 [N].
      by_name: what each function says, float64 [N]; 0 where it failed.
      errors: rewards that failed, over all functions and pairs.
      messages: what failed, a sentence for each function and way of failing.
    """

    total: np.ndarray
    by_name: dict[str, np.ndarray]
    errors: int
    messages: list[str]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        by_name = {name: values.tolist() for name, values in self.by_name.items()}
        return {**vars(self), "total": self.total.tolist(), "by_name": by_name}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The same scores."""
        by_name = {name: np.array(values, np.float64) for name, values in fields["by_name"].items()}
        total = np.array(fields["total"], np.float64)
        return cls(total, by_name, fields["errors"], fields["messages"])


class Rewards:
    """The reward functions of a config, ready to be called; a context manager. Threads may share it.

    Raises:
      UserError: a function cannot be imported or is none; with every such problem.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._names, self._weights = reward_names(config), reward_weights(config)
        self._stops = config.reward_error == "stop"
        self._seconds = config.reward_timeout_seconds
        self._asked = {"names": self._names, "pattern": config.reward_format}
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False
        self._start()

    def of(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Scores:
        """The rewards of N pairs: completion i answers prompt i.

        Raises:
          RewardError: a function fails and reward_error=stop.
          ValueError: there are not as many prompts as completions, or it is closed.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
        by_name: dict[str, np.ndarray] = {}
        failed: list[tuple[int, str]] = []
        with self._lock:
            if self._is_closed:
                raise ValueError("these rewards are closed")
            for name in self._names if prompts else ():
                by_name[name], problems = self._ask(name, prompts, completions)
                failed += problems
                if problems and self._stops:
                    raise RewardError(f"{problem} Mend it, or set reward_error=zero." for _, problem in problems)
        for name in self._names:
            by_name.setdefault(name, np.zeros(0))
        total = np.zeros(len(prompts))
        for weight, rewards in zip(self._weights, by_name.values(), strict=True):
            total += weight * rewards
        return Scores(total, by_name, sum(count for count, _ in failed), [problem for _, problem in failed])

    def close(self) -> None:
        """Ends the process that functions run in, once what it is asked is answered."""
        with self._lock:
            self._is_closed = True
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> _Worker:
        """A process in which the functions have been imported."""
        worker = _Worker()
        try:
            problems = worker.asked(self._asked, max(_START_SECONDS, self._seconds))["problems"]
        except _Lost as error:
            where = f"reward_functions={','.join(self._names)}: importing them"
            problems = [f"{where} {error.reason or f'took more than {number_text(_START_SECONDS)} seconds'}."]
        except BaseException:
            worker.kill()
            raise
        if problems:
            worker.kill()
            raise UserError(problems)
        self._worker = worker
        return worker

    def _ask(
        self, name: str, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """What one function says, float64 [N], and for each way in which it failed, the number of pairs and why."""
        count = len(prompts)
        try:
            worker = self._worker or self._start()
            reply: dict[str, Any] = worker.asked(_request(name, prompts, completions), self._seconds)
        except _Lost as error:
            self._worker = None
            why = error.reason or f"did not return within reward_timeout_seconds={number_text(self._seconds)}"
            reply = {"error": why}
        except UserError as error:  # what could be imported before cannot be any more
            reply = {"error": f"could not be started again: {' '.join(error.problems)}"}
        except BaseException:  # such as Ctrl-C: its answer is not to be taken for that to the next question
            if self._worker is not None:
                self._worker.kill()
                self._worker = None
            raise
        if "error" in reply:
            return np.zeros(count), [(count, _sentence(name, reply["error"], count, count))]
        rewards: list[float | None] = reply["rewards"]
        wrong = [str(reward) for reward in rewards if reward is None or not math.isfinite(reward)]
        problems = [
            (wrong.count(each), _sentence(name, f"returned {each}", wrong.count(each), count))
            for each in dict.fromkeys(wrong)
        ]
        kept = [0.0 if reward is None or not math.isfinite(reward) else reward for reward in rewards]
        return np.array(kept, np.float64), problems


def _request(name: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, Any]:
    keys = dict.fromkeys(key for prompt in prompts for key in prompt.fields)
    return {
        "name": name,
        "prompts": [prompt.text for prompt in prompts],
        "completions": list(completions),
        "fields": {key: [prompt.fields.get(key) for prompt in prompts] for key in keys},
    }


def _sentence(name: str, what: str, failed: int, count: int) -> str:
    return f"Reward function {name} {what}: no reward for {failed} of {count} pairs."


class _Lost(Exception):
    """The process of the functions gave no answer, and is no more.

    Attributes:
      reason: how it ended; "" where it was ended because time was up.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class _Worker:
    """A process that runs `reward_worker`."""

    def __init__(self) -> None:
        # The functions' own imports must not take the accelerator that this process holds. And what this process can
        # import, that one can: modules in the working directory as well, which -m puts first.
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "maxtext_lite.rl.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | own,
            bufsize=0,
            start_new_session=True,  # a group of its own, to be ended as a whole
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._to, self._from = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    def asked(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a line. If none comes within `seconds`, the process is killed.

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
        """Lets the process end by itself; if it does not, ends it."""
        self._close_pipes()
        try:
            self._popen.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process, and what functions started in it."""
        # Before it is waited for: until then no other process can have its number.
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._close_pipes()

    def _how_it_ended(self) -> str:
        self.kill()  # what it started; its own code stays what it was
        code = self._popen.returncode
        return f"ended its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def _close_pipes(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
