"""One step's batch: stated, or derived from global_batch_size."""

from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.config import BatchConfig
from maxtext_lite.config.errors import number_text
from maxtext_lite.config.problem import Edit, Edits, Problem, divisors, multiples, single_edits

PLAINEST_BATCH: Edit = {
    "per_device_batch_size": Fraction(1),
    "gradient_accumulation_steps": 1,
    "global_batch_size": 0,
}
"""A batch that suits any machine."""

_MOST_TRIED = 16


@dataclass(frozen=True)
class Batch:
    """One optimizer step's examples: per device, per micro-batch over all devices, and in all."""

    per_device_batch_size: Fraction
    gradient_accumulation_steps: int
    micro_batch_to_train: int

    @property
    def global_batch_to_train(self) -> int:
        """Examples per optimizer step."""
        return self.micro_batch_to_train * self.gradient_accumulation_steps


def derive_batch(config: BatchConfig, num_devices: int) -> Batch | Problem:
    """The batch that the config states or that follows from global_batch_size, or why there is none."""
    per_device, accumulation = config.per_device_batch_size, config.gradient_accumulation_steps
    stated = config.global_batch_size
    if stated == 0 and (per_device == -1 or accumulation == -1):
        return _nothing_to_derive_from(per_device, accumulation, num_devices)
    if per_device == -1 and accumulation == -1:
        return Problem(
            "gradient_accumulation_steps",
            f"per_device_batch_size=-1 and gradient_accumulation_steps=-1 cannot both follow from "
            f"global_batch_size={stated}. Set one of them.",
            above=[{"gradient_accumulation_steps": number} for number in divisors(stated)],
        )
    if per_device == -1:
        if stated % accumulation:
            below, above = single_edits("gradient_accumulation_steps", divisors(stated), accumulation)
            return Problem(
                "gradient_accumulation_steps",
                f"global_batch_size={stated} / gradient_accumulation_steps={accumulation} = "
                f"{_ratio_text(Fraction(stated, accumulation))} examples per micro-batch, "
                "not a whole number.",
                below,
                above,
            )
        micro = stated // accumulation
        return Batch(Fraction(micro, num_devices), accumulation, micro)
    micro = per_device * num_devices
    if micro.denominator != 1:
        return not_whole("per_device_batch_size", per_device, num_devices)
    if accumulation == -1:
        if stated % micro:
            below, above = multiples("global_batch_size", int(micro), stated)
            smaller, larger = _per_device_edits([Fraction(rows, num_devices) for rows in divisors(stated)], per_device)
            return Problem(
                "global_batch_size",
                f"global_batch_size={stated} / (per_device_batch_size={number_text(per_device)} x "
                f"{num_devices} devices = {micro} examples) = {_ratio_text(stated / micro)} accumulation "
                "steps, not a whole number.",
                below,
                above,
                (*smaller, *larger),
            )
        accumulation = int(stated / micro)
    elif stated and stated != micro * accumulation:
        return Problem(
            "global_batch_size",
            f"global_batch_size={stated} contradicts per_device_batch_size={number_text(per_device)} x "
            f"{num_devices} devices x gradient_accumulation_steps={accumulation} = "
            f"{micro * accumulation}.",
            [{"global_batch_size": int(micro * accumulation)}],
            [{"per_device_batch_size": Fraction(-1)}],
            rule="stated twice",
        )
    return Batch(per_device, accumulation, int(micro))


def stated_batch(config: BatchConfig, num_devices: int) -> Batch | None:
    """The batch as far as the config states it, for finding further problems of one that is wrong."""
    per_device = config.per_device_batch_size
    if per_device == -1 or (per_device * num_devices).denominator != 1:
        return None
    return Batch(per_device, max(config.gradient_accumulation_steps, 1), int(per_device * num_devices))


def smaller_batches(config: BatchConfig, batch: Batch, num_devices: int, most: int) -> list[Edit]:
    """Changes to a batch of at most `most` examples, the largest first, each of as few keys as it takes."""
    micro, accumulation = batch.micro_batch_to_train, batch.gradient_accumulation_steps
    sized: list[tuple[int, Edit]] = []
    if config.global_batch_size:
        if config.per_device_batch_size == -1 or config.gradient_accumulation_steps == -1:
            unit = accumulation if config.per_device_batch_size == -1 else micro
            sized += [(unit * times, {"global_batch_size": unit * times}) for times in _down_from(most // unit)]
        else:
            sized += [
                (rows * accumulation, {
                    "per_device_batch_size": Fraction(rows, num_devices), "global_batch_size": rows * accumulation,
                })
                for rows in _down_from(most // accumulation)
            ]  # fmt: skip
    else:
        for rows in _down_from(most // accumulation):
            sized.append((rows * accumulation, {"per_device_batch_size": Fraction(rows, num_devices)}))
        for times in _down_from(most // micro):
            sized.append((micro * times, {"gradient_accumulation_steps": times}))
    for rows in _down_from(most):
        edit: Edit = {"per_device_batch_size": Fraction(rows, num_devices), "gradient_accumulation_steps": 1}
        sized.append((rows, {**edit, **({"global_batch_size": 0} if config.global_batch_size else {})}))
    fewest_keys_first = sorted(sized, key=lambda pair: (len(pair[1]), -pair[0]))
    return [edit for _, edit in fewest_keys_first]


def _down_from(largest: int) -> range:
    """The positive numbers up to `largest`, descending, as many as are worth trying."""
    return range(largest, max(largest - _MOST_TRIED, 0), -1)


def _ratio_text(value: Fraction) -> str:
    """A value that is not whole, to two decimals where they are many: for reading, not for computing."""
    text = number_text(value)
    return text if len(text) <= 8 and "/" not in text else f"{float(value):.2f}"


def _per_device_edits(values: list[Fraction], value: Fraction) -> Edits:
    return single_edits("per_device_batch_size", values, value)


def _nothing_to_derive_from(per_device: Fraction, accumulation: int, num_devices: int) -> Problem:
    if per_device == -1 and accumulation == -1:
        edit: Edit = {"per_device_batch_size": Fraction(1), "gradient_accumulation_steps": 1}
        return Problem(
            "per_device_batch_size",
            "per_device_batch_size=-1 and gradient_accumulation_steps=-1 with "
            "global_batch_size=0: nothing states the batch size.",
            otherwise=(edit,),
        )
    key, value, alone = (
        ("per_device_batch_size", -1, [Fraction(1), Fraction(1, num_devices)])
        if per_device == -1
        else ("gradient_accumulation_steps", -1, [1])
    )
    return Problem(
        key,
        f"{key}={value} is derived from global_batch_size, which is 0: not stated.",
        above=[{key: number} for number in alone],
        rule="underived",
    )


def not_whole(key: str, per_device: Fraction, num_devices: int) -> Problem:
    """Refuses a per-device size that gives no whole number of examples over all devices."""
    below, above = multiples(key, Fraction(1, num_devices), per_device)
    return Problem(
        key,
        f"{key}={number_text(per_device)} x {num_devices} devices = "
        f"{_ratio_text(per_device * num_devices)} examples, not a whole number.",
        below,
        above,
        rule=f"{key} is whole",
    )
