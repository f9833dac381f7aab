"""What a step minimises: a sum over rows, divided by a count."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.config import Config, NumericsConfig, UserError
from maxtext_lite.config.registry import resolve
from maxtext_lite.parallel import Tree, in_token_order
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import LossSums, Outputs, auxiliary_metrics, spread_over_targets, target_tokens

Reduction = Literal["mean", "sum", "max", "any"]
"""How the values of replicas with local updates become one; `mean` weighs them by what the objective counts."""


class Objective(Protocol):
    """The loss of rows as sums; the factor that multiplies every term makes them means."""

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

    @property
    def divisor_dtype(self) -> type[np.generic]:
        """int32, or float32 where a row may count in part."""
        ...

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """The `target_tokens` of each row, int32 [..., B], and its part of the divisor."""
        ...

    @property
    def own_sums(self) -> tuple[str, ...]:
        """The names of the sums that `loss` reports beside the experts'."""
        ...

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """The scalar to differentiate, and the sums to report.

        Args:
          factor: the loss scale divided by the step's count; multiplies every term.
        """
        ...

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
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
    divisor_dtype: type[np.generic] = np.int32
    reductions: Mapping[str, Reduction] = MappingProxyType({})

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The examples themselves."""
        del axes
        return batch


class NextToken(OneRowExamples):
    """Next-token prediction: the mean negative log-likelihood of target tokens."""

    divisor = "target_tokens"
    own_sums = ()

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """Target tokens."""
        return {"target_tokens": target_tokens(rows)}

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """See `Objective`."""
        # The weights carry the division: scaled before the backward pass, float16 gradients follow the loss scale.
        weight_BT = rows["weights"] * factor
        loss, sums = outputs.cross_entropy(rows["targets"], weight_BT)
        auxiliary, auxiliary_sums = outputs.auxiliary_loss(weight_BT, target_tokens(rows) * factor)
        return loss + auxiliary, sums._replace(aux=auxiliary_sums)

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
        """AUXILIARY_METRICS, where there are any."""
        del count
        return auxiliary_metrics(aux, config)

    def scores(self, outputs: Outputs, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Summed nll [B], float32, and target tokens [B], int32."""
        nll_BT = outputs.scored_nll(rows["targets"])
        return jnp.sum(nll_BT * rows["weights"], axis=-1), target_tokens(rows)

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The mean loss in nats per target token, and the number of target tokens.

        Row sums are added in double precision, so neither the order nor the size of the batches matters.
        """
        num_tokens = sum(int(tokens_B.sum()) for _, tokens_B in scores)
        total = math.fsum(float(nll) for nll_B, _ in scores for nll in nll_B)
        return {"eval_loss": total / max(num_tokens, 1), "eval_target_tokens": num_tokens}


NEXT_TOKEN = NextToken()


def next_token(config: Config) -> NextToken:
    """The same for all configs."""
    del config
    return NEXT_TOKEN


def objective_of(config: Config) -> ScoredObjective:
    """The objective of a run with this config."""
    return resolve(config.objective_kind.makes)(config)


WEIGHT = "loss_weight"
"""The count that divides a custom loss, and its metric."""

_TOKENS, _ROWS = 16, 4  # of the batch that a loss is tried on
_MICRO_BATCH_AXES = ("batch", "length")
_CLOSE = 1e-4  # relative tolerance of float32 sums


NumpyRows: TypeAlias = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The model's outputs for rows [B, T], tokens in the order of the text; each is computed when it is called.

    Attributes:
      nll: () -> negative log-likelihood of `rows["targets"]`, float32 [B, T], with the logits of one tile at a time
        (`num_vocab_tiling`).
      logits: () -> float32 [B, T, V], all at once.
      hidden: () -> final hidden states after the norm, [B, T, D] in `dtype`.
    """

    nll: Callable[[], jax.Array]
    logits: Callable[[], jax.Array]
    hidden: Callable[[], jax.Array]


