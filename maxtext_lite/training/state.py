"""The parts of a train step, and TrainState: all that a step changes, its creation and its sharding."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.batching import BatchPlan, scaled_optimizer
from maxtext_lite.config import Config, NumericsConfig, UserError, adapted_weights, remat_of
from maxtext_lite.config.kernels import Accelerator, attention_kernel, grouped_matmul_kernel
from maxtext_lite.config.weights import ExpertSizes, model_shape
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape, Lora, root_key
from maxtext_lite.parallel import (
    Params,
    Tree,
    TreePath,
    accelerator_of,
    make_mesh,
    per_replica,
    sharding,
    tree_shardings,
    with_dims,
    zero1_sharding,
)
from maxtext_lite.training.arrays import Device, as_float32
from maxtext_lite.training.objective import NEXT_TOKEN, Objective, objective_of
from maxtext_lite.training.optimizer import (
    GradientAccumulation,
    OptimizerFactory,
    Progress,
    make_optimizer,
    master_of,
)

if TYPE_CHECKING:
    from maxtext_lite.parallel.pipeline import Pipeline
    from maxtext_lite.training.local_updates import LocalUpdates, OuterState

DecoderFactory: TypeAlias = "Callable[[DecoderShape, Pipeline | None], Decoder]"
"""Makes a decoder from its shape and its pipeline."""


@dataclasses.dataclass(frozen=True)
class Overrides:
    """The parts of a step that the caller supplies; None: as configured."""

    model: DecoderFactory = Decoder
    objective: Objective | None = None
    optimizer: optax.GradientTransformation | OptimizerFactory | None = None


CONFIGURED = Overrides()
"""Every part as configured."""

OF_REPLICAS = ("opt_state", "replica_params")
"""The parts of `TrainState.update_state` that local updates hold once for each replica."""


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The parts of a step on a mesh.

    Attributes:
      config: number formats, tiles, multipliers of auxiliary losses.
      objective: the loss to minimise.
      local: how replicas train apart; None: they share their parameters.
    """

    decoder: Decoder
    optimizer: GradientAccumulation
    mesh: Mesh
    config: NumericsConfig
    objective: Objective = NEXT_TOKEN
    local: "LocalUpdates | None" = None

    @property
    def num_replicas(self) -> int:
        """The replicas that each accumulate gradients of their own."""
        return self.local.num_replicas if self.local else self.mesh.shape["data"]

    @property
    def is_interleaved(self) -> bool:
        """Whether the pipeline schedule is 1f1b, which differentiates pieces of several micro-batches at a time."""
        return self.decoder.pipeline is not None and self.decoder.pipeline.schedule == "1f1b"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a step takes and returns, and that a checkpoint saves.

    With local updates, `params`, `opt_state` and `progress` have one entry per replica: leaves [R, ...].

    Attributes:
      params: the trained parameters: the decoder's, in `weight_dtype`, or with LoRA its adapters, in float32.
      opt_state: the optimizer's state, with float32 masters where `params` are narrower; its `gradient_step` counts
        updates. It never holds a gradient accumulator.
      progress: examples and target tokens of all updates.
      step: int32 number of steps done, skipped ones included.
      skipped_in_a_row: int32 number of consecutive steps, up to this one, skipped for a non-finite gradient. Once it
        reaches the optimizer's `max_skipped`, no step changes the parameters: the run must end, and until the host
        notices, they stay as the failing step had them.
      outer: with local updates, the state that the replicas share; otherwise None.
      frozen: with LoRA, the decoder's parameters without adapters, which no step changes; otherwise None.
      average: with ema_decay, the float32 moving average of `params` over all updates, which begins as the initial
        parameters; sharded and offloaded like the optimizer's state. Otherwise None.
    """

    params: Params
    opt_state: optax.MultiStepsState
    progress: Progress
    step: Array
    skipped_in_a_row: Array
    outer: "OuterState | None" = None
    frozen: Params | None = None
    average: Params | None = None

    @property
    def model_params(self) -> Params:
        """The trained parameters to evaluate and save; with local updates, the last synchronisation's."""
        return self.params if self.outer is None else self.outer.params

    @property
    def update_state(self) -> dict[str, Any]:
        """The parts of a checkpoint beside `model_params` and the numbers of steps."""
        parts: dict[str, Any] = {"opt_state": self.opt_state, "progress": self.progress}
        if self.outer is not None:
            parts["replica_params"] = self.params
            if self.outer.momentum is not None:
                parts["outer_momentum"] = self.outer.momentum
            if self.outer.master is not None:
                parts["outer_master"] = self.outer.master
        return parts

    @property
    def plain_params(self) -> Params:
        """The parameters without adapters that a run may start from."""
        return self.model_params if self.frozen is None else self.frozen


