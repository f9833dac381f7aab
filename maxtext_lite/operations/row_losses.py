"""The loss of each row of a step, and its part of the step's gradient."""

from collections.abc import Callable
from dataclasses import dataclass

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

_TEXT_TOKENS, _TEXT_LETTERS = 256, 400


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


def make_row_losses(run: TrainingRun) -> Callable[[TrainState, int, int], list[RowLoss]]:
    """A function (state, first, count) -> the rows at positions `first` to `first + count - 1` of a run.

    `state` is that before the step that consumes them. Each row goes through the step's own loss and gradient, in a
    batch of its own; rows that the run excludes there are left out. All hosts call it.

    Raises:
      UserError: the run has local updates, in which rows see different parameters.
    """
    if run.parts.local:
        raise UserError(
            "--rows takes the gradient of each row with one set of parameters; enable_diloco=true has parameters for "
            "each replica."
        )
    tokenizer = load_tokenizer(run.config)
    source, where, reader = run.source, sharding(run.mesh, TRAIN_BATCH_AXES), run.plan.loading_hosts[0]
    sizes = 1, run.plan.slots_for(1), source.num_tokens

    @jax.jit
    def alone(
        params: Params, frozen: Params | None, loss_scale: jax.Array | None, batch: Rows
    ) -> tuple[jax.Array, ...]:
        found = step_gradients(run.parts, params, batch, None, loss_scale, frozen)
        norm = optax.tree.norm(found.gradients)
        return found.losses.loss, found.counts["target_tokens"], found.counts[run.parts.objective.divisor], norm

    def text(fields: dict[str, np.ndarray]) -> str:
        ids = fields["tokens"][fields["segments"] > 0][:_TEXT_TOKENS]
        return tokenizer.decode(ids[ids < tokenizer.vocab_size])[:_TEXT_LETTERS]

    def row_losses(state: TrainState, first: int, count: int) -> list[RowLoss]:
        ids = source.ids_of_run(first, count, run.config.data_shuffle_seed)
        ids = ids[~left_out(ids, first, run.excluded)]
        names = source.row_ids(ids) if source.parts else [("", row) for row in ids.tolist()]
        params, frozen = jax.block_until_ready((state.params, state.frozen))
        loss_scale = run.parts.optimizer.loss_scale(state.opt_state)
        found: list[tuple[dict[str, np.ndarray], float, int, float, float]] = []
        phases.enter("compile")  # the first row's
        for row in ids.tolist():
            phases.advance()
            read = {name: x.tolist() for name, x in source[row].items()} if jax.process_index() == reader else None
            fields = {name: np.asarray(x, field_dtype(name)) for name, x in value_of_host(reader, read).items()}
            batch = {name: np.zeros(sizes, field_dtype(name)) for name in source.fields}
            for name, values in fields.items():
                batch[name][0, 0] = values
            arrays = {name: jax.make_array_from_callback(sizes, where, x.__getitem__) for name, x in batch.items()}
            loss, tokens, counted, norm = jax.device_get(alone(params, frozen, loss_scale, arrays))
            found.append((fields, float(loss), int(tokens), float(counted), float(norm)))
        whole = sum(counted for *_, counted, _ in found) or 1.0
        return [
            RowLoss(*name, text(fields), int(fields["segments"].max()), tokens, loss, loss * n, norm * n / whole, n)
            for name, (fields, loss, tokens, n, norm) in zip(names, found, strict=True)
        ]

    return row_losses
