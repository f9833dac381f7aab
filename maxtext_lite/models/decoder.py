"""The decoder: stacked and scanned layers, as pure functions of a nested dict of parameters."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from maxtext_lite.config.keys import mixer_of
from maxtext_lite.config.weights import WeightTable, end_weights, is_matrix, layer_kind, part_of
from maxtext_lite.models.attention import attention
from maxtext_lite.models.decoding import CachedAttend, KVCache, Memory
from maxtext_lite.models.experts import EXPERT_COUNTS, with_layer
from maxtext_lite.models.layers import (
    RESIDUAL_AXES,
    Attend,
    Block,
    BlockFactory,
    DecoderLayer,
    Embedding,
    Head,
    Norm,
    OutputHead,
    projected,
    query_factor,
    scaled_queries,
)
from maxtext_lite.models.lora import adapter_axes, adapters_of, frozen_of, joined, new_adapters, with_merged_experts
from maxtext_lite.models.ops import Rotation, soft_capped
from maxtext_lite.models.rotary import rotary_angles
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import Params, Pipeline, Tree


def graph_of(layer: Callable[..., Block]) -> Any:
    """The graph that makes a module from one layer's parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(params=0))))


def stacked(axis: str, layer: Callable[..., Block], num_layers: int, rngs: nnx.Rngs) -> Any:
    """A layer whose parameters are those of all layers, stacked on a leading dim."""

    graphs: list[Any] = []

    def create(key: jax.Array) -> Any:
        graph, params = nnx.split(layer(rngs=nnx.Rngs(params=key)))
        graphs.append(graph)  # the same for every layer: this is traced once
        return params

    stacked = jax.vmap(create)(jax.random.split(rngs.params(), num_layers))
    stacked = jax.tree.map(
        lambda param: param.replace(axes=(axis, *param.axes)),
        stacked,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
    return nnx.merge(graphs[0], stacked)


Kinds = tuple[str, str | None]
"""The kind of a layer, and the name of its stack if there are several."""


def layer_of(stack: Tree, number: jax.Array) -> Tree:
    """The parameters of one layer of a stack [L, ...], for a loop over a few tokens.

    On CPUs XLA casts bfloat16 to float32 before it slices, and casts before the loop: a float32 copy of the whole stack
    for each token. An optimization barrier that includes the loop's own counter keeps the cast in the loop.
    """
    stack, number = jax.lax.platform_dependent(
        stack, number, cpu=lambda *both: jax.lax.optimization_barrier(both), default=lambda *both: both
    )
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stack)


def scan_pattern(
    layer: Callable[[Kinds, int | None, Tree, Tree], Tree],
    kinds: tuple[Kinds, ...],
    carry: Tree,
    stacks: dict[str | None, Tree],
) -> Tree:
    """The carry after layers whose kinds follow a repeated pattern.

    Args:
      layer: (kinds, place, carry, stack) -> carry, for the stack's entry at that place; None: the stack is the entry.
      kinds: the pattern.
      stacks: by name, leaves [L, ...]. The layers after the last whole pattern run outside the scan.
    """
    period, num_layers = len(kinds), sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks.values())
    rounds, each = num_layers // period, Counter(name for _, name in kinds)
    if len(stacks) > 1 and rounds < 2:  # no pattern repeats
        return _in_runs(layer, [kinds[number % period] for number in range(num_layers)], carry, stacks)
    if period == 1:
        ((_, name),) = kinds
        return jax.lax.scan(lambda carry, stack: (layer(kinds[0], None, carry, stack), None), carry, stacks[name])[0]

    def some(carry: Tree, stacks: dict[str | None, Tree], count: int) -> Tree:
        done = Counter[str | None]()
        for kind in kinds[:count]:
            carry = layer(kind, done[kind[1]], carry, stacks[kind[1]])
            done[kind[1]] += 1
        return carry

    def in_rounds(name: str | None) -> Tree:
        whole = rounds * each[name]
        return jax.tree.map(lambda x: x[:whole].reshape(rounds, each[name], *x.shape[1:]), stacks[name])

    def rest(name: str | None) -> Tree:
        return jax.tree.map(lambda x: x[rounds * each[name] :], stacks[name])

    whole: dict[str | None, Tree] = {name: in_rounds(name) for name in stacks}
    carry, _ = jax.lax.scan(lambda carry, stacks: (some(carry, stacks, period), None), carry, whole)
    return some(carry, {name: rest(name) for name in stacks}, num_layers - rounds * period)


