"""The optimizer and its schedule, and the accumulation of gradients over micro-batches."""

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.schedule import decay, warm_up
from maxtext_lite.config import Config, OptimizerConfig, UserError
from maxtext_lite.config.registry import load
from maxtext_lite.config.weights import is_in_group, model_shape
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.sources_on_hosts import target_tokens_of_run
from maxtext_lite.models import is_matrix, root_key, unstacked
from maxtext_lite.parallel import Tree, TreePath
from maxtext_lite.training.arrays import Scalar, as_float32, map_axes

_INITIAL = 2.0**16
_LEAST = 1.0  # a smaller scale would itself cost float16 range


class LossScaleState(NamedTuple):
    """The scale (float32), and the number of updates since it last changed (int32)."""

    scale: Array
    updates: Array


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """The loss scale's change from step to step, whatever the number of micro-batches.

    Attributes:
      fixed: a constant scale; 0: it doubles after `growth_interval` updates in a row and halves, down to 1, at a step
        whose gradient is not finite.
    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """

    fixed: float
    growth_interval: int

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(jnp.float32(self.fixed or _INITIAL), jnp.int32(0))

    def next(self, state: LossScaleState, finite: Array) -> LossScaleState:
        """The state after a step with a gradient that was `finite` or not."""
        if self.fixed:
            return state
        grows = finite & (state.updates + 1 >= self.growth_interval)
        largest = 2.0**127  # float32's largest power of two
        scale = jnp.where(grows, jnp.minimum(state.scale * 2, largest), state.scale)
        scale = jnp.where(finite, scale, jnp.maximum(state.scale / 2, _LEAST))
        return LossScaleState(scale, jnp.where(finite & ~grows, state.updates + 1, 0))

    def may_shrink(self, scale: float) -> bool:
        """Whether this scale may be why a gradient was not finite, and a smaller one can be tried."""
        return not self.fixed and scale > _LEAST


class WithMaster(NamedTuple):
    """An inner optimizer's state, and the float32 masters that it updates; rounded, they are the weights."""

    inner: Tree
    master: Tree


def _inner_and_master(state: optax.MultiStepsState) -> tuple[Tree, Tree]:
    """The inner optimizer's state, and the masters or None."""
    if isinstance(state.inner_opt_state, WithMaster):
        return state.inner_opt_state.inner, state.inner_opt_state.master
    return state.inner_opt_state, None


def master_of(state: optax.MultiStepsState) -> Tree:
    """The float32 masters of a state, or the leaves in their place in a tree like it; None without masters."""
    return _inner_and_master(state)[1]


def with_master(state: optax.MultiStepsState, master: Tree) -> optax.MultiStepsState:
    """The state with other masters; unchanged where `master` is None."""
    inner: Any = state.inner_opt_state
    return state if master is None else state._replace(inner_opt_state=inner._replace(master=master))


