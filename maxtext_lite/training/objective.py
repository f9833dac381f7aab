"""What a step minimises: a sum over rows, divided by a count."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

import jax.numpy as jnp
from jax import Array

from maxtext_lite.config import Config, NumericsConfig
from maxtext_lite.config.registry import resolve
from maxtext_lite.parallel import Tree
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import (
    LossSums,
    Outputs,
    auxiliary_metrics,
    target_tokens,
)

Reduction = Literal["mean", "sum", "max", "any"]
"""How the values of replicas with local updates become one; `mean` weighs them by what the objective counts."""


class Objective(Protocol):
    """Summed losses of rows; `factor` normalizes them."""

    @property
    def rows_per_example(self) -> int:
        """Rows of one example in the step's arrays."""
        ...

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The rows [..., B, T] of a batch of examples; both have the logical axes `axes`."""
        ...

    @property
    def divisor(self) -> str:
        """The name of the count that divides the loss."""
        ...

    def counts(self, rows: Rows) -> dict[str, Array]:
        """The `target_tokens` of each row, int32 [..., B], and its part of the divisor, int32 or float32."""
        ...

    @property
    def own_sums(self) -> tuple[str, ...]:
        """The names of the sums that `loss` reports beside the experts'."""
        ...

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The scalar to differentiate, and the sums to report.

        Args:
          factor: the loss scale divided by the step's count; multiplies every term.
        """
        ...

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """The metrics of a step beside its loss, from its means and its count."""
        ...

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """How each of its own metrics is reduced over replicas."""
        ...


class ScoredObjective(Objective, Protocol):
    """An objective that also scores held-out examples."""

    def scores(self, outputs: Outputs, rows: Rows) -> Tree:
        """Arrays whose first dim counts examples, or is 1 where they are sums over all of them."""
        ...

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The entries of an evaluation's record, from the scores of its batches on the host."""
        ...


class OneRowExamples:
    """The base of objectives whose examples are single rows."""

    rows_per_example = 1
    reductions: Mapping[str, Reduction] = MappingProxyType({})

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The examples themselves."""
        del axes
        return batch


@dataclasses.dataclass(frozen=True)
class NextToken(OneRowExamples):
    """Next-token prediction: the mean negative log-likelihood of target tokens.

    Attributes:
      mtp_num_layers: layers of multi-token prediction, whose mean loss is added.
    """

    mtp_num_layers: int = 0

    divisor = "target_tokens"
    reductions = MappingProxyType({"mtp_loss": "mean"})

    @property
    def own_sums(self) -> tuple[str, ...]:
        """The loss of multi-token prediction."""
        return ("mtp_loss",) if self.mtp_num_layers else ()

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The examples; of a train step with what layers of multi-token prediction read, which no evaluation runs."""
        return with_ahead(batch, self.mtp_num_layers) if "accumulation" in axes else batch

    def counts(self, rows: Rows) -> dict[str, Array]:
        """Target tokens."""
        return {"target_tokens": target_tokens(rows)}

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The weighted negative log-likelihood of the targets, with the z-loss and the experts' losses."""
        # The weights carry the division: scaled before the backward pass, float16 gradients follow the loss scale.
        weight_BT = rows["weights"] * factor
        loss, sums = outputs.cross_entropy(rows["targets"], weight_BT)
        auxiliary, auxiliary_sums = outputs.auxiliary_loss(weight_BT, target_tokens(rows) * factor)
        if outputs.ahead:
            auxiliary_sums["mtp_loss"] = outputs.mtp_loss(rows, factor)
            auxiliary += outputs.config.mtp_loss_scaling_factor * auxiliary_sums["mtp_loss"]
        return loss + auxiliary, sums._replace(aux=auxiliary_sums)

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """`mtp_loss` and AUXILIARY_METRICS, where there are any."""
        del count
        return {name: aux[name] for name in self.own_sums} | auxiliary_metrics(aux, config)

    def scores(self, outputs: Outputs, rows: Rows) -> tuple[Array, Array]:
        """Summed nll [B], float32, and target tokens [B], int32."""
        nll_BT = outputs.scored_nll(rows["targets"])
        return jnp.sum(nll_BT * rows["weights"], axis=-1), target_tokens(rows)

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The mean loss in nats per target token, and the number of target tokens.

        Row sums are added in double precision, so neither the order nor the size of the batches matters.
        """
        num_tokens = sum(int(tokens_B.sum()) for _, tokens_B in scores)
        total = math.fsum(float(nll) for nll_B, _ in scores for nll in nll_B)
        return {
            "eval_loss": total / max(num_tokens, 1),
            "eval_target_tokens": num_tokens,
        }


NEXT_TOKEN = NextToken()


def next_token(config: Config) -> NextToken:
    """Next-token prediction with the config's layers of multi-token prediction."""
    return NextToken(config.mtp_num_layers)


def with_ahead(batch: Rows, num_layers: int) -> Rows:
    """A step's whole batch [A, B, T] with the tokens, targets, weights and segments that are k places ahead, `tokens+k`
    and so on for each layer k of multi-token prediction.

    All are 0 where the token k places ahead is in another document. The weights are multiplied by the step's target
    tokens over those of layer k: divided by the step's count, as the loss is, each layer has a count of its own.
    """
    rows = dict(batch)
    for number in range(1, num_layers + 1):
        ahead = {name: _shifted(batch[name], number) for name in ("tokens", "targets", "weights", "segments")}
        is_inside = (ahead["segments"] == batch["segments"]) & (ahead["segments"] > 0)
        ahead = {name: jnp.where(is_inside, x, 0) for name, x in ahead.items()}
        ahead["weights"] *= jnp.sum(target_tokens(batch)) / jnp.maximum(jnp.sum(target_tokens(ahead)), 1)
        rows |= {f"{name}+{number}": x for name, x in ahead.items()}
    return rows


def _shifted(x: Array, places: int) -> Array:
    """The values that many tokens later in the row, then zeros."""
    return jnp.pad(x[..., places:], [(0, 0)] * (x.ndim - 1) + [(0, places)])


def objective_of(config: Config) -> ScoredObjective:
    """The objective of a run with this config."""
    return resolve(config.objective_kind.makes)(config)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The model's outputs for rows [B, T], tokens in text order; each is computed when it is called.

    Attributes:
      nll: () -> negative log-likelihood of `rows["targets"]`, float32 [B, T], with the logits of one tile at a time
        (`num_vocab_tiling`).
      logits: () -> float32 [B, T, V], all at once.
      hidden: () -> final hidden states after the norm, [B, T, D] in `dtype`.
    """

    nll: Callable[[], Array]
    logits: Callable[[], Array]
    hidden: Callable[[], Array]


class Loss(Protocol):
    """A pure function of rows, traced by jax. It sees a micro-batch or a part of one, never the whole batch.

    A row's sum and weight may depend on that row only: then the sums over any parts of a batch add up to those of the
    batch, however it is split. The weight depends on the rows, not on the model's outputs. A row without a document
    (`segments` and `weights` all 0) contributes nothing to either.
    """

    def __call__(self, predictions: Predictions, rows: Rows) -> tuple[Array, Array]:
        """Two scalars, (sum, weight); a step's loss is its batch's sum divided by its batch's weight.

        Args:
          rows: tokens, targets, segments, positions (int32 [B, T]) and weights (float32), and the source's own fields.
        """
        ...