class Loss(Protocol):
    """A pure function of rows, traced by jax, that sees a micro-batch or a part of one, never the whole batch.

    A row's sum and weight may depend on that row only: then the sums over any parts of a batch add up to those of the
    batch, however it is split. The weight depends on the rows, not on the model's outputs. A row without a document
    (`segments` and `weights` all 0) contributes nothing to either.
    """

    def __call__(self, predictions: Predictions, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Two scalars, (sum, weight); a step's loss is its batch's sum divided by its batch's weight.

        Args:
          rows: tokens, targets, segments, positions (int32 [B, T]) and weights (float32), and the source's own fields.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CustomLoss(OneRowExamples):
    """The objective that minimises a `Loss`; see `objective.ScoredObjective`.

    Attributes:
      vocab_size, emb_dim: of the logits and hidden states.
    """

    function: Loss
    vocab_size: int
    emb_dim: int

    divisor = WEIGHT
    divisor_dtype = np.float32
    own_sums = ()

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """Target tokens, and the weight of each row."""
        axes = ("accumulation",) * (rows["weights"].ndim - 2) + ("global_batch", "length")
        return {"target_tokens": target_tokens(rows), WEIGHT: self._weights(_in_token_order(rows, axes))}

    def _weights(self, rows: Rows) -> jax.Array:
        weight = self._weight_of_row
        for _ in range(rows["weights"].ndim - 1):
            weight = jax.vmap(weight)
        return weight(rows)

    def _weight_of_row(self, row: Rows) -> jax.Array:
        """The weight of a row of arrays [T]. Zeros stand for the model's outputs, on which it must not depend."""
        sizes = 1, row["tokens"].shape[0]
        nothing = Predictions(
            lambda: jnp.zeros(sizes),
            lambda: jnp.zeros((*sizes, self.vocab_size)),
            lambda: jnp.zeros((*sizes, self.emb_dim)),
        )
        return self.function(nothing, {name: x[None] for name, x in row.items()})[1].astype(jnp.float32)

    def loss(self, outputs: Outputs, rows: Rows, factor: jax.Array) -> tuple[jax.Array, LossSums]:
        """The loss with the experts' auxiliary losses, in which a row has its own weight."""
        total, _ = self._of(outputs, rows)
        loss = factor * total
        weight_B = factor * self._weights(_in_token_order(rows, _MICRO_BATCH_AXES))
        more, sums = outputs.auxiliary_loss(*spread_over_targets(weight_B, rows))
        return loss + more, LossSums(loss, jnp.zeros_like(loss), sums)

    def _of(self, outputs: Outputs, rows: Rows) -> tuple[jax.Array, jax.Array]:
        def ordered(x: jax.Array) -> jax.Array:
            return in_token_order(x, _MICRO_BATCH_AXES + (None,) * (x.ndim - 2), dim=1)

        predictions = Predictions(
            lambda: ordered(outputs.nll(rows["targets"])),
            lambda: ordered(outputs.logits()),
            lambda: ordered(outputs.tokens.merge(outputs.x_BTD)),
        )
        total, weight = self.function(predictions, _in_token_order(rows, _MICRO_BATCH_AXES))
        return total.astype(jnp.float32), weight.astype(jnp.float32)

    def metrics(self, aux: dict[str, jax.Array], count: jax.Array, config: NumericsConfig) -> Metrics:
        """`loss_weight` and, with experts, AUXILIARY_METRICS."""
        return {WEIGHT: count, **auxiliary_metrics(aux, config)}

    def scores(self, outputs: Outputs, rows: Rows) -> tuple[jax.Array, ...]:
        """The sum, the weight and the target tokens of all rows, each [1]."""
        found = *self._of(outputs, rows), jnp.sum(rows["weights"] > 0, dtype=jnp.int32)
        return tuple(x[None] for x in found)

    def evaluation(self, scores: Sequence[Tree]) -> dict[str, float | int]:
        """The sum over all examples divided by their weight, and their target tokens."""
        total, weight, tokens = (np.concatenate(part).astype(np.float64) for part in zip(*scores, strict=True))
        return {
            "eval_loss": math.fsum(total) / (math.fsum(weight) or 1.0),
            "eval_target_tokens": int(tokens.sum()),
            "eval_loss_weight": math.fsum(weight),
        }


def _in_token_order(rows: Rows, axes: Sequence[str]) -> Rows:
    return {name: in_token_order(x, tuple(axes)) for name, x in rows.items()}


def custom_loss(
    function: Loss, *, fields: Sequence[str], vocab_size: int, emb_dim: int, z_loss_multiplier: float
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
            "Nearest that works: z_loss_multiplier=0; a z-loss can be computed from `predictions.logits()`."
        )
    rng = np.random.default_rng(0)
    rows = _random_rows(rng, fields, vocab_size)
    seen, other = (_random_outputs(rng, vocab_size, emb_dim) for _ in range(2))
    of = functools.partial(_tried, function)
    total, weight = of(seen, rows)
    halves = [
        of([x[part] for x in seen], {name: x[part] for name, x in rows.items()}) for part in (slice(2), slice(2, 4))
    ]
    empty = {name: np.concatenate([x, np.zeros_like(x)]) for name, x in rows.items()}
    with_empty = of([np.concatenate([x, x]) for x in seen], empty)
    for place, name in enumerate(("sum", "weight")):
        whole, (first, second) = (total, weight)[place], (half[place] for half in halves)
        if not _are_close(whole, first + second):
            raise UserError(
                f"objective: the {name} of {_ROWS} rows is {whole:.6g}, those of their two halves are {first:.6g} and "
                f"{second:.6g}. It must be a sum over rows, never a mean: the weight divides it later."
            )
        if not _are_close(whole, with_empty[place]):
            raise UserError(
                f"objective: the {name} of {_ROWS} rows is {whole:.6g}, and with {_ROWS} empty rows beside them "
                f'{with_empty[place]:.6g}. Tokens with rows["weights"] 0 must add nothing: multiply by the weights.'
            )
    if not _are_close(weight, of(other, rows)[1]):
        raise UserError(
            "objective: the weight changes with the model's predictions. It must depend on the rows alone: the whole "
            "step's weight is known before its first micro-batch is computed."
        )
    if weight <= 0:
        raise UserError(f"objective: the weight of {_ROWS} rows with targets is {weight:.6g}; it must be above 0.")
    return CustomLoss(function, vocab_size, emb_dim)


def _are_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE * 1e-2)


