"""Loss-spike rollback: finds the rows that caused a spike and excludes them from the run."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.data.excluded import ExcludedRow, excluded_text
from maxtext_lite.data.history import Mixture
from maxtext_lite.data.sources import with_history
from maxtext_lite.operations.row_losses import RowLoss, make_row_losses
from maxtext_lite.parallel import on_first_host
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.hooks import Hook, LossSpike, Restart
from maxtext_lite.training.run import EXCLUDED, TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step_log import NOTHING_SAVED, WINDOW, StepLog, band_limit

MOST = 5
"""The most times that a run goes back within WINDOW steps."""
_LEAST_ROWS = 4  # fewer cannot show an outlier
_MOST_NAMED = 8


class SpikeLocation(NamedTuple):
    """The step of a spike, the examples before it, and the history of the run's mixtures up to it."""

    step: int
    examples_seen: int
    mixtures: Sequence[Mapping[str, Any]]


class RollbackError(LossSpike):
    """A spike whose step cannot be reached again; the run ends."""


class PreviousStepRows(NamedTuple):
    """The step before the spike, with losses by the parameters before that step.

    Attributes:
      first: the step's place in the run.
      rows: the step's rows.
      next_rows: the rows of the spike's step.
    """

    first: int
    rows: Sequence[RowLoss]
    next_rows: Sequence[RowLoss]


class Outliers(NamedTuple):
    """The rows that caused a spike, the place of their step in the run, and the reason."""

    rows: Sequence[RowLoss]
    first: int
    why: str


class SpikesHook(Hook):
    """Rolls a run back to before a loss spike and excludes the rows that caused it."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run

    def on_spike(self, error: LossSpike) -> None:
        refuse_to_go_back_often(self._run, error)
        spike = SpikeLocation(error.step, error.examples_seen, self._run.mixtures)
        prepare = functools.partial(exclude_outliers, spike=spike, limit=error.limit)
        raise Restart(f"{error}; the run rolls back", prepare)


def refuse_to_go_back_often(run: TrainingRun, spike: LossSpike) -> None:
    """Raises the spike, with the reason, if the run has rolled back too often."""
    if len({row.spike for row in run.recorded if spike.step - WINDOW < row.step <= spike.step}) >= MOST:
        often = f"the run has rolled back {MOST} times within {WINDOW} steps (see {run.directory / EXCLUDED})"
        raise LossSpike(f"{spike}; {often}", spike.step, spike.examples_seen)


def exclude_outliers(run: TrainingRun, say: Callable[[str], None], *, spike: SpikeLocation, limit: float) -> None:
    """Finds the rows that caused a spike and adds them to the run's list. All hosts call it.

    First deletes the checkpoints of the step before the spike and later, if an older one leads to the same steps. Saves
    nothing while it searches: a killed run hits the same spike again.

    Args:
      limit: of the `LossSpike`.
    Raises:
      RollbackError: the run would replay other examples than those of the spike.
    """
    if run.checkpointer:
        run.checkpointer.go_back(spike.step - 1, functools.partial(_leads_to, spike, run))
    outliers = find_outlier_rows(*_rows_before(run, spike), limit=limit, width=run.config.max_loss_spike)
    sources = run.source.named()
    number = max((row.spike for row in run.recorded), default=0) + 1
    excluded = list(run.recorded)
    for row in outliers.rows:
        excluded.append(
            ExcludedRow(
                row=row.row,
                source=row.source,
                data=sources[row.source].fingerprint,
                from_example=outliers.first,
                spike=number,
                step=spike.step,
                loss=row.loss,
                grad_norm=row.grad_norm,
            )
        )
    path = run.files.directory / EXCLUDED

    def write() -> None:
        write_whole(path, excluded_text(excluded))
        run.files.upload()

    on_first_host(path, write)
    named = [f"{row.source} {row.row:,} (loss {row.loss:.4g})".strip() for row in outliers.rows[:_MOST_NAMED]]
    more = ", ..." if len(outliers.rows) > _MOST_NAMED else ""
    say(f"excluded from example {outliers.first:,} on: row {', '.join(named)}{more}: {outliers.why}")


def _leads_to(
    spike: SpikeLocation, run: TrainingRun, counts: TrainProgress, mixtures: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the run's steps after these counts take the examples that it took before the spike.

    They do not if the batch or the mixture changed at a later checkpoint.

    Args:
      mixtures: the history up to the counts.
    """
    if run.plan.length.examples_after(spike.step - 1 - counts.step, counts.examples_seen) != spike.examples_seen:
        return False
    _, after = with_history(run.config, run.source, mixtures, (counts.examples_seen, counts.tokens_seen))
    return _meanings(after) == _meanings(spike.mixtures)


