"""An objective's part of `equiv` and `replay`: what stays unchanged when a step is repeated, and its batches.

An objective names its own in `ObjectiveKind.repeats`; an object with these attributes serves.
"""

import contextlib
import gzip
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.analysis.short_runs import SHORT_RUNS
from maxtext_lite.config import Config, packaged_file
from maxtext_lite.config.keys import source_kind
from maxtext_lite.config.registry import resolve

EXAMPLES = 16
"""Examples of a step, where they are read."""


class ReadBatches:
    """Steps whose batches are read: the data stay as they are."""

    def batch_keys(self, config: Config, devices: int, accumulation: int) -> dict[str, object]:
        """The keys that split a step's examples into micro-batches."""
        per_device = EXAMPLES / devices / accumulation
        keys: dict[str, object] = {
            "per_device_batch_size": per_device,
            "gradient_accumulation_steps": accumulation,
            "on_resume_batch": "config",
        }
        if config.enable_rampup_batch_size:  # half the batch for one step
            keys["per_device_batch_size_start"] = per_device / 2
            keys["per_device_batch_size_increment"] = per_device / 2
            keys["global_rampup_samples"] = EXAMPLES // 2
        if config.batch_schedule:  # the same
            keys["gradient_accumulation_steps"] = -1
            keys["batch_schedule"] = ((0, EXAMPLES // 2), (EXAMPLES // 2, EXAMPLES))
            keys["batch_schedule_unit"] = "examples"
            keys["rampup_mode"] = "per_device_batch_size"
        return keys

    def splits(self, config: Config) -> Sequence[tuple[str, Mapping[str, object], int]]:
        """Further splits: name, changes of keys, micro-batches."""
        del config
        return (("data 8, two loads a step", {"ici_data_parallelism": 8, "expansion_factor_real_data": 0.5}, 1),)

    def small_keys(self, config: Config) -> Mapping[str, object]:
        """The keys of small data."""
        return SHORT_RUNS["text"] if source_kind(config.dataset_type).data == "text" else {}

    def freeze(self, config: Config, run: Path | None, directory: Path) -> tuple[Mapping[str, object], str]:
        """Writes what comes from outside a step into `directory`.

        Args:
          run: the run directory to take it from; None: there is none.
        Returns:
          Changes of keys, and what the user should know; "" for nothing.
        """
        del run
        if source_kind(config.dataset_type).data != "text":
            return {}, ""
        return {"dataset_path": str(_write_ragged_text(directory))}, ""

    def difference(self, frozen: Path, run: Path) -> str:
        """What a run has computed differently from its record; "" for nothing."""
        del frozen, run
        return ""

    def train(self, config: Config, frozen: Path, callbacks: Sequence[Any]) -> None:
        """Trains a run on what `freeze` wrote."""
        from maxtext_lite.training.loop import train

        del frozen
        train(config, callbacks=callbacks)

    @contextlib.contextmanager
    def opened(self, config: Config) -> Generator[tuple[Any, Any]]:
        """The `TrainingRun` of a config whose steps are done, and a function that makes its `StepSource`."""
        from maxtext_lite.training.feed_steps import make_feed_steps
        from maxtext_lite.training.opening import open_run

        yield open_run(config), make_feed_steps

    def row_losses(self, run: Any, steps: Any, state: Any, examples_seen: int) -> Callable[[], list[Any]]:
        """A function to call after the next step, whose result is the `RowLoss` of each of its rows before it."""
        from maxtext_lite.operations.row_losses import make_row_losses

        del steps
        found = make_row_losses(run)(state, examples_seen, run.plan.length.step_examples(examples_seen))
        return lambda: found


READ = ReadBatches()


def repeats_of(config: Config) -> ReadBatches:
    """How `equiv` and `replay` repeat steps of the config's objective."""
    return resolve(config.objective_kind.repeats)


def _write_ragged_text(directory: Path) -> Path:
    """Writes the shipped text with every third paragraph split into words.

    Rows of whole plays would have equally many targets, and a mean of means would equal the mean.
    """
    packaged = packaged_file("assets", "shakespeare.jsonl.gz")
    assert packaged is not None
    path = directory / "ragged.jsonl"
    with gzip.open(packaged, "rt", encoding="utf-8") as plays:
        paragraphs = json.loads(plays.readline())["text"].split("\n\n")
    with path.open("w", encoding="utf-8") as file:
        for number, paragraph in enumerate(paragraphs):
            for text in paragraph.split() if number % 3 == 1 else [paragraph]:
                file.write(json.dumps({"text": text}) + "\n")
    return path
