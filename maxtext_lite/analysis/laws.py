"""Published laws for the batch size and the settings of AdamW. Imports no jax.

Each law states what was found where it was fitted; beyond that it extrapolates, and laws differ. So every law keeps its
name, its source and the range of its fit, and several together give an interval.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from maxtext_lite.batching.parameters import active_parameters, count_parameters
from maxtext_lite.config import Config

Purpose = Literal["best", "critical"]
"""A best batch reaches the lowest loss on given tokens; beyond a critical batch, a larger one hardly saves steps."""

WIDENING = 2.0
"""The factor by which the interval of best batches is widened on both sides, at about 5 % more compute.

Source: arXiv:2607.01487.
"""

_POWER_LINES = "Bergsma et al. 2025, arXiv:2505.13738"
_LADDER = "OLMo's model ladder, after Porian et al. 2024, arXiv:2406.19146"
_STEP_LAW = "Li et al. 2025, arXiv:2503.04715"
_DEEPSEEK = "DeepSeek LLM 2024, arXiv:2401.02954"
_UNVERIFIED = "its coefficient is not verified"


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
        """C = 6 N D, the compute in terms of which the laws are stated."""
        return 6 * self.parameters * self.tokens


def budget_of(config: Config, *, tokens: float, loss: float | None) -> Budget:
    """The budget of a config's model; of experts, only those that a token passes through count."""
    parameters = active_parameters(config)
    return Budget(parameters, parameters - count_parameters(config).tables, tokens, loss)


@dataclasses.dataclass(frozen=True)
class BatchLaw:
    """A law for the batch.

    Attributes:
      formula: the law as text, in N, D, C, L and tokens.
      fitted: what it was fitted on, and what is unknown about that.
      tokens: the batch in tokens; None if the budget does not contain what the law needs.
      inverse: the tokens of a run for which the law gives a batch of that many tokens; None if it has no D.
    """

    name: str
    purpose: Purpose
    formula: str
    fitted: str
    source: str
    tokens: Callable[[Budget], float | None]
    inverse: Callable[[float], float] | None = None


@dataclasses.dataclass(frozen=True)
class RateLaw:
    """A law for the peak learning rate, at the best batch of the same source."""

    name: str
    formula: str
    fitted: str
    source: str
    rate: Callable[[Budget], float]


def _by_loss(budget: Budget) -> float | None:
    return None if budget.loss is None else 2e8 * budget.loss ** (-1 / 0.21)


BATCH_LAWS: tuple[BatchLaw, ...] = (
    BatchLaw(
        "Step Law", "best", "0.58 D^0.571", "0.09 % off the optimum at 1B parameters and 100B tokens", _STEP_LAW,
        lambda budget: 0.58 * budget.tokens**0.571,
    ),
    BatchLaw(
        "DeepSeek", "best", "0.2920 C^0.3271", "a learning rate that falls in steps", _DEEPSEEK,
        lambda budget: 0.2920 * budget.flops**0.3271,
    ),
    BatchLaw(
        "Power Lines", "best", "2048 x 0.0306 D^0.383", f"111M to 3.3B parameters, muP; {_UNVERIFIED}", _POWER_LINES,
        lambda budget: 2048 * 0.0306 * budget.tokens**0.383,
    ),
    BatchLaw(
        "OLMo ladder", "best", "327,680 (N / 108M)^(2/3)", "about 20 tokens a parameter", _LADDER,
        lambda budget: 327_680 * (budget.parameters / 108e6) ** (2 / 3),
    ),
    BatchLaw(
        "Zhang", "critical", "512 x 22.91 (D / 1M)^0.47", "85M to 1.2B parameters; costs a fifth more tokens",
        "Zhang et al. 2024, arXiv:2410.21676",
        lambda budget: 512 * 22.91 * (budget.tokens / 1e6) ** 0.47,
        lambda batch: 1e6 * (batch / (512 * 22.91)) ** (1 / 0.47),
    ),
    BatchLaw(
        "Power Lines", "critical", "2048 x 0.0471 D^0.462", f"111M to 3.3B parameters, muP; {_UNVERIFIED}",
        _POWER_LINES,
        lambda budget: 2048 * 0.0471 * budget.tokens**0.462,
        lambda batch: (batch / (2048 * 0.0471)) ** (1 / 0.462),
    ),
    BatchLaw(
        "Kaplan", "critical", "2e8 L^(-1/0.21)", "data of 2019, a constant learning rate",
        "Kaplan et al. 2020, arXiv:2001.08361", _by_loss,
    ),
)  # fmt: skip
"""Laws for the batch in tokens."""

