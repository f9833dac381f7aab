"""What a step minimises: a sum over rows, and the count that it is divided by."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from maxtext_lite.config import Config, NumericsConfig
from maxtext_lite.models import Decoder
from maxtext_lite.training.loss import (
    LossSums,
    auxiliary_loss,
    auxiliary_metrics,
    auxiliary_names,
    hidden_loss,
    row_losses,
)
from maxtext_lite.training.preference import Preference

Rows = dict[str, jax.Array]


class Cut(NamedTuple):
    """How tokens are shared out where a loss is taken: [B, T, ...] to the shares, and back."""

    cut: Callable[[jax.Array], jax.Array]
    uncut: Callable[[jax.Array], jax.Array]


WHOLE = Cut(lambda x: x, lambda x: x)
"""Not shared out."""


class Objective(Protocol):
    """The loss of rows, as sums; means are taken by dividing the factor that is passed."""

    @property
    def rows_per_example(self) -> int:
        """Rows of an example in the step's arrays."""
        ...

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """Arrays [..., B, T] of rows from those of examples; `axes` are logical axes, the same of both."""
        ...

    @property
    def divisor(self) -> str:
        """The count that losses are divided by."""
        ...

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """What each of the rows adds to `target_tokens` and to the divisor; int32 [..., B]."""
        ...

    def zeros(self, decoder: Decoder, zero: jax.Array) -> LossSums:
        """Before the first micro-batch: `zero` for each sum."""
        ...

    def loss(
        self,
        decoder: Decoder,
        params: Any,
        x_BTD: jax.Array,
        aux: dict[str, jax.Array],
        rows: Rows,
        factor: jax.Array,
        config: NumericsConfig,
        tokens: Cut = WHOLE,
    ) -> tuple[jax.Array, LossSums]:
        """What is differentiated, and the sums to report.

        Args:
          params: the decoder's parameters as `Decoder.cast` gives them.
          x_BTD: final hidden states, normed; in the shares of `tokens`.
          aux: of the rows' streams after all layers.
          factor: what every term is multiplied by: the loss scale over the step's count.
        """
        ...

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> dict[str, jax.Array]:
        """What a step reports beside its loss, from its means and its count."""
        ...


class ScoredObjective(Objective, Protocol):
    """One by which an evaluation also judges examples."""

    def scores(self, decoder: Decoder, params: Any, rows: Rows, *, num_tiles: int) -> Any:
        """What an evaluation needs to know of examples: arrays whose first dim is examples."""
        ...

    def evaluation(self, scores: Sequence[Any]) -> dict[str, float | int]:
        """The entries of an evaluation's record, from the scores of its batches on the host."""
        ...


class NextToken:
    """The next token of texts: mean over target tokens of their negative log-likelihood."""

    rows_per_example = 1
    divisor = "target_tokens"

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """See Objective."""
        del axes
        return batch

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """Target tokens."""
        return {"target_tokens": jnp.sum(rows["weights"] > 0, axis=-1, dtype=jnp.int32)}

    def zeros(self, decoder: Decoder, zero: jax.Array) -> LossSums:
        """See Objective."""
        return LossSums(zero, zero, dict.fromkeys(auxiliary_names(decoder), zero))

    def loss(
        self,
        decoder: Decoder,
        params: Any,
        x_BTD: jax.Array,
        aux: dict[str, jax.Array],
        rows: Rows,
        factor: jax.Array,
        config: NumericsConfig,
        tokens: Cut = WHOLE,
    ) -> tuple[jax.Array, LossSums]:
        """See Objective."""
        # Weights carry the division: scaled before the backward pass, float16 gradients follow the loss scale.
        weights_BT = rows["weights"] * factor
        cut_rows = {"targets": tokens.cut(rows["targets"]), "weights": tokens.cut(weights_BT)}
        loss, sums = hidden_loss(decoder, params, x_BTD, cut_rows, config)
        weights = {"weights": weights_BT, "example_weights": self.counts(rows)["target_tokens"] * factor}
        more, sums_of_aux = auxiliary_loss(decoder, aux, weights, config)
        return loss + more, sums._replace(aux=sums_of_aux)

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> dict[str, jax.Array]:
        """AUXILIARY_METRICS as far as there are any."""
        del count
        return auxiliary_metrics(aux, config)

    def scores(self, decoder: Decoder, params: Any, rows: Rows, *, num_tiles: int) -> tuple[jax.Array, jax.Array]:
        """Summed nll [B] and target tokens [B]."""
        return row_losses(decoder, params, rows, num_tiles=num_tiles)

    def evaluation(self, scores: Sequence[Any]) -> dict[str, float | int]:
        """Mean loss in nats per target token, and their number.

        Row sums are added in double precision, so that neither the order nor the size of the batches enters.
        """
        target_tokens = sum(int(tokens_B.sum()) for _, tokens_B in scores)
        total = math.fsum(float(nll) for nll_B, _ in scores for nll in nll_B)
        return {"eval_loss": total / max(target_tokens, 1), "eval_target_tokens": target_tokens}


NEXT_TOKEN = NextToken()


def objective_of(config: Config) -> ScoredObjective:
    """What a run with this config minimises."""
    if config.dataset_type == "dpo":
        return Preference(config.dpo_beta, config.dpo_label_smoothing)
    return NEXT_TOKEN
