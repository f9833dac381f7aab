"""A replay of a step of a run, from the nearest checkpoint before it, compared with its line of metrics.jsonl."""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

import contextlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxtext_lite.analysis.run_difference import compared_fields, lines_of
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import absolute, original
from maxtext_lite.config.errors import nearest_clause
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.kernels import KERNELS
from maxtext_lite.config.load import config_of_run
from maxtext_lite.config.records import Record, record_text
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.operations.row_losses import RowLoss, make_row_losses
from maxtext_lite.training.compilation_cache import reading_compiled
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.hooks import LossSpike
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.parameter_files import check_start
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import environment, run_directory
from maxtext_lite.training.saving import check, read_about
from maxtext_lite.training.starts import Starts, first_parameters, resume_between, settings_at
from maxtext_lite.training.step_log import StepLog

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
      fields: expected and found values of its line, and whether they agree; see `run_difference.compared_fields`.
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


class _Kept:
    """The records of steps in memory, in place of metrics.jsonl."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
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
    (config, starts), lines = _config(directory, step, overrides), lines_of(directory)
    if (step, False) not in lines:
        steps = sorted(step for step, is_evaluation in lines if not is_evaluation)
        has = f"steps {steps[0]:,} to {steps[-1]:,}" if steps else "none"
        raise UserError(f"--step={step}: metrics.jsonl of RUN_DIR={directory} has no such step; it has {has}.")
    config = _with_first_parameters(config, starts, step)
    elsewhere = "keys are not the run's" if overrides else ""
    with reading_compiled(config):  # before anything is compiled
        run = open_run(config)
        elsewhere = elsewhere or _other_environment(directory) or _of_kernel(run.plan.attention_kernel.name)
        with jax.default_matmul_precision(config.matmul_precision), jax.set_mesh(run.mesh):
            found = _repeated(run, step, starts, lines, with_rows=with_rows, say=say)
    run.failures.raise_together()
    allowed = tolerance if tolerance is not None else TOLERANCES[config.dtype] if elsewhere else 0.0
    compared, differing = _compared(found.records, lines, allowed)
    # A GPU's compiler times its choices, so a step that it compiled anew may round elsewhere.
    if differing and tolerance is None and not elsewhere and found.compiled_anew and jax.default_backend() == "gpu":
        elsewhere, allowed = "the step was compiled anew, on a GPU", TOLERANCES[config.dtype]
        compared, differing = _compared(found.records, lines, allowed)
    if step not in compared:
        raise UserError(f"step {max(compared)} of RUN_DIR={directory} ends the run when it is replayed.")
    return Replay(
        step, found.after, elsewhere, allowed, compared[step], differing[0] if differing else None, found.rows
    )


class _Repeated(NamedTuple):
    """The steps of a run done again: those after `after`, whether compiled anew, and the last one's rows."""

    records: Sequence[Record]
    after: int
    compiled_anew: bool
    rows: Sequence[RowLoss] | None


def _repeated(
    run: TrainingRun[Any],
    step: int,
    starts: Starts,
    lines: Mapping[tuple[int, bool], Record],
    *,
    with_rows: bool,
    say: Callable[[str], None],
) -> _Repeated:
    """The steps from the nearest checkpoint before `step`."""
    terminal, kept, rows = Terminal(log_period=1, quiet=True), _Kept(), None
    run.read_before(step, say)
    state, counts = run.restore_or_init()
    after = counts.step
    if after == 0 and run.config.load_parameters_path != (first_parameters(starts) or run.config.load_parameters_path):
        raise UserError(f"--step={step}: no intact checkpoint is left before it.")
    if (seam := resume_between(starts, after, step)) is not None:
        raise _without_checkpoint(run.config, step, seam, lines)
    begin = f"the checkpoint of step {after:,}" if after else "the run's first parameters"
    if after + run.steps_left(counts) < step:
        raise UserError(f"--step={step} is not reached with steps={run.config.steps}.")
    say(f"{step - after:,} steps from {begin}")
    log = StepLog(run, terminal, kept, counts)
    with contextlib.closing(FeedSteps(run, terminal, state, counts)) as steps:
        for number in range(after + 1, step + 1):
            if not steps.ready:
                steps.prepare(number)
            if with_rows and number == step:
                first = log.counts.examples_seen
                rows = make_row_losses(run)(state, first, run.plan.length.step_examples(first))
            state, taken = steps.take(state, number)
            try:
                log.add(number, taken, state)
            except LossSpike as error:  # as it may have been in the run
                say(str(error))
                break
    return _Repeated(kept.records, after, steps.compiled_anew, rows)


