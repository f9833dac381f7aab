"""The course of the learning rate over a run, relative to its peak, for the arrays of any library.

Positions are counted in steps at the target batch size. The train step asks with jax, the plan without it.
"""

from typing import Any

from maxtext_lite.config import OptimizerConfig


def decay(config: OptimizerConfig, u: Any, last: float, xp: Any) -> Any:
    """The part of the peak to which the rate has fallen at positions `u` of a run that ends at `last`.

    It is 1 at u = warmup_steps and the final fraction at u = last; neither point is rounded.

    Args:
      xp: the library of `u`, jax.numpy or numpy.
    Source: wsd is Hu et al. 2024, arXiv:2404.06395, section 4, with a linear decay.
    """
    final, warmup = config.learning_rate_final_fraction, warmup_end(config, last)
    decay_steps = max(last - warmup, 1)
    match config.learning_rate_schedule:
        case "cosine":
            progress = xp.clip((u - warmup) / decay_steps, 0, 1)
            return final + (1 - final) * 0.5 * (1 + xp.cos(xp.pi * progress))
        case "linear":
            return 1 - (1 - final) * xp.clip((u - warmup) / decay_steps, 0, 1)
        case "wsd":
            wsd_steps = max(config.wsd_decay_steps_fraction * last, 1)
            return 1 - (1 - final) * xp.clip((u - (last - wsd_steps)) / wsd_steps, 0, 1)
        case "constant":
            return xp.ones_like(u)


def warm_up(config: OptimizerConfig, u: Any, last: float, xp: Any) -> Any:
    """The part of the peak to which the rate has risen at positions `u` of a run that ends at `last`, at most 1."""
    warmup = warmup_end(config, last)
    if warmup == 0:  # positions count in part where the schedule's unit is examples
        return xp.ones_like(u)
    return xp.minimum(u / warmup, 1)


def warmup_end(config: OptimizerConfig, last: float) -> float:
    """The position at which the warm-up of a run that ends at `last` is over: warmup_steps, or below 1 that part."""
    stated = float(config.warmup_steps)
    return stated * last if stated < 1 else stated
