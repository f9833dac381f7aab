"""The configured optimizer, made of Optax's parts, and its learning rate schedule."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.rate_shape import decay, warm_up
from maxtext_lite.config import Config, OptimizerConfig, UserError
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.sources_on_hosts import target_tokens_of_run
from maxtext_lite.models import is_matrix, num_inputs, of_one, unstacked
from maxtext_lite.parallel import Tree, TreePath
from maxtext_lite.training.accumulate import GradientAccumulation, loss_scaling
from maxtext_lite.training.arrays import Scalar

_BIAS_AXES = ("router_bias",)

Rate: TypeAlias = Callable[[Scalar], jax.Array]
"""Position u in the run, in steps (float or traced) -> learning rate of the update that reaches it."""


class Progress(NamedTuple):
    """Examples and target tokens of all applied updates, each as uint32 [2]: high and low half of a 64-bit count."""

    examples: jax.Array
    tokens: jax.Array

    @classmethod
    def start(cls) -> "Progress":
        """No updates."""
        return cls(jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.uint32))

    def plus(self, examples: jax.Array, tokens: jax.Array) -> "Progress":
        """The progress after another update with these counts (int32)."""
        return Progress(_add(self.examples, examples), _add(self.tokens, tokens))


def _add(count: jax.Array, more: jax.Array) -> jax.Array:
    low = count[1] + more.astype(jnp.uint32)
    return jnp.stack([count[0] + (low < count[1]), low])


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of an update as a function of progress, the update included.

    Attributes:
      unit: the unit of progress (`schedule_unit`).
      units_per_step: units in a step at the target batch size, the measure of positions.
      rate: learning rate at a position.
    """

    unit: Literal["steps", "examples", "tokens"]
    units_per_step: float
    rate: Rate

    def __call__(self, updates: Scalar, progress: Progress) -> jax.Array:
        """The learning rate of the update that reaches both counts."""
        if self.unit == "steps":
            return self.rate(jnp.asarray(updates, jnp.float32))
        high, low = (progress.examples if self.unit == "examples" else progress.tokens).astype(jnp.float32)
        return self.rate((high * 2.0**32 + low) / self.units_per_step)


def learning_rate_schedule(config: OptimizerConfig, *, last: float, units_per_step: float = 1.0) -> Schedule:
    """The config's schedule over a run that ends at position `last`, counted in steps at the target batch size.

    The rate rises as u/warmup_steps, reaches the peak at u = warmup_steps and its final fraction at u = last. Neither
    point is rounded: the curve is continuous in u. Update 1 has rate peak/warmup_steps.
    """
    peak, last = config.learning_rate, float(last)  # jax takes no integer above 2**31

    def rate(u: Scalar) -> jax.Array:
        u = jnp.asarray(u, jnp.float32)
        return peak * decay(config, u, last, jnp) * warm_up(config, u, last, jnp)

    return Schedule(config.schedule_unit, units_per_step, rate)


def schedule_of_run(
    config: OptimizerConfig, plan: BatchPlan, source: ExampleSource, *, seed: int, step: int, examples_seen: int
) -> Schedule:
    """The config's schedule over a run that has come this far: it ends with the run.

    A restart with the same config leaves it as it is, to the bit; one that changes the batch or the length moves the
    end.

    Args:
      config: with the optimizer's settings as `plan` scales them.
      source: its target tokens are counted with schedule_unit=tokens; all hosts then call this.
      seed: of the data's order.
    """
    unit = config.schedule_unit
    last = plan.schedule_end(unit, step, examples_seen)
    if unit == "steps":
        return learning_rate_schedule(config, last=last)
    _, total = plan.length.end_after(step, examples_seen)
    if unit == "tokens":
        total = target_tokens_of_run(source, total_examples=total, seed=seed, loading_hosts=plan.loading_hosts)
    return learning_rate_schedule(config, last=last, units_per_step=total / last)


def _direction(config: OptimizerConfig, axes: Tree) -> optax.GradientTransformation:
    """The transformation of a gradient into an undecayed step of learning rate 1."""
    match config.optimizer:
        case "adamw":
            return optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps)
        case "sgd":
            return optax.trace(config.sgd_momentum) if config.sgd_momentum else optax.identity()
        case "lion":
            return optax.scale_by_lion(config.adam_b1, config.adam_b2)
        case "adafactor":
            return _of_each_tensor(
                optax.chain(
                    optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
                ),
                axes,
            )
        case "muon":
            return _muon(config, axes)


def _over_axes(function: Callable[[tuple[str, ...]], object], axes: Tree) -> Tree:
    """`function` of each parameter's logical axes, as a tree like the parameters."""
    return jax.tree.map(function, axes, is_leaf=lambda node: isinstance(node, tuple))


def _of_each_tensor(inner: optax.GradientTransformation, axes: Tree) -> optax.GradientTransformation:
    """`inner` applied to every tensor by itself, to each layer of a stack and each expert, as if there were no stacks.

    Its state is a tree like the parameters with one state of `inner` per stack: arrays have the stack's dims before
    their own; scalars, which are counts, are shared by the stack.
    """
    num_stacked = dict(
        jax.tree_util.tree_leaves_with_path(_over_axes(lambda leaf: len(leaf) - len(of_one(leaf)), axes))
    )

    def over(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: 0 if x.ndim else None, tree)

    def init(params: Tree) -> Tree:
        def of_stack(path: TreePath, p: jax.Array) -> Tree:
            one, of_one_tensor = jax.ShapeDtypeStruct(p.shape[num_stacked[path] :], p.dtype), inner.init
            for _ in range(num_stacked[path]):
                of_one_tensor = jax.vmap(of_one_tensor, out_axes=over(jax.eval_shape(inner.init, one)))
            return of_one_tensor(p)

        return jax.tree_util.tree_map_with_path(of_stack, params)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        def of_stack(path: TreePath, update: jax.Array, state: Tree, p: jax.Array) -> tuple[Tree, Tree]:
            of_one_tensor = inner.update
            for _ in range(num_stacked[path]):
                of_one_tensor = jax.vmap(of_one_tensor, in_axes=(0, over(state), 0), out_axes=(0, over(state)))
            return of_one_tensor(update, state, p)

        tree = jax.tree.structure(updates)
        found = tree.flatten_up_to(jax.tree_util.tree_map_with_path(of_stack, updates, state, params))
        return tuple(tree.unflatten(part) for part in zip(*found, strict=True))

    return optax.GradientTransformation(init, update)


