"""A run's plan beside the plan of the same config on another machine: what changes, and whether training does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maxtext_lite.batching import batch_settings, has_same_batch_keys, keep_batches
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.batching.topology import mesh_text
from maxtext_lite.config import BatchConfig, Config, MeshConfig, RunConfig, UserError
from maxtext_lite.config.errors import bytes_text, settings_of, value_text
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.keys import GLOBAL_BATCH_KEYS
from maxtext_lite.config.whole_file import steps_in

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
_TRAINING, _MACHINE, _PLACES = (_TABLE[name] for name in ("training", "machine", "places"))
_SPLIT_AND_SHOWN = {
    *_TABLE["split_and_shown"],
    *RunConfig.model_fields,
    *BatchConfig.model_fields,
    *MeshConfig.model_fields,
} - {"seed"}
_MOST_STAGES = 4
"""Stages of a ramp that a table lists."""


@dataclass(frozen=True)
class Move:
    """Two plans of a run, each as in plan.json.

    Attributes:
      changes: by key, the run's value and the other machine's.
      unchanged: by key, the common value of everything that training depends on.
      done, end: (steps, examples) at the newest checkpoint, and at the end of the run that continues from it.
      may_end_before: a source of its mixture may be exhausted before.
    """

    changes: Mapping[str, tuple[Any, Any]]
    unchanged: Mapping[str, Any]
    done: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (0, 0)
    may_end_before: bool = False

    @property
    def trains_alike(self) -> bool:
        """Whether a run that continues there makes the same updates, up to rounding."""
        return not self._other

    @property
    def _other(self) -> list[str]:
        """The changed keys that training depends on."""
        return [key for key in self.changes if key not in (*_MACHINE, *_PLACES, "memory")]

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        found: dict[str, Any] = {
            "changes": {key: {"from": before, "to": after} for key, (before, after) in self.changes.items()},
            "unchanged": dict(self.unchanged),
            "trains_alike": self.trains_alike,
        }
        step, seen = self.done
        steps, total = self.end
        if step:
            found["resumed"] = {
                "step": step,
                "examples_seen": seen,
                "steps": steps,
                "total_examples": total,
                "may_end_before": self.may_end_before,
            }
        return found

    def lines(self) -> list[str]:
        """A table of what changes, then what stays and what follows."""
        width = max((len(key) for key in self.changes), default=0)
        lines: list[str] = []
        for key, values in self.changes.items():
            before, after = (_text(key, value) for value in values)
            if before != after:
                lines.append(f"{key:<{width}}  {before} -> {after}")
        kept = ", ".join(f"{key}={_text(key, value)}" for key, value in self.unchanged.items() if value is not None)
        lines = [*(lines or ["nothing changes"]), "", f"unchanged: {kept}", *self._outcome()]
        places = [key for key in _PLACES if key in self.changes]
        if places:
            lines[-1] += f" The content of {' and '.join(places)} must be the same there, which a resume checks."
        return lines

    def _outcome(self) -> list[str]:
        """Where the run ends, and whether it makes the same updates."""
        sentences: list[str] = []
        step, seen = self.done
        steps, total = self.end
        newest = f"its newest checkpoint, of step {step:,} after {seen:,} examples"
        if step and self.done == self.end:
            sentences.append(f"Nothing is left to do after {newest}.")
        elif step:
            unless = ", if no source is exhausted before" if self.may_end_before else ""
            sentences.append(
                f"Continued from {newest}, the run ends at step {steps:,} after {total:,} examples{unless}."
            )
        if not self.trains_alike:
            keep = ""
            if "global_batch_to_train" in self.changes:
                batch, _ = self.changes["global_batch_to_train"]
                keep = f" To keep the batch, set global_batch_size={batch} per_device_batch_size=-1."
            sentences.append(f"The run would not be the same there: {', '.join(self._other)}.{keep}")
        elif not step or self.done != self.end:
            sentences.append(
                "The run continues there with the same examples in the same steps; updates differ only by rounding."
            )
        return sentences


def read_plan(run: Path) -> dict[str, Any]:
    """plan.json of a run directory.

    Raises:
      UserError: it is missing, or from another version of maxtext_lite.
    """
    try:
        found = read_object(run / "plan.json")
    except UserError as error:
        raise UserError(f"--from={value_text(run)} is not a run directory: {error}") from None
    if any(key not in found for key in (*_TRAINING, *_MACHINE)):
        raise UserError(f"--from={value_text(run)}: plan.json is from another version of maxtext_lite.")
    return found


def done_in(run: Path) -> tuple[int, int]:
    """(steps, examples) done at the newest checkpoint of a run directory; (0, 0): there is none."""
    about = _newest_about(run)
    return (about["step"], about["examples_seen"]) if about else (0, 0)


def _newest_about(run: Path) -> dict[str, Any]:
    """The newest checkpoint's own description in a run directory; empty: there is none."""
    for step in reversed(steps_in(run / "checkpoints")):
        try:
            return read_object(run / "checkpoints" / str(step) / "about" / "metadata") | {"step": step}
        except UserError:
            continue  # a resume sets this checkpoint aside
    return {}


