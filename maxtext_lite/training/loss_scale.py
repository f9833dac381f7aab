"""Loss scaling: keeps float16 gradients out of the range where they would be rounded to nothing."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_lite.config import NumericsConfig

_INITIAL = 2.0**16
_LEAST = 1.0  # below it, scaling would take away from what float16 can hold


class LossScaleState(NamedTuple):
    """The scale (float32), and how many updates in a row it has stood (int32)."""

    scale: jax.Array
    updates: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """How the loss scale moves, once a step: micro-batches do not count.

    Attributes:
      fixed: the scale, if it does not move; 0: it doubles after `growth_interval` updates in a row and halves, down
        to 1, at a step whose gradient is not finite.
    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """

    fixed: float
    growth_interval: int

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(jnp.float32(self.fixed or _INITIAL), jnp.int32(0))

    def next(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradient was finite, or not."""
        if self.fixed:
            return state
        grows = finite & (state.updates + 1 >= self.growth_interval)
        largest = 2.0**127  # a power of two that float32 still has
        scale = jnp.where(grows, jnp.minimum(state.scale * 2, largest), state.scale)
        scale = jnp.where(finite, scale, jnp.maximum(state.scale / 2, _LEAST))
        return LossScaleState(scale, jnp.where(finite & ~grows, state.updates + 1, 0))

    def may_shrink(self, scale: float) -> bool:
        """Whether a gradient that was not finite at this scale may be the scale's fault."""
        return not self.fixed and scale > _LEAST


def loss_scaling(config: NumericsConfig) -> LossScaling | None:
    """The loss scaling of a config; None where the dtype has float32's range and needs none."""
    if config.dtype != "float16":
        return None
    return LossScaling(config.loss_scale, config.loss_scale_growth_interval)
