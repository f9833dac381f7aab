"""A step repeated from a checkpoint, and the first difference of two runs."""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

import contextlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_lite.analysis.repeat import repeats_of
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import absolute, original
from maxtext_lite.config.errors import nearest_clause
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.kernels import kernel_named
from maxtext_lite.config.records import Record, is_evaluation, read_records, record_text
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.data import examples_hash, open_sources
from maxtext_lite.data.sources import with_history
from maxtext_lite.hf.model_directory import config_of_run
from maxtext_lite.operations.row_losses import RowLoss
from maxtext_lite.parallel import Tree
from maxtext_lite.parallel.devices import start_devices
from maxtext_lite.training.checkpoint import RestartHistory, first_parameters, resume_between, settings_at
from maxtext_lite.training.compile import reading_compiled
from maxtext_lite.training.hooks import Hook, LossSpike
from maxtext_lite.training.parameter_files import check_start
from maxtext_lite.training.parameter_layout import AVERAGE, has_average
from maxtext_lite.training.run_files import environment, run_directory
from maxtext_lite.training.saving import check, read_about, read_arrays, saved_shapes
from maxtext_lite.training.step_log import StepLog

_TIMES = ("_seconds", "_per_second", "_per_device", "mfu", "utilization", "_memory_bytes", "overlap_fraction")
"""Suffixes of metrics of time and memory, which two runs never share. per_device_batch_size is not one of them."""

_SPLITS = ("per_device_batch_size", "gradient_accumulation_steps")
_OF_SPLITS = ("gradient_noise_scale", "attention_imbalance", "loss_scale")
"""Prefixes of metrics that depend on how a batch is split."""

_AROUND_0 = ("reward_", "kl", "rollout_", "clip_fraction_")
"""Prefixes of differences of log-probabilities and shares, which start at 0 but round like numbers around 1."""
_OF_POLICY = "token_nll"  # a metric of every step of a policy

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
"""The share of the whole tree's norm that a tolerance adds to an array's own: the 1e-7 beside the 1e-5 of "two runs
agree". Arrays that are 0 up to rounding, such as the biases of keys, have no meaningful relative error."""


@dataclass(frozen=True)
class Difference:
    """The first line of metrics.jsonl that differs between two runs.

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
    lines, others = (lines_of(run) for run in runs)
    difference = None
    common = sorted(lines.keys() & others.keys())
    if not common:
        raise UserError(f"{runs[0]} and {runs[1]} have no step in common in their metrics.jsonl.")
    for count, key in enumerate(common, start=1):
        fields = compared_fields(lines[key], others[key], tolerance)
        differing = {name: (a, b) for name, (a, b, same) in fields.items() if not same}
        if differing:
            difference = Difference(*key, differing)
            common = common[:count]
            break
    evaluations = sum(is_of_evaluation for _, is_of_evaluation in common)
    return Comparison(len(common) - evaluations, evaluations, (max(lines)[0], max(others)[0]), difference)


def lines_of(run: Path) -> dict[tuple[int, bool], Record]:
    """The lines of a run's metrics.jsonl by (step, whether it is an evaluation's).

    Raises:
      UserError: there are none.
    """
    records = read_records(run / "metrics.jsonl", [])
    lines = {(record["step"], is_evaluation(record)): record for record in records}
    if not lines:
        raise UserError(f"RUN_DIR={run} has no metrics.jsonl with a step in it: it must be a run directory.")
    return lines


def compared_fields(first: Record, second: Record, tolerance: float) -> dict[str, tuple[Any, Any, bool]]:
    """The metrics that two lines of metrics.jsonl should share, causes first: both values, and whether they agree.

    A value is None where its line lacks it. `tolerance` is as in `compare_metrics`.
    """
    flat, other = dict(_flat(first)), dict(_flat(second))
    fields: dict[str, tuple[Any, Any, bool]] = {}
    for name in dict.fromkeys((*_EXACT, "learning_rate", *flat, *other)):
        depends_on_split = name in _SPLITS or name.startswith(_OF_SPLITS)
        if tolerance == 0 if depends_on_split else not name.endswith(_TIMES):
            value, of_other = flat.get(name), other.get(name)
            floor = tolerance if is_around_0(name, flat) else 0.0
            fields[name] = (value, of_other, _same(name, value, of_other, tolerance, floor))
    if tolerance and all(abs(each.get("reward_margin", 1.0)) <= tolerance for each in (flat, other)):
        fields.pop("reward_accuracy", None)  # its sign is rounding
    return fields


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def is_around_0(name: str, record: Record) -> bool:
    """Whether a metric may be 0 up to the rounding of numbers near 1, like the sum of a group's advantages."""
    return name.startswith(_AROUND_0) or (name == "loss" and _OF_POLICY in record)