class GradientAccumulation(optax.MultiSteps):
    """`optax.MultiSteps` with a second interface, for a loop that has all micro-batches of a step at hand.

    `init`, `update`, `has_updated` and the rest work as in the original, on the sum of `every_k_schedule` calls. The
    train step uses the same state but never calls `update`: it makes a zero `accumulator`, calls `accumulate` for each
    micro-batch, and `finish` once. Measured with Adam and 8 micro-batches (optax 0.2.8, on a CPU):

    |                                       | `update`, 8 times | `accumulate`, 8 times, and `finish` |
    |---------------------------------------|-------------------|-------------------------------------|
    | flops per parameter                   | 8 x 34            | 8 x 1 + 13                          |
    | temporaries, in copies of the parameters | 3              | 1                                   |
    | state in a checkpoint, likewise       | 3                 | 2                                   |
    | CPU time of a step                    | 49 ms             | 8 ms                                |

    `update` runs the inner optimizer for every micro-batch and uses only the last result; the sum is part of its
    state, and the number of micro-batches is compiled in. It also gives micro-batches equal weight: for unrelated
    gradients, the mean of the means over 1 and over 4 tokens is off by 3/4 of the true mean's norm.

    Gradients arrive divided by the step's total weight and are summed in float32. The state is a `MultiStepsState`
    whose `acc_grads` is empty between steps: nothing of an unfinished step is ever saved. Its `skip_state` is the loss
    scale's state.

    Args:
      inner: turns the step's gradients into updates of learning rate 1.
      loss_scaling: None: gradients are not scaled.
      every_k_schedule: micro-batches that `update` sums, for callers without a loop of their own.
      max_skipped: consecutive steps skipped for a non-finite gradient after which the run ends; None: any number.
      biases: a tree like the parameters, true for the routers' biases, which have no gradient and follow the expert
        counts instead. The inner optimizer does not see them. None where there are none.
      keeps_loads: these are no biases but the experts' loads: count over the mean of the layer, less 1.
      bias_rate: added to the bias of an expert with fewer tokens than the mean of its layer, and subtracted from one
        with more: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
      masters: parameters that are not float32 have a float32 master copy in the state, to which updates are added: a
        narrower weight would round small ones away.
      over_data: each replica of the data axis keeps its share of the state and updates its share of the parameters
        (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).
      on_host: between updates the state is in pinned host memory.
      has_rate: the inner optimizer applies its own learning rate.
      state_dtype: of the inner optimizer's moments between updates.
      seed: of their rounding.
      clip_heads: (parameters, largest logits [L, N]) -> the parameters to keep after an update.
      ema_decay: of the moving average of the parameters; 0: there is none.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        loss_scaling: LossScaling | None = None,
        *,
        every_k_schedule: int = 1,
        max_skipped: int | None = None,
        biases: Tree = None,
        bias_rate: float = 0.0,
        keeps_loads: bool = False,
        masters: bool = True,
        over_data: bool = False,
        on_host: bool = False,
        has_rate: bool = False,
        state_dtype: str = "float32",
        seed: int = 0,
        clip_heads: Callable[[Tree, Array], Tree] | None = None,
        ema_decay: float = 0.0,
    ):
        if biases is not None:
            inner = optax.masked(inner, jax.tree.map(operator.not_, biases))
        super().__init__(inner, every_k_schedule, use_grad_mean=False, accumulator_dtype=jnp.float32)
        self._keeps_sum = every_k_schedule > 1
        self._biases = biases
        self._bias_rate = bias_rate
        self._keeps_loads = keeps_loads
        self.loss_scaling = loss_scaling
        self.max_skipped = max_skipped
        self._masters = masters
        self.over_data = over_data
        self.on_host = on_host
        self._has_rate = has_rate
        self.state_dtype = state_dtype
        self._seed = seed
        self._clip_heads = clip_heads
        self.ema_decay = ema_decay

    def init(self, params: Tree) -> optax.MultiStepsState:
        """The original's state before the first step, for float32 parameters; without an accumulator if
        `every_k_schedule` is 1.
        """
        wide = as_float32(params)
        state: Any = self.narrow(super().init(wide))
        if self.has_masters(params):
            state = state._replace(inner_opt_state=WithMaster(state.inner_opt_state, wide))
        if self.loss_scaling:
            state = state._replace(skip_state=self.loss_scaling.init())
        return state if self._keeps_sum else state._replace(acc_grads=())

    def narrow(self, state: optax.MultiStepsState) -> optax.MultiStepsState:
        """A state after its last update, with its moments in `state_dtype`."""
        if self.state_dtype == "float32":
            return state
        return load("moments", self.state_dtype)(state, jax.random.fold_in(root_key(self._seed), state.gradient_step))

    def with_state_dtype(self, dtype: str) -> "GradientAccumulation":
        """This optimizer with its moments in another dtype."""
        other = copy.copy(self)
        other.state_dtype = dtype
        return other

    def widen(self, state: optax.MultiStepsState) -> optax.MultiStepsState:
        """A state with its moments in float32."""
        return state if self.state_dtype == "float32" else load("moments", "float32")(state)

    def _set_bias_updates(self, updates: Tree, params: Tree, expert_counts: Array | None) -> Tree:
        """Replaces the updates of the routers' biases by those that the expert counts ask for."""
        if self._biases is None:
            return updates
        assert expert_counts is not None
        mean = jnp.mean(expert_counts, axis=-1, keepdims=True)
        loads = jnp.where(mean > 0, expert_counts / jnp.where(mean > 0, mean, 1) - 1, 0)
        steps = loads if self._keeps_loads else self._bias_rate * jnp.sign(mean - expert_counts)
        layer = 0

        def update(is_bias: bool, u: Array, p: Array) -> Array:
            nonlocal layer
            if not is_bias:
                return u
            # In a pipeline with several rounds, a bias is stored by round.
            first, layer = layer, layer + math.prod(u.shape[:-1])
            own = steps[first:layer].reshape(u.shape)
            return own - p if self._keeps_loads else own

        return jax.tree.map(update, self._biases, updates, params)

    def loss_scale(self, state: optax.MultiStepsState) -> Array | None:
        """The factor of the loss in the next backward pass; None without loss scaling."""
        return cast(LossScaleState, state.skip_state).scale if self.loss_scaling else None

    def next_loss_scale(self, state: optax.MultiStepsState, finite: Array) -> optax.MultiStepsState:
        """The state with the loss scale after a step with a gradient that was `finite` or not."""
        assert self.loss_scaling is not None
        return state._replace(skip_state=self.loss_scaling.next(cast(LossScaleState, state.skip_state), finite))

    def has_ended(self, skipped_in_a_row: Scalar) -> Array:
        """Whether this many skipped steps in a row end the run: no update is applied from then on."""
        if self.max_skipped is None:
            return jnp.array(False)
        return jnp.asarray(skipped_in_a_row) >= self.max_skipped

    def skipped_after(self, skipped_in_a_row: Array, finite: Array, loss_scale: Tree) -> Array:
        """Skipped steps in a row after one more step, without those that the loss scale may explain. Once the run has
        ended, the number stays.
        """
        more: Any = 1
        if self.loss_scaling:
            more = 1 - jnp.asarray(self.loss_scaling.may_shrink(loss_scale), jnp.int32)
        after = jnp.where(finite, 0, skipped_in_a_row + more)
        return jnp.where(self.has_ended(skipped_in_a_row), skipped_in_a_row, after)

    def accumulator(self, params: Tree, *leading: int) -> Tree:
        """Float32 zeros in the shapes of `params`, each with `leading` dims in front."""
        return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), jnp.float32), params)

    def accumulate(self, accumulator: Tree, gradients: Tree) -> Tree:
        """The accumulator plus one micro-batch's gradients, in float32."""
        return jax.tree.map(lambda acc, g: acc + g.astype(acc.dtype), accumulator, gradients)

    def has_masters(self, params: Tree) -> bool:
        """Whether parameters like these have a float32 master copy in the state."""
        return self._masters and any(p.dtype != jnp.float32 for p in jax.tree.leaves(params))

    def finish(
        self,
        gradients: Tree,
        state: optax.MultiStepsState,
        params: Tree,
        learning_rate: Array,
        expert_counts: Array | None = None,
        largest_logits: Array | None = None,
    ) -> tuple[Tree, optax.MultiStepsState]:
        """The parameters and the state after an update with the whole step's float32 gradients.

        The loss scale is left to the caller, who decides whether the step is skipped.

        Args:
          expert_counts: the tokens that chose each expert in the step, [L, E] of the layers with experts, stack by
            stack; needed where routers have biases.
        """
        inner, master = _inner_and_master(self.widen(state))
        wide = as_float32(params) if master is None else master
        updates, inner = self.inner_opt.update(gradients, inner, wide)
        if not self._has_rate:
            updates = jax.tree.map(lambda u: -learning_rate * u, updates)
        updates = self._set_bias_updates(updates, wide, expert_counts)
        new_params = optax.apply_updates(params if master is None else master, updates)
        if self._clip_heads is not None:
            assert largest_logits is not None
            new_params = self._clip_heads(new_params, largest_logits)
        if master is not None:
            inner = WithMaster(inner, new_params)
            new_params = jax.tree.map(lambda m, p: m.astype(p.dtype), new_params, params)
        state = state._replace(gradient_step=state.gradient_step + 1, inner_opt_state=inner)
        return new_params, self.narrow(state)

    def average(self, average: Tree, params: Tree, state: optax.MultiStepsState) -> Tree:
        """The float32 moving average after an update to these parameters and this state."""
        master = master_of(state)
        wide = as_float32(params) if master is None else master
        return jax.tree.map(lambda a, p: self.ema_decay * a + (1 - self.ema_decay) * p, average, wide)

    def update(self, updates: Tree, state: Tree, params: Tree = None, **extra_args: Tree) -> tuple[Tree, Tree]:
        """As the original: at every `every_k_schedule`-th call the updates of the sum, otherwise zeros."""
        inner, master = _inner_and_master(self.widen(state))
        sums = state.acc_grads if self._keeps_sum else self.accumulator(updates)
        plain = state._replace(inner_opt_state=inner, acc_grads=sums)
        found, new = super().update(as_float32(updates), plain, params if master is None else master, **extra_args)
        if master is not None:
            new = new._replace(inner_opt_state=WithMaster(new.inner_opt_state, optax.apply_updates(master, found)))
        new = new._replace(skip_state=state.skip_state)
        new = self.narrow(new)
        return found, new if self._keeps_sum else new._replace(acc_grads=())


