"""What a run tells the program that started it, and how that may end it."""

from maxtext_lite.training.arrays import Record
from maxtext_lite.training.state import TrainState


class Callback:
    """Sees what a run does; a subclass overrides what it wants to know. Here, all of it does nothing.

    Every host of a run makes the same callbacks, and each is called on every host, in the same order. Where one returns
    True, on any host, the run ends as if its last step had come: after the step that is under way (with several hosts
    the one after it), evaluated where it evaluates and with a checkpoint where it saves any. The same config goes on
    from there.

    A state's arrays are on the devices and are donated to the next step: what is to outlast the call is copied, by
    `jax.device_get` or `jnp.copy`. To look at one waits for the devices.

    Attributes:
      wants_state: `after_step` is given the state. Steps are then taken one at a time: a device waits while the host
        records the step.
    """

    wants_state = False

    def after_step(self, step: int, record: Record, state: TrainState | None) -> bool | None:
        """Each step, once it is recorded; the next one is under way, unless a callback `wants_state`.

        Args:
          state: after this step; None unless a callback `wants_state`.
        """

    def after_evaluation(self, step: int, record: Record, state: TrainState) -> bool | None:
        """Each evaluation, with its line of metrics.jsonl."""

    def after_checkpoint(self, step: int, state: TrainState) -> bool | None:
        """Each checkpoint, once its arrays are copied: it may still be on its way to the disk."""