RATE_LAWS: tuple[RateLaw, ...] = (
    RateLaw(
        "Step Law", "1.79 n^-0.713 D^0.307", "0.09 % off the optimum at 1B parameters and 100B tokens", _STEP_LAW,
        lambda budget: 1.79 * budget.non_embedding**-0.713 * budget.tokens**0.307,
    ),
    RateLaw(
        "DeepSeek", "0.3118 C^-0.1250", "a learning rate that falls in steps", _DEEPSEEK,
        lambda budget: 0.3118 * budget.flops**-0.1250,
    ),
    RateLaw(
        "OLMo ladder", "0.0047 (N / 108M)^(-1/3) / 2", "about 20 tokens a parameter", _LADDER,
        lambda budget: 0.0047 * (budget.parameters / 108e6) ** (-1 / 3) / 2,
    ),
)  # fmt: skip
"""Laws for AdamW's peak learning rate; n counts the parameters without embeddings."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """The range of several laws.

    Attributes:
      low, high: the smallest and the largest value.
    """

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean of the ends."""
        return math.sqrt(self.low * self.high)

    def widened(self, factor: float) -> "Interval":
        """The interval from low / factor to high x factor."""
        return Interval(self.low / factor, self.high * factor)


def batch_interval(budget: Budget, purpose: Purpose) -> Interval:
    """The range of the laws for one purpose, in tokens per batch."""
    found = [tokens for law in BATCH_LAWS if law.purpose == purpose and (tokens := law.tokens(budget)) is not None]
    return Interval(min(found), max(found))


def rate_interval(budget: Budget) -> Interval:
    """The range of the laws for the learning rate."""
    rates = [law.rate(budget) for law in RATE_LAWS]
    return Interval(min(rates), max(rates))


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


def doubling_tokens(batch: float) -> Interval:
    """Tokens that a run must have seen before a batch of `batch` tokens is within the critical batch.

    These are the laws for the critical batch, solved for D: the critical batch starts near 0 and grows with the tokens
    seen.
    Source for that growth, and for doubling the batch with it: Merrill et al. 2025, arXiv:2505.23971.
    """
    found = [law.inverse(batch) for law in BATCH_LAWS if law.inverse]
    return Interval(min(found), max(found))


_CLEARLY = 2  # batch and noise scale differ if even the near end of the error bar is off by this factor
_STANDARD_ERRORS = 2
_TOO_UNCERTAIN = 0.5  # the relative standard error at which zero is within two standard errors
_LIMITS = (
    "This is a guide to the order of magnitude, for a learning rate that suits the batch; it ignores memory and speed, "
    "and the noise scale usually grows while the loss falls."
)


def example_efficiency(noise_scale: float, batch: float) -> float:
    """Progress per example, as a fraction of what an example gives in tiny batches: 1 / (1 + batch / noise_scale).

    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.3.
    """
    return 1 / (1 + batch / noise_scale)


def step_efficiency(noise_scale: float, batch: float) -> float:
    """Progress per step, as a fraction of what an infinite batch makes: 1 / (1 + noise_scale / batch).

    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2.
    """
    return 1 / (1 + noise_scale / batch)


