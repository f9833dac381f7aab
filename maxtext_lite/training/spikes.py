"""The way back before a loss spike: finds the guilty rows, and lists them so that the run leaves them out."""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from maxtext_lite.data import ExampleSource, named_sources
from maxtext_lite.data.excluded import ExcludedRow, excluded_text
from maxtext_lite.training.feed_steps import FeedSteps
from maxtext_lite.training.loss_band import WINDOW, band_limit
from maxtext_lite.training.metrics import Terminal
from maxtext_lite.training.row_losses import RowLoss, make_row_losses
from maxtext_lite.training.run import EXCLUDED, TrainingRun
from maxtext_lite.training.step_log import LossSpike

MOST = 5
"""The most times that a run goes back within WINDOW steps."""
_LEAST_ROWS = 4  # fewer cannot show an outlier
_MOST_NAMED = 8


class RowsBefore(NamedTuple):
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


def refuse_to_go_back(run: TrainingRun[ExampleSource], spike: LossSpike) -> None:
    """Raises the spike if the config says stop or the run has gone back too often."""
    if not run.config.max_loss_spike or run.config.loss_spike_action == "stop":
        raise spike
    if len({row.spike for row in run.recorded if spike.step - WINDOW < row.step <= spike.step}) >= MOST:
        often = f"the run has gone back {MOST} times within {WINDOW} steps, as {run.directory / EXCLUDED} says"
        raise LossSpike(f"{spike}; {often}", spike.step)


def leave_out_guilty(run: TrainingRun[ExampleSource], terminal: Terminal, *, step: int, limit: float) -> None:
    """Finds the rows that caused a spike and adds them to the run's list. All hosts call it.

    Deletes first the checkpoints of the step before the spike and later, if there is an older one. Saves nothing while
    it searches, so that a run killed here meets the same spike again.

    Args:
      step, limit: of the `LossSpike`.
    """
    if run.checkpointer:
        run.checkpointer.go_back(step - 1)
    guilty = find_guilty(*_rows_on_the_way(run, step), limit=limit, width=run.config.max_loss_spike)
    sources, number = named_sources(run.source), max((row.spike for row in run.recorded), default=0) + 1
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
        scratch = path.with_name(f"{path.name}.tmp")
        scratch.write_text(excluded_text([*run.recorded, *found]), encoding="utf-8")
        scratch.replace(path)
        run.files.upload()

    run.failures.on_first_host(path, write)
    named = [f"{row.source} {row.row:,} (loss {row.loss:.4g})".strip() for row in guilty.rows[:_MOST_NAMED]]
    more = ", ..." if len(found) > _MOST_NAMED else ""
    terminal.say(f"left out from example {guilty.first:,} on: row {', '.join(named)}{more}: {guilty.why}")


def _rows_on_the_way(run: TrainingRun[ExampleSource], step: int) -> tuple[int, Sequence[RowLoss], RowsBefore | None]:
    """Repeats the steps before this one; returns its place in the run, its rows, and the step before if it ran."""
    state, counts = run.restore_or_init()
    place, before = counts.examples_seen, None
    examples = run.plan.step_examples
    quiet = Terminal(log_period=1, quiet=True)
    with contextlib.closing(FeedSteps(run, quiet, state, counts, proves_kernels=False)) as steps:
        row_losses = make_row_losses(run)  # after pairs have their reference
        for number in range(counts.step + 1, step):
            if not steps.ready:
                steps.prepare(number)
            if number == step - 1:
                after = place + examples(place)
                rows, next_rows = (row_losses(state, first, examples(first)) for first in (place, after))
                before = RowsBefore(place, rows, next_rows)
            state, taken = steps.take(state, number)
            place += taken.num_examples
        return place, row_losses(state, place, examples(place)), before


def find_guilty(
    first: int, rows: Sequence[RowLoss], before: RowsBefore | None, *, limit: float, width: float
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
        out, why = _standing_out(before.rows, width), "the update of its step made the loss leave its band"
        if out:
            return Guilty(out, before.first, f"{why}, and it stands out there")
        return Guilty(before.rows, before.first, f"{why}, and no row stands out there")
    out, why = _standing_out(rows, width), "the loss of its step left its band"
    if out and _is_within([row for row in rows if row not in out], limit):
        return Guilty(out, first, f"{why}, and it stands out there")
    return Guilty(rows, first, f"{why}, and no row stands out for which the others would not")


def _standing_out(rows: Sequence[RowLoss], width: float) -> list[RowLoss]:
    of_loss, of_norm = (
        band_limit(values, width, least=_LEAST_ROWS)
        for values in ([row.loss for row in rows], [row.grad_norm for row in rows])
    )

    def beyond(value: float, limit: float) -> bool:
        return not math.isfinite(value) or value > limit

    return [row for row in rows if beyond(row.loss, of_loss) or beyond(row.grad_norm, of_norm)]


def _is_within(rows: Sequence[RowLoss], limit: float) -> bool:
    """Whether the mean loss of rows is finite and within a limit."""
    loss = math.fsum(row.loss_sum for row in rows) / max(sum(row.num_counted for row in rows), 1)
    return math.isfinite(loss) and loss <= limit
