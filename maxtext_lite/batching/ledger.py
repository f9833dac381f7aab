"""What a device holds while a step runs, line by line: a name, bytes, why, and when."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

Moment = Literal["loss", "mlp", "attention", "update"]
"""When most may be held: between the last layer and its way back, while a layer's mlp or experts go back, while its
attention does, and while the optimizer runs."""
LAYERS: tuple[Moment, ...] = ("mlp", "attention")
PASSES: tuple[Moment, ...] = ("loss", *LAYERS)
MOMENTS: tuple[Moment, ...] = (*PASSES, "update")

Part = Literal["params", "optimizer_state", "gradients", "weights", "activations", "logits"]
PARTS: dict[Part, str] = {
    "params": "parameters",
    "optimizer_state": "optimizer",
    "gradients": "gradients",
    "weights": "weights in use (estimate)",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
}
"""The parts that lines add up to, and their names in tables."""


@dataclass(frozen=True)
class MemoryLine:
    """One thing that a device holds.

    Attributes:
      bytes: on one device, at each of its moments.
      why: the shapes that they follow from.
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
      lines: what is held, those of nothing left out.
      limit: what the device has, where that is known.
      offloaded: in the host's pinned memory, which is not part of the total.
    """

    lines: tuple[MemoryLine, ...]
    limit: int | None
    offloaded: int = 0

    def at(self, moment: Moment) -> tuple[MemoryLine, ...]:
        """What is held then."""
        return tuple(line for line in self.lines if moment in line.moments)

    @property
    def peak(self) -> Moment:
        """When most is held."""
        return max(MOMENTS, key=lambda moment: sum(line.bytes for line in self.at(moment)))

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(line.bytes for line in self.at(self.peak))

    @property
    def held(self) -> int:
        """Bytes that a step is given and leaves on the device: of what lasts, parameters and optimizer state."""
        lasting = (line for line in self.lines if line.moments == MOMENTS)
        return sum(line.bytes for line in lasting if line.part in ("params", "optimizer_state"))

    def at_peak(self, part: Part) -> int:
        """Bytes of a part then; those of all parts are the total."""
        return sum(line.bytes for line in self.at(self.peak) if line.part == part)

    def most(self, part: Part) -> int:
        """Bytes of a part when it is largest, which need not be at the peak."""
        return max(sum(line.bytes for line in self.at(moment) if line.part == part) for moment in MOMENTS)

    @property
    def params(self) -> int:
        """Bytes of parameters as they are."""
        return self.most("params")

    @property
    def optimizer_state(self) -> int:
        """Bytes of moments and masters."""
        return self.most("optimizer_state")

    @property
    def gradients(self) -> int:
        """Bytes of gradients and of their sums."""
        return self.most("gradients")

    @property
    def weights(self) -> int:
        """Bytes of parameters as matmuls take them: in `dtype`, and whole but for tensor."""
        return self.most("weights")

    @property
    def activations(self) -> int:
        """Bytes of layers' tensors."""
        return self.most("activations")

    @property
    def logits(self) -> int:
        """Bytes of the loss's tensors."""
        return self.most("logits")

    def to_json(self) -> dict[str, object]:
        """Parts when they are largest and at the peak, total and lines by name."""
        parts: dict[str, object] = {part: self.most(part) for part in PARTS}
        lines = [dataclasses.asdict(line) | {"moments": list(line.moments)} for line in self.lines]
        rest = {"total": self.total, "limit": self.limit, "offloaded": self.offloaded, "peak": self.peak}
        at_peak = {part: self.at_peak(part) for part in PARTS}
        return parts | rest | {"at_peak": at_peak, "lines": lines}


def bytes_text(size: int) -> str:
    """A number of bytes to read: 1.5 GB (1e9 bytes), 3.2 MB or 0.4 kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
