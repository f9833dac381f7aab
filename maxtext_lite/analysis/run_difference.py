"""The first difference of two runs: its step and metrics, the rows of that step, and saved arrays."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.load import config_of_run
from maxtext_lite.config.records import Record, is_evaluation, read_records
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.data import MixtureSource, hash_of_run, open_mixture
from maxtext_lite.data.mixture_of_run import in_run
from maxtext_lite.data.mixture_source import ids_of_run
from maxtext_lite.parallel import Tree
from maxtext_lite.training.saving import read_arrays, saved_shapes

_TIMES = ("_seconds", "_per_second", "_per_device", "mfu", "utilization", "_memory_bytes")
"""Suffixes of metrics of time and memory, which two runs never share. per_device_batch_size is not one of them."""

_SPLITS = ("per_device_batch_size", "gradient_accumulation_steps")
_OF_SPLITS = ("gradient_noise_scale", "attention_imbalance", "loss_scale")
"""Prefixes of metrics that depend on how a batch is split."""

_REWARD = "reward_"
"""In names of differences of log-probabilities, which start at 0 but round like numbers around 1."""

_EXACT = (
    "examples_hash",
    "examples",
    "examples_seen",
    "global_batch_to_train",
    "target_tokens",
    "tokens_seen",
    "skipped",
)
"""Metrics that must be equal, causes before consequences."""

_ARRAYS_FLOOR = 1e-2
"""The share of the whole tree's norm that is added to an array's own, with a tolerance: the 1e-7 beside the 1e-5 of
"two runs agree". Arrays that are 0 up to rounding, such as the biases of keys, have no meaningful relative error."""


@dataclass(frozen=True)
class Difference:
    """The first line of metrics.jsonl in which two runs differ.

    Attributes:
      evaluation: whether it is an evaluation's.
      fields: the metrics that differ, causes first, with the value of each run; None where a run has none.
    """

    step: int
    evaluation: bool
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """A comparison of two runs' metrics.

    Attributes:
      steps: compared training lines.
      evaluations: compared evaluation lines.
      last: the last step of each run.
    """

    steps: int
    evaluations: int
    last: tuple[int, int]
    difference: Difference | None


def compare_metrics(runs: tuple[Path, Path], tolerance: float) -> Comparison:
    """Compares the lines that both runs have, step by step, up to the first difference.

    Args:
      tolerance: relative, of computed numbers; 0: equal to the bit, with the same split of the batch.
    Raises:
      UserError: a run has no metrics.jsonl, or they have no step in common.
    """
    lines = [lines_of(run) for run in runs]
    counts, difference = [0, 0], None
    for key in sorted(lines[0].keys() & lines[1].keys()):
        first, second = (each[key] for each in lines)
        counts[key[1]] += 1
        fields = compared_fields(first, second, tolerance)
        if not all(same for _, _, same in fields.values()):
            differing = {name: (a, b) for name, (a, b, same) in fields.items() if not same}
            difference = Difference(key[0], key[1], differing)
            break
    if not any(counts):
        raise UserError(f"{runs[0]} and {runs[1]} have no step in common in their metrics.jsonl.")
    ends = [max(step for step, _ in each) for each in lines]
    return Comparison(counts[0], counts[1], (ends[0], ends[1]), difference)


def lines_of(run: Path) -> dict[tuple[int, bool], Record]:
    """The lines of a run's metrics.jsonl by (step, whether it is an evaluation's).

    Raises:
      UserError: there are none.
    """
    path, notes = run / "metrics.jsonl", list[str]()
    lines = {(record["step"], is_evaluation(record)): record for record in read_records(path, notes)}
    if not lines:
        raise UserError(f"RUN_DIR={run} has no metrics.jsonl with a step in it: it must be a run directory.")
    return lines


def compared_fields(first: Record, second: Record, tolerance: float) -> dict[str, tuple[Any, Any, bool]]:
    """The metrics that two lines of metrics.jsonl should share, causes first: both values, and whether they agree.

    A value is None where its line lacks it. `tolerance` is that of `compare_metrics`.
    """
    flat = [dict(_flat(record)) for record in (first, second)]
    names = dict.fromkeys(itertools.chain(_EXACT, ("learning_rate",), *flat))
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in names if _counts(name, tolerance)}
    if tolerance and all(abs(each.get("reward_margin", 1.0)) <= tolerance for each in flat):  # its sign is rounding
        pairs.pop("reward_accuracy", None)
    return {
        name: (*pair, _same(*pair, 0.0 if name in _EXACT else tolerance, tolerance if _REWARD in name else 0.0))
        for name, pair in pairs.items()
    }


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _counts(name: str, tolerance: float) -> bool:
    if name in _SPLITS or name.startswith(_OF_SPLITS):
        return tolerance == 0
    return not name.endswith(_TIMES)


def _same(first: Any, second: Any, tolerance: float, floor: float) -> bool:
    if isinstance(first, float | int) and isinstance(second, float | int):
        return first == second or (tolerance > 0 and math.isclose(first, second, rel_tol=tolerance, abs_tol=floor))
    return first == second


def rows_of_step(run: Path, step: int) -> list[Any] | str:
    """The numbers of the rows that a step of a run consumed, in order; of a mixture, with the names of their sources.

    They are computed from config.yml and the data, and checked against the step's `examples_hash`. Where they are
    unknown, the result is a sentence that says why.
    """
    record = lines_of(run).get((step, False))
    if record is None:
        return f"metrics.jsonl has no step {step}"
    try:
        config = config_of_run(run)
        if config.run_kind == "rl":
            return "reinforcement learning reads prompts and samples its rows, some of which are in rollouts.jsonl"
        source, _ = in_run(config, open_mixture(config, vocab_size=config.vocab_size)[0])
    except UserError as error:
        return str(error)
    ids = ids_of_run(
        source, record["examples_seen"] - record["examples"], record["examples"], seed=config.data_shuffle_seed
    )
    if hash_of_run(source, ids) != record["examples_hash"]:
        return "those of config.yml have another examples_hash: the data or the mixture has changed"
    return source.named_rows(ids) if isinstance(source, MixtureSource) else ids.tolist()


@dataclass(frozen=True)
class SavedDifference:
    """The differences between two checkpoints of one step.

    Attributes:
      arrays: differences beyond the tolerance by the array's path; infinite where shapes or dtypes differ.
      compared: the number of compared arrays.
      largest: the largest difference, be it within the tolerance.
    """

    step: int
    arrays: Mapping[str, float]
    compared: int
    largest: float


def compare_checkpoints(runs: tuple[Path, Path], tolerance: float) -> list[SavedDifference]:
    """Compares the checkpoints that both runs have, from the oldest, up to the first pair that differs.

    Parameters are compared; with a tolerance of 0 the optimizer's state, too.

    Args:
      tolerance: of the 2-norm of each array's difference, relative to the array's norm plus a hundredth of the tree's.
    Raises:
      UserError: a checkpoint cannot be read.
    """
    steps = [set(steps_in(run / "checkpoints")) for run in runs]
    found: list[SavedDifference] = []
    for step in sorted(steps[0] & steps[1]):
        first, second = (_saved((run / "checkpoints" / str(step)).absolute(), tolerance) for run in runs)
        found.append(_saved_difference(step, first, second, tolerance))
        if found[-1].arrays:
            break
    return found


def _saved(directory: Path, tolerance: float) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by path, restored on one device, whatever mesh saved it."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def on_one_device(leaf: Tree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

    items = ("params",) if tolerance else ("params", "update_state")
    restored = read_arrays(
        directory, {item: jax.tree.map(on_one_device, saved_shapes(directory, item)) for item in items}
    )
    leaves = jax.tree_util.tree_leaves_with_path({item: restored[item] for item in items})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _saved_difference(
    step: int, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], tolerance: float
) -> SavedDifference:
    apart = dict.fromkeys(sorted(first.keys() ^ second.keys()), math.inf)
    beyond = dict(apart)
    floor = _ARRAYS_FLOOR * math.hypot(*(_norm(array) for array in second.values())) if tolerance else 0.0
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name], second[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            apart[name] = beyond[name] = math.inf
        elif a.tobytes() != b.tobytes():
            distance, size = _norm(a.astype(np.float64) - b.astype(np.float64)), _norm(b) + floor
            apart[name] = distance / size if size else math.inf
            if not (tolerance and apart[name] <= tolerance):
                beyond[name] = apart[name]
    return SavedDifference(step, beyond, len(first), max(apart.values(), default=0.0))


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))