Rate: TypeAlias = Callable[[Scalar], Array]
"""Position u in the run, in steps (float or traced) -> learning rate of the update that reaches it."""


class Progress(NamedTuple):
    """Examples and target tokens of all applied updates, each as uint32 [2]: high and low half of a 64-bit count."""

    examples: Array
    tokens: Array

    @classmethod
    def start(cls) -> "Progress":
        """No updates."""
        return cls(jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.uint32))

    def plus(self, examples: Array, tokens: Array) -> "Progress":
        """The progress after another update with these counts (int32)."""
        return Progress(_add(self.examples, examples), _add(self.tokens, tokens))


def _add(count: Array, more: Array) -> Array:
    low = count[1] + more.astype(jnp.uint32)
    return jnp.stack([count[0] + (low < count[1]), low])


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of an update as a function of progress, the update included.

    Attributes:
      unit: the unit of progress (`schedule_unit`).
      units_per_step: units in a step at the target batch size, the measure of positions.
      rate: learning rate at a position.
      factors: (first step, factor of the rate) of each stage of the batch; empty: the factor is 1.
    """

    unit: Literal["steps", "examples", "tokens"]
    units_per_step: float
    rate: Rate
    factors: tuple[tuple[int, float], ...] = ()

    def __call__(self, updates: Scalar, progress: Progress, step: Scalar = 1) -> Array:
        """The learning rate of the update that reaches both counts, in step number `step`, skipped ones counted."""
        if self.unit == "steps":
            rate = self.rate(jnp.asarray(updates, jnp.float32))
        else:
            high, low = (progress.examples if self.unit == "examples" else progress.tokens).astype(jnp.float32)
            rate = self.rate((high * 2.0**32 + low) / self.units_per_step)
        if not self.factors:
            return rate
        first_steps, factors = (jnp.array(numbers) for numbers in zip(*self.factors, strict=True))
        return rate * factors[jnp.searchsorted(first_steps, step, side="right") - 1]


def learning_rate_schedule(config: OptimizerConfig, *, last: float, units_per_step: float = 1.0) -> Schedule:
    """The config's schedule over a run that ends at position `last`, counted in steps at the target batch size.

    The rate rises as u/warmup_steps, reaches the peak at u = warmup_steps and its final fraction at u = last. Neither
    point is rounded: the curve is continuous in u. Update 1 has rate peak/warmup_steps.
    """
    peak, last = config.learning_rate, float(last)  # jax takes no integer above 2**31

    def rate(u: Scalar) -> Array:
        u = jnp.asarray(u, jnp.float32)
        return peak * decay(config, u, last, jnp) * warm_up(config, u, last, jnp)

    return Schedule(config.schedule_unit, units_per_step, rate)


_LAST_STEP = 2**31 - 1


def schedule_of_run(
    config: OptimizerConfig, plan: BatchPlan, source: ExampleSource, *, seed: int, step: int, examples_seen: int
) -> Schedule:
    """The config's schedule over a run with this progress: it ends with the run.

    A restart with the same config leaves it as it is, to the bit; one that changes the batch or the length moves the
    end.

    Args:
      config: with the optimizer's settings as `plan` scales them.
      source: its target tokens are counted with schedule_unit=tokens; all hosts then call this.
      seed: of the data's order.
    """
    unit = config.schedule_unit
    last = plan.schedule_end(unit, step, examples_seen)
    units_per_step = 1.0
    if unit != "steps":
        _, total = plan.length.end_after(step, examples_seen)
        if unit == "tokens":
            total = target_tokens_of_run(source, total_examples=total, seed=seed, loading_hosts=plan.loading_hosts)
        units_per_step = total / last
    schedule = learning_rate_schedule(config, last=last, units_per_step=units_per_step)
    if not plan.scales_by_stage:
        return schedule
    factors: list[tuple[int, float]] = []
    for stage in dataclasses.replace(plan.length, done=(step, examples_seen)).stages_ahead:
        first_step = min(stage.first_step, _LAST_STEP)
        factors.append((first_step, plan.stage_multiplier(stage) / plan.learning_rate_multiplier))
    return dataclasses.replace(schedule, factors=tuple(factors))


def _direction(config: Config, axes: Tree) -> optax.GradientTransformation:
    """The transformation of a gradient into an undecayed step of learning rate 1."""
    match config.optimizer:
        case "adamw":
            return optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps)
        case "sgd":
            return optax.trace(config.sgd_momentum) if config.sgd_momentum else optax.identity()
        case "lion":
            return optax.scale_by_lion(config.adam_b1, config.adam_b2)
        case "adafactor":
            from maxtext_lite.training.per_tensor import adafactor

            return adafactor(axes)
        case "muon":
            from maxtext_lite.training.per_tensor import muon

            return muon(config, axes)


OptimizerFactory: TypeAlias = Callable[[optax.Schedule, Tree], optax.GradientTransformation]
"""(schedule, axes) -> an optimizer that applies the schedule. The schedule gives the config's learning rate by the
number of updates so far; `axes` is a tree like the parameters, with the logical axes of each as a tuple."""


UNKNOWN_RATE = Schedule("steps", 1.0, lambda u: jnp.full_like(u, jnp.nan))
"""The schedule of an optimizer with an unknown learning rate of its own: null in metrics.jsonl."""


def make_optimizer(
    config: Config,
    axes: Tree,
    own: optax.GradientTransformation | OptimizerFactory | None = None,
    *,
    last: float = 0.0,
) -> GradientAccumulation:
    """Clipping, the optimizer's direction and decoupled weight decay, in that order, without the learning rate.

    The routers' biases are exempt from all of it: see `GradientAccumulation`.

    Args:
      axes: the parameters' logical axes, which decide what is decayed.
      own: replaces all of it, the learning rate included; None: nothing does.
      last: the number of steps of the schedule that `own` receives if it is a factory.
    Raises:
      UserError: `own` is a factory, and the schedule counts more than updates.
    """
    if own is None:
        inner = _configured(config, axes)
    elif isinstance(own, optax.GradientTransformation):
        inner = own
    elif config.schedule_unit != "steps":
        raise UserError(
            f"schedule_unit={config.schedule_unit} does not count updates, as the schedule of an optimizer's factory "
            "does. Nearest that works: schedule_unit=steps."
        )
    elif config.learning_rate_scaling_of == "stage":
        raise UserError(
            "learning_rate_scaling_of=stage does not follow from the number of updates, as the schedule of an "
            "optimizer's factory does. Nearest that works: learning_rate_scaling_of=target."
        )
    else:
        rate = learning_rate_schedule(config, last=last).rate
        inner = own(lambda updates: rate(jnp.asarray(updates) + 1), axes)
    if config.learning_rate_groups:
        inner = _scaled(inner, _group_multipliers(config, axes))
    biases = map_axes(lambda leaf: unstacked(leaf) == ("router_bias",), axes)
    return GradientAccumulation(
        inner,
        LossScaling(config.loss_scale, config.loss_scale_growth_interval) if config.dtype == "float16" else None,
        max_skipped=config.max_skipped_updates if config.skip_nonfinite_updates else 1,
        biases=biases if any(jax.tree.leaves(biases)) else None,
        bias_rate=config.routed_bias_update_rate,
        keeps_loads=config.load_balance_over == "batch",
        masters=config.master_weights,
        over_data=config.shard_optimizer_over_data,
        on_host=config.optimizer_memory_host_offload,
        has_rate=own is not None,
        ema_decay=config.ema_decay,
        state_dtype=config.optimizer_state_dtype,
        seed=config.seed,
        clip_heads=_head_clipping(config),
    )


def _group_multipliers(config: Config, axes: Tree) -> Tree:
    """The multiplier of each parameter's learning rate by learning_rate_groups."""

    def multiplier(path: TreePath, leaf: tuple[str, ...]) -> float:
        del leaf
        names = [str(entry.key) for entry in path]
        if config.lora_rank:
            names[-1] = f"lora_{names[-1]}"
        found = 1.0
        for group, rate in config.learning_rate_groups.items():
            if is_in_group("/".join(names), group):
                found = rate
        return found

    return jax.tree_util.tree_map_with_path(multiplier, axes, is_leaf=lambda node: isinstance(node, tuple))