def batch_size_advice(noise_scale: float | None, relative_error: float | None, global_batch: int) -> str:
    """A few sentences: what the noise scale implies for `global_batch`, and what it does not.

    The batch counts as far below (above) the noise scale if even the near end of the error bar, which extends two
    standard errors to each side, is more than twice (less than half) the batch.

    Args:
      noise_scale: in examples; None if it was not measured.
      relative_error: its standard error / noise_scale; None if unknown.
      global_batch: examples per step.
    Source: McCandlish et al. 2018, arXiv:1812.06162.
    """
    batch = f"the batch of {global_batch:,} example{'' if global_batch == 1 else 's'}"
    if noise_scale is None:
        return (
            f"The gradient noise scale is not known, so it says nothing about {batch}. Measuring it takes at least two "
            "gradients per step (data replicas, or gradient_accumulation_steps of 2 or more) and enough steps for the "
            "estimate to settle."
        )
    if noise_scale <= 0:
        return (
            f"The gradient noise scale came out as {noise_scale:.3g} examples; one that is not above 0 means that the "
            f"estimate is lost in its own noise, so it says nothing about {batch}."
        )
    measured = measured_scale(noise_scale, relative_error)
    if relative_error is None:
        return (
            f"{measured}, with an unknown error. {_progress(noise_scale, global_batch)} "
            f"Without an error bar this is only a hint. {_LIMITS}"
        )
    low = max(noise_scale * (1 - _STANDARD_ERRORS * relative_error), 0.0)
    high = noise_scale * (1 + _STANDARD_ERRORS * relative_error)
    if relative_error >= _TOO_UNCERTAIN:
        return f"{measured}. That is too uncertain to say anything about {batch}; more steps narrow it."
    verdict = _verdict(low, high, noise_scale, global_batch)
    return f"{measured}. {_progress(noise_scale, global_batch)} {verdict} {_LIMITS}"


def measured_scale(noise_scale: float, relative_error: float | None) -> str:
    """The noise scale with its error bar of two standard errors."""
    measured = f"The gradient noise scale is about {_count(noise_scale)} examples"
    if relative_error is None:
        return measured
    low = max(noise_scale * (1 - _STANDARD_ERRORS * relative_error), 0.0)
    high = noise_scale * (1 + _STANDARD_ERRORS * relative_error)
    return f"{measured} (two standard errors: {_count(low)} to {_count(high)})"


def _progress(noise_scale: float, batch: int) -> str:
    return (
        f"With the batch of {batch:,} a step makes {step_efficiency(noise_scale, batch):.0%} of the progress of an "
        f"infinitely large batch, and an example gives {example_efficiency(noise_scale, batch):.0%} of what it gives "
        "in a very small one."
    )


def _verdict(low: float, high: float, noise_scale: float, batch: int) -> str:
    if low > _CLEARLY * batch:
        fewer_steps = 1 - step_efficiency(noise_scale, batch) / step_efficiency(noise_scale, 2 * batch)
        more_examples = example_efficiency(noise_scale, batch) / example_efficiency(noise_scale, 2 * batch) - 1
        return (
            "The batch is well below the noise scale: to reach the same loss, twice the batch would take about "
            f"{fewer_steps:.0%} fewer steps and {more_examples:.0%} more examples."
        )
    if high < batch / _CLEARLY:
        fewer_examples = 1 - example_efficiency(noise_scale, batch) / example_efficiency(noise_scale, batch / 2)
        more_steps = step_efficiency(noise_scale, batch) / step_efficiency(noise_scale, batch / 2) - 1
        return (
            "The batch is well above the noise scale, so examples are wasted: to reach the same loss, half the batch "
            f"would take about {fewer_examples:.0%} fewer examples and {more_steps:.0%} more steps."
        )
    if low >= batch / _CLEARLY and high <= _CLEARLY * batch:
        return "The two are of similar size, the usual compromise between few steps and few examples."
    side, factor = ("above", "twice") if noise_scale > batch else ("below", "half")
    return f"Whether the noise scale is {side} {factor} the batch cannot be told within its error."


def _count(examples: float) -> str:
    """A measured number of examples: whole from 100 on, otherwise to three digits."""
    return f"{examples:,.0f}" if examples >= 100 else f"{examples:.3g}"
