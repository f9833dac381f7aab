"""Reinforcement learning: batches of prompts and pairs, how responses are generated, and the memory that takes."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.batch import Batch, SampledBatch
from maxtext_lite.batching.ledger import MOMENTS, MemoryEstimate, MemoryLine
from maxtext_lite.batching.parameters import BYTES, count_parameters, elements_on_device
from maxtext_lite.batching.topology import Topology, mesh_text, model_dimensions
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import Refusal, around, bytes_text, divisors, multiples_around, number_text
from maxtext_lite.config.weights import layer_kind, model_shape
from maxtext_lite.hf.directory import files_of_model, run_config_json
from maxtext_lite.post_training.keys import FRACTIONS, RLRunConfig, prompt_stages


@dataclass(frozen=True)
class Rollout:
    """The work of the devices that generate.

    Attributes:
      mesh: sizes of their axes data, fsdp and tensor; other axes have size 1.
      slots: responses generated at once, a multiple of data x fsdp.
      params, cache: bytes per device of the copy of the parameters, and of all slots' keys, values and states.
    """

    mesh: Mapping[str, int]
    slots: int
    params: int
    cache: int

    def __str__(self) -> str:
        axes = mesh_text(self.mesh, "1 device")
        return (
            f"{self.slots} slots on {axes}; {bytes_text(self.params + self.cache)} per device = parameters "
            f"{bytes_text(self.params)} + keys and values {bytes_text(self.cache)}"
        )


@dataclass(frozen=True)
class RLBatch(SampledBatch):
    """The batch that a step of reinforcement learning samples and trains on.

    Attributes:
      prompts_per_batch: prompts; the same one may be in a batch again where an epoch ends.
      num_generations: responses to each prompt.
      pairs_per_batch: pairs of prompt and response, the run's `global_batch_to_train`.
      pairs_per_micro_batch: whole groups of responses to one prompt; one micro-batch is sampled while the previous one
        is trained on.
      micro_batches: micro-batches of a batch, whose gradients add up to one update.
      dynamic_sampling: most prompts sampled for a batch, in multiples of `prompts_per_batch`.
      updates_per_batch: optimizer steps on each batch.
      batches: batches of the whole run.
      max_prompt_tokens, max_response_tokens: limits of a pair.
      trainer_devices, sampler_devices: devices that train and devices that generate; all of them if they take turns.
      takes_turns: whether the same devices do both.
      rollout: how responses are generated; None if a server generates them.
      prompt_stages: (threshold, batch) of each stage, in prompts; all but the last with other `prompts_per_batch`.
    """

    prompts_per_batch: int
    num_generations: int
    pairs_per_batch: int
    pairs_per_micro_batch: int
    micro_batches: int
    dynamic_sampling: int
    updates_per_batch: int
    batches: int
    max_prompt_tokens: int
    max_response_tokens: int
    trainer_devices: int
    sampler_devices: int
    takes_turns: bool
    rollout: Rollout | None
    prompt_stages: tuple[tuple[int, int], ...]

    @property
    def trained(self) -> Batch:
        """The batch of the trainer's devices: a pair is an example."""
        per_device = Fraction(self.pairs_per_micro_batch, self.trainer_devices)
        return Batch(per_device, self.micro_batches, self.pairs_per_micro_batch)

    @property
    def stages(self) -> list[tuple[int, Batch]]:
        """Thresholds in pairs, one for each update on them; a stage begins with a batch, so they are whole batches."""
        found: list[tuple[int, Batch]] = []
        seen = 0
        ends = [threshold for threshold, _ in self.prompt_stages[1:]]
        for (_, prompts), end in itertools.zip_longest(self.prompt_stages, ends):
            found.append((seen * self.examples_per_entry, self.of_prompts(prompts).trained))
            if end is not None:
                seen += max(-(-(end - seen) // prompts), 0) * prompts
        return found

    def of_prompts(self, prompts: int) -> "RLBatch":
        """The batch of another stage, in the same micro-batches."""
        pairs = prompts * self.num_generations
        return dataclasses.replace(
            self,
            prompts_per_batch=prompts,
            pairs_per_batch=pairs,
            micro_batches=-(-pairs // self.pairs_per_micro_batch),  # whole by `keys`
        )

    @property
    def prompts_per_micro_batch(self) -> int:
        """Prompts of one micro-batch."""
        return self.pairs_per_micro_batch // self.num_generations

    @property
    def examples_per_entry(self) -> int:
        """Pairs that a prompt becomes, over all steps made with it."""
        return self.num_generations * self.updates_per_batch

    @property
    def overlap_fraction(self) -> Fraction:
        """The share of a batch's training that can overlap with sampling: all micro-batches but the last.

        The trainer's devices wait for the first micro-batch, the sampler's for the update after the last one.
        """
        return Fraction(0) if self.takes_turns else Fraction(self.micro_batches - 1, self.micro_batches)

    def rows(self) -> list[tuple[str, str]]:
        """Prompts, pairs, updates, devices and how responses are generated."""
        each = self.num_generations
        chunk = self.pairs_per_micro_batch
        prompts = _prompts(self.prompts_per_batch)
        most = ""
        if self.dynamic_sampling > 1:
            most = f", of at most {self.dynamic_sampling * self.prompts_per_batch} prompts sampled"
        in_chunk = _prompts(self.prompts_per_micro_batch)
        devices = f"{self.trainer_devices} train, {self.sampler_devices} sample; {self.micro_batches - 1} of "
        devices += f"{self.micro_batches} micro-batches are trained on while the next is sampled"
        if self.takes_turns:
            devices = "the same devices sample and train, in turns"
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        return [
            ("pairs_per_batch", f"{self.pairs_per_batch} = {prompts} x {each} generations{most}"),
            ("micro_batches", f"{self.micro_batches} of {chunk} pairs, {in_chunk} each"),
            ("updates_per_batch", f"{self.updates_per_batch}; {batches} in all"),
            (
                "tokens of a pair",
                f"at most {self.max_prompt_tokens} of the prompt and {self.max_response_tokens} of the response",
            ),
            ("devices", devices),
            ("rollout", "by a server" if self.rollout is None else str(self.rollout)),
        ]

    def to_json(self) -> dict[str, object]:
        """The fields by name, the rollout's with the prefix `rollout_`, and the overlap."""
        fields = dataclasses.asdict(self)
        rollout: dict[str, object] = fields.pop("rollout") or {}
        del fields["prompt_stages"]  # `rampup` has them
        of_rollout = {f"rollout_{name}": value for name, value in rollout.items()}
        return {**fields, **of_rollout, "overlap_fraction": float(self.overlap_fraction)}

    def training_part(self, topology: Topology) -> Topology:
        """The devices that train: on all hosts if they take turns with sampling, otherwise on one."""
        hosts = topology.num_hosts if self.takes_turns else 1
        return dataclasses.replace(topology, num_devices=self.trainer_devices, num_hosts=hosts)

    def with_sampling(self, memory: MemoryEstimate, config: Config, mesh: Mapping[str, int]) -> MemoryEstimate:
        """The memory of a device that trains: a step's, the KL reference, and what is held to sample.

        The sampler's activations and logits are not counted: those of training are larger, because a decode step has
        one token per slot. Its parameters stay on devices that take turns until the next update; its keys and values
        are there only while it samples, beside what is held throughout a step.

        Args:
          memory: of a training step.
          mesh: size of each axis of the devices that train.
        """
        assert isinstance(config, RLRunConfig), "only its configs have such a batch"
        always = (*MOMENTS, "rollout")
        lines = list(memory.lines)
        for i, line in enumerate(lines):
            if line.moments == MOMENTS:
                lines[i] = dataclasses.replace(line, moments=always)
        if config.grpo_beta:
            # With LoRA too, as a step donates the frozen parameters.
            count = count_parameters(config, tiled=False, **mesh)
            rest = (count.tables + count.norms) * BYTES[config.weight_dtype]
            size = count.matrices * BYTES[config.dtype] + rest
            why = "the initial model, matrices in `dtype`"
            lines.append(MemoryLine("KL reference", "rollout", size, why, always))
        if self.takes_turns and self.rollout is not None:
            why = "a copy in `dtype` on the sampler's mesh"
            lines.append(MemoryLine("sampler's parameters", "rollout", self.rollout.params, why, always))
            why = f"of {self.rollout.slots} slots over all devices"
            lines.append(MemoryLine("keys and values", "rollout", self.rollout.cache, why, ("rollout",)))
        return dataclasses.replace(memory, lines=tuple(lines))

    def memory_warnings(self, memory: MemoryEstimate) -> list[str]:
        """Warnings of devices that have less memory than training or sampling needs, with the keys that need less."""
        limit = memory.limit
        rollout = self.rollout
        works = "lower micro_batch_size, or set remat_policy=full."
        if self.takes_turns and rollout is not None:
            works = "lower micro_batch_size or rollout_slots, raise rollout_fsdp_parallelism, or set remat_policy=full."
        warnings = memory.warnings(works)
        if limit is None or self.takes_turns or rollout is None or rollout.params + rollout.cache <= limit:
            return warnings
        return [
            *warnings,
            f"about {bytes_text(rollout.params + rollout.cache)} per device that samples are needed, more than the "
            f"{bytes_text(limit)} it has: lower micro_batch_size or rollout_slots, or raise rollout_fsdp_parallelism.",
        ]

    def warnings(self, config: Config, num_entries: int | None) -> list[str]:
        """What works but is probably a mistake.

        Args:
          num_entries: prompts to train on; None: unknown.
        """
        assert isinstance(config, RLRunConfig), "only its configs have such a batch"
        warnings: list[str] = []
        num_devices = int(self.trainer_devices / config.trainer_devices_fraction)
        idle = 0 if self.takes_turns else num_devices - self.trainer_devices - self.sampler_devices
        if idle:
            stated = " and ".join(f"{key}={number_text(getattr(config, key))}" for key in FRACTIONS)
            warnings.append(f"{stated}: {idle} of {num_devices} devices neither train nor sample.")
        if config.capacity_factor != -1 and config.rollout_correction == "none":
            warnings.append(
                f"capacity_factor={number_text(config.capacity_factor)}: only training drops tokens, so responses are "
                "sampled from another policy than the loss has (rollout_mismatch). Set capacity_factor=-1 or "
                "rollout_correction=truncated."
            )
        if num_entries is not None and self.prompts_per_batch > num_entries:
            warnings.append(
                f"batch_size={self.prompts_per_batch} is more than the {num_entries} prompts: a batch has some of them "
                "several times, each with groups of its own."
            )
        return warnings


def rl_batch(config: RLRunConfig, topology: Topology) -> RLBatch | list[Refusal]:
    """The batch that the config states on a machine, or every broken rule."""
    pairs = config.batch_size * config.num_generations
    chunk = pairs if config.micro_batch_size == -1 else config.micro_batch_size
    num_devices = topology.num_devices
    num_hosts = topology.num_hosts
    takes_turns = config.trainer_devices_fraction == config.sampler_devices_fraction == 1
    broken: list[Refusal] = []
    turns = dict.fromkeys(FRACTIONS, Fraction(1))
    if num_hosts > 1 and not takes_turns:
        stated = " and ".join(f"{key}={number_text(getattr(config, key))}" for key in FRACTIONS)
        message = f"{stated} need all devices on one host, not {num_hosts}."
        broken.append(Refusal("num_hosts", message, (turns, 1)))
    if config.rollout_engine != "local" and (wrong := _inexpressible(config)):
        message = (
            f"rollout_engine={config.rollout_engine} hands the model over as a Hugging Face directory, but {wrong}"
        )
        broken.append(Refusal("rollout_engine", message, ({"rollout_engine": "local", "rollout_url": ""},)))
    parts: list[Fraction] = []
    for key in FRACTIONS:
        fraction = getattr(config, key)
        parts.append(fraction * num_devices)
        if parts[-1].denominator != 1:
            product = f"{number_text(fraction)} x {num_devices} devices = {number_text(parts[-1])} devices"
            message = f"{key}={product}, not a whole number."
            broken.append(Refusal(key, message, (*multiples_around(Fraction(1, num_devices), fraction), turns)))
    if broken:
        return broken
    trainer, sampler = map(int, parts)
    rollout = rollout_of(config, sampler, chunk) if config.rollout_engine == "local" else None
    if isinstance(rollout, list):
        return rollout
    return RLBatch(
        prompts_per_batch=config.batch_size,
        num_generations=config.num_generations,
        pairs_per_batch=pairs,
        pairs_per_micro_batch=chunk,
        micro_batches=pairs // chunk,
        dynamic_sampling=config.dynamic_sampling,
        updates_per_batch=config.num_iterations,
        batches=config.steps // config.num_iterations,
        max_prompt_tokens=config.max_prefill_predict_length,
        max_response_tokens=config.max_target_length - config.max_prefill_predict_length,
        trainer_devices=trainer,
        sampler_devices=sampler,
        takes_turns=takes_turns,
        rollout=rollout,
        prompt_stages=prompt_stages(config),
    )


def _prompts(number: int) -> str:
    return "1 prompt" if number == 1 else f"{number} prompts"


def _inexpressible(config: RLRunConfig) -> str | None:
    """The setting that no family of Hugging Face models can express, which an export of the model would refuse."""
    try:
        run_config_json(files_of_model(config), config, num_positions=config.max_target_length, dtype="float32")
    except UserError as error:
        return error.problems[0]
    return None


def rollout_of(config: RLRunConfig, num_devices: int, pairs: int) -> Rollout | list[Refusal]:
    """How the devices generate micro-batches of `pairs` pairs, or every broken rule."""
    if broken := _mesh_violations(config, num_devices):
        return broken
    tensor = config.rollout_tensor_parallelism
    fsdp = config.rollout_fsdp_parallelism
    mesh = {"data": num_devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}
    shards = mesh["data"] * mesh["fsdp"]
    slots = config.rollout_slots
    if slots == -1:
        slots = -(-pairs // shards) * shards
    elif slots % shards:
        key = "rollout_slots"
        message = f"{key}={slots} is not a multiple of the {shards} parts into which the generating devices split them."
        return [Refusal(key, message, (*multiples_around(shards, slots), -1))]
    shape = model_shape(config)
    cache = 0
    for mixer, layers in shape.caching_layers_of.items():
        kind = layer_kind(mixer)
        if kind is None:
            own = shape.of_mixer(mixer)
            width = own.num_kv_heads * (own.head_dim + own.value_dim) // mesh["tensor"]
            if config.mla is not None:  # keys of one head, which contain its values, on every device of a tensor group
                width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
            cache += len(layers) * config.max_target_length * width * BYTES[config.dtype]
        else:
            cache += len(layers) * 4 * sum(elements_on_device(weight, mesh) for weight in kind.state(shape).values())
    params = -(-count_parameters(config).total // (mesh["fsdp"] * mesh["tensor"]))
    return Rollout(mesh, slots, BYTES[config.dtype] * params, slots // shards * cache)


def _mesh_violations(config: RLRunConfig, devices: int) -> list[Refusal]:
    split = {"tensor": "heads, mlp and vocabulary", "fsdp": "embedding"}
    tensor = config.rollout_tensor_parallelism
    fsdp = config.rollout_fsdp_parallelism
    broken: list[Refusal] = []
    legal: dict[str, list[int]] = {}
    for axis, size, other in (("tensor", tensor, fsdp), ("fsdp", fsdp, tensor)):
        works = divisors(math.gcd(*model_dimensions(config, axis).values(), devices))
        legal[axis] = [each for each in works if devices % (each * other) == 0]
        if size not in works:
            key = f"rollout_{axis}_parallelism"
            message = (
                f"{key}={size} does not divide both the model's {split[axis]} and the {devices} generating devices."
            )
            broken.append(Refusal(key, message, tuple(around(legal[axis] or works, size))))
    if broken or devices % (tensor * fsdp) == 0:
        return broken
    message = (
        f"rollout_tensor_parallelism={tensor} x rollout_fsdp_parallelism={fsdp} does not divide the {devices} "
        "generating devices."
    )
    near = [{"rollout_tensor_parallelism": size} for size in around(legal["tensor"], tensor)]
    return [Refusal("rollout_fsdp_parallelism", message, tuple(near))]
