"""The way back before a loss spike: finds the guilty rows, and lists them so that the run leaves them out."""

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
from maxtext_lite.training.loss_band import WINDOW, band_limit
from maxtext_lite.training.run import EXCLUDED, TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step_log import NOTHING_SAVED, StepLog

MOST = 5
"""The most times that a run goes back within WINDOW steps."""
_LEAST_ROWS = 4  # fewer cannot show an outlier
_MOST_NAMED = 8


class Place(NamedTuple):
    """The place of a spike in a run.

    Attributes:
      step: that of the `LossSpike`.
      examples_seen: before this step.
      mixtures: the history of the run's mixtures up to it.
    """

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


class Guilty(NamedTuple):
    """The guilty rows, the place of their step in the run, and the reason."""

    rows: Sequence[RowLoss]
    first: int
    why: str


class SpikesHook(Hook):
    """Has a run go back to before a loss spike and leave the guilty rows out."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run

    def on_spike(self, error: LossSpike) -> None:
        refuse_to_go_back_often(self._run, error)
        place = Place(error.step, error.examples_seen, self._run.mixtures)
        prepare = functools.partial(exclude_outliers, place=place, limit=error.limit)
        raise Restart(f"{error}; the run goes back", prepare)


def refuse_to_go_back_often(run: TrainingRun, spike: LossSpike) -> None:
    """Raises the spike, with the reason, if the run has gone back too often."""
    if len({row.spike for row in run.recorded if spike.step - WINDOW < row.step <= spike.step}) >= MOST:
        often = f"the run has gone back {MOST} times within {WINDOW} steps, as {run.directory / EXCLUDED} says"
        raise LossSpike(f"{spike}; {often}", spike.step, spike.examples_seen)


def exclude_outliers(run: TrainingRun, say: Callable[[str], None], *, place: Place, limit: float) -> None:
    """Finds the rows that caused a spike and adds them to the run's list. All hosts call it.

    Deletes first the checkpoints of the step before the spike and later, if there is an older one from which the run
    takes the same steps again. Saves nothing while it searches, so that a run killed here meets the same spike again.

    Args:
      limit: of the `LossSpike`.
    Raises:
      NoWayBack: the run's steps come to other examples than those of the spike.
    """
    step = place.step
    if run.checkpointer:
        run.checkpointer.go_back(step - 1, functools.partial(_leads_to, place, run))
    guilty = find_outlier_rows(*_rows_on_the_way(run, place), limit=limit, width=run.config.max_loss_spike)
    sources = run.source.named()
    number = max((row.spike for row in run.recorded), default=0) + 1
    found = [
        ExcludedRow(
            row=row.row,
            source=row.source,
            data=sources[row.source].fingerprint,
            from_example=guilty.first,
            spike=number,
            step=step,
            loss=row.loss,
            grad_norm=row.grad_norm,
        )
        for row in guilty.rows
    ]
    path = run.files.directory / EXCLUDED

    def write() -> None:
        write_whole(path, excluded_text([*run.recorded, *found]))
        run.files.upload()

    on_first_host(path, write)
    named = [f"{row.source} {row.row:,} (loss {row.loss:.4g})".strip() for row in guilty.rows[:_MOST_NAMED]]
    more = ", ..." if len(found) > _MOST_NAMED else ""
    say(f"left out from example {guilty.first:,} on: row {', '.join(named)}{more}: {guilty.why}")


def _leads_to(place: Place, run: TrainingRun, counts: TrainProgress, mixtures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run's steps after these counts take the examples that it has taken up to a place.

    They do not if the batch or the mixture changed at a later checkpoint.

    Args:
      mixtures: the history up to the counts.
    """
    _, after = with_history(run.config, run.source, mixtures, (counts.examples_seen, counts.tokens_seen))
    comes_to = run.plan.length.examples_after(place.step - 1 - counts.step, counts.examples_seen)
    # By what the rows depend on: hosts may have the data under different names.
    histories = [
        [(each.examples_seen, each.tokens_seen, each.meaning) for each in map(Mixture.of, history)]
        for history in (after, place.mixtures)
    ]
    return comes_to == place.examples_seen and histories[0] == histories[1]


def _rows_on_the_way(run: TrainingRun, spike: Place) -> tuple[int, Sequence[RowLoss], PreviousStepRows | None]:
    """Repeats the steps before a spike; returns its place in the run, its rows, and the step before if it ran."""
    step = spike.step
    state, counts = run.restore_or_init()
    if not _leads_to(spike, run, counts, run.mixtures):
        raise RollbackError(
            f"step {step} has a loss spike, and the run cannot go back before it: the checkpoint from which its batch "
            f"or its mixture changed is gone, and from that of step {counts.step} it comes to other examples; "
            f"{NOTHING_SAVED}",
            step,
            spike.examples_seen,
        )
    place, before = counts.examples_seen, None
    examples = run.plan.length.step_examples
    with contextlib.closing(FeedSteps(run, state, StepLog(run, counts))) as steps:
        row_losses = make_row_losses(run)  # after pairs have their reference
        for number in range(counts.step + 1, step):
            steps.prepare(state, number)
            if number == step - 1:
                after = place + examples(place)
                rows, next_rows = (row_losses(state, first, examples(first)) for first in (place, after))
                before = PreviousStepRows(place, rows, next_rows)
            state, taken = steps.take(state, number)
            place += taken.num_examples
        return place, row_losses(state, place, examples(place)), before


def find_outlier_rows(
    first: int, rows: Sequence[RowLoss], before: PreviousStepRows | None, *, limit: float, width: float
) -> Guilty:
    """The rows that caused a spike.

    If the step's rows are within the band by the parameters before the last update, that update is to blame, and the
    guilty rows are of its step; otherwise they are of the spike's own step. Guilty rows stand out in their step: their
    loss or gradient norm is not finite, or beyond the `band_limit` of the step's rows. All rows of the step are guilty
    if none stands out, or if the rest of the spike's own step is beyond the band too.

    Args:
      first: the place of the step in the run.
      rows: of the step, by the parameters before it.
      limit: the end of the band.
      width: max_loss_spike.
    """
    if before and _is_within(before.next_rows, limit):
        out, why = _find_outliers(before.rows, width), "the update of its step made the loss leave its band"
        if out:
            return Guilty(out, before.first, f"{why}, and it stands out there")
        return Guilty(before.rows, before.first, f"{why}, and no row stands out there")
    out, why = _find_outliers(rows, width), "the loss of its step left its band"
    if out and _is_within([row for row in rows if row not in out], limit):
        return Guilty(out, first, f"{why}, and it stands out there")
    return Guilty(rows, first, f"{why}, and no row stands out for which the others would not")


def _find_outliers(rows: Sequence[RowLoss], width: float) -> list[RowLoss]:
    of_loss, of_norm = (
        band_limit(values, width, least=_LEAST_ROWS)
        for values in ([row.loss for row in rows], [row.grad_norm for row in rows])
    )

    def beyond(value: float, limit: float) -> bool:
        return not math.isfinite(value) or value > limit

    return [row for row in rows if beyond(row.loss, of_loss) or beyond(row.grad_norm, of_norm)]


def _is_within(rows: Sequence[RowLoss], limit: float) -> bool:
    """Whether the mean loss of rows is finite and within a limit."""
    loss = math.fsum(row.loss_sum for row in rows) / (sum(row.num_counted for row in rows) or 1.0)
    return math.isfinite(loss) and loss <= limit