def make_parts(
    config: Config, plan: BatchPlan, devices: Sequence[Device] | None = None, own: Overrides = CONFIGURED
) -> StepContext:
    """The parts of a config's steps on these devices, with the optimizer's settings as `plan` scales them.

    Args:
      devices: may be unattached; None: all attached devices.
    Raises:
      UserError: the config asks for a kernel that does not run on these devices, or contradicts a part of `own`.
    """
    mesh = make_mesh(plan.ici_mesh, plan.dcn_mesh, devices)
    decoder = make_decoder(config, accelerator_of(mesh.devices.flat[0]), plan, own.model)
    optimizer = optimizer_of_run(config, plan, decoder, own, last=plan.steps)
    parts = StepContext(decoder, optimizer, mesh, config, own.objective or objective_of(config))
    if plan.diloco_num_replicas is None:
        return parts
    from maxtext_lite.training.local_updates import LocalUpdates

    return dataclasses.replace(parts, local=LocalUpdates.of(config, plan.diloco_num_replicas))


def optimizer_of_run(
    config: Config, plan: BatchPlan, decoder: Decoder, own: Overrides, *, last: int
) -> GradientAccumulation:
    """The optimizer of a run that ends after `last` steps; the schedule of an own optimizer depends on them."""
    return make_optimizer(scaled_optimizer(config, plan), decoder.trained(decoder.axes), own.optimizer, last=last)


def make_decoder(
    config: Config,
    platform: str | Accelerator,
    plan: BatchPlan | None = None,
    model: DecoderFactory = Decoder,
) -> Decoder:
    """The decoder of a config, with kernels that suit the devices.

    Args:
      platform: "cpu", "gpu" or "tpu", or a description of the accelerator.
      plan: splits layers over pipeline stages and tokens over context shards; None: neither is split.
      model: makes the decoder.
    Raises:
      UserError: the configured attention kernel does not run there.
    """
    shape = decoder_shape(config)
    accelerator = Accelerator.of(platform)
    shards = 1 if plan is None else plan.mesh["context"]
    try:
        kernel = attention_kernel(config, accelerator, shards).name
        global_kernel = attention_kernel(config.of_global_layers, accelerator, shards).name
    except ValueError as error:
        raise UserError(str(error)) from None
    if shape.experts is not None:
        matmul = grouped_matmul_kernel(accelerator, config.dtype)
        shape = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, matmul=matmul))
    shape = dataclasses.replace(shape, attention=kernel, global_kernel=global_kernel)
    return model(shape, None if plan is None else _pipeline(plan))


def make_plain_decoder(config: Config) -> Decoder:
    """The decoder of a config for reading, writing and sampling: without stages, and with adapters merged.

    The training kernel of attention need not run here: decoding attends over its cache.
    """
    return make_decoder(
        config.model_copy(update={"attention": "dot_product", "lora_rank": 0, "qk_clip_threshold": 0}),
        jax.default_backend(),
    )