def kept_settings(run: Path, config: Config, num_devices: int) -> list[str]:
    """The settings that make a resume on these devices keep the global batches, as `train` does.

    None where the config has them as it is, or a batch key has changed since the newest checkpoint.
    """
    start = (_newest_about(run).get("starts") or [{}])[-1]
    if config.on_resume_batch == "config" or not has_same_batch_keys(start, batch_settings(config)):
        return []
    batches = [(threshold, examples) for threshold, examples in start["batches"]]
    kept = keep_batches(config, batches, num_devices)
    changed: dict[str, Any] = {}
    for key in GLOBAL_BATCH_KEYS:
        if getattr(kept, key) != getattr(config, key):
            changed[key] = getattr(kept, key)
    return settings_of(changed)


def moved(
    before: Mapping[str, Any],
    plan: BatchPlan,
    settings: Mapping[str, tuple[Any, Any]] = {},
    *,
    may_end_before: bool = False,
) -> Move:
    """What changes if a run whose plan.json is `before` continues as planned.

    Args:
      settings: the `changed_settings` with which it continues.
      may_end_before: see `Move`.
    """
    one = _compared(before)
    other = _compared(json.loads(json.dumps(plan.to_json())))
    end = (plan.steps, plan.total_examples)
    if plan.length.done == end:  # no batch is left: the last ones were the run's
        other |= {key: one[key] for key in ("last_batch_examples", "dropped_examples")}
    changes = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
    unchanged = {key: one[key] for key in _TRAINING if key not in changes}
    return Move(changes | dict(settings), unchanged, plan.length.done, end, may_end_before)


def changed_settings(run: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """By key, the run's value and the other config's, if they differ in more than splitting or showing a run.

    Keys that the plan itself has do not count.
    """
    other = config.model_dump(mode="json")
    changed: dict[str, tuple[Any, Any]] = {}
    for key, value in run.model_dump(mode="json").items():
        if value != other[key] and key not in _SPLIT_AND_SHOWN and key not in _TRAINING:
            changed[key] = (value, other[key])
    if run.held_out_fraction != config.held_out_fraction:
        changed["eval_fraction"] = (run.held_out_fraction, config.held_out_fraction)
    return changed


def _compared(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The compared part of a plan.json."""
    found: dict[str, Any] = {key: plan[key] for key in (*_MACHINE, *_TRAINING)}
    found["memory"] = plan["memory"]["total"] if "memory" in plan else None  # no estimate was installed
    ramp = plan["rampup"]
    if ramp is not None:  # not how the batch of a stage is split
        found["rampup"] = [{key: stage[key] for key in _TABLE["stage"]} for stage in (*ramp["stages"], ramp["target"])]
    return found


def _text(key: str, value: Any) -> str:
    if key == "memory":
        return "not estimated" if value is None else bytes_text(value)
    if key == "mesh":
        return mesh_text(value)
    if key == "rampup" and value:
        stages = [f"{stage['global_batch_to_train']} from step {stage['first_step']}" for stage in value]
        if len(stages) > _MOST_STAGES:
            stages = [*stages[:2], "...", stages[-1]]
        return ", ".join(stages)
    return f"{value:g}" if isinstance(value, float) else value_text(value)
