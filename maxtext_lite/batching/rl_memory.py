"""What a run of reinforcement learning holds besides a training step: the sampler's arrays and the KL reference.

The sampler's activations and logits are not counted, as those of training are larger: a decode step has one token per
slot.
"""

import dataclasses
from collections.abc import Mapping

from maxtext_lite.batching.activations import BYTES
from maxtext_lite.batching.ledger import MOMENTS, MemoryEstimate, MemoryLine, bytes_text
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.rl import RLBatch
from maxtext_lite.config import Config, RLRunConfig


def with_rollout(memory: MemoryEstimate, config: Config, rl: RLBatch | None, mesh: Mapping[str, int]) -> MemoryEstimate:
    """The memory of a device that trains: that of a step and, in reinforcement learning, what is held besides.

    The sampler's parameters stay on devices that take turns until the next update; its keys and values are there only
    while it samples, beside what is held throughout a step.

    Args:
      memory: of a training step.
      mesh: size of each axis of the devices that train.
    """
    if rl is None:
        return memory
    assert isinstance(config, RLRunConfig), "only its configs have such a batch"
    always = (*MOMENTS, "rollout")
    lines = [dataclasses.replace(line, moments=always) if line.moments == MOMENTS else line for line in memory.lines]
    if config.grpo_beta:
        count = count_parameters(config, tiled=False, **mesh)  # with LoRA too, as a step donates the frozen parameters
        rest = (count.tables + count.norms) * BYTES[config.weight_dtype]
        size, why = count.matrices * BYTES[config.dtype] + rest, "the initial model, matrices in `dtype`"
        lines.append(MemoryLine("KL reference", "rollout", size, why, always))
    if rl.takes_turns and rl.rollout is not None:
        why = "a copy in `dtype` on the sampler's mesh"
        lines.append(MemoryLine("sampler's parameters", "rollout", rl.rollout.params, why, always))
        why = f"of {rl.rollout.slots} slots over all devices"
        lines.append(MemoryLine("keys and values", "rollout", rl.rollout.cache, why, ("rollout",)))
    return dataclasses.replace(memory, lines=tuple(lines))


def memory_warnings(memory: MemoryEstimate, rl: RLBatch | None) -> list[str]:
    """Warnings of devices that have less memory than a run needs, with the keys that need less."""
    limit = memory.limit
    if limit is None:
        return []
    warnings: list[str] = []
    rollout = None if rl is None else rl.rollout
    if not memory.fits:
        works = "lower per_device_batch_size, raise gradient_accumulation_steps, or set remat_policy=full."
        if rl is not None and rl.takes_turns and rollout is not None:
            works = "lower micro_batch_size or rollout_slots, raise rollout_fsdp_parallelism, or set remat_policy=full."
        elif rl is not None:
            works = "lower micro_batch_size, or set remat_policy=full."
        warnings.append(
            f"about {bytes_text(memory.total)} per device are needed, more than the {bytes_text(limit)} it has: {works}"
        )
    if rl is not None and not rl.takes_turns and rollout is not None and rollout.params + rollout.cache > limit:
        warnings.append(
            f"about {bytes_text(rollout.params + rollout.cache)} per device that samples are needed, more than the "
            f"{bytes_text(limit)} it has: lower micro_batch_size or rollout_slots, or raise rollout_fsdp_parallelism."
        )
    return warnings
