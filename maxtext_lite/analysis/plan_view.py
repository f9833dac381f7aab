"""plan.json in words: rows of name, value and meaning, memory; and numbers as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_lite.batching.ledger import PARTS
from maxtext_lite.config.errors import bytes_text, counted, value_text

_APART = ("mesh", "rampup", "memory", "mixture", "data", "warnings", "num_hosts")  # shown elsewhere, or beside another


def plan_rows(plan: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Value and remark of every entry of plan.json, including RL, but without ramp, memory, data and warnings."""
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
            rows |= {name: (plain(each), "") for name, each in value.items()}
        else:
            rows[key] = (plain(value), "")
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
    """A device's memory in words, and each part's name, bytes and share of the limit or of a larger total."""
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


def short_number(value: float, digits: int = 4, units: str = "kMGT") -> str:
    """A number in short form: 0.003, 12.5, 50k, 3.2M, 5e-06."""
    size = abs(value)
    if value and (size < 1e-3 or size >= 1e15):
        return f"{value:.3g}"
    for power, unit in reversed([*enumerate(units, start=1)]):
        if size >= 1000**power * (1 - 0.5 / 10**digits):
            return f"{value / 1000**power:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def long_number(value: float) -> str:
    """A number with its significant digits: 12,345,678, or 2.3457."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1e4 else f"{value:.5g}"
