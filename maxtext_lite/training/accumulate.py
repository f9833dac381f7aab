"""Gradient accumulation: `optax.MultiSteps` cut in two, so that the inner optimizer runs once a step; and loss scaling,
which keeps float16 gradients out of the range where they would be rounded to nothing."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# jax, optax and orbax declare some of their functions in part.

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxtext_lite.config import NumericsConfig
from maxtext_lite.training.arrays import Scalar, Tree, as_float32

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


class WithMaster(NamedTuple):
    """An inner optimizer's state, and the float32 parameters that it updates, of which the weights are the rounding."""

    inner: Tree
    master: Tree


def _parts(state: optax.MultiStepsState) -> tuple[Tree, Tree]:
    """The inner optimizer's state, and the masters beside it or None."""
    inner: Any = state.inner_opt_state
    return (inner.inner, inner.master) if isinstance(inner, WithMaster) else (inner, None)


def master_of(state: optax.MultiStepsState) -> Tree:
    """The float32 masters in a state, or what a tree like it has in their place; None where there are none."""
    return _parts(state)[1]


def with_master(state: optax.MultiStepsState, master: Tree) -> optax.MultiStepsState:
    """The state with other masters; None: it has none."""
    inner: Any = state.inner_opt_state
    return state if master is None else state._replace(inner_opt_state=inner._replace(master=master))


