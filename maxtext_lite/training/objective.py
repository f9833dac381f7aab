"""What a step minimises: a sum over rows, and the count that it is divided by."""

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.config import Config, NumericsConfig
from maxtext_lite.models import Decoder
from maxtext_lite.training.arrays import Metrics, Rows, Tree
from maxtext_lite.training.loss import LossSums
from maxtext_lite.training.outputs import Outputs, auxiliary_metrics, auxiliary_names
from maxtext_lite.training.preference import Preference


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

    @property
    def divisor_dtype(self) -> type[np.generic]:
        """int32, or float32 where a row may count in part."""
        ...

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """What each of the rows adds to `target_tokens`, int32 [..., B], and to the divisor."""
        ...

    def zeros(self, decoder: Decoder, zero: jax.Array) -> LossSums:
        """Before the first micro-batch: `zero` for each sum."""
        ...

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """What is differentiated, and the sums to report.

        Args:
          factor: what every term is multiplied by: the loss scale over the step's count.
        """
        ...

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
        """What a step reports beside its loss, from its means and its count."""
        ...


class ScoredObjective(Objective, Protocol):
    """One by which an evaluation also judges examples."""

    def scores(self, outputs: Outputs, rows: Rows) -> Tree:
        """What an evaluation needs to know of examples: arrays with a first dim, of examples or of all of them."""
        ...

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The entries of an evaluation's record, from the scores of its batches on the host."""
        ...


class NextToken:
    """The next token of texts: mean over target tokens of their negative log-likelihood."""

    rows_per_example = 1
    divisor = "target_tokens"
    divisor_dtype = np.int32

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

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """See Objective."""
        # Weights carry the division: scaled before the backward pass, float16 gradients follow the loss scale.
        weight_BT = rows["weights"] * factor
        loss, sums = outputs.cross_entropy(rows["targets"], weight_BT)
        more, sums_of_aux = outputs.auxiliary_loss(weight_BT, self.counts(rows)["target_tokens"] * factor)
        return loss + more, sums._replace(aux=sums_of_aux)

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
        """AUXILIARY_METRICS as far as there are any."""
        del count
        return auxiliary_metrics(aux, config)

    def scores(self, outputs: Outputs, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Summed nll [B], float32, and target tokens [B], int32."""
        nll_BT = outputs.scored_nll(rows["targets"])
        return jnp.sum(nll_BT * rows["weights"], axis=-1), self.counts(rows)["target_tokens"]

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
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
