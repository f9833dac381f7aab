"""The exact held-out loss: each held-out token once, whatever the batch size and the mesh."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from maxtext_lite.data import Batch


def evaluate(eval_step: Any, params: Any, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss in nats per target token, and the number of target tokens.

    Row sums come from the devices; they are added in double precision here, so that neither the order nor the
    size of the batches enters.

    Args:
      eval_step: as `step.make_eval_step` makes it.
    """
    row_nll: list[np.ndarray] = []
    target_tokens = 0
    for batch in batches:
        nll_B, tokens_B = jax.device_get(eval_step(params, batch.arrays))
        row_nll.append(nll_B)
        target_tokens += int(tokens_B.sum())
    total = math.fsum(float(nll) for rows in row_nll for nll in rows)
    return total / max(target_tokens, 1), target_tokens
