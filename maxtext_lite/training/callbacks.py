"""Callbacks: how a program that starts a run observes it and may end it."""

from maxtext_lite.training.arrays import Record
from maxtext_lite.training.state import TrainState


class Callback:
    """An observer of a run. A subclass overrides the methods it needs; the methods here do nothing.

    Every host of a run makes the same callbacks, and each is called on every host, in the same order. If one returns
    True, on any host, the run ends as if it had reached its last step, with an evaluation if it evaluates and a
    checkpoint if it saves any. The same config continues it. It ends after the step that is under way, the one after
    that of `after_step`; where none is, as at an evaluation, at a checkpoint, or if a callback `wants_state`, it ends
    at once. The evaluation before the first step, of reinforcement learning, is followed by that step in any case.
    With several hosts it ends one step later, except at an evaluation or a checkpoint.

    A state's arrays are on the devices and will be donated to the next step: copy what must outlast the call, with
    `jax.device_get` or `jnp.copy`. To read an array waits for the devices.

    Attributes:
      wants_state: pass the state to `after_step`. Steps are then taken one at a time: the devices wait while the host
        records a step.
    """

    wants_state = False

    def after_step(self, step: int, record: Record, state: TrainState | None) -> bool | None:
        """Called for each step once it is recorded; the next one is already running, unless a callback `wants_state`.

        Args:
          state: after this step; None unless a callback `wants_state`.
        """

    def after_evaluation(self, step: int, record: Record, state: TrainState) -> bool | None:
        """Called after each evaluation, with its line of metrics.jsonl."""

    def after_checkpoint(self, step: int, state: TrainState) -> bool | None:
        """Called for each checkpoint once its arrays are copied; it may not be on disk yet."""
