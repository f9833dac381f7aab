"""DPO: the model learns to prefer the chosen answer of each pair more than a frozen reference does.

An example is two adjacent rows, one of chosen and one of rejected answers; segments k of the two rows form a pair.
Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with label smoothing Mitchell 2023, "A note on DPO with
noisy preferences", equation 3.

The reference's log-probabilities of all answers are computed once, in a pass over the data before the first step, and
stored in the run directory: two numbers per pair. A second copy of the parameters, with a forward pass in every step,
would give the same numbers; this way needs no device memory, leaves the step unchanged on every mesh and schedule, and
gives the same bits after a restart.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Wrapped

from maxtext_lite.config import Config, NumericsConfig, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.data import REFERENCE, ExampleSource
from maxtext_lite.data.feed import evaluation_batches
from maxtext_lite.data.mixture import MixtureSource
from maxtext_lite.models.ops import sums_at
from maxtext_lite.parallel import Params, bytes_of_host, constrain, exchange, sharding, value_of_host
from maxtext_lite.post_training.answers import PairSource
from maxtext_lite.post_training.array_files import read_arrays, write_arrays
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES, make_eval_step, scores_of
from maxtext_lite.training.loss import LossSums, Outputs, auxiliary_metrics, spread_over_targets, target_tokens
from maxtext_lite.training.objective import Reduction
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

_REWARDS = ("reward_chosen", "reward_rejected", "reward_accuracy")
PREFERENCE_METRICS = (*_REWARDS, "reward_margin")
"""Means over pairs. An answer's reward is beta times its log-probability less the reference's; the margin is the reward
of the chosen answer less that of the rejected one; the accuracy is the share of margins above 0."""


class PairScores(NamedTuple):
    """The scores of examples.

    Attributes:
      log_ratio: log-probability less the reference's, of chosen and rejected answers; float32 [B, 2, T + 1], with
        segment k at index k, 0 where there is none.
      num_pairs: int32 [B].
      target_tokens: of both rows; int32 [B].
    """

    log_ratio: Array
    num_pairs: Array
    target_tokens: Array


def pair_losses(margin: Array, *, beta: float, label_smoothing: float) -> Array:
    """Each pair's loss, from the log-ratio of the chosen answer less that of the rejected one; any shape."""
    right = jax.nn.log_sigmoid(beta * margin)
    wrong = jax.nn.log_sigmoid(-beta * margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def segment_sums(x_BT: Array, segment_BT: Array) -> Array:
    """The sum over the tokens of each segment, [B, T + 1] by segment number; padding is segment 0."""
    T = x_BT.shape[1]

    def of_row(x_T: Array, segment_T: Array) -> Array:
        sums_S1: Any = sums_at(x_T[:, None], segment_T, T + 1)
        return sums_S1[:, 0]

    return jax.vmap(of_row)(x_BT, segment_BT)


def _log_ratios(nll_BT: Array, rows: Rows) -> Array:
    """The `PairScores.log_ratio` [B / 2, 2, T + 1] of the rows."""
    ratio_BT = -nll_BT * (rows["weights"] > 0) - rows[REFERENCE]
    ratio_BT = jnp.where(rows["segments"] > 0, ratio_BT, 0)  # padding, which need not be finite
    sums_BS = segment_sums(ratio_BT, rows["segments"])
    num_places = sums_BS.shape[1]
    is_segment_S = jnp.arange(num_places) > 0
    return jnp.where(is_segment_S, sums_BS, 0).reshape(-1, 2, num_places)


def _num_pairs(rows: Rows) -> Array:
    """The number of pairs of each row, int32 [..., B]."""
    return jnp.max(rows["segments"], axis=-1)


@dataclasses.dataclass(frozen=True)
class Preference:
    """The objective of DPO; see `objective.Objective`."""

    beta: float
    label_smoothing: float

    rows_per_example = 2
    divisor = "pairs"
    own_sums = _REWARDS
    reductions: ClassVar[Mapping[str, Reduction]] = dict.fromkeys(PREFERENCE_METRICS, "mean")

    def rows(self, batch: Rows, axes: Sequence[str]) -> Rows:
        """The rows [..., 2 B, T] of examples [..., B, 2 T]. An example's two stay adjacent and on their device."""

        def split(x: Array) -> Array:
            B, length = x.shape[-2:]
            return constrain(x.reshape(*x.shape[:-2], 2 * B, length // 2), axes)

        return {name: split(x) for name, x in batch.items()}

    def counts(self, rows: Rows) -> dict[str, Array]:
        """Target tokens, and pairs, counted at the rows of chosen answers."""
        pairs = _num_pairs(rows)
        is_chosen = jnp.arange(pairs.shape[-1]) % 2 == 0
        return {"target_tokens": target_tokens(rows), "pairs": jnp.where(is_chosen, pairs, 0)}

    def loss(self, outputs: Outputs, rows: Rows, factor: Array) -> tuple[Array, LossSums]:
        """The loss of the pairs, and the sums of their losses and rewards."""
        places = jnp.arange(rows["segments"].shape[1] + 1)
        is_pair = (places <= _num_pairs(rows)[::2, None]) & (places > 0)
        log_ratio = _log_ratios(outputs.nll(rows["targets"]), rows)
        margin = log_ratio[:, 0] - log_ratio[:, 1]
        losses = pair_losses(margin, beta=self.beta, label_smoothing=self.label_smoothing)
        loss = factor * jnp.sum(jnp.where(is_pair, losses, 0))
        # A pair has weight 1, half of it in either row.
        more, sums_of_aux = outputs.auxiliary_loss(*spread_over_targets(0.5 * factor * _num_pairs(rows), rows))
        rewards = self.beta * factor * jnp.sum(log_ratio, axis=(0, 2))
        accuracy = factor * jnp.sum(is_pair & (log_ratio[:, 0] > log_ratio[:, 1]))
        sums_of_aux |= dict(zip(_REWARDS, (*rewards, accuracy), strict=True))
        return loss + more, LossSums(loss, jnp.zeros_like(loss), sums_of_aux)

    def metrics(self, aux: dict[str, Array], count: Array, config: NumericsConfig) -> Metrics:
        """`pairs`, PREFERENCE_METRICS and, with experts, AUXILIARY_METRICS."""
        rewards = {name: aux[name] for name in _REWARDS}
        rest = {name: x for name, x in aux.items() if name not in _REWARDS}
        margin = {"reward_margin": rewards["reward_chosen"] - rewards["reward_rejected"]}
        return {"pairs": count, **rewards, **margin, **auxiliary_metrics(rest, config)}

    def scores(self, outputs: Outputs, rows: Rows) -> PairScores:
        """The log-ratios of the examples' pairs; with a reference of 0, their log-probabilities."""
        nll_BT = outputs.scored_nll(rows["targets"])
        tokens_B = jnp.sum(target_tokens(rows).reshape(-1, 2), axis=1)
        return PairScores(_log_ratios(nll_BT, rows), _num_pairs(rows)[::2], tokens_B)

    def evaluation(self, scores: Sequence[PairScores]) -> dict[str, float | int]:
        """Means over pairs, summed in double precision, and the numbers of pairs and target tokens."""
        ratios = np.concatenate([pairs_of(each) for each in scores]).astype(np.float64)
        margins = ratios[:, 0] - ratios[:, 1]
        losses = pair_losses(jnp.asarray(margins), beta=self.beta, label_smoothing=self.label_smoothing)

        def mean(values: Iterable[float]) -> float:
            return math.fsum(map(float, values)) / max(len(margins), 1)

        return {
            "eval_loss": mean(losses),
            "eval_target_tokens": sum(int(each.target_tokens.sum()) for each in scores),
            "eval_pairs": len(margins),
            "eval_reward_margin": self.beta * mean(margins),
            "eval_reward_accuracy": mean(margins > 0),
        }


def preference(config: Config) -> Preference:
    """The objective of a run with this config."""
    return Preference(config.dpo_beta, config.dpo_label_smoothing)


def against(own: PairScores, reference: PairScores) -> PairScores:
    """Scores whose log-ratios are those to a reference."""
    return own._replace(log_ratio=own.log_ratio - reference.log_ratio)


def pairs_of(scores: PairScores) -> np.ndarray:
    """The log-ratios of the pairs, float32 [pairs, 2], in the order of examples and their segments."""
    places = np.arange(scores.log_ratio.shape[2])
    is_pair = (places > 0) & (places <= np.asarray(scores.num_pairs)[:, None])
    return np.moveaxis(np.asarray(scores.log_ratio), 1, 2)[is_pair]


FILE = "reference.npz"
"""In the run directory: log-probabilities float32 [pairs, 2] by the source's fingerprint."""


def add_reference(run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
    """Adds the reference's log-probabilities to the pairs of a DPO run. It computes them before the first step; later,
    and in a run that is only read, it reads their file.

    Pairs that have it keep it: a run that goes back before a loss spike comes here twice. All hosts call it.

    Raises:
      UserError: a resumed run's pairs have changed, or its file is gone.
    """
    if any(exchange(isinstance(run.source, PairSource) and run.source.reference is not None)):  # on hosts that read
        return
    held_out = [] if run.eval_source is None else run.eval_source.named().values()
    sources = [run.source, *held_out]
    if counts.step or run.is_read_only:
        tables = _read(run, sources)
    else:
        started = time.perf_counter()
        eval_step = make_eval_step(run.parts)
        params = run.decoder.joined(state.model_params, state.frozen)  # new adapters are the identity
        tables = {source.fingerprint: _find(run, eval_step, params, source) for source in sources}
        if run.is_first:
            write_arrays(run.directory / FILE, run.files.directory / FILE, tables)
        say(
            f"log-probabilities of the reference, of {sum(map(len, tables.values())):,} pairs, in "
            f"{time.perf_counter() - started:.1f} s"
        )
    run.source = _with(run.source, tables)
    run.eval_source = None if run.eval_source is None else _with(run.eval_source, tables)


def _with(source: ExampleSource, tables: Mapping[str, np.ndarray]) -> ExampleSource:
    if isinstance(source, MixtureSource):  # held-out sets with names
        return dataclasses.replace(source, sources=tuple(_with(each, tables) for each in source.sources))
    # A host that does not read has no pairs.
    return source.with_reference(tables[source.fingerprint]) if isinstance(source, PairSource) else source


def _find(run: TrainingRun, eval_step: Wrapped, params: Params, source: ExampleSource) -> np.ndarray:
    """Log-probabilities [pairs, 2] by the pair's number; on a host that reads no data, in the order of examples."""
    where = sharding(run.mesh, EVAL_BATCH_AXES)
    with evaluation_batches(source, run.plan, sharding=where, eval_steps=-1) as batches:
        found = np.concatenate([pairs_of(scores) for scores in scores_of(eval_step, params, batches)])
    if isinstance(source, PairSource):
        by_number = np.empty_like(found)
        by_number[source.rows.members] = found
        return by_number
    return found


def _read(run: TrainingRun, sources: Sequence[ExampleSource]) -> dict[str, np.ndarray]:
    """The tables in the first host's file, on every host."""
    path = run.files.directory / FILE
    remedy = (
        f"Use another run_name, with load_parameters_path={run.directory} to continue from its parameters as a new "
        "reference."
    )
    if not value_of_host(0, run.is_first and path.is_file()):
        raise UserError(f"{path} is gone, which holds the reference of the run. {remedy}")
    content = bytes_of_host(0, path.read_bytes() if run.is_first else b"")
    try:
        found = read_arrays(content)
    except ValueError as error:
        raise UserError(f"{path}, the reference of the run, is damaged ({value_text(error)}). {remedy}") from None
    if any(source.fingerprint not in found for source in sources):
        raise UserError(
            f"{path} holds the reference of other pairs than dataset_path and eval_dataset_path have now. Use the "
            "pairs that the run began with, or another run_name."
        )
    return found
