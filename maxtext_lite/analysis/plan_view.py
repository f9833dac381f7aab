"""plan.json in words: rows of name, value and meaning, memory; and numbers as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_lite.batching.ledger import PARTS
from maxtext_lite.config.errors import bytes_text, counted, value_text

_MEANINGS = {
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
    "pipeline_schedule": "gpipe: all forward passes, then all backward passes; 1f1b: one of each per tick",
    "attention_kernel": "the kernel of `attention` on these devices, and why it is none of the better ones",
    "pipeline_schedules": "costs of each schedule: bubble, and bytes of activations (estimate)",
    "pipeline_microbatch_size": "examples in the largest microbatch",
    "pipeline_bubble_fraction": "share of a pass in which stages are idle",
    "steps": "optimizer steps in the whole run",
    "epochs": "passes over the data in the whole run",
    "steps_per_epoch": "at the full batch",
    "num_examples": "training examples in the data",
    "total_examples": "examples of the whole run",
    "last_batch_examples": "examples of the last, short step (last_batch=train)",
    "dropped_examples": "examples at the end of the epochs that do not fill a batch (last_batch=drop)",
    "learning_rate": "from the config, before the multiplier",
    "learning_rate_multiplier": "from learning_rate_scaling",
    **dict.fromkeys(("adam_b1", "adam_b2", "adam_eps"), "after scale_adam_with_batch"),
    "prompts_per_batch": "prompts",
    "num_generations": "responses to each prompt",
    "pairs_per_batch": "pairs of a prompt and a response = prompts_per_batch × num_generations = global_batch_to_train",
    "pairs_per_micro_batch": "pairs in a chunk: one chunk is sampled while the previous one trains",
    "micro_batches": "chunks of a batch, whose gradients are summed for one update",
    "updates_per_batch": "optimizer steps on each batch",
    "batches": "in the whole run",
    "max_prompt_tokens": "of a pair",
    "max_response_tokens": "of a pair",
    "trainer_devices": "devices that train",
    "sampler_devices": "devices that generate",
    "takes_turns": "the same devices train and generate",
    "rollout_mesh": "axis sizes of the mesh that generates",
    "rollout_slots": "responses sampled at once",
    "rollout_params": "bytes of parameters on each device that generates",
    "rollout_cache": "bytes of keys and values on each device that generates",
    "overlap_fraction": "share of a batch's training that can overlap with sampling: all chunks but the last",
    "diloco_num_replicas": "replicas with their own updates",
    "diloco_sync_period": "steps between synchronizations",
}
_APART = ("mesh", "rampup", "memory", "mixture", "data", "warnings", "num_hosts")  # shown elsewhere, or beside another


def plan_rows(plan: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Value and meaning of every entry of plan.json, including RL, but without ramp, memory, data and warnings."""
    rows: dict[str, tuple[str, str]] = {}
    is_pipelined = plan.get("num_pipeline_stages", 1) != 1
    for key, value in plan.items():
        if key in _APART or value is None or ("pipeline" in key and not is_pipelined):
            continue
        if key == "num_devices":
            sizes = [f"{axis} {size:,}" for axis, size in plan["mesh"].items() if size != 1]
            mesh = " × ".join(sizes) or "all mesh axes 1"
            rows[key] = (plain(value), f"{mesh}, on {counted(plan['num_hosts'], 'host')}")
        elif key == "loading_hosts":
            rows[key] = (f"{len(value):,} of {plan['num_hosts']:,}", f"hosts {ranges(value)}")
        elif key == "resumed":
            rows[key] = (f"after step {value['step']:,}", f"{value['examples_seen']:,} examples")
        elif key == "rl":
            for name, each in value.items():
                rows[name] = (plain(each), _MEANINGS.get(name, ""))
        else:
            rows[key] = (plain(value), _MEANINGS.get(key, ""))
    return rows


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers in short form: 0–3, 8, 10–11."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{span[0]}–{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def memory_parts(plan: Mapping[str, Any]) -> tuple[str, list[tuple[str, str, float]]]:
    """The memory of a device in words, and each part's name, bytes and share of the limit or of a larger total."""
    memory = plan.get("memory")
    if memory is None:
        return "", []
    total = memory["total"]
    limit = memory["limit"] or 0
    sentence = f"{bytes_text(total)} of {bytes_text(limit)} per device" if limit else f"{bytes_text(total)} per device"
    at_peak = memory.get("at_peak", memory)
    parts = [(name, at_peak[key]) for key, name in PARTS.items() if key in at_peak]
    return sentence, [(name, bytes_text(size), size / max(limit, total)) for name, size in parts]


def plain(value: object) -> str:
    """A JSON value for reading: numbers with grouped digits, anything nested as JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return long_number(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value_text(value)


def short_number(value: float) -> str:
    """A number in short form: 0.003, 12.5, 50k, 3.2M, 5e-06."""
    size = abs(value)
    if value and (size < 1e-3 or size >= 1e15):
        return f"{value:.3g}"
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, suffix = next((unit for unit in units if size >= unit[0] * 0.99995), (1, ""))
    return f"{value / scale:.4g}{suffix}"


def long_number(value: float) -> str:
    """A number with its significant digits: 12,345,678, or 2.3457."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1e4 else f"{value:.5g}"
