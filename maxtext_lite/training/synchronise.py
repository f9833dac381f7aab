"""Local updates between steps: merges the parameters and metrics of several replicas."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.stages import Wrapped

from maxtext_lite.parallel import sharding
from maxtext_lite.training.arrays import Metrics
from maxtext_lite.training.optimizer import master_of, with_master
from maxtext_lite.training.state import StepContext, TrainState, state_shardings
from maxtext_lite.training.step import choose, copy_to_devices, means_of

_REDUCTIONS = {
    "target_tokens": "sum",
    "groups": "sum",
    "group_squares": "sum",
    "skipped": "any",
    "loss_scale": "min",
    "skipped_in_a_row": "max",
}


def make_synchronise(parts: StepContext) -> Wrapped:
    """A jitted function state -> state that synchronises the replicas of local updates; donates its argument.

    Once the run has ended (`TrainState`), it changes nothing.
    """
    optimizer = parts.optimizer
    local = parts.local
    assert local is not None
    shardings = state_shardings(parts)
    on_host = master_of(shardings.opt_state)  # on the devices without optimizer_memory_host_offload

    def synchronise(state: TrainState) -> TrainState:
        assert state.outer is not None
        masters = master_of(state.opt_state)
        if optimizer.on_host:
            masters = copy_to_devices(masters, on_host)
        params, outer = local.synchronised(state.params, state.outer, masters)
        synchronised = params, outer, None if outer.master is None else local.copies(outer.master)
        has_ended = optimizer.has_ended(state.skipped_in_a_row)
        params, outer, masters = choose(has_ended, (state.params, state.outer, masters), synchronised)
        if optimizer.on_host:
            masters = jax.device_put(masters, on_host)
        return dataclasses.replace(state, params=params, opt_state=with_master(state.opt_state, masters), outer=outer)

    return jax.jit(synchronise, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)


def make_summarise(parts: StepContext) -> Wrapped:
    """The jitted function from a step's metrics, each [R], to scalars for the whole step.

    Losses are means over the target tokens, pairs or weight of all replicas; the other metrics are reduced as
    `_REDUCTIONS` says, or are means over replicas.
    """
    divisor = parts.objective.divisor
    means = means_of(parts.objective)
    reductions = {**parts.objective.reductions, **_REDUCTIONS, divisor: "sum"}

    def summarise(metrics: Metrics) -> Metrics:
        counted_R = metrics[divisor]
        whole = jnp.sum(counted_R)
        share_R = counted_R / jnp.where(whole > 0, whole, 1)  # a custom loss may have a weight between 0 and 1
        summary: Metrics = {}
        for name, x_R in metrics.items():
            if name in means:
                summary[name] = jnp.sum(share_R * x_R)
            else:
                summary[name] = getattr(jnp, reductions.get(name, "mean"))(x_R)
        return summary

    return jax.jit(summarise, out_shardings=sharding(parts.mesh))
