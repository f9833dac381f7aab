"""The loss of each row of a step, and its part of the step's gradient."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import optax

from maxtext_lite.config import UserError
from maxtext_lite.config.phases import phases
from maxtext_lite.data import field_dtype, load_tokenizer
from maxtext_lite.data.excluded import left_out
from maxtext_lite.parallel import Params, sharding, value_of_host
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES, step_gradients
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

_TEXT_TOKENS = 256
_TEXT_LETTERS = 400


@dataclass(frozen=True)
class RowLoss:
    """One row of a step.

    Attributes:
      source: the source's name in a mixture; "" without one.
      row: its number in the source.
      text: its beginning, without special tokens.
      documents: the number of documents in it.
      loss: nats per target token (dpo: the loss per pair).
      loss_sum: over its target tokens, or pairs.
      grad_norm: norm of its part of the step's gradient. The parts add up to that gradient, so the sum of their norms
        is at least the step's `grad_norm`, up to rounding.
      num_counted: target tokens, or pairs; of a custom loss, its weight.
    """

    source: str
    row: int
    text: str
    documents: int
    target_tokens: int
    loss: float
    loss_sum: float
    grad_norm: float
    num_counted: float


class NamedRow(NamedTuple):
    """One row of a step before it is evaluated; source and row as in `RowLoss`."""

    source: str
    row: int
    fields: Mapping[str, np.ndarray]


Parameters: TypeAlias = tuple[Params, Params | None, jax.Array | None]
"""Trained parameters, frozen ones, and the loss scale."""


def trained_parameters(run: TrainingRun, state: TrainState) -> Parameters:
    """What the gradients of a step depend on, once it is computed."""
    return jax.block_until_ready((state.params, state.frozen, run.parts.optimizer.loss_scale(state.opt_state)))


def make_losses_alone(run: TrainingRun) -> Callable[[Parameters, Iterable[NamedRow]], list[RowLoss]]:
    """A function of parameters and rows that runs the step's own loss and gradient on each row alone.

    All hosts call it.

    Raises:
      UserError: the run has local updates, in which rows see different parameters.
    """
    if run.parts.local:
        raise UserError(
            "--rows takes the gradient of each row with one set of parameters; enable_diloco=true has parameters for "
            "each replica."
        )
    tokenizer = load_tokenizer(run.config)
    where = sharding(run.mesh, TRAIN_BATCH_AXES)

    @jax.jit
    def alone(
        params: Params, frozen: Params | None, loss_scale: jax.Array | None, batch: Rows
    ) -> tuple[jax.Array, ...]:
        found = step_gradients(run.parts, params, batch, None, loss_scale, frozen)
        norm = optax.tree.norm(found.gradients)
        return found.losses.loss, found.counts["target_tokens"], found.counts[run.parts.objective.divisor], norm

    def text(fields: Mapping[str, np.ndarray]) -> str:
        ids = fields["tokens"][fields["segments"] > 0][:_TEXT_TOKENS]
        return tokenizer.decode(ids[ids < tokenizer.vocab_size])[:_TEXT_LETTERS]

    def losses_alone(parameters: Parameters, rows: Iterable[NamedRow]) -> list[RowLoss]:
        found: list[RowLoss] = []
        phases.enter("compile")  # the first row's
        for row in rows:
            phases.advance()
            arrays: Rows = {}
            for name, values in row.fields.items():
                slots = np.zeros((1, run.plan.slots_for(1), len(values)), field_dtype(name))
                slots[0, 0] = values
                arrays[name] = jax.make_array_from_callback(slots.shape, where, slots.__getitem__)
            loss, tokens, counted, norm = map(float, jax.device_get(alone(*parameters, arrays)))
            documents = int(row.fields["segments"].max())
            found.append(
                RowLoss(
                    source=row.source,
                    row=row.row,
                    text=text(row.fields),
                    documents=documents,
                    target_tokens=int(tokens),
                    loss=loss,
                    loss_sum=loss * counted,
                    grad_norm=norm * counted,
                    num_counted=counted,
                )
            )
        whole = sum(row.num_counted for row in found) or 1.0
        return [dataclasses.replace(row, grad_norm=row.grad_norm / whole) for row in found]

    return losses_alone


def make_row_losses(run: TrainingRun) -> Callable[[TrainState, int, int], list[RowLoss]]:
    """A function (state, first, count) -> the rows at positions `first` to `first + count - 1` of a run.

    `state` is the one before the step that consumes them. Each row goes through the step's own loss and gradient, in a
    batch of its own; rows that the run excludes there are skipped. All hosts call it.

    Raises:
      UserError: the run has local updates, in which rows see different parameters.
    """
    alone = make_losses_alone(run)
    source = run.source
    reader = run.plan.loading_hosts[0]

    def rows(first: int, count: int) -> Iterator[NamedRow]:
        ids = source.ids_of_run(first, count, run.config.data_shuffle_seed)
        ids = ids[~left_out(ids, first, run.excluded)]
        names = source.row_ids(ids) if source.parts else [("", row) for row in ids.tolist()]
        for (name, number), row in zip(names, ids.tolist(), strict=True):
            read = {field: x.tolist() for field, x in source[row].items()} if jax.process_index() == reader else None
            shared = value_of_host(reader, read)
            yield NamedRow(name, number, {field: np.asarray(x, field_dtype(field)) for field, x in shared.items()})

    return lambda state, first, count: alone(trained_parameters(run, state), rows(first, count))