def _random_rows(rng: np.random.Generator, fields: Sequence[str], vocab_size: int) -> NumpyRows:
    """Rows [_ROWS, _TOKENS] of one or two documents, some of them padded."""
    sizes = _ROWS, _TOKENS
    place = np.broadcast_to(np.arange(_TOKENS), sizes)
    real = place < rng.integers(_TOKENS // 2, _TOKENS + 1, (_ROWS, 1))
    second = place >= _TOKENS // 4
    known = {
        "tokens": rng.integers(0, vocab_size, sizes) * real,
        "targets": rng.integers(0, vocab_size, sizes) * real,
        "segments": (1 + second) * real,
        "positions": (place - second * (_TOKENS // 4)) * real,
    }
    rows = {name: x.astype(np.int32) for name, x in known.items()}
    rows |= {name: (rng.random(sizes) * real).astype(np.float32) for name in fields if name not in known}
    return rows | {"weights": (real * rng.choice([0.0, 0.5, 1.0, 1.0], sizes)).astype(np.float32)}


def _random_outputs(rng: np.random.Generator, vocab_size: int, emb_dim: int) -> list[np.ndarray]:
    """Random likelihoods, logits and hidden states for `_random_rows`."""
    sizes = _ROWS, _TOKENS
    drawn = rng.gamma(2.0, 2.0, sizes), rng.normal(size=(*sizes, vocab_size)), rng.normal(size=(*sizes, emb_dim))
    return [x.astype(np.float32) for x in drawn]


def _tried(function: Loss, outputs: Sequence[np.ndarray], rows: NumpyRows) -> tuple[float, float]:
    """The function's sum and weight.

    Raises:
      UserError: it does not return two finite scalars.
    """
    asked = [functools.partial(jnp.asarray, x) for x in outputs]
    found: Tree = function(Predictions(*asked), {name: jnp.asarray(x) for name, x in rows.items()})
    if not (isinstance(found, tuple) and len(found) == 2):
        raise UserError(f"objective: it returns {type(found).__name__}, not the pair (sum, weight).")
    for name, x in zip(("sum", "weight"), found, strict=True):
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if shape or not jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.complexfloating):
            raise UserError(f"objective: the {name} is {dtype} of shape {shape}, not a number of shape ().")
        if not math.isfinite(float(x)):
            raise UserError(f"objective: the {name} of {len(rows['tokens'])} random rows is {float(x)}.")
    return float(found[0]), float(found[1])
