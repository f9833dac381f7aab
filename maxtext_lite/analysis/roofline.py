"""The least time of a step on a device whose matmul units, memory and links never idle, and the MFU it allows."""

from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.batching.devices import Device

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Roofline:
    """Least seconds of a step by each resource of a device; None if the amount or the rate is unknown.

    Attributes:
      matmul_seconds: all matmuls at the device's peak for their dtype.
      memory_seconds: all memory traffic at the full rate.
      link_seconds: all bytes sent within a slice or host, over all links at once.
      peak_flops: FLOP/s of MFU's denominator.
      model_flops: of one device and step, by the model.
    """

    matmul_seconds: float | None
    memory_seconds: float | None
    link_seconds: float | None
    peak_flops: float | None
    model_flops: float

    @property
    def bound(self) -> tuple[str, float] | None:
        """The slowest resource with its seconds, among those known; None if none is."""
        known = {"matmuls": self.matmul_seconds, "memory": self.memory_seconds, "links": self.link_seconds}
        seconds = {name: value for name, value in known.items() if value is not None}
        longest = max(seconds, key=lambda name: seconds[name], default=None)
        return None if longest is None else (longest, seconds[longest])

    @property
    def most_mfu(self) -> float | None:
        """The MFU of a step as short as `bound`, at most 1; None if that is unknown."""
        return None if self.bound is None else self.mfu_of(self.bound[1])

    def mfu_of(self, seconds: float) -> float | None:
        """The MFU of a step of this many seconds, at most 1; None if the peak is unknown."""
        if self.peak_flops is None:
            return None
        return min(1.0, self.model_flops / self.peak_flops / seconds) if seconds else 1.0


def roofline(
    device: Device | None,
    *,
    dtype: str,
    model_flops: float,
    matmul_flops: Mapping[str, float | None],
    memory_bytes: float | None,
    sent_bytes: float | None,
) -> Roofline:
    """The least time of one step on one device.

    Args:
      device: None if its figures are unknown.
      dtype: of the activations; MFU is relative to its peak.
      model_flops: of one device, forward and backward, without recomputation.
      matmul_flops: of one device by the operands' dtypes (HLO's names, joined by x), with those of kernels if known.
        A dtype without a peak of its own counts at bfloat16's, as such dtypes are never faster.
      memory_bytes: between one device and its memory.
      sent_bytes: by one device over links.
    """
    if device is None:
        return Roofline(None, None, None, None, model_flops)
    matmul_seconds: float | None = 0.0
    for operands, flops in matmul_flops.items():
        peak = matmul_peak(device, operands)
        known = matmul_seconds is not None and flops is not None and peak is not None
        matmul_seconds = (matmul_seconds or 0) + (flops or 0) / (peak or 1) if known else None
    links = device.link_bytes_per_second
    return Roofline(
        matmul_seconds,
        None if memory_bytes is None else memory_bytes / device.memory_bytes_per_second,
        0.0 if sent_bytes == 0 else None if sent_bytes is None or links is None else sent_bytes / links,
        device.peak(dtype),
        model_flops,
    )


def matmul_peak(device: Device, operands: str) -> float | None:
    """FLOP/s of a matmul by its operands' dtypes, as in `roofline`; of two, the slower. None: unknown."""
    peaks = [
        device.peak("float8" if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)) or device.peak("bfloat16")
        for dtype in operands.split("x")
    ]
    return min((peak for peak in peaks if peak is not None), default=None)
