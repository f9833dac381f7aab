"""plan.json in words: rows of name, value and formula, the stages of a ramp, and memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from maxtext_lite.batching.ledger import bytes_text
from maxtext_lite.config.errors import value_text
from maxtext_lite.reporting.scales import long_number

MEMORY_PARTS = {
    "params": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "weights": "weights in use (estimate)",
    "activations": "activations (estimate)",
    "logits": "logits (estimate)",
}
"""The parts of plan.json's `memory`, in the order that they are shown in, and their names."""

_ELSEWHERE = ("mesh", "rampup", "memory", "warnings", "num_hosts")

_FORMULAS = {
    "num_devices": "all devices of the mesh",
    "per_device_batch_size": "examples per device in one forward/backward pass",
    "micro_batch_to_train": "examples = per_device_batch_size × num_devices",
    "empty_slots_per_micro_batch": "row slots without an example",
    "gradient_accumulation_steps": "micro-batches per optimizer step",
    "global_batch_to_train": "examples per step = micro-batch × gradient_accumulation_steps",
    "global_batch_to_load": "row slots of one load = global_batch_to_train × expansion_factor_real_data",
    "loads_per_step": "loads that feed one step",
    "examples_per_loading_host": "examples that a loading host reads in one load",
    "rows_per_example": "rows of max_target_length tokens in an example",
    "tokens_per_step": "= global_batch_to_train × rows_per_example × max_target_length",
    "eval_per_device_batch_size": "examples per device in evaluation",
    "eval_batch_examples": "examples per evaluation batch",
    "num_pipeline_stages": "parts of the model, each on its own devices",
    "num_pipeline_microbatches": "pieces of one micro-batch that flow through the stages",
    "num_pipeline_repeats": "rounds through the stages",
    "pipeline_schedule": "gpipe: all forwards, then backwards; 1f1b: one of each in a tick",
    "attention_kernel": "what `attention` means on these devices, and why none of the better ones is it",
    "pipeline_schedules": "what each schedule costs: bubble, and bytes of activations (estimate)",
    "pipeline_microbatch_size": "examples in the largest of them",
    "pipeline_bubble_fraction": "of a pass that stages wait",
    "steps": "optimizer steps in the whole run",
    "epochs": "passes over the data in the whole run",
    "steps_per_epoch": "at the full batch",
    "num_examples": "training examples in the data",
    "total_examples": "examples of the whole run",
    "last_batch_examples": "examples of the last, short step (last_batch=train)",
    "dropped_examples": "examples at the end of the epochs that fill no batch (last_batch=drop)",
    "learning_rate": "of the config, before the multiplier",
    "learning_rate_multiplier": "from learning_rate_scaling",
    "adam_b1": "as scale_adam_with_batch leaves it",
    "adam_b2": "as scale_adam_with_batch leaves it",
    "adam_eps": "as scale_adam_with_batch leaves it",
    "prompts_per_batch": "unique prompts",
    "num_generations": "responses to each prompt",
    "pairs_per_batch": "of a prompt with a response = prompts_per_batch × num_generations = global_batch_to_train",
    "pairs_per_micro_batch": "of a chunk: one is sampled while the one before it is trained on",
    "micro_batches": "chunks of a batch, whose gradients add up to one update",
    "updates_per_batch": "optimizer steps on each batch",
    "batches": "of the whole run",
    "max_prompt_tokens": "of a pair",
    "max_response_tokens": "of a pair",
    "trainer_devices": "that train",
    "sampler_devices": "that generate",
    "takes_turns": "the same devices train and generate",
    "rollout_mesh": "sizes of the axes of the devices that generate",
    "rollout_slots": "responses under way at once",
    "rollout_params": "bytes of the parameters on each of those devices",
    "rollout_cache": "bytes of keys and values on each of them",
    "overlap_fraction": "of a batch's training that can run beside sampling: all its chunks but the last",
    "diloco_num_replicas": "copies that update by themselves",
    "diloco_sync_period": "steps between their meetings",
}


@dataclass(frozen=True)
class Row:
    """A line of a plan's table."""

    name: str
    value: str
    meaning: str


def plan_rows(plan: Mapping[str, Any]) -> list[Row]:
    """Every entry of plan.json but the ramp, the memory and the warnings, which have places of their own.

    Those of reinforcement learning, one level down, are rows like the others.
    """
    rows: list[Row] = []
    pipelined = plan.get("num_pipeline_stages", 1) != 1
    for key, value in plan.items():
        if key in _ELSEWHERE or ("pipeline" in key and not pipelined):
            continue
        if key == "num_devices":
            rows.append(Row(key, plain(value), _machine(plan)))
        elif key == "loading_hosts" and isinstance(value, list) and all(isinstance(host, int) for host in value):
            rows.append(Row(key, f"{len(value):,} of {plain(plan.get('num_hosts'))}", f"hosts {ranges(value)}"))
        elif key == "rl" and isinstance(value, dict):
            rows += [Row(name, plain(each), _FORMULAS.get(name, "")) for name, each in value.items()]
        elif value is not None:
            rows.append(Row(key, plain(value), _FORMULAS.get(key, "")))
    return rows


def plain(value: object) -> str:
    """A value of a JSON file to read: numbers with their digits grouped, anything nested as JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return long_number(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value_text(value)


def _machine(plan: Mapping[str, Any]) -> str:
    mesh, hosts = plan.get("mesh"), plan.get("num_hosts")
    sizes = mesh.items() if isinstance(mesh, dict) else ()
    used = " × ".join(f"{axis} {plain(size)}" for axis, size in sizes if size != 1) or "all mesh axes 1"
    return used + ("" if hosts is None else f", on {plain(hosts)} host{'' if hosts == 1 else 's'}")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers in short: 0–3, 8, 10–11."""
    starts = [0, *(index + 1 for index, (one, two) in enumerate(pairwise(numbers)) if two != one + 1)]
    ends = [*(start - 1 for start in starts[1:]), len(numbers) - 1]
    spans = [(numbers[start], numbers[end]) for start, end in zip(starts, ends, strict=True)] if numbers else []
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


@dataclass(frozen=True)
class MemoryPart:
    """A share of a device's memory; `fraction` is of the device, or of the sum where the device is not known."""

    name: str
    text: str
    fraction: float


def memory_parts(plan: Mapping[str, Any]) -> tuple[str, list[MemoryPart]] | None:
    """The sentence above the memory bar and its parts; None where the plan has none."""
    memory = plan.get("memory")
    if not isinstance(memory, dict):
        return None
    at_peak = memory.get("at_peak")
    found = at_peak if isinstance(at_peak, dict) else memory
    sizes = {key: found[key] for key in MEMORY_PARTS if isinstance(found.get(key), int | float)}
    total, limit = memory.get("total"), memory.get("limit")
    if not sizes or not isinstance(total, int | float) or total <= 0:
        return None
    if not isinstance(limit, int | float) or limit <= 0:
        limit = None
    whole = total if limit is None else max(limit, total)
    parts = [MemoryPart(MEMORY_PARTS[key], bytes_text(size), size / whole) for key, size in sizes.items()]
    sentence = bytes_text(int(total)) + ("" if limit is None else f" of {bytes_text(int(limit))}") + " per device"
    return sentence, parts