def _along(name: str, inner: optax.GradientTransformation, axes: Tree) -> optax.GradientTransformation:
    """`inner`, mapped over the dim `name` of the parameters that have one, so that it stays split as it is.

    The state is that of `inner`. Counts are shared by all parameters.
    """
    places = _over_axes(lambda leaf: leaf.index(name) if name in leaf else None, axes)
    at = dict(jax.tree_util.tree_leaves_with_path(places))

    def dims(tree: Tree) -> Tree:
        def dim(path: TreePath, _: jax.Array) -> int | None:  # the state's paths end in those of the parameters
            return next((at[path[start:]] for start in range(len(path)) if path[start:] in at), None)

        return jax.tree_util.tree_map_with_path(dim, tree)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        of = (dims(updates), dims(state), dims(params))
        return jax.vmap(inner.update, in_axes=of, out_axes=of[:2])(updates, state, params)

    return optax.GradientTransformation(inner.init, update) if at else inner


def _muon(config: OptimizerConfig, axes: Tree) -> optax.GradientTransformation:
    """Muon on the layers' matrices, each expert by itself, and Adam on embeddings, head and norms, both with Nesterov's
    momentum, which Optax applies to either or neither.

    Source: Jordan et al. 2024.
    """

    def dimension_numbers(leaf: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
        """The input and output dims of a stacked projection; None where Muon does not apply."""
        matrix = of_one(leaf)
        if unstacked(leaf) == leaf or not is_matrix(leaf):
            return None
        dims = range(-len(matrix), 0)
        split = num_inputs(matrix)
        inputs, outputs = tuple(dims[:split]), tuple(dims[split:])
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)

    # Optax's muon applies a learning rate: 1 leaves it to the train step, and -1 undoes the sign.
    muon = optax.contrib.muon(
        learning_rate=1.0,
        beta=config.adam_b1,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        eps=config.adam_eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_over_axes(dimension_numbers, axes),
    )
    # It merges all dims before a matrix, of which only the first can stay split: that is to be the layers'.
    for name in ("repeats", "experts"):
        muon = _along(name, muon, axes)
    return optax.chain(muon, optax.scale(-1.0))


OptimizerFactory: TypeAlias = Callable[[optax.Schedule, Tree], optax.GradientTransformation]
"""(schedule, axes) -> an optimizer that applies the schedule, which gives the config's learning rate by the number of
updates so far; `axes` is a tree like the parameters, with the logical axes of each as a tuple."""


def own_optimizer(
    optimizer: optax.GradientTransformation | OptimizerFactory, config: OptimizerConfig, axes: Tree, *, last: float
) -> optax.GradientTransformation:
    """A user's optimizer: itself, or made by a factory with the config's schedule over `last` steps.

    Raises:
      UserError: it is a factory, and schedule_unit is not steps.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    if config.schedule_unit != "steps":
        raise UserError(
            f"optimizer: a factory takes a schedule over updates, but schedule_unit={config.schedule_unit} counts "
            "something else. Nearest that works: schedule_unit=steps."
        )
    rate = learning_rate_schedule(config, last=last).rate
    return optimizer(lambda updates: rate(jnp.asarray(updates) + 1), axes)


UNKNOWN_RATE = Schedule("steps", 1.0, lambda u: jnp.full_like(u, jnp.nan))
"""The schedule of an optimizer with an unknown learning rate of its own: null in metrics.jsonl."""


def make_optimizer(config: Config, axes: Tree, own: optax.GradientTransformation | None = None) -> GradientAccumulation:
    """Clipping, the optimizer's direction and decoupled weight decay, in that order, without the learning rate.

    The routers' biases are exempt from all of it: see `GradientAccumulation`.

    Args:
      axes: the parameters' logical axes, which decide what is decayed.
      own: replaces all of it, the learning rate included; None: nothing does.
    """
    biases = _over_axes(lambda leaf: unstacked(leaf) == _BIAS_AXES, axes)
    decayed = _over_axes(lambda leaf: config.weight_decay_on_norms_and_embeddings or is_matrix(leaf), axes)
    clipping = config.gradient_clipping_threshold
    return GradientAccumulation(
        own
        or optax.chain(
            optax.clip_by_global_norm(clipping) if clipping else optax.identity(),
            _direction(config, axes),
            optax.add_decayed_weights(config.weight_decay, decayed),  # also at 0: the state keeps its shape
        ),
        loss_scaling(config),
        max_skipped=config.max_skipped_updates if config.skip_nonfinite_updates else 1,
        biases=biases if any(jax.tree.leaves(biases)) else None,
        bias_rate=config.routed_bias_update_rate,
        masters=config.master_weights,
        over_data=config.shard_optimizer_over_data,
        on_host=config.optimizer_memory_host_offload,
        has_rate=own is not None,
    )
