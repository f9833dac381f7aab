"""Batches of reinforcement learning: prompts, pairs of a prompt with a response, and the chunks of a batch."""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.config import Config, RLRunConfig, UserError
from maxtext_lite.config.errors import nearest_clause, number_text


@dataclass(frozen=True)
class RLBatch:
    """What a step of reinforcement learning samples and trains on.

    Attributes:
      prompts_per_batch: unique prompts.
      num_generations: responses to each.
      pairs_per_batch: of a prompt with a response: `global_batch_to_train`.
      pairs_per_micro_batch: of a chunk, whole groups of responses to one prompt; one is sampled while the one before it
        is trained on.
      micro_batches: chunks of a batch, whose gradients add up to one update.
      updates_per_batch: optimizer steps on each batch.
      batches: of the whole run.
      max_prompt_tokens, max_response_tokens: of a pair.
      trainer_devices, sampler_devices: those that train and those that generate; all of them where they take turns.
      takes_turns: the same devices do both.
    """

    prompts_per_batch: int
    num_generations: int
    pairs_per_batch: int
    pairs_per_micro_batch: int
    micro_batches: int
    updates_per_batch: int
    batches: int
    max_prompt_tokens: int
    max_response_tokens: int
    trainer_devices: int
    sampler_devices: int
    takes_turns: bool

    @property
    def overlap_fraction(self) -> Fraction:
        """The share of a batch's training that can run beside sampling: of all its chunks but the last.

        The devices that train wait for the first chunk, those that sample for the update after the last one.
        """
        return Fraction(0) if self.takes_turns else Fraction(self.micro_batches - 1, self.micro_batches)

    def to_json(self) -> dict[str, object]:
        """The fields by name, and the overlap."""
        return {**dataclasses.asdict(self), "overlap_fraction": float(self.overlap_fraction)}


def rl_batch(config: RLRunConfig, num_devices: int) -> RLBatch:
    """The batch that the config states on so many devices.

    Raises:
      UserError: the fractions do not give whole devices; names fractions that do.
    """
    pairs = config.batch_size * config.num_generations
    chunk = pairs if config.micro_batch_size == -1 else config.micro_batch_size
    takes_turns = config.trainer_devices_fraction == config.sampler_devices_fraction == 1
    keys = ("trainer_devices_fraction", "sampler_devices_fraction")
    problems = [
        _not_whole(key, getattr(config, key), num_devices)
        for key in keys
        if (getattr(config, key) * num_devices).denominator != 1
    ]
    if problems:
        raise UserError(problems)
    trainer, sampler = (int(getattr(config, key) * num_devices) for key in keys)
    return RLBatch(
        prompts_per_batch=config.batch_size,
        num_generations=config.num_generations,
        pairs_per_batch=pairs,
        pairs_per_micro_batch=chunk,
        micro_batches=pairs // chunk,
        updates_per_batch=config.num_iterations,
        batches=config.steps // config.num_iterations,
        max_prompt_tokens=config.max_prefill_predict_length,
        max_response_tokens=config.max_target_length - config.max_prefill_predict_length,
        trainer_devices=trainer,
        sampler_devices=sampler,
        takes_turns=takes_turns,
    )


def _not_whole(key: str, fraction: Fraction, num_devices: int) -> str:
    whole = int(fraction * num_devices)
    near = tuple(Fraction(count, num_devices) for count in (whole, whole + 1) if 0 < count <= num_devices)
    return (
        f"{key}={number_text(fraction)} x {num_devices} devices = {number_text(fraction * num_devices)} devices, not a "
        f"whole number.{nearest_clause(near)}"
    )


def rollout_mesh(config: RLRunConfig, batch: RLBatch) -> dict[str, int]:
    """Sizes of the mesh axes (data, fsdp, tensor) of the devices that generate; the others have 1.

    Raises:
      UserError: the model or the devices cannot be divided so; names the nearest numbers that work.
    """
    devices = batch.sampler_devices
    width = config.base_mlp_dim if config.num_experts == 1 else config.moe_mlp_dim
    heads = math.gcd(config.base_num_query_heads, config.base_num_kv_heads)
    tensor, fsdp = config.rollout_tensor_parallelism, config.rollout_fsdp_parallelism
    tensor_works = _divisors(math.gcd(heads, width, config.vocab_size, devices))
    fsdp_works = _divisors(math.gcd(config.base_emb_dim, devices))
    problems: list[str] = []
    for key, value, other, works, others, what in (
        ("rollout_tensor_parallelism", tensor, fsdp, tensor_works, fsdp_works, "heads, mlp and vocabulary"),
        ("rollout_fsdp_parallelism", fsdp, tensor, fsdp_works, tensor_works, "embedding"),
    ):
        if value not in works:
            # Beside what the other key says, where that can stay.
            beside = [size for size in works if other not in others or devices % (size * other) == 0]
            problems.append(
                f"{key}={value} does not divide both the model's {what} and the {devices} devices that generate."
                f"{nearest_clause(_next_to(value, beside))}"
            )
    if not problems and devices % (tensor * fsdp):
        beside = [size for size in tensor_works if devices % (size * fsdp) == 0]
        near = [f"rollout_tensor_parallelism={size}" for size in _next_to(tensor, beside)]
        problems.append(
            f"rollout_tensor_parallelism={tensor} x rollout_fsdp_parallelism={fsdp} does not divide the {devices} "
            f"devices that generate.{nearest_clause(near)}"
        )
    if problems:
        raise UserError(problems)
    return {"data": devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}


def _divisors(whole: int) -> list[int]:
    return [number for number in range(1, whole + 1) if whole % number == 0]


def _next_to(value: int, numbers: list[int]) -> list[int]:
    """The largest of the increasing numbers below the value, and the smallest above it."""
    below = [number for number in numbers if number < value]
    return below[-1:] + [number for number in numbers if number > value][:1]


def trained_config(config: RLRunConfig, batch: RLBatch) -> Config:
    """What `make_plan` plans: a chunk is a micro-batch over the devices that train, a pair an example."""
    keys = {
        "per_device_batch_size": Fraction(batch.pairs_per_micro_batch, batch.trainer_devices),
        "gradient_accumulation_steps": batch.micro_batches,
    }
    plain = {name: getattr(config, name) for name in Config.model_fields}
    return Config.model_construct(**plain | keys).with_origins(config.origins)  # type: ignore[arg-type]
