"""Hooks: moments of a run when other code observes it, adds to it, and may end it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxtext_lite.config import Config
from maxtext_lite.config.keys import listed
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.registry import load
from maxtext_lite.training.arrays import Record, Rows
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState


class LossSpike(Exception):
    """The loss of a step left its band (max_loss_spike); nothing was saved after it.

    Attributes:
      step: the first to show it; the cause is in its examples or in the update before it.
      examples_seen: before this step.
      limit: the upper end of the band.
    """

    def __init__(self, message: str, step: int, examples_seen: int, limit: float = math.inf):
        super().__init__(message)
        self.step = step
        self.examples_seen = examples_seen
        self.limit = limit


class NonFiniteLoss(LossSpike):
    """The loss or the gradient of a step was infinite or not a number; nothing was saved after it."""


class Hook:
    """An observer of a run. A subclass overrides the methods it needs; the methods here do nothing.

    Every host of a run makes the same hooks, and each is called on every host, in the same order, at the moments in
    the order of the methods here. A hook of the caller, a callback, may end the run: if one returns True from
    `after_step`, `after_evaluation` or `after_checkpoint`, on any host, the run ends as if it had reached its last
    step, with an evaluation if it evaluates and a checkpoint if it saves any. The same config continues it. It ends
    after the step that is under way, the one after that of `after_step`; where none is, as at an evaluation, at a
    checkpoint, or if a hook `wants_state`, it ends at once. The evaluation before the first step, of reinforcement
    learning, is followed by that step in any case. With several hosts it ends one step later, except at an evaluation
    or a checkpoint.

    A state's arrays are on the devices and will be donated to the next step: copy what must outlast the call, with
    `jax.device_get` or `jnp.copy`. To read an array waits for the devices.

    Attributes:
      wants_state: pass the state to `after_step`. Steps are then taken one at a time: the devices wait while the host
        records a step.
    """

    wants_state = False

    def opened(self, run: TrainingRun) -> None:
        """Called once the run directory belongs to the run, before anything is restored."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        """Called once the state is restored or new, and the run has introduced itself.

        Args:
          say: prints a line on the first host.
        """

    def after_compile(self, num_bytes: int) -> str:
        """Called with the bytes of a device that the step of the last stage needs; returns a clause on them."""
        del num_bytes
        return ""

    def before_first_step(self, rows: Rows) -> None:
        """Called with this start's first batch, [A, B, T], on the devices, before the step that trains on it."""

    def before_step(self, step: int) -> None:
        """Called before each step is dispatched."""

    def entries(self, step: int) -> Mapping[str, Any]:
        """More entries of the record of a step."""
        del step
        return {}

    def written(self, record: Record) -> None:
        """Called with each line of metrics.jsonl, from a step or an evaluation."""

    def on_spike(self, error: LossSpike) -> None:
        """Called with the spike of a step, which ends the run, unless this raises `Restart`."""

    def after_step(self, step: int, record: Record, state: TrainState | None) -> bool | None:
        """Called for each step once it is recorded; the next one is already running, unless a hook `wants_state`.

        Args:
          state: after this step; None unless a hook `wants_state`.
        """

    def after_evaluation(self, step: int, record: Record, state: TrainState) -> bool | None:
        """Called after each evaluation, with its line of metrics.jsonl."""

    def after_checkpoint(self, step: int, state: TrainState) -> bool | None:
        """Called for each checkpoint once its arrays are copied; it may not be on disk yet."""

    def after_last_step(self) -> None:
        """Called after the last step of this start, before its last files are on disk."""

    def saved(self) -> str:
        """Called once everything that the run wrote is safe; returns a last line, or ""."""
        return ""

    def close(self) -> None:
        """Called at the end of a run that has started, also after an error, for hooks in reverse order."""


Callback = Hook
"""A hook of the caller of `train`."""


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuses what cannot be called at the moments of a run.

    Raises:
      TypeError: an object is no `Hook`, or an attribute of it has taken the name of a moment.
    """
    for callback in callbacks:
        kind = type(callback).__name__
        if not isinstance(callback, Hook):
            raise TypeError(f"{kind} is not a subclass of maxtext_lite.training.Callback, as callbacks must be.")
        for name, moment in vars(Hook).items():
            if callable(moment) and not callable(getattr(callback, name)):
                raise TypeError(f"{kind}.{name} is not a method, as Callback.{name} is: give it another name.")


Prepare = Callable[[TrainingRun, Callable[[str], None]], None]
"""Called with a newly opened run, before it restores its checkpoint, and a function that prints a line."""


class Restart(Exception):
    """Ends this start of a run and begins another in the same process after `prepare`; says why."""

    def __init__(self, why: str, prepare: Prepare):
        super().__init__(why)
        self.prepare = prepare


def hooks_of(config: Config) -> list[Hook]:
    """The library's own hooks that a config enables, in the order of their calls, then those of `hooks`.

    Raises:
      NotInstalled: one of them is absent, and its key is not at its default.
    """
    asked: dict[str, Sequence[str]] = {"goodput": (), "memory": (), "advice": ()}
    if config.log_to or config.prometheus_port:
        asked["trackers"] = ("log_to", "prometheus_port")
    asked["profiler"] = ("profiler_steps",)
    asked["kernel_check"] = ()
    if config.max_loss_spike and config.loss_spike_action != "stop":
        asked["spikes"] = ("max_loss_spike",)
    made = [load_asked(config, "hook", name, *keys) for name, keys in asked.items()]
    made += [load("hook", name) for name in listed(config.hooks)]
    return [make() for make in made if make is not None]