def abstract_on_mesh(decoder: Decoder, mesh: Mesh, uneven: str) -> Params:
    """Shapes, dtypes and shardings of a decoder's parameters on a mesh.

    Args:
      uneven: the end of the message about a parameter that does not split evenly, after `over`.
    Raises:
      UserError: a parameter does not split evenly; names it.
    """

    def on_mesh(path: TreePath, leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
        try:
            where.shard_shape(leaf.shape)
        except ValueError:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(f"parameter {name} of shape {leaf.shape} cannot be split evenly over {uneven}") from None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(on_mesh, decoder.abstract_params, tree_shardings(mesh, decoder.axes))


def decoder_shape(config: Config) -> DecoderShape:
    """The shape of a config's decoder, with plain attention."""
    remat = remat_of(config)
    width_ratio = config.width_ratio
    config = config.with_plain_multipliers()
    shape = model_shape(config)
    return DecoderShape(
        **vars(dataclasses.replace(shape, experts=_expert_shape(config, shape.experts))),
        norm_epsilon=config.normalization_layer_epsilon,
        activation=config.mlp_activation,
        window=config.sliding_window_size,
        chunk=config.chunk_attn_window_size,
        soft_cap=config.attn_logits_soft_cap,
        query_scalar=config.query_pre_attn_scalar,
        inverse_layer_scaling=config.inverse_layer_scaling,
        position_temperature=config.position_temperature,
        keeps_largest_logits=config.qk_clip_threshold > 0,
        clip_qkv=config.clip_qkv,
        residual_multiplier=config.residual_multiplier,
        logits_multiplier=config.logits_multiplier,
        rope_max_timescale=config.rope_max_timescale,
        rope_local_max_timescale=config.rope_local_max_timescale,
        rope_scaling=config.rope_scaling,
        scaled_embeddings=config.scale_embeddings,
        embedding_multiplier=config.embedding_multiplier,
        final_soft_cap=config.final_logits_soft_cap,
        initializer_range=config.initializer_range,
        width_ratio=width_ratio,
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        grad_dtype=jnp.dtype(config.grad_dtype),
        quantization=config.quantization,
        saved=None if remat is None else remat.saved,
        offloaded=() if remat is None else remat.offloaded,
        context_strategy=config.context_parallel_strategy,
        lora=Lora(config.lora_rank, config.lora_alpha, adapted_weights(config)) if config.lora_rank else None,
    )


def _pipeline(plan: BatchPlan) -> "Pipeline | None":
    if plan.num_pipeline_stages == 1:
        return None
    from maxtext_lite.parallel.pipeline import Pipeline

    return Pipeline(
        plan.num_pipeline_stages, plan.num_pipeline_microbatches, plan.num_pipeline_repeats, plan.pipeline_schedule
    )


def _expert_shape(config: Config, sizes: ExpertSizes | None) -> ExpertShape | None:
    if sizes is None:
        return None
    return ExpertShape(
        **vars(sizes),
        score=config.routed_score_func,
        normalised=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        on_input=config.apply_router_weight_on_input,
        capacity_factor=None if config.capacity_factor == -1 else config.capacity_factor,
        num_groups=config.n_routing_groups,
        groups_per_token=config.topk_routing_group,
        activation=config.mlp_activation,
        grad_dtype=jnp.dtype(config.grad_dtype),
        quantization=config.quantization,
    )


def _state_of(parts: StepContext, all_params: Params) -> TrainState:
    """The state before the first step, from all parameters, adapters included."""
    decoder = parts.decoder
    local = parts.local
    params = decoder.trained(all_params)
    frozen = decoder.frozen(all_params)
    opt_state = parts.optimizer.init(params)
    progress = Progress.start()
    outer = None
    if local is not None:
        outer = local.outer_state(params, master_of(opt_state))
        params, opt_state, progress = local.copies((params, opt_state, progress))
    zero = jnp.zeros([], jnp.int32)
    average = as_float32(params) if parts.optimizer.ema_decay else None
    return TrainState(params, opt_state, progress, zero, zero, outer, frozen, average)


def gradient_shardings(parts: StepContext) -> Tree:
    """The shardings of a step's summed gradients and of its update: the parameters', or shares (ZeRO-1)."""
    decoder = parts.decoder
    params = tree_shardings(parts.mesh, decoder.trained(decoder.axes))
    if not parts.optimizer.over_data:
        return params
    trained = decoder.trained(decoder.abstract_params)
    return jax.tree.map(lambda where, leaf: zero1_sharding(where, leaf.shape), params, trained)


def state_shardings(parts: StepContext) -> TrainState:
    """The sharding of each leaf of the state."""
    decoder = parts.decoder
    local = parts.local
    everywhere: Any = sharding(parts.mesh)
    params = tree_shardings(parts.mesh, decoder.trained(decoder.axes))
    frozen = tree_shardings(parts.mesh, decoder.frozen(decoder.axes))
    progress = Progress(everywhere, everywhere)
    outer = None
    if local is not None:
        has_masters = parts.optimizer.has_masters(decoder.trained(decoder.abstract_params))
        outer = local.outer_like(params, has_masters=has_masters)
        params, progress = jax.tree.map(per_replica, (params, progress))
    average = None
    if parts.optimizer.ema_decay:
        memory = "pinned_host" if parts.optimizer.on_host else "device"
        average = jax.tree.map(lambda where: where.with_memory_kind(memory), gradient_shardings(parts))
    return TrainState(params, _opt_state_shardings(parts), progress, everywhere, everywhere, outer, frozen, average)


def _opt_state_shardings(parts: StepContext) -> Tree:
    """Optimizer state of a parameter's shape has its gradient's sharding.

    State that lacks one dim of its parameter (adafactor's means over it) has that sharding without the dim, and the
    scales of blocks without that of the last dim; the rest, which is counts, is replicated.
    """
    everywhere = sharding(parts.mesh)
    trained = parts.decoder.trained(parts.decoder.abstract_params)
    gradients = jax.tree.leaves(gradient_shardings(parts))
    sharding_of = {
        _names(path): (leaf.shape, where)
        for (path, leaf), where in zip(jax.tree_util.tree_leaves_with_path(trained), gradients, strict=True)
    }

    def of_parameter(path: TreePath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = _names(path)
        for first in range(len(names)):  # optimizers repeat the parameters' tree below names of their own
            shape, where = sharding_of.get(names[first:], ((), everywhere))
            if shape == leaf.shape:
                return where
            if leaf.ndim == len(shape) > 0 and shape[:-1] == leaf.shape[:-1]:  # scales of blocks
                return with_dims(where, len(shape), len(shape) - 1, len(shape), 1)
            for dim in reversed(range(len(shape))):
                if (*shape[:dim], *shape[dim + 1 :]) == leaf.shape:
                    return with_dims(where, len(shape), dim, dim + 1, 0)
        return everywhere

    def place(path: TreePath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        where = of_parameter(path, leaf)
        if parts.local:
            where = per_replica(where)
        is_count = leaf.ndim == 0  # and stays on the devices
        return where.with_memory_kind("pinned_host") if parts.optimizer.on_host and not is_count else where

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(parts.optimizer.init, trained))


def _names(path: TreePath) -> tuple[str, ...]:
    """The dict keys on a path into a tree."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def abstract_state(parts: StepContext) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated."""
    shapes = jax.eval_shape(lambda params: _state_of(parts, params), parts.decoder.abstract_params)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, state_shardings(parts)
    )


def with_moments_converted(parts: StepContext, state: TrainState, then: GradientAccumulation) -> TrainState:
    """A state of the optimizer `then` in the `state_dtype` of this one, each leaf where it belongs."""

    def convert(opt_state: optax.MultiStepsState) -> optax.MultiStepsState:
        return parts.optimizer.narrow(then.widen(opt_state))

    opt_state = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), state.opt_state)
    converted = jax.jit(jax.vmap(convert) if parts.local else convert)(opt_state)
    return dataclasses.replace(state, opt_state=jax.device_put(converted, state_shardings(parts).opt_state))


def init_state(parts: StepContext, seed: int) -> TrainState:
    """The state before the first step, each leaf created on its own devices; its values depend on the seed alone."""
    create = jax.jit(lambda key: _state_of(parts, parts.decoder.init(key)), out_shardings=state_shardings(parts))
    with jax.set_mesh(parts.mesh):
        return create(root_key(seed))


def state_from(parts: StepContext, params: Params, seed: int, adapters: Params | None = None) -> TrainState:
    """The state before the first step of a run that starts from given parameters on the mesh, which are donated.

    Args:
      params: without adapters.
      adapters: None: with LoRA, new ones from the seed.
    """

    def state(params: Params, adapters: Params | None, key: Array) -> TrainState:
        decoder = parts.decoder
        both = decoder.with_adapters(params, key) if adapters is None else decoder.joined(adapters, params)
        return _state_of(parts, both)

    create = jax.jit(state, donate_argnums=(0, 1), out_shardings=state_shardings(parts))
    with jax.set_mesh(parts.mesh):
        return create(params, adapters, root_key(seed))