class GradientAccumulation(optax.MultiSteps):
    """`optax.MultiSteps` with a second way through a step, for a loop that holds all of its micro-batches.

    `init`, `update`, `has_updated` and the rest are the original's, with the sum of `every_k_schedule` calls. The train
    step shares that state and never calls `update`: it makes a zero `accumulator`, calls `accumulate` for each
    micro-batch, and `finish` once. Measured with Adam and 8 micro-batches (optax 0.2.8, on a CPU):

    |                                       | `update`, 8 times | `accumulate`, 8 times, and `finish` |
    |---------------------------------------|-------------------|-------------------------------------|
    | flops for a parameter                 | 8 x 34            | 8 x 1 + 13                          |
    | temporaries, in sizes of a parameter  | 3                 | 1                                   |
    | state, likewise, as a checkpoint has it | 3               | 2                                   |
    | CPU time of a step                    | 49 ms             | 8 ms                                |

    `update` runs the inner optimizer for every micro-batch, of which the last one's result counts, and the sum is part
    of its state. It weighs micro-batches alike: a mean of the means over 1 and over 4 tokens, of gradients that have
    nothing to do with each other, is wrong by 3/4 of the true mean's norm. The number of its micro-batches stands in
    the executable.

    Gradients arrive divided by the step's total weight and are added up in float32. State is a `MultiStepsState` whose
    `acc_grads` is empty between steps: nothing of an unfinished step is ever saved. Its `skip_state` is the loss
    scale's.

    Args:
      inner: what turns the step's gradients into updates of learning rate 1.
      loss_scaling: of float16 gradients; None: they are not scaled.
      every_k_schedule: micro-batches that `update` adds up, for callers without a loop of their own.
      max_skipped: steps in a row that may be skipped for a gradient that is not finite, the last of which ends the
        run; None: any number.
      loads: a tree like the parameters, true for the routers' biases, whose "gradients" are the numbers of tokens that
        chose each expert; None where there are none. The inner optimizer does not see them.
      load_rate: what a step adds to the bias of an expert with fewer tokens than the mean of its layer's, and takes
        from one with more: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
      masters: parameters that are not float32 have a float32 master copy in the state, which is what updates add up
        in: rounded to a narrower weight, one that is small beside it would be lost.
      over_data: each replica of the data axis keeps its share of the state, and updates its share of the parameters
        (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).
      on_host: between updates the state lies in pinned host memory.
      has_rate: the inner optimizer's updates are what is added, without another learning rate.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        loss_scaling: LossScaling | None = None,
        *,
        every_k_schedule: int = 1,
        max_skipped: int | None = None,
        loads: Tree = None,
        load_rate: float = 0.0,
        masters: bool = True,
        over_data: bool = False,
        on_host: bool = False,
        has_rate: bool = False,
    ):
        if loads is not None:
            inner = optax.masked(inner, jax.tree.map(operator.not_, loads))
        super().__init__(inner, every_k_schedule, use_grad_mean=False, accumulator_dtype=jnp.float32)
        self._keeps_sum = every_k_schedule > 1
        self._loads, self._load_rate = loads, load_rate
        self.loss_scaling, self.max_skipped = loss_scaling, max_skipped
        self._masters = masters
        self.over_data = over_data
        self.on_host = on_host
        self._has_rate = has_rate

    def init(self, params: Tree) -> optax.MultiStepsState:
        """The original's state before the first step, of float32 parameters as gradients are; with `every_k_schedule`
        of 1 there is no accumulator.
        """
        wide = as_float32(params)
        state: Any = super().init(wide)
        if self.has_masters(params):
            state = state._replace(inner_opt_state=WithMaster(state.inner_opt_state, wide))
        scale = self.loss_scaling.init() if self.loss_scaling else ()
        return state._replace(acc_grads=state.acc_grads if self._keeps_sum else (), skip_state=scale)

    def map_gradients(self, function: Callable[[jax.Array], jax.Array], gradients: Tree) -> Tree:
        """`function` of each gradient that is one; loads stay as they are, whole numbers."""
        if self._loads is None:
            return jax.tree.map(function, gradients)
        return jax.tree.map(lambda is_load, g: g if is_load else function(g), self._loads, gradients)

    def without_loads(self, gradients: Tree) -> list[jax.Array]:
        """The gradients that are such, which loads are not."""
        leaves = jax.tree.leaves(gradients)
        if self._loads is None:
            return leaves
        return [g for g, is_load in zip(leaves, jax.tree.leaves(self._loads), strict=True) if not is_load]

    def _with_biases(self, updates: Tree, gradients: Tree) -> Tree:
        """The updates, with those of the routers' biases."""
        if self._loads is None:
            return updates

        def towards_the_mean(load: jax.Array) -> jax.Array:
            return self._load_rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)

        return jax.tree.map(
            lambda is_load, u, g: towards_the_mean(g) if is_load else u, self._loads, updates, gradients
        )

    def loss_scale(self, state: optax.MultiStepsState) -> jax.Array | None:
        """What the loss is multiplied by in the next backward pass; None where it is not."""
        skip_state: Any = state.skip_state
        return skip_state.scale if self.loss_scaling else None

    def has_ended(self, skipped_in_a_row: Scalar) -> jax.Array:
        """Whether this many skipped steps in a row end the run, so that nothing is applied any more."""
        return jnp.array(False) if self.max_skipped is None else jnp.asarray(skipped_in_a_row) >= self.max_skipped

    def skipped_after(self, skipped_in_a_row: jax.Array, finite: jax.Array, loss_scale: Tree) -> jax.Array:
        """The steps skipped in a row after one more, but for those that may be the loss scale's fault; at the run's end
        it stays.
        """
        counts = self.loss_scaling is None or ~jnp.asarray(self.loss_scaling.may_shrink(loss_scale))
        after = jnp.where(finite, 0, skipped_in_a_row + jnp.asarray(counts, jnp.int32))
        return jnp.where(self.has_ended(skipped_in_a_row), skipped_in_a_row, after)

    def accumulator(self, params: Tree, *leading: int) -> Tree:
        """Zeros in float32, shaped like `params` with `leading` dims before each."""
        return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), jnp.float32), params)

    def accumulate(self, accumulator: Tree, gradients: Tree) -> Tree:
        """The accumulator with one micro-batch's gradients added, in float32."""
        return jax.tree.map(lambda acc, g: acc + g.astype(acc.dtype), accumulator, gradients)

    def has_masters(self, params: Tree) -> bool:
        """Whether parameters like these have a float32 master copy in the state."""
        return self._masters and any(p.dtype != jnp.float32 for p in jax.tree.leaves(params))

    def finish(
        self, gradients: Tree, state: optax.MultiStepsState, params: Tree, learning_rate: jax.Array
    ) -> tuple[Tree, optax.MultiStepsState]:
        """The parameters after the whole step's float32 gradients, and the next state.

        The loss scale stays as it is: it follows from whether the step was skipped, which the caller decides.
        """
        inner, master = _parts(state)
        updates, inner = self.inner_opt.update(gradients, inner, as_float32(params) if master is None else master)
        if not self._has_rate:
            updates = jax.tree.map(lambda u: -learning_rate * u, updates)
        updates = self._with_biases(updates, gradients)
        if master is None:
            new_params = optax.apply_updates(params, updates)
        else:
            master = optax.apply_updates(master, updates)
            new_params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
            inner = WithMaster(inner, master)
        return new_params, state._replace(gradient_step=state.gradient_step + 1, inner_opt_state=inner)

    def update(self, updates: Tree, state: Tree, params: Tree = None, **extra_args: Tree) -> tuple[Tree, Tree]:
        """The original's: every `every_k_schedule` calls the inner optimizer's updates of the sum, otherwise zeros."""
        inner, master = _parts(state)
        sums = state.acc_grads if self._keeps_sum else self.accumulator(updates)
        params = params if params is None or master is None else master
        found, new = super().update(
            as_float32(updates), state._replace(inner_opt_state=inner, acc_grads=sums), params, **extra_args
        )
        inner = new.inner_opt_state
        if master is not None:
            inner = WithMaster(inner, optax.apply_updates(master, found))
        return found, new._replace(
            inner_opt_state=inner,
            acc_grads=new.acc_grads if self._keeps_sum else (),
            skip_state=state.skip_state,
        )