def _with_first_parameters(config: Config, starts: Starts, step: int) -> Config:
    """The config with the run's own first parameters; with none, which may be gone, where a checkpoint comes before.

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
    compared = dict[int, dict[str, tuple[Any, Any, bool]]]()
    for record in records:
        fields = compared_fields(lines.get((record["step"], False), {}), record, tolerance)
        compared[record["step"]] = {name: of for name, of in fields.items() if not name.startswith(_OF_ALL_DATA)}
    return compared, [number for number, of in compared.items() if not all(same for _, _, same in of.values())]


def _config(directory: Path, step: int, overrides: Sequence[str]) -> tuple[Config, Starts]:
    """The config with which a run took a step, with the given directory as its run directory, wherever it was written.

    config.yml is that of the newest start; the newest checkpoint lists earlier ones that differed, also returned.
    """
    if not (directory / "config.yml").is_file():
        raise UserError(f"RUN_DIR={original(directory, 'RUN_DIR')} is not a run directory: it has no config.yml.")
    where = absolute(original(directory, "RUN_DIR"))
    newest, starts = _starts(where / "checkpoints")
    settings = settings_at(starts, step) if step <= newest else []
    config = config_of_run(directory, [*settings, *overrides])
    kind = "reinforcement learning" if config.run_kind == "rl" else config.dataset_type
    reasons = {
        "reinforcement learning": "its responses were sampled and are not stored",
        "dpo": "its rows are pairs, whose reference is computed before the first step",
    }
    if kind in reasons:
        raise UserError(f"RUN_DIR={directory} is a run of {kind}: {reasons[kind]}. replay takes pre-training and SFT.")
    return config, starts


def _starts(checkpoints: Path) -> tuple[int, Starts]:
    """The newest checkpoint that can list the run's starts, and its list; (0, []) without one."""
    for saved in reversed(steps_in(checkpoints)):
        if check(checkpoints / str(saved), ("about",)).problem is None:
            return saved, read_about(checkpoints / str(saved)).get("starts", [])
    return 0, []


def _without_checkpoint(config: Config, step: int, seam: int, lines: Container[tuple[int, bool]]) -> UserError:
    """The refusal of a step before which the run resumed with other settings, after `seam`, where no checkpoint is."""
    checkpoints = run_directory(config) / "checkpoints"
    later = [saved for saved in steps_in(checkpoints) if saved >= step and (saved + 1, False) in lines]
    intact = [saved for saved in later if check(checkpoints / str(saved)).problem is None]
    return UserError(
        f"--step={step}: the run resumed with other settings after step {seam}, of which no intact checkpoint is left."
        + nearest_clause([seam, *(saved + 1 for saved in intact[:1])])
    )


def _of_kernel(name: str) -> str:
    """Why a step with this attention kernel need not have the same bits; "": it has them."""
    return "" if KERNELS[name].repeats else f"attention={name} rounds otherwise each time"


def _other_environment(directory: Path) -> str:
    """How this process differs from the run's environment.json; "": not at all."""
    if not (directory / "environment.json").is_file():
        return "environment.json is missing"
    then, now = read_object(directory / "environment.json"), environment()
    for name in ("devices", "num_processes"):
        if then.get(name) != now[name]:
            return f"{name} are not the run's"
    versions = then.get("packages", {}) | now["packages"]
    changed = [
        f"{name} is {now['packages'].get(name)}, then {then.get('packages', {}).get(name)}"
        for name in versions
        if name not in _NOT_OF_STEPS and now["packages"].get(name) != then.get("packages", {}).get(name)
    ]
    return ", ".join(changed)
