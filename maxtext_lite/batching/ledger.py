"""A device's memory while a step runs, line by line: name, bytes, reason and time."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maxtext_lite.config.errors import bytes_text

Moment = Literal["loss", "mlp", "attention", "update", "rollout"]
"""The moments at which memory may peak. These are between the forward and the backward pass, during the backward pass
of a layer's mlp or experts, during that of its attention, while the optimizer runs, and in reinforcement learning while
the same devices sample."""
LAYERS: tuple[Moment, ...] = ("mlp", "attention")
PASSES: tuple[Moment, ...] = ("loss", *LAYERS)
MOMENTS: tuple[Moment, ...] = (*PASSES, "update")
"""Those of a training step."""
_ALL: tuple[Moment, ...] = (*MOMENTS, "rollout")

Part = Literal["params", "optimizer_state", "gradients", "weights", "activations", "logits", "rollout"]
PARTS: dict[Part, str] = {
    "params": "parameters",
    "optimizer_state": "optimizer",
    "gradients": "gradients",
    "weights": "weights in use (estimate)",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
    "rollout": "sampler and reference",
}
"""The parts into which lines are summed, and their names in tables."""


@dataclass(frozen=True)
class MemoryLine:
    """One thing that a device holds.

    Attributes:
      bytes: on one device, at each of the moments.
      why: the shapes from which the bytes follow.
      moments: when it is held.
    """

    name: str
    part: Part
    bytes: int
    why: str
    moments: tuple[Moment, ...] = MOMENTS


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device while a step runs.

    Attributes:
      lines: what is held; lines of 0 bytes are dropped. Empty where no estimator is installed.
      limit: memory of the device, where known.
      offloaded: bytes in the host's pinned memory, which are not part of the total.
    """

    lines: tuple[MemoryLine, ...]
    limit: int | None
    offloaded: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the memory of the step is estimated; all its bytes are 0 otherwise."""
        return bool(self.lines)

    def at(self, moment: Moment) -> tuple[MemoryLine, ...]:
        """The lines held at a moment."""
        return tuple(line for line in self.lines if moment in line.moments)

    def bytes_at(self, moment: Moment, *parts: Part) -> int:
        """Bytes of some parts at a moment; of all, if none is named."""
        return sum(line.bytes for line in self.at(moment) if not parts or line.part in parts)

    @property
    def peak(self) -> Moment:
        """The moment of peak memory."""
        return max(_ALL, key=self.bytes_at)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.bytes_at(self.peak)

    @property
    def held(self) -> int:
        """Bytes of parameters and optimizer state that a step receives and leaves on the device."""
        lasting = (line for line in self.lines if set(MOMENTS) <= set(line.moments))
        return sum(line.bytes for line in lasting if line.part in ("params", "optimizer_state"))

    @property
    def without_batch(self) -> int:
        """Bytes at the peak of what a batch of any size needs: parameters, optimizer state and gradients."""
        return max(self.bytes_at(moment, "params", "optimizer_state", "gradients") for moment in _ALL)

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit; true where that is not known."""
        return self.limit is None or self.total <= self.limit

    def at_peak(self, part: Part) -> int:
        """Bytes of a part at the peak; all parts add up to the total."""
        return self.bytes_at(self.peak, part)

    def most(self, part: Part) -> int:
        """Bytes of a part at its own maximum, which need not be at the peak."""
        return max(self.bytes_at(moment, part) for moment in _ALL)

    def warnings(self, works: str) -> list[str]:
        """A warning if a device has less memory than the step needs.

        Args:
          works: the keys that need less, as an instruction.
        """
        if self.limit is None or self.fits:
            return []
        needed = bytes_text(self.total)
        there = bytes_text(self.limit)
        return [f"about {needed} per device are needed, more than the {there} it has: {works}"]

    def to_json(self) -> dict[str, object]:
        """Each part at its maximum and at the peak, the total, and the lines; of RL also the part `rollout`."""
        names: list[Part] = [part for part in PARTS if part != "rollout" or self.most(part)]
        parts: dict[str, object] = {part: self.most(part) for part in names}
        lines = [dataclasses.asdict(line) | {"moments": list(line.moments)} for line in self.lines]
        rest = {"total": self.total, "limit": self.limit, "offloaded": self.offloaded, "peak": self.peak}
        at_peak = {part: self.at_peak(part) for part in names}
        return parts | rest | {"at_peak": at_peak, "lines": lines}
