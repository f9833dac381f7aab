"""Gradient accumulation: `optax.MultiSteps` cut in two, so that the inner optimizer runs once a step."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxtext_lite.training.loss_scale import LossScaling


class WithMaster(NamedTuple):
    """An inner optimizer's state, and the float32 parameters that it updates."""

    inner: Any
    master: Any


class GradientAccumulation(optax.MultiSteps):
    """`optax.MultiSteps` whose sum is kept by the caller's loop and whose inner optimizer runs once, at the end.

    The original runs the inner optimizer on every micro-batch and throws all results but the last away, keeps the
    sum in its state, and averages micro-batches equally whatever their number of target tokens. Here gradients
    arrive already divided by the step's total weight, `accumulate` adds one micro-batch's, and `finish` clips and
    decays once. State is a `MultiStepsState` whose `acc_grads` is empty: nothing of an unfinished step is ever saved,
    and the number of micro-batches may change from one step to the next. Its `skip_state` is the loss scale's.

    Args:
      inner: what turns the step's gradients into updates of learning rate 1.
      loss_scaling: of float16 gradients; None: they are not scaled.
      loads: a tree like the parameters, true for the routers' biases, whose "gradients" are the numbers of tokens that
        chose each expert; None where there are none. The inner optimizer does not see them.
      load_rate: what a step adds to the bias of an expert with fewer tokens than the mean of its layer's, and takes
        from one with more: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
      over_data: each replica of the data axis keeps its share of the state, and updates its share of the parameters
        (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1). Parameters that are not float32 then have a
        float32 master copy in the state.
      on_host: between updates the state lies in pinned host memory.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        loss_scaling: LossScaling | None = None,
        *,
        loads: Any = None,
        load_rate: float = 0.0,
        over_data: bool = False,
        on_host: bool = False,
    ):
        if loads is not None:
            inner = optax.masked(inner, jax.tree.map(operator.not_, loads))
        super().__init__(inner, every_k_schedule=1, use_grad_mean=False, accumulator_dtype=jnp.float32)
        self._loads, self._load_rate = loads, load_rate
        self.loss_scaling = loss_scaling
        self.over_data = over_data
        self.on_host = on_host

    def init(self, params: Any) -> optax.MultiStepsState:
        """State before the first step: the inner optimizer's, in float32 as its gradients are, and no accumulator."""
        zero = jnp.zeros([], jnp.int32)
        wide = self._wide(params)
        inner = self._opt.init(wide)
        if self._has_master(params):
            inner = WithMaster(inner, wide)
        return optax.MultiStepsState(
            mini_step=zero,
            gradient_step=zero,
            inner_opt_state=inner,
            acc_grads=(),
            skip_state=self.loss_scaling.init() if self.loss_scaling else (),
        )

    def map_slopes(self, function: Any, gradients: Any) -> Any:
        """`function` of each gradient that is one; loads stay as they are, whole numbers."""
        if self._loads is None:
            return jax.tree.map(function, gradients)
        return jax.tree.map(lambda is_load, g: g if is_load else function(g), self._loads, gradients)

    def slopes(self, gradients: Any) -> list[Any]:
        """The gradients that are such, which loads are not."""
        leaves = jax.tree.leaves(gradients)
        if self._loads is None:
            return leaves
        return [g for g, is_load in zip(leaves, jax.tree.leaves(self._loads), strict=True) if not is_load]

    def _with_biases(self, updates: Any, gradients: Any) -> Any:
        """The updates, with those of the routers' biases."""
        if self._loads is None:
            return updates

        def towards_the_mean(load: jax.Array) -> jax.Array:
            return self._load_rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)

        return jax.tree.map(
            lambda is_load, u, g: towards_the_mean(g) if is_load else u, self._loads, updates, gradients
        )

    def loss_scale(self, state: optax.MultiStepsState) -> Any:
        """What the loss is multiplied by in the next backward pass; None where it is not."""
        skip_state: Any = state.skip_state
        return skip_state.scale if self.loss_scaling else None

    def _wide(self, params: Any) -> Any:
        """The parameters in float32: the inner optimizer's state then has one dtype, whatever theirs is."""
        return jax.tree.map(lambda p: p.astype(self._accumulator_dtype), params)

    def accumulator(self, params: Any, *leading: int) -> Any:
        """Zeros in float32, shaped like `params` with `leading` dims before each."""
        return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), self._accumulator_dtype), params)

    def accumulate(self, accumulator: Any, gradients: Any) -> Any:
        """The accumulator with one micro-batch's gradients added, in float32."""
        return jax.tree.map(lambda acc, g: self._acc_update(g.astype(acc.dtype), acc, n_acc=0), accumulator, gradients)

    def _has_master(self, params: Any) -> bool:
        return self.over_data and any(p.dtype != self._accumulator_dtype for p in jax.tree.leaves(params))

    def finish(
        self, gradients: Any, state: optax.MultiStepsState, params: Any, learning_rate: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        """The parameters after the whole step's float32 gradients, and the next state.

        The loss scale stays as it is: it follows from whether the step was skipped, which the caller decides.
        """
        updates, inner, master = self._inner_update(gradients, state.inner_opt_state, params)
        updates = self._with_biases(jax.tree.map(lambda u: -learning_rate * u, updates), gradients)
        if master is None:
            new_params = optax.apply_updates(params, updates)
        else:
            master = optax.apply_updates(master, updates)
            new_params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
            inner = WithMaster(inner, master)
        return new_params, state._replace(gradient_step=state.gradient_step + 1, inner_opt_state=inner)

    def _inner_update(self, gradients: Any, inner: Any, params: Any) -> tuple[Any, Any, Any]:
        """Updates of learning rate -1, the inner optimizer's next state, and the master copy where there is one."""
        master = None
        if isinstance(inner, WithMaster):
            inner, master = inner
        updates, inner = self._opt.update(gradients, inner, self._wide(params) if master is None else master)
        return updates, inner, master

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        """A step of one micro-batch, as any Optax transformation: the inner optimizer's updates of its gradients."""
        gradients = self.accumulate(self.accumulator(updates), updates)
        found, inner, master = self._inner_update(gradients, state.inner_opt_state, params)
        inner = inner if master is None else WithMaster(inner, optax.apply_updates(master, found))
        return found, state._replace(gradient_step=state.gradient_step + 1, inner_opt_state=inner)