def _in_runs(
    layer: Callable[[Kinds, int | None, Tree, Tree], Tree],
    kinds: list[Kinds],
    carry: Tree,
    stacks: dict[str | None, Tree],
) -> Tree:
    """`scan_pattern` for each run of consecutive layers with the same stack."""
    done = Counter[str | None]()
    for _, group in itertools.groupby(kinds, key=lambda kind: kind[1]):
        run = tuple(group)
        name, first = run[0][1], done[run[0][1]]
        done[name] += len(run)
        part = jax.tree.map(lambda x: x[first : first + len(run)], stacks[name])  # noqa: B023
        period = next(p for p in range(1, len(run) + 1) if run[p:] == run[: len(run) - p])
        carry = scan_pattern(layer, run[:period], carry, {name: part})
    return carry


class Stream(NamedTuple):
    """The values that flow from layer to layer.

    Attributes:
      x_BTD: the residual stream, in `dtype`.
      segment_BT: document number of each token.
      position_BT: position of each token in its document.
      aux: sums over the layers so far of what `experts.ExpertShape.aux_axes` names, [B] or [B, T], and the
        EXPERT_COUNTS of the last L layers with experts; {} without experts.
    """

    x_BTD: jax.Array
    segment_BT: jax.Array
    position_BT: jax.Array
    aux: dict[str, jax.Array]


def stream_axes(shape: DecoderShape) -> Tree:
    """Logical axes of a stream's arrays."""
    token_axes: Any = ("batch", "length")
    aux_axes: Any = {} if shape.experts is None else shape.experts.aux_axes
    return Stream(RESIDUAL_AXES, token_axes, token_axes, aux_axes)  # type: ignore[arg-type]


def empty_aux(shape: DecoderShape, num_rows: int, num_tokens: int) -> dict[str, jax.Array]:
    """The `aux` of a stream of rows of this many tokens before the first layer: zeros."""
    experts = shape.experts
    if experts is None:
        return {}
    sizes = num_rows, num_tokens
    aux = {name: jnp.zeros(sizes[: len(axes)], jnp.float32) for name, axes in experts.aux_axes.items()}
    if experts.biased:
        aux[EXPERT_COUNTS] = jnp.zeros((num_rows, shape.num_expert_layers, experts.num_experts), jnp.int32)
    return aux


class _Modules(nnx.Module):
    def __init__(self, shape: DecoderShape, block: BlockFactory, *, rngs: nnx.Rngs):
        self.embedding = Embedding(shape, rngs=rngs)
        self.layers = _layers(shape, block, rngs)
        self.dense_layers = _stack(shape, "dense_layers", block, rngs) if shape.num_dense_layers else None
        self.final_norm = Norm(shape, part_of(end_weights(shape), "final_norm"))
        self.head = Head(shape, rngs=rngs) if part_of(end_weights(shape), "head") else None


def _layers(shape: DecoderShape, block: BlockFactory, rngs: nnx.Rngs) -> nnx.Module:
    """The layers after the first dense ones, in as many stacks as there are kinds with weights of their own."""
    if "layers" in shape.stacks:
        return _stack(shape, "layers", block, rngs)
    mixed = nnx.Module()
    for path in shape.stacks:
        setattr(mixed, path.removeprefix("layers/"), _stack(shape, path, block, rngs))
    return mixed


def _stack(shape: DecoderShape, path: str, block: BlockFactory, rngs: nnx.Rngs) -> nnx.Module:
    per_tensor_axes = functools.partial(block, shape.of_stack(path))
    return stacked(path.partition("/")[0], per_tensor_axes, len(shape.stacks[path]), rngs)


