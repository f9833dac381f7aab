"""The exact held-out loss: each held-out example once, whatever the batch size and the mesh."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from maxtext_lite.data import Batch
from maxtext_lite.training.objective import NEXT_TOKEN, ScoredObjective


def evaluate(
    eval_step: Any, params: Any, batches: Iterable[Batch], objective: ScoredObjective = NEXT_TOKEN
) -> dict[str, float | int]:
    """The entries of an evaluation's record, `eval_loss` and `eval_target_tokens` among them.

    Args:
      eval_step: as `step.make_eval_step` makes it, for the same objective.
    """
    return objective.evaluation(list(scores_of(eval_step, params, batches)))


def scores_of(eval_step: Any, params: Any, batches: Iterable[Batch]) -> Iterator[Any]:
    """The scores of each batch, on the host."""
    for batch in batches:
        yield jax.device_get(eval_step(params, batch.arrays))