def _same(name: str, first: Any, second: Any, tolerance: float, floor: float) -> bool:
    if name in _EXACT or not (isinstance(first, float | int) and isinstance(second, float | int)):
        return first == second
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=floor)


def rows_of_step(run: Path, step: int) -> list[Any] | str:
    """The rows that a step of a run consumed, by number, in order; of a mixture, with their sources.

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
        source, _ = with_history(config, open_sources(config, vocab_size=config.vocab_size)[0])
    except UserError as error:
        return str(error)
    first = record["examples_seen"] - record["examples"]
    ids = source.ids_of_run(first, record["examples"], config.data_shuffle_seed)
    if examples_hash(source.hashed(ids)) != record["examples_hash"]:
        return "those of config.yml have another examples_hash: the data or the mixture has changed"
    return source.row_ids(ids)


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
    if has_average(directory):
        items = (*items, AVERAGE)
    restored = read_arrays(
        directory, {item: jax.tree.map(on_one_device, saved_shapes(directory, item)) for item in items}
    )
    leaves = jax.tree_util.tree_leaves_with_path({item: restored[item] for item in items})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _saved_difference(
    step: int, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], tolerance: float
) -> SavedDifference:
    floor = _ARRAYS_FLOOR * math.hypot(*(_norm(array) for array in second.values())) if tolerance else 0.0
    apart = dict.fromkeys(sorted(first.keys() ^ second.keys()), math.inf)
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name], second[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            apart[name] = math.inf
        elif a.tobytes() != b.tobytes():
            size = _norm(b) + floor
            apart[name] = _norm(a.astype(np.float64) - b.astype(np.float64)) / size if size else math.inf
    beyond = {name: distance for name, distance in apart.items() if not (tolerance and distance <= tolerance)}
    return SavedDifference(step, beyond, len(first), max(apart.values(), default=0.0))


def compare_recorded(directories: tuple[Path, Path], tolerance: float) -> str:
    """The first array that differs in the files of arrays that both directories have; "" without one.

    Args:
      tolerance: of the 2-norm of the difference, relative to the second array's.
    """
    first, second = directories
    for path in sorted(first.glob("*.npz")):
        if not (second / path.name).is_file():
            continue
        with np.load(path) as arrays, np.load(second / path.name) as others:
            for name in arrays.keys() & others.keys():
                a, b = arrays[name], others[name]
                is_same = a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                if is_same:
                    continue
                apart = _norm(a - b) / (_norm(b) or 1.0) if a.shape == b.shape else math.inf
                if a.dtype.kind != "f" or not apart <= tolerance:
                    return f"{name} of {path.name}: {apart:.3g}"
    return ""


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative tolerance by `dtype` for a replay on other devices, with other versions or other keys."""
_OF_ALL_DATA = ("epoch", "source_epochs")  # prefixes of metrics that a run's later mixtures change
_NOT_OF_STEPS = ("maxtext-lite", "orbax-checkpoint", "grain")  # packages without influence on a step's numbers