def _meanings(history: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """The part of a mixture's history that rows depend on: hosts may have the data under different names."""
    return [(each.examples_seen, each.tokens_seen, each.meaning) for each in map(Mixture.of, history)]


def _rows_before(run: TrainingRun, spike: SpikeLocation) -> tuple[int, Sequence[RowLoss], PreviousStepRows | None]:
    """Repeats the steps before a spike; returns its location, its rows, and the step before if it ran."""
    state, counts = run.restore_or_init()
    if not _leads_to(spike, run, counts, run.mixtures):
        raise RollbackError(
            f"step {spike.step} has a loss spike, and the run cannot roll back past it: the checkpoint where its batch "
            f"or mixture changed is gone, and the one of step {counts.step} would replay other examples; "
            f"{NOTHING_SAVED}",
            spike.step,
            spike.examples_seen,
        )
    place = counts.examples_seen
    before = None
    examples = run.plan.length.step_examples
    with contextlib.closing(FeedSteps(run, state, StepLog(run, counts))) as steps:
        row_losses = make_row_losses(run)  # after pairs have their reference
        for number in range(counts.step + 1, spike.step):
            steps.prepare(state, number)
            if number == spike.step - 1:
                rows = row_losses(state, place, examples(place))
                after = place + examples(place)
                before = PreviousStepRows(place, rows, row_losses(state, after, examples(after)))
            state, taken = steps.take(state, number)
            place += taken.num_examples
        return place, row_losses(state, place, examples(place)), before


def find_outlier_rows(
    first: int, rows: Sequence[RowLoss], before: PreviousStepRows | None, *, limit: float, width: float
) -> Outliers:
    """The rows that caused a spike.

    If the step's rows are within the band by the parameters before the last update, that update is to blame and its
    step is searched, otherwise the spike's own. An outlier's loss or gradient norm is not finite or beyond the
    `band_limit` of the step's rows. All rows of the step are excluded if there is no outlier, or if the rest of the
    spike's own step is beyond the band too.

    Args:
      first: the place of the step in the run.
      rows: of the step, by the parameters before it.
      limit: the end of the band.
      width: max_loss_spike.
    """
    if before and _is_within(before.next_rows, limit):
        why = "the update of its step pushed the loss out of its band"
        if outliers := _outliers(before.rows, width):
            return Outliers(outliers, before.first, f"{why}, and it is an outlier there")
        return Outliers(before.rows, before.first, f"{why}, and no row is an outlier there")
    why = "the loss of its step left its band"
    outliers = _outliers(rows, width)
    if outliers and _is_within([row for row in rows if row not in outliers], limit):
        return Outliers(outliers, first, f"{why}, and it is an outlier there")
    return Outliers(rows, first, f"{why}, and removing outliers does not fix it")


def _outliers(rows: Sequence[RowLoss], width: float) -> list[RowLoss]:
    most_loss = band_limit([row.loss for row in rows], width, least=_LEAST_ROWS)
    most_norm = band_limit([row.grad_norm for row in rows], width, least=_LEAST_ROWS)
    return [row for row in rows if not (_is_below(row.loss, most_loss) and _is_below(row.grad_norm, most_norm))]


def _is_below(value: float, limit: float) -> bool:
    return math.isfinite(value) and value <= limit


def _is_within(rows: Sequence[RowLoss], limit: float) -> bool:
    """Whether the mean loss of rows is finite and within a limit."""
    return _is_below(math.fsum(row.loss_sum for row in rows) / (sum(row.num_counted for row in rows) or 1.0), limit)