@functools.lru_cache(maxsize=64)
def _abstract(shape: DecoderShape, block: BlockFactory) -> tuple[Any, dict[str, Any], Any]:
    """The graph of the modules, that of a layer of each stack, and the abstract parameters; found once a process."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: _Modules(shape, block, rngs=nnx.Rngs(params=0))))
        layers = {path: graph_of(functools.partial(block, shape.of_stack(path))) for path in shape.stacks}
    return graph, layers, state


class Decoder:
    """A Llama-family decoder (arXiv:2302.13971): pure functions of `params`, which `init` makes.

    Args:
      shape: decides parameters and arithmetic.
      pipeline: how the layers are split over stages; None: every device has all of them.
      block: makes a layer, (shape, rngs=) -> `Block`.

    Attributes:
      abstract_params: shapes and dtypes of the parameters.
      axes: a tree like `params` whose leaves are the tuples of logical axes.
    """

    def __init__(self, shape: DecoderShape, pipeline: Pipeline | None = None, block: BlockFactory = DecoderLayer):
        self.shape, self.pipeline, self.block = shape, pipeline, block
        self._graph, self._layer_graphs, state = _abstract(shape, block)
        axes = nnx.to_pure_dict(
            jax.tree.map(
                lambda param: param.replace(param.axes), state, is_leaf=lambda node: isinstance(node, nnx.Param)
            )
        )
        if pipeline:
            axes["layers"] = jax.tree.map(
                pipeline.axes_in_stages, axes["layers"], is_leaf=lambda node: isinstance(node, tuple)
            )
        self._plain_axes = axes
        self.axes = axes if shape.lora is None else joined(shape.lora, adapter_axes(shape.lora, axes), axes)
        self.abstract_params: Params = jax.eval_shape(
            lambda params, key: self.with_adapters(self._in_stages(params), key),
            nnx.to_pure_dict(state),
            jax.eval_shape(lambda: jax.random.key(0)),  # without eval_shape it would be compiled and run
        )

    def init(self, key: jax.Array) -> Params:
        """New parameters, normal with standard deviation `initializer_range`, norms 1; the same for any sharding."""
        with nnx.use_eager_sharding(False):
            params = self._in_stages(
                nnx.to_pure_dict(nnx.state(_Modules(self.shape, self.block, rngs=nnx.Rngs(params=key))))
            )
        return self.with_adapters(params, key)

    def with_adapters(self, params: Params, key: jax.Array) -> Params:
        """These parameters, as the pipeline stores them, with new adapters; unchanged without LoRA."""
        lora = self.shape.lora
        if lora is None:
            return params
        return joined(lora, new_adapters(lora, self._plain_axes, params, key), params)

    def trained(self, tree: Tree) -> Tree:
        """The part of a tree like `params` that is trained: all of it, or with LoRA the adapters."""
        return tree if self.shape.lora is None else adapters_of(tree)

    def frozen(self, tree: Tree) -> Tree:
        """The part of a tree like `params` that is frozen; None without LoRA."""
        return None if self.shape.lora is None else frozen_of(tree)

    def joined(self, trained: Tree, frozen: Tree) -> Tree:
        """The tree like `params` with these two parts."""
        return trained if self.shape.lora is None else joined(self.shape.lora, trained, frozen)

    def _in_stages(self, params: Params) -> Params:
        """The parameters with the layers as the pipeline stores them."""
        if self.pipeline is None:
            return params
        return params | {"layers": jax.tree.map(self.pipeline.in_stages, params["layers"])}

    def cast(self, params: Params) -> Params:
        """The parameters as matmuls use them, in `dtype`; norms, biases, routers and tables are unchanged.

        Gradients with respect to the cast copy round each micro-batch's gradient once, and sharded weights are gathered
        in `dtype`. The look-up's gradient is a sum over tokens and keeps its width.
        """

        def cast_leaf(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
            return x.astype(self.shape.dtype) if is_matrix(axes) and "router" not in axes else x

        return jax.tree.map(cast_leaf, self.axes, params, is_leaf=lambda node: isinstance(node, tuple))

    def hidden(self, params: Params, token_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
        """Final hidden states [B, T, D], normed, in `dtype`.

        Args:
          segment_BT: document number of each token, 0 for padding; a token attends to its own document only.
          position_BT: position of each token in its document.
        """
        return self.hidden_and_aux(params, token_BT, segment_BT, position_BT)[0]

    def hidden_and_aux(
        self, params: Params, token_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`hidden`, and the stream's `aux` after all layers."""
        aux = empty_aux(self.shape, *token_BT.shape)
        stream = Stream(self.embed(params, token_BT, position_BT), segment_BT, position_BT, aux)
        stream = self.dense_layers(params, stream)
        run = (
            self.layers
            if self.pipeline is None
            else functools.partial(self.pipeline.run, self.layers, axes=stream_axes(self.shape))
        )
        stream = run(params["layers"], stream)
        return self.final_norm(params, stream.x_BTD), stream.aux

    def embed(self, params: Params, token_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        return nnx.merge(self._graph, params).embedding(token_BT, position_BT, self.shape.dtype)

    def dense_layers(self, params: Params, stream: Stream) -> Stream:
        """The stream after the first dense layers of a model with experts; most models have none.

        Like the embedding, they are on all pipeline stages.
        """
        if not self.shape.num_dense_layers:
            return stream
        return self._scan(params["dense_layers"], stream, self._attend_to(stream), first=0)[0]

    def layers(self, layer_params: Params, stream: Stream) -> Stream:
        """The stream after a stack of layers: all of `params["layers"]`, or some consecutive ones."""

        return self._scan(layer_params, stream, self._attend_to(stream), first=self.shape.num_dense_layers)[0]

    def _attend_to(self, stream: Stream) -> Callable[[str, Any, None], Attend | Memory]:
        """The attention or memory of each kind of layer over the stream's own tokens; it keeps nothing."""

        def of_layer(kind: str, layer: Any, cache: None) -> Attend | Memory:
            if mixer_of(kind) == kind:
                zeros = {name: x[0] for name, x in self._states(kind, 1, stream.segment_BT.shape[0]).items()}
                return Memory(stream.segment_BT, stream.position_BT, zeros, kind)
            segment_BT, scoring = stream.segment_BT, self.shape.scoring(kind)
            if scoring.chunk is not None and scoring.chunk < segment_BT.shape[1]:
                segment_BT = _chunks(stream, scoring.chunk)
            options: Any = {"kernel": self.shape.attention, "strategy": self.shape.context_strategy, "scoring": scoring}
            return lambda q, k, v, sink: (attention(q, k, v, segment_BT, sink, **options), None)

        return of_layer

    def final_norm(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """The output projection's input: the last layer's hidden states [B, T, D], normed."""
        return nnx.merge(self._graph, params).final_norm(x_BTD)

    def new_cache(self, num_sequences: int, num_positions: int) -> KVCache:
        """An empty cache of all layers, in `dtype`, for sequences of at most this many tokens."""
        shape = self.shape
        heads, key_dim, value_dim = shape.num_kv_heads, shape.head_dim, shape.head_dim
        if shape.latent is not None:
            heads, key_dim, value_dim = 1, shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim, None
        layers_of = shape.layers_of
        cache = KVCache.empty(
            num_layers=len(layers_of.get("attention", ())),
            num_sequences=num_sequences,
            num_positions=num_positions,
            num_kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=shape.dtype,
        )
        states = {kind: self._states(kind, len(layers_of[kind]), num_sequences) for kind in self._kinds_with_state}
        return cache._replace(states=states)

    @property
    def cache_axes(self) -> KVCache:
        """Logical axes of the cache; latent attention's one head is on all devices that share its queries."""
        axes: Any = (None, "batch", None if self.shape.latent else "activation_heads", None, None)
        states: Any = {
            kind: {name: (None, "batch", *weight.axes) for name, weight in self._state_table(kind).items()}
            for kind in self._kinds_with_state
        }
        return KVCache(axes, None if self.shape.latent else axes, states)

    @property
    def _kinds_with_state(self) -> list[str]:
        return [mixer for mixer in self.shape.layers_of if mixer != "attention"]

    def _state_table(self, kind: str) -> WeightTable:
        layer = layer_kind(kind)
        assert layer is not None
        return layer.state(self.shape)

    def _states(self, kind: str, num_layers: int, num_sequences: int) -> dict[str, jax.Array]:
        """The states of layers of a kind before the first token, [L, B, ...]."""
        table, sizes = self._state_table(kind), (num_layers, num_sequences)
        return {name: jnp.zeros((*sizes, *weight.sizes), jnp.float32) for name, weight in table.items()}

    def decode(
        self, params: Params, token_BT: jax.Array, start_B: jax.Array, cache: KVCache, count_B: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states [B, T, D] of T more tokens of B sequences, which have `start_B` tokens in the cache already.

        A rotation that follows the length uses the length so far; keys in the cache keep theirs.

        Args:
          count_B: how many of the T are tokens; None: all. Padding follows them: later tokens overwrite its keys, and
            no earlier token attends to them.
        """
        place_1T = jnp.arange(token_BT.shape[1])[None, :]
        position_BT = start_B[:, None] + place_1T

        layers_of = self.shape.layers_of

        def of_layer(kind: str, number: jax.Array, cache: KVCache) -> Attend | Memory:
            mixer = mixer_of(kind)
            layer = number if len(layers_of) == 1 else jnp.sum(jnp.asarray(layers_of[mixer]) < number)
            if mixer != "attention":
                state = {name: all_LB[layer] for name, all_LB in cache.states[kind].items()}
                return Memory(segment_BT, position_BT, state, kind, cache, layer)
            scoring = self.shape.scoring(kind)
            scoring = dataclasses.replace(scoring, scale=scoring.scale_of(self.shape.head_dim))
            return CachedAttend(position_BT, cache, layer, scoring)

        assert self.pipeline is None, "a cache belongs to all layers, a stage has some"
        first = self.shape.num_dense_layers
        segment_BT = jnp.ones_like(token_BT) if count_B is None else (place_1T < count_B[:, None]).astype(jnp.int32)
        stream = Stream(self.embed(params, token_BT, position_BT), segment_BT, position_BT, {})
        if first:
            stream, cache = self._scan(params["dense_layers"], stream, of_layer, first=0, cache=cache)
        # A capacity is for training: here a token's output would depend on how many are decoded at once.
        stream, cache = self._scan(params["layers"], stream, of_layer, first=first, cache=cache, drop=False)
        return self.final_norm(params, stream.x_BTD), cache

    def head(self, params: Params) -> jax.Array:
        """The output projection [D, V]."""
        return params["embedding"]["table"].T if self.shape.tied else params["head"]["projection"]

    def output_head(self, params: Params, dtype: DTypeLike) -> OutputHead:
        """The output projection in `dtype`, with its bias if there is one."""
        head_DV = self.head(params).astype(dtype)
        return OutputHead(head_DV, params["head"]["bias"] if self.shape.logits_bias else None)

    def logits(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """Logits [B, T, V] in float32 of hidden states."""
        logits_BTV = self.shape.logits_multiplier * projected(x_BTD, self.output_head(params, x_BTD.dtype))
        return soft_capped(logits_BTV, self.shape.final_soft_cap) if self.shape.final_soft_cap else logits_BTV

    def _scan(
        self,
        layer_params: Params,
        stream: Stream,
        attend_of: Callable[[str, Any, Any], Attend | Memory],
        *,
        first: int,
        cache: KVCache | None = None,
        drop: bool = True,
    ) -> tuple[Stream, Any]:
        """The stream and the cache after a stack of layers, scanned a whole pattern of kinds at a time.

        Args:
          attend_of: a layer's attention or memory, from its kind, its number and the cache.
          first: number of a layer of the model with the kind of the stack's first one.
        """
        shape = self.shape
        rotations = {kind: self._rotation(stream, kind) for kind in shape.pattern}
        real_BT = stream.segment_BT > 0
        whole = "dense_layers" if first < shape.num_dense_layers else "layers"
        mixed = whole not in shape.stacks
        # Only a cache needs a layer's number, and scores that are divided by it.
        counted = cache is not None or shape.inverse_layer_scaling

        of_kinds: Tree = layer_params if mixed else {None: layer_params}

        def entries(name: str | None, params: Params) -> Tree:
            """For each layer of a stack its parameters, or with a cache its place in the stack, and its number."""
            count = jax.tree.leaves(params)[0].shape[0]
            number = jnp.asarray(shape.stacks[f"layers/{name}"]) if name else first + jnp.arange(count)
            return ({}, jnp.arange(count), number) if cache is not None else (params, None, number if counted else None)

        def layer(kinds: Kinds, place: int | None, carry: Tree, stack: Tree) -> Tree:
            kind, name = kinds
            graph = self._layer_graphs[f"layers/{name}" if name else whole]
            # Indexed in here, a layer's weights are read from the stack again in the backward pass, not kept as copies.
            params, in_stack, number = jax.tree.map(lambda x: x if place is None else x[place], stack)
            x_BTD, aux, cache = carry
            if cache is not None:
                params = layer_of(of_kinds[name], in_stack)
            attend = attend_of(kind, number, cache)
            if (factor_BT := query_factor(shape, kind, stream.position_BT, number)) is not None:
                attend = scaled_queries(cast(Attend, attend), factor_BT)
            module = nnx.merge(graph, with_merged_experts(params))
            x_BTD, cache, more = module(x_BTD, rotations[kind], attend, real_BT, drop=drop)
            return x_BTD, with_layer(aux, more), cache

        if shape.saved is not None:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=shape.saved,
                names_which_can_be_offloaded=shape.offloaded,
                offload_src="device",
                offload_dst="pinned_host",
            )
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False, static_argnums=(0, 1))
        carry = (stream.x_BTD, stream.aux, cache)
        stacks: dict[str | None, Any] = {name: entries(name, params) for name, params in of_kinds.items()}
        x_BTD, aux, cache = scan_pattern(layer, shape.layers_from(first), carry, stacks)
        return stream._replace(x_BTD=x_BTD, aux=aux), cache

    def _rotation(self, stream: Stream, kind: str) -> Rotation | None:
        rope = self.shape.rope(kind)
        return None if rope is None else rotary_angles(stream.position_BT, rope, stream.segment_BT)


def _chunks(stream: Stream, chunk: int) -> jax.Array:
    """Document numbers [B, T] that make each chunk of this many tokens a document of its own; 0: padding."""
    chunks_of_row = -(-stream.segment_BT.shape[1] // chunk)
    segment_BT = stream.segment_BT * chunks_of_row + stream.position_BT // chunk
    return jnp.where(stream.segment_BT > 0, segment_BT, 0)