@dataclass(frozen=True)
class Replay:
    """A replayed step.

    Attributes:
      after: the step of the checkpoint that it started from; 0: the run's first parameters.
      elsewhere: why bits need not be equal; "": no difference is known.
      tolerance: relative; 0: to the bit.
      fields: expected and found values of its line, and whether they agree; see `replay.compared_fields`.
      first_difference: the first step after `after` that differs; None: none does.
      rows: each row by itself, in the step's order; None: not requested.
    """

    step: int
    after: int
    elsewhere: str
    tolerance: float
    fields: Mapping[str, tuple[Any, Any, bool]]
    first_difference: int | None
    rows: Sequence[RowLoss] | None


class _Records(Hook):
    """Keeps the lines of metrics.jsonl in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def written(self, record: Record) -> None:
        self.records.append(json.loads(record_text(record)))


def replayed(
    directory: Path,
    step: int,
    overrides: Sequence[str],
    *,
    tolerance: float | None,
    with_rows: bool,
    say: Callable[[str], None],
) -> Replay:
    """Replays a step of a run from the nearest checkpoint before it; writes nothing. All hosts call it.

    Args:
      directory: of the run, or the local copy of one in a bucket.
      overrides: `key=value` words that win over its config.yml.
      tolerance: relative; None: 0 where devices, versions and keys are the run's, otherwise TOLERANCES, as for a step
        that differs and had to be compiled anew on a GPU.
      say: takes progress messages.
    Raises:
      UserError: the run cannot be replayed, or has no such step.
    """
    config, starts = _config(directory, step, overrides)
    lines = lines_of(directory)
    if (step, False) not in lines:
        there = sorted(step for step, is_evaluation in lines if not is_evaluation)
        has = f"steps {there[0]:,} to {there[-1]:,}" if there else "none"
        raise UserError(f"--step={step}: metrics.jsonl of RUN_DIR={directory} has no such step; it has {has}.")
    config = _with_first_parameters(config, starts, step)
    elsewhere = "keys are not the run's" if overrides else ""
    repeats = repeats_of(config)
    with reading_compiled(config), repeats.opened(config) as (run, make_steps):  # before anything is compiled
        kernel = run.plan.attention_kernel.name
        elsewhere = elsewhere or _other_environment(directory)
        if not elsewhere and not kernel_named(kernel).repeats:
            elsewhere = f"attention={kernel} rounds otherwise each time"
        run.open_read_only(step, say)
        kept = _Records()
        rows: Sequence[RowLoss] | None = None
        with jax.default_matmul_precision(config.matmul_precision), jax.set_mesh(run.mesh):
            state, counts = run.restore_or_init()
            after = counts.step
            first = first_parameters(starts)
            if after == 0 and first is not None and run.config.load_parameters_path != first:
                raise UserError(f"--step={step}: no intact checkpoint is left before it.")
            if (seam := resume_between(starts, after, step)) is not None:
                raise _without_checkpoint(run.config, step, seam, lines)
            begin = f"the checkpoint of step {after:,}" if after else "the run's first parameters"
            if after + run.steps_left(counts) < step:
                raise UserError(f"--step={step} is not reached with steps={run.config.steps}.")
            say(f"{step - after:,} steps from {begin}")
            log = StepLog(run, counts, hooks=[kept])
            steps, _ = make_steps(run, state, log)
            with contextlib.closing(steps):
                for number in range(after + 1, step + 1):
                    steps.prepare(state, number)
                    find_rows = None
                    if with_rows and number == step:
                        find_rows = repeats.row_losses(run, steps, state, log.counts.examples_seen)
                    state, taken = steps.take(state, number)
                    rows = find_rows() if find_rows else None
                    try:
                        log.record(number, taken, state)
                    except LossSpike as error:  # as it may have been in the run
                        say(str(error))
                        break
    compared, differing = _compared(kept.records, lines, tolerance or 0.0)
    # A GPU's compiler times its choices, so a step that it compiled anew may round elsewhere.
    if differing and steps.compiled_anew and jax.default_backend() == "gpu" and tolerance is None:
        elsewhere = elsewhere or "the step was compiled anew, on a GPU"
    if tolerance is None:
        tolerance = TOLERANCES[config.dtype] if elsewhere else 0.0
        compared, differing = _compared(kept.records, lines, tolerance)
    if step not in compared:
        raise UserError(f"step {max(compared)} of RUN_DIR={directory} ends the run when it is replayed.")
    return Replay(
        step=step,
        after=after,
        elsewhere=elsewhere,
        tolerance=tolerance,
        fields=compared[step],
        first_difference=differing[0] if differing else None,
        rows=rows,
    )


def _with_first_parameters(config: Config, starts: RestartHistory, step: int) -> Config:
    """The config with the run's own first parameters, or with none (they may be gone) if an earlier checkpoint exists.

    Older runs do not say which these were: config.yml has those of the newest start.
    """
    if (path := first_parameters(starts)) is None:
        return config
    if any(saved < step for saved in steps_in(run_directory(config) / "checkpoints")):
        path = ""
    config = config.model_copy(update={"load_parameters_path": path})
    check_start(config, resumes=False)
    return config


def _compared(
    records: Sequence[Record], lines: Mapping[tuple[int, bool], Record], tolerance: float
) -> tuple[dict[int, dict[str, tuple[Any, Any, bool]]], list[int]]:
    """`Replay.fields` of each step, and the steps that differ."""
    compared: dict[int, dict[str, tuple[Any, Any, bool]]] = {}
    for record in records:
        fields = compared_fields(lines.get((record["step"], False), {}), record, tolerance)
        compared[record["step"]] = {name: of for name, of in fields.items() if not name.startswith(_OF_ALL_DATA)}
    differing = [step for step, fields in compared.items() if not all(same for _, _, same in fields.values())]
    return compared, differing


def _config(directory: Path, step: int, overrides: Sequence[str]) -> tuple[Config, RestartHistory]:
    """The config that a run used for a step, and the run's restarts. The config's run directory is the given one.

    config.yml has the newest start's config; the newest checkpoint lists earlier ones that differed.
    """
    if not (directory / "config.yml").is_file():
        raise UserError(f"RUN_DIR={original(directory, 'RUN_DIR')} is not a run directory: it has no config.yml.")
    where = absolute(original(directory, "RUN_DIR"))
    start_devices()  # processes must join before they compare checkpoints
    newest, starts = _starts(where / "checkpoints")
    settings = settings_at(starts, step) if step <= newest else []
    return config_of_run(directory, [*settings, *overrides]), starts


def _starts(checkpoints: Path) -> tuple[int, RestartHistory]:
    """The newest checkpoint that can list the run's starts, and its list; (0, []) without one."""
    for saved in reversed(steps_in(checkpoints)):
        if check(checkpoints / str(saved), ("about",)) is None:
            return saved, read_about(checkpoints / str(saved)).get("starts", [])
    return 0, []


