"""Published laws for the batch size and the settings of AdamW. Imports no jax.

Each law states what was found where it was fitted; beyond that it extrapolates, and laws differ. So every law keeps its
name, its source and the range of its fit, and several together give an interval.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import yaml

from maxtext_lite.batching.parameters import active_parameters, count_parameters
from maxtext_lite.config import Config

Purpose = Literal["best", "critical", "rate"]
"""A best batch reaches the lowest loss on given tokens. Beyond a critical one, larger batches hardly save steps. A rate
belongs to the best batch of the same source."""

WIDENING = 2.0
"""The factor by which the interval of best batches is widened on both sides, at about 5 % more compute.

Source: arXiv:2607.01487.
"""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The quantities that the laws depend on.

    Attributes:
      parameters: N; of experts, only those that a token passes through.
      non_embedding: N without the embedding tables and the output projection.
      tokens: D, of the whole run.
      loss: L, the loss to reach in nats per token; None if not stated.
    """

    parameters: float
    non_embedding: float
    tokens: float
    loss: float | None = None

    @property
    def flops(self) -> float:
        """C = 6 N D, the compute that the laws are stated in."""
        return 6 * self.parameters * self.tokens

    @property
    def quantities(self) -> dict[str, float | None]:
        """What laws call them."""
        return {"N": self.parameters, "n": self.non_embedding, "D": self.tokens, "C": self.flops, "L": self.loss}


def budget_of(config: Config, *, tokens: float, loss: float | None) -> Budget:
    """The budget of a config's model; of experts, only those that a token passes through count."""
    parameters = active_parameters(config)
    return Budget(parameters, parameters - count_parameters(config).tables, tokens, loss)


@dataclasses.dataclass(frozen=True)
class Law:
    """A law for the batch in tokens or for the peak learning rate: `factor` x the product of (quantity / unit)^power.

    Attributes:
      formula: the law as text, in N, D, C, L and tokens.
      fitted: what it was fitted on, and what is unknown about that.
      powers: by quantity, those of `Budget.quantities`.
    """

    name: str
    purpose: Purpose
    formula: str
    fitted: str
    source: str
    factor: float
    powers: Mapping[str, float]
    unit: float = 1.0

    def value(self, budget: Budget) -> float | None:
        """The value for a budget; None if the budget does not contain what the law needs."""
        value = self.factor
        for name, power in self.powers.items():
            quantity = budget.quantities[name]
            if quantity is None:
                return None
            value *= (quantity / self.unit) ** power
        return value

    def inverse(self, batch: float) -> float:
        """The tokens of a run for which a law in D gives a batch of that many tokens."""
        return self.unit * (batch / self.factor) ** (1 / self.powers["D"])


_LAWS = [Law(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))]
BATCH_LAWS = tuple(law for law in _LAWS if law.purpose != "rate")
"""Laws for the batch in tokens."""
RATE_LAWS = tuple(law for law in _LAWS if law.purpose == "rate")
"""Laws for AdamW's peak learning rate."""
_CRITICAL_BY_TOKENS = [law for law in _LAWS if law.purpose == "critical" and "D" in law.powers]


@dataclasses.dataclass(frozen=True)
class Interval:
    """The smallest and the largest value of several laws."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Interval":
        """The interval of the values that are known."""
        known = [value for value in values if value is not None]
        return cls(min(known), max(known))

    @property
    def middle(self) -> float:
        """The geometric mean of the ends."""
        return math.sqrt(self.low * self.high)

    def widened(self, factor: float) -> "Interval":
        """The interval from low / factor to high x factor."""
        return Interval(self.low / factor, self.high * factor)


def interval(budget: Budget, purpose: Purpose) -> Interval:
    """The range of the laws for one purpose: batches in tokens, or learning rates."""
    return Interval.of(law.value(budget) for law in _LAWS if law.purpose == purpose)


def timescale(budget: Budget) -> float:
    """The share of a run over which AdamW's decay should average updates: B / (learning rate x decay x D).

    Source: Bergsma et al. 2025, arXiv:2505.13738: 1.084 (D / N)^-0.527; its coefficient is not verified.
    """
    return 1.084 * (budget.tokens / budget.parameters) ** -0.527


def weight_decay(budget: Budget, batch: float, rate: float) -> float:
    """AdamW's weight decay for a batch in tokens and a learning rate, by `timescale`."""
    return batch / (rate * timescale(budget) * budget.tokens)


def adam_b2(batch: float) -> float:
    """AdamW's second decay for a batch in tokens.

    Source: OLMo's model ladder, after Porian et al. 2024, arXiv:2406.19146: 0.95 above 524,288 tokens, else 0.99.
    """
    return 0.95 if batch > 2**19 else 0.99


