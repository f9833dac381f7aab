"""What the gradient noise scale implies for the batch size, beside what published laws say. Imports no jax."""

from maxtext_lite.analysis.laws import batch_interval, budget_of
from maxtext_lite.config import Config

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
    measured = f"The gradient noise scale is about {_count(noise_scale)} examples"
    if relative_error is None:
        return (
            f"{measured}, with an unknown error. {_progress(noise_scale, global_batch)} "
            f"Without an error bar this is only a hint. {_LIMITS}"
        )
    low = max(noise_scale * (1 - _STANDARD_ERRORS * relative_error), 0.0)
    high = noise_scale * (1 + _STANDARD_ERRORS * relative_error)
    bars = f"{measured} (two standard errors: {_count(low)} to {_count(high)})"
    if relative_error >= _TOO_UNCERTAIN:
        return f"{bars}. That is too uncertain to say anything about {batch}; more steps narrow it."
    return f"{bars}. {_progress(noise_scale, global_batch)} {_verdict(low, high, noise_scale, global_batch)} {_LIMITS}"


def laws_beside(config: Config, tokens: int) -> str:
    """A sentence on what the laws say about a run of `tokens` tokens, for comparison with a measured noise scale."""
    budget = budget_of(config, tokens=tokens, loss=None)
    example_tokens = config.max_target_length * config.rows_per_example
    best, critical = (
        " to ".join(_count(end / example_tokens) for end in (interval.low, interval.high))
        for interval in (batch_interval(budget, "best"), batch_interval(budget, "critical"))
    )
    return (
        f"For this model and {tokens:,} tokens, published laws put the best batch at {best} examples and the critical "
        f"one at {critical} (`advise` names them); the noise scale underestimates the critical batch of language "
        "models (Merrill et al. 2025)."
    )


def advice_of_run(
    config: Config, noise_scale: float | None, relative_error: float | None, global_batch: int, tokens: int
) -> list[str]:
    """What a run of `tokens` tokens says of its batch at the end: `batch_size_advice`, and the laws in pre-training."""
    advice = [batch_size_advice(noise_scale, relative_error, global_batch)]
    if config.objective == "pretrain":
        advice.append(laws_beside(config, tokens))
    return advice


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