def _without_checkpoint(config: Config, step: int, seam: int, lines: Container[tuple[int, bool]]) -> UserError:
    """The error for a step after a resume with other settings at `seam`, where there is no checkpoint."""
    checkpoints = run_directory(config) / "checkpoints"
    later = [saved for saved in steps_in(checkpoints) if saved >= step and (saved + 1, False) in lines]
    intact = [saved for saved in later if check(checkpoints / str(saved)) is None]
    return UserError(
        f"--step={step}: the run resumed with other settings after step {seam}, of which no intact checkpoint is left."
        + nearest_clause([seam, *(saved + 1 for saved in intact[:1])])
    )


def _other_environment(directory: Path) -> str:
    """How this process differs from the run's environment.json; "": not at all."""
    if not (directory / "environment.json").is_file():
        return "environment.json is missing"
    then = read_object(directory / "environment.json")
    now = environment()
    for name in ("devices", "num_processes"):
        if then.get(name) != now[name]:
            return f"{name} are not the run's"
    changed: list[str] = []
    before: dict[str, str] = then.get("packages", {})
    packages: dict[str, str] = now["packages"]
    for name in before | packages:
        if name not in _NOT_OF_STEPS and packages.get(name) != before.get(name):
            changed.append(f"{name} is {packages.get(name)}, then {before.get(name)}")
    return ", ".join(changed)
