"""Each row of a step alone: its loss and its part of the step's gradient."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# jax and optax declare some of their functions in part.

from dataclasses import dataclass

import jax
import numpy as np
import optax

from maxtext_lite.config import UserError
from maxtext_lite.data import ExampleSource, MixtureSource, field_dtype, load_tokenizer
from maxtext_lite.data.mixture_source import ids_of_run
from maxtext_lite.parallel import sharding
from maxtext_lite.training.arrays import Params, Rows
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES, accumulate_gradients
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

_TEXT_TOKENS, _TEXT_LETTERS = 256, 400


@dataclass(frozen=True)
class RowLoss:
    """A row of a step, alone.

    Attributes:
      source: its name in a mixture; "" without one.
      row: its number in its source.
      text: its beginning; special tokens give none.
      documents: that have tokens in it.
      loss: nats per target token.
      loss_sum: nats of all of its target tokens.
      grad_norm: of its part of the step's gradient. The parts add up to that gradient, so that the parts' norms add up
        to no less than the step's `grad_norm`, but for the rounding of their sum.
    """

    source: str
    row: int
    text: str
    documents: int
    target_tokens: int
    loss: float
    loss_sum: float
    grad_norm: float


def row_losses(run: TrainingRun[ExampleSource], state: TrainState, *, first: int, count: int) -> list[RowLoss]:
    """The rows at the positions `first` to `first + count - 1` of a run, by the state before the step that takes them.

    Each goes through the step's own loss and gradient, in a batch of no other row.

    Raises:
      UserError: the run has local updates, whose rows meet different parameters, or several processes.
    """
    if run.parts.local or jax.process_count() > 1:
        what = "enable_diloco=true has parameters for each replica" if run.parts.local else "it has several processes"
        raise UserError(f"--rows takes the gradient of one row after the other by one set of parameters; {what}.")
    source, where = run.source, sharding(run.mesh, TRAIN_BATCH_AXES)
    ids = ids_of_run(source, first, count, seed=run.config.data_shuffle_seed)
    names = source.named_rows(ids) if isinstance(source, MixtureSource) else [("", row) for row in ids.tolist()]
    tokenizer, step_gradients = load_tokenizer(run.config), accumulate_gradients(run.parts)
    params, frozen = jax.block_until_ready((state.params, state.frozen))
    loss_scale = run.parts.optimizer.loss_scale(state.opt_state)

    @jax.jit
    def alone(params: Params, frozen: Params | None, batch: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        found = step_gradients(params, batch, None, loss_scale, frozen)
        return found.loss, found.target_tokens, optax.tree.norm(run.parts.optimizer.without_loads(found.gradients))

    found: list[tuple[dict[str, np.ndarray], float, int, float]] = []
    for row in ids.tolist():
        fields = source[row]
        sizes = 1, run.plan.slots_for(1), source.num_tokens
        batch = {name: np.zeros(sizes, field_dtype(name)) for name in source.fields}
        for name, values in fields.items():
            batch[name][0, 0] = values
        loss, tokens, norm = jax.device_get(alone(params, frozen, jax.device_put(batch, where)))
        found.append((fields, float(loss), int(tokens), float(norm)))
    whole = max(sum(tokens for _, _, tokens, _ in found), 1)

    def text(fields: dict[str, np.ndarray]) -> str:
        ids = fields["tokens"][fields["segments"] > 0][:_TEXT_TOKENS]
        return tokenizer.decode(ids[ids < tokenizer.vocab_size])[:_TEXT_LETTERS]

    return [
        RowLoss(*name, text(fields), int(fields["segments"].max()), tokens, loss, loss * tokens, norm * tokens / whole)
        for name, (fields, loss, tokens, norm) in zip(names, found, strict=True)
    ]
