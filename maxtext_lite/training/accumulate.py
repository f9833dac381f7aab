"""Gradient accumulation: `optax.MultiSteps` cut in two, so that the inner optimizer runs once a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext_lite.training.loss_scale import LossScaling


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
    """

    def __init__(self, inner: optax.GradientTransformation, loss_scaling: LossScaling | None = None):
        super().__init__(inner, every_k_schedule=1, use_grad_mean=False, accumulator_dtype=jnp.float32)
        self.loss_scaling = loss_scaling

    def init(self, params: Any) -> optax.MultiStepsState:
        """State before the first step: the inner optimizer's, in float32 as its gradients are, and no accumulator."""
        zero = jnp.zeros([], jnp.int32)
        params = self._wide(params)
        return optax.MultiStepsState(
            mini_step=zero,
            gradient_step=zero,
            inner_opt_state=self._opt.init(params),
            acc_grads=(),
            skip_state=self.loss_scaling.init() if self.loss_scaling else (),
        )

    def _wide(self, params: Any) -> Any:
        """The parameters in float32: the inner optimizer's state then has one dtype, whatever theirs is."""
        return jax.tree.map(lambda p: p.astype(self._accumulator_dtype), params)

    def accumulator(self, params: Any, *leading: int) -> Any:
        """Zeros in float32, shaped like `params` with `leading` dims before each."""
        return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), self._accumulator_dtype), params)

    def accumulate(self, accumulator: Any, gradients: Any) -> Any:
        """The accumulator with one micro-batch's gradients added, in float32."""
        return jax.tree.map(lambda acc, g: self._acc_update(g.astype(acc.dtype), acc, n_acc=0), accumulator, gradients)

    def finish(self, gradients: Any, state: optax.MultiStepsState, params: Any) -> tuple[Any, optax.MultiStepsState]:
        """Updates to add to `params`, from the whole step's float32 gradients, and the next state.

        The loss scale stays as it is: it follows from whether the step was skipped, which the caller decides.
        """
        updates, inner_opt_state = self._opt.update(gradients, state.inner_opt_state, self._wide(params))
        return updates, state._replace(gradient_step=state.gradient_step + 1, inner_opt_state=inner_opt_state)

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        """A step of one micro-batch, as any Optax transformation: `finish` of its gradients alone."""
        return self.finish(self.accumulate(self.accumulator(updates), updates), state, params)