def _scaled(inner: optax.GradientTransformation, multipliers: Tree) -> optax.GradientTransformation:
    """`inner` with each parameter's updates multiplied; its state stays the same."""

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, params)
        # Without its gradient, a router's bias is an empty tree.
        return jax.tree.map(optax.tree.scale, multipliers, updates), state

    return optax.GradientTransformation(inner.init, update)


def _head_clipping(config: Config) -> Callable[[Tree, Array], Tree] | None:
    if not config.qk_clip_threshold:
        return None
    from maxtext_lite.models.qk_clip import clip_heads

    return functools.partial(clip_heads, threshold=config.qk_clip_threshold, shape=model_shape(config))


def _configured(config: Config, axes: Tree) -> optax.GradientTransformation:
    clipping = config.gradient_clipping_threshold
    direction = _direction(config, axes)
    if config.depth_ratio != 1:  # outside the layers adam_eps has no depth: Adam's step of g / L is that with L x eps
        by_depth = map_axes(lambda leaf: 1.0 if unstacked(leaf) != leaf else 1 / config.depth_ratio, axes)
        # Without its gradient, a router's bias is an empty tree.
        shrink = optax.stateless(lambda updates, _: jax.tree.map(optax.tree.scale, by_depth, updates))
        direction = optax.chain(shrink, direction)
    if config.width_ratio != 1:  # but for the decay, so that rate x decay is the same in every width
        rate = 1 / config.width_ratio
        is_hidden = map_axes(lambda leaf: unstacked(leaf) != leaf and is_matrix(leaf), axes)
        direction = _scaled(direction, jax.tree.map(lambda hidden: rate if hidden else 1.0, is_hidden))
    decayed = map_axes(lambda leaf: config.weight_decay_on_norms_and_embeddings or is_matrix(leaf), axes)
    return optax.chain(
        optax.clip_by_global_norm(clipping) if clipping else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, decayed),  # also at 0: the state keeps its shape
    )