def warmup_steps(budget: Budget, batch: float) -> dict[str, float]:
    """Steps of the warm-up by law: N tokens (OLMo's model ladder), or 2,000 steps (DeepSeek LLM 2024)."""
    return {"OLMo ladder": budget.parameters / batch, "DeepSeek": 2000.0}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run's critical batch.

    Attributes:
      batch: in tokens.
      tokens: seen when it was measured.
      how: how it was measured, for people.
    """

    batch: float
    tokens: float
    how: str


def doubling_tokens(batch: float, measured: Measured | None = None) -> Interval:
    """Tokens that a run must have seen before a batch of `batch` tokens is within the critical batch.

    These are the laws for the critical batch, solved for D: the critical batch starts near 0 and grows with the tokens
    seen.

    Args:
      measured: a point through which each law is to go, which leaves only its exponent; None: as published.
    Source for that growth, and for doubling the batch with it: Merrill et al. 2025, arXiv:2505.23971.
    """
    if measured is None:
        return Interval.of(law.inverse(batch) for law in _CRITICAL_BY_TOKENS)
    share = batch / measured.batch
    return Interval.of(measured.tokens * law.inverse(share) / law.inverse(1.0) for law in _CRITICAL_BY_TOKENS)


def critical_at(tokens: float, measured: Measured) -> float:
    """The smallest critical batch in tokens, by the laws through a measured one, after `tokens` tokens."""
    growth = tokens / measured.tokens
    return measured.batch * min(growth ** law.powers["D"] for law in _CRITICAL_BY_TOKENS)


_STANDARD_ERRORS = 2


def measured_scale(noise_scale: float, relative_error: float | None) -> str:
    """The noise scale with its error bar of two standard errors."""
    measured = f"The gradient noise scale is about {_count(noise_scale)} examples"
    if relative_error is None:
        return measured
    low, high = _ends(noise_scale, relative_error)
    return f"{measured} (two standard errors: {_count(low)} to {_count(high)})"


def batch_size_advice(noise_scale: float | None, relative_error: float | None, batch: int) -> str:
    """What the noise scale implies for a batch. The batch is well below (above) it if the near end of the error bar is
    more than twice (less than half) the batch.

    To reach a loss takes steps as 1 + noise / batch and examples as 1 + batch / noise.

    Args:
      noise_scale: in examples; None if it was not measured.
      relative_error: its standard error / noise_scale; None if unknown.
      batch: examples per step.
    Source: McCandlish et al. 2018, arXiv:1812.06162, sections 2.2 and 2.3.
    """
    if noise_scale is None:
        return (
            f"The gradient noise scale is not known, so nothing can be said about the batch of {batch:,} examples. "
            "Measuring it takes two gradients per step, from data replicas or gradient_accumulation_steps."
        )
    if noise_scale <= 0:
        return f"The gradient noise scale of {noise_scale:.3g} examples is lost in its own noise and says nothing."
    measured = measured_scale(noise_scale, relative_error)
    steps = 1 + noise_scale / batch
    examples = 1 + batch / noise_scale
    progress = (
        f"With the batch of {batch:,} a step makes {1 / steps:.0%} of the progress of an infinite batch, an example "
        f"{1 / examples:.0%} of that in a tiny one."
    )
    if relative_error is None:
        return f"{measured}. {progress} Its error is not known, so this is only a hint."
    if relative_error >= 1 / _STANDARD_ERRORS:
        return f"{measured}, which is too uncertain to judge the batch of {batch:,}."
    low, high = _ends(noise_scale, relative_error)
    if low > 2 * batch:
        fewer = 1 - (1 + noise_scale / (2 * batch)) / steps
        more = (1 + 2 * batch / noise_scale) / examples - 1
        verdict = f"well below it: twice the batch would take {fewer:.0%} fewer steps and {more:.0%} more examples"
    elif high < batch / 2:
        fewer = 1 - (1 + batch / (2 * noise_scale)) / examples
        more = (1 + 2 * noise_scale / batch) / steps - 1
        verdict = f"well above it: half the batch would take {fewer:.0%} fewer examples and {more:.0%} more steps"
    elif low >= batch / 2 and high <= 2 * batch:
        verdict = "of similar size, the usual compromise between few steps and few examples"
    else:
        side, factor = ("above", "twice") if noise_scale > batch else ("below", "half")
        verdict = f"near it; whether the noise scale is {side} {factor} the batch cannot be told within its error"
    return f"{measured}. {progress} At a suitable learning rate, the batch is {verdict}."


def _ends(noise_scale: float, relative_error: float) -> tuple[float, float]:
    reach = _STANDARD_ERRORS * relative_error
    return max(noise_scale * (1 - reach), 0.0), noise_scale * (1 + reach)


def _count(examples: float) -> str:
    """A measured number of examples: whole from 100 on, otherwise to three digits."""
    return f"{examples:,.0f}" if examples >= 100 else f"{examples:.3g}"
