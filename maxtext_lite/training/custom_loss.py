"""The objective that minimises a loss of the caller's own."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.config import NumericsConfig, UserError
from maxtext_lite.parallel import Tree, in_token_order
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import (
    LossSums,
    Outputs,
    auxiliary_metrics,
    spread_over_targets,
    target_tokens,
)
from maxtext_lite.training.objective import Loss, OneRowExamples, Predictions

WEIGHT = "loss_weight"
"""The count that divides a custom loss, and its metric."""

_MICRO_BATCH_AXES = ("batch", "length")


@dataclasses.dataclass(frozen=True)
class CustomLoss(OneRowExamples):
    """The objective that minimises a `Loss`.

    Attributes:
      vocab_size, emb_dim: of the logits and hidden states.
    """

    function: Loss
    vocab_size: int
    emb_dim: int

    divisor = WEIGHT
    own_sums = ()

    def counts(self, rows: Rows) -> dict[str, Array]:
        """Target tokens, and the weight of each row."""
        axes = ("accumulation",) * (rows["weights"].ndim - 2) + (
            "global_batch",
            "length",
        )
        return {
            "target_tokens": target_tokens(rows),
            WEIGHT: self._row_weights(_in_token_order(rows, axes)),
        }

    def _row_weights(self, rows: Rows) -> Array:
        """The weight of each row, [..., B]. It must not depend on the model's outputs, which zeros replace."""

        def weight_of_row(row: Rows) -> Array:
            shape = 1, row["tokens"].shape[0]
            zeros = Predictions(
                lambda: jnp.zeros(shape),
                lambda: jnp.zeros((*shape, self.vocab_size)),
                lambda: jnp.zeros((*shape, self.emb_dim)),
            )
            _, weight = self.function(zeros, {name: x[None] for name, x in row.items()})
            return weight.astype(jnp.float32)

        for _ in range(rows["weights"].ndim - 1):
            weight_of_row = jax.vmap(weight_of_row)
        return weight_of_row(rows)

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The loss with the experts' auxiliary losses, where each row has its own weight."""
        total, _ = self._sum_and_weight(outputs, rows)
        loss = factor * total
        weight_B = factor * self._row_weights(_in_token_order(rows, _MICRO_BATCH_AXES))
        auxiliary, auxiliary_sums = outputs.auxiliary_loss(*spread_over_targets(weight_B, rows))
        return loss + auxiliary, LossSums(loss, jnp.zeros_like(loss), auxiliary_sums)

    def _sum_and_weight(self, outputs: Outputs, rows: Rows) -> tuple[Array, Array]:
        def ordered(x: Array) -> Array:
            return in_token_order(x, _MICRO_BATCH_AXES + (None,) * (x.ndim - 2), dim=1)

        predictions = Predictions(
            lambda: ordered(outputs.nll(rows["targets"])),
            lambda: ordered(outputs.logits()),
            lambda: ordered(outputs.tokens.merge(outputs.x_BTD)),
        )
        total, weight = self.function(predictions, _in_token_order(rows, _MICRO_BATCH_AXES))
        return total.astype(jnp.float32), weight.astype(jnp.float32)

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """`loss_weight` and, with experts, AUXILIARY_METRICS."""
        return {WEIGHT: count, **auxiliary_metrics(aux, config)}

    def scores(self, outputs: Outputs, rows: Rows) -> tuple[Array, ...]:
        """The sum, the weight and the target tokens of all rows, each [1]."""
        total, weight = self._sum_and_weight(outputs, rows)
        return total[None], weight[None], jnp.sum(target_tokens(rows))[None]

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The sum over all examples divided by their weight, and their target tokens."""
        total, weight, tokens = (np.concatenate(part) for part in zip(*scores, strict=True))
        total_weight = math.fsum(weight)
        return {
            "eval_loss": math.fsum(total) / (total_weight or 1.0),
            "eval_target_tokens": int(tokens.sum()),
            "eval_loss_weight": total_weight,
        }


def _in_token_order(rows: Rows, axes: Sequence[str]) -> Rows:
    return {name: in_token_order(x, tuple(axes)) for name, x in rows.items()}


def custom_loss(
    function: Loss,
    *,
    fields: Sequence[str],
    vocab_size: int,
    emb_dim: int,
    z_loss_multiplier: float,
) -> CustomLoss:
    """The objective that minimises `function`, after a trial on random rows that it is a sum over rows.

    Args:
      fields: of the rows.
    Raises:
      UserError: the function breaks a promise of `Loss`; says what it returned.
    """
    if z_loss_multiplier:
        raise UserError(
            f"z_loss_multiplier={z_loss_multiplier:g} does not apply to a custom objective, which is the whole loss. "
            "Nearest that works: z_loss_multiplier=0."
        )
    rng = np.random.default_rng(0)
    rows = _random_rows(rng, fields, vocab_size)
    shape = rows["tokens"].shape
    outputs = [
        rng.gamma(2.0, 2.0, shape),
        rng.normal(size=(*shape, vocab_size)),
        rng.normal(size=(*shape, emb_dim)),
    ]
    whole = _sum_and_weight(function, outputs, rows)
    halves = [
        _sum_and_weight(
            function,
            [x[part] for x in outputs],
            {name: x[part] for name, x in rows.items()},
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    for name, found, first, second in zip(("sum", "weight"), whole, *halves, strict=True):
        if not math.isclose(found, first + second, rel_tol=1e-4, abs_tol=1e-6):
            raise UserError(
                f"objective: the {name} of 4 rows and 4 empty ones is {found:.6g}, those of the first and last 2 "
                f"{first:.6g} and {second:.6g}. It must be a sum over rows, 0 where weights are 0."
            )
    _, weight = whole
    _, other_weight = _sum_and_weight(function, [rng.permuted(x) for x in outputs], rows)
    if not math.isclose(weight, other_weight, rel_tol=1e-4):
        raise UserError("objective: the weight changes with the model's predictions. It must depend on the rows alone.")
    if weight <= 0:
        raise UserError(f"objective: the weight of 4 rows with targets is {weight:.6g}; it must be above 0.")
    return CustomLoss(function, vocab_size, emb_dim)


def _random_rows(rng: np.random.Generator, fields: Sequence[str], vocab_size: int) -> dict[str, np.ndarray]:
    """Four rows of two documents and padding, then four empty ones, [8, 16]."""
    shape = 8, 16
    place = np.broadcast_to(np.arange(16), shape)
    lengths = np.append(rng.integers(8, 17, 4), np.zeros(4, np.int64))
    is_real = place < lengths[:, None]
    rows = {name: rng.random(shape) * is_real for name in fields}
    rows |= {
        "tokens": rng.integers(vocab_size, size=shape) * is_real,
        "targets": rng.integers(vocab_size, size=shape) * is_real,
        "segments": (1 + (place >= 4)) * is_real,
        "positions": np.where(place < 4, place, place - 4) * is_real,
        "weights": rng.choice([0.0, 0.5, 1.0, 1.0], shape) * is_real,
    }
    return {name: x.astype(np.int32 if x.dtype == np.int64 else np.float32) for name, x in rows.items()}


def _sum_and_weight(function: Loss, outputs: Sequence[np.ndarray], rows: dict[str, np.ndarray]) -> tuple[float, float]:
    """The function's sum and weight, once they are known to be two finite scalars."""
    nll, logits, hidden = (functools.partial(jnp.asarray, x, jnp.float32) for x in outputs)
    found: Tree = function(
        Predictions(nll, logits, hidden),
        {name: jnp.asarray(x) for name, x in rows.items()},
    )
    is_pair = isinstance(found, tuple) and [jnp.shape(x) for x in found] == [(), ()]
    if not is_pair or not all(math.isfinite(x) for x in found):
        raise UserError(f"objective: it returned {str(found)[:80]}, not two finite numbers (sum, weight) of shape ().")
    total, weight = found
    return float(total), float(weight)
