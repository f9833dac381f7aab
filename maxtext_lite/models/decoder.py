"""The decoder: stacked and scanned layers, as pure functions of a nested dict of parameters."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.config.keys import mixer_of
from maxtext_lite.config.weights import MTP_LAYERS, MTP_NORMS, end_weights, is_matrix, mtp_weights, part_of
from maxtext_lite.models.attention import attention
from maxtext_lite.models.layers import (
    HEADS_AXES,
    RESIDUAL_AXES,
    Attend,
    Block,
    BlockFactory,
    DecoderLayer,
    Embedding,
    Head,
    Memory,
    Norm,
    OutputHead,
    declare,
    projected,
    query_factor,
    scaled_queries,
    state_table,
)
from maxtext_lite.models.ops import Rotation, project, soft_capped
from maxtext_lite.models.rotary import rotary_angles
from maxtext_lite.models.shape import EXPERT_COUNTS, LARGEST_LOGITS, DecoderShape
from maxtext_lite.parallel import Params, Tree, constrain

if TYPE_CHECKING:
    from maxtext_lite.parallel.pipeline import Pipeline


OF_LAYERS = (EXPERT_COUNTS, LARGEST_LOGITS)


def with_layer(aux: dict[str, Array], more: dict[str, Array]) -> dict[str, Array]:
    """The stream's `aux` after a layer that adds `more`.

    Entries [B, L, ...] of all layers are shifted by one layer, and this layer's is appended.
    """
    return aux | {
        name: jnp.concatenate([aux[name][:, 1:], x[:, None]], axis=1) if name in OF_LAYERS else aux[name] + x
        for name, x in more.items()
        if name in aux
    }


def graph_of(layer: Callable[..., Block]) -> Any:
    """The graph that makes a module from one layer's parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(params=0))))


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Param)


LayerKind = tuple[str, str | None]
"""The kind of a layer, and the name of its stack if there are several."""


def layer_of(stack: Tree, number: Array) -> Tree:
    """The parameters of one layer of a stack [L, ...], for a loop over a few tokens.

    On CPUs XLA casts bfloat16 to float32 before it slices, and casts before the loop: a float32 copy of the whole stack
    for each token. An optimization barrier that includes the loop's own counter keeps the cast in the loop.
    """
    stack, number = jax.lax.platform_dependent(
        stack, number, cpu=lambda *both: jax.lax.optimization_barrier(both), default=lambda *both: both
    )
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stack)


def scan_pattern(
    layer: Callable[[LayerKind, int | None, Tree, Tree], Tree],
    kinds: tuple[LayerKind, ...],
    carry: Tree,
    stacks: dict[str | None, Tree],
) -> Tree:
    """The carry after layers whose kinds follow a repeated pattern.

    Args:
      layer: (kinds, place, carry, stack) -> carry, for the stack's entry at that place; None: the stack is the entry.
      kinds: the pattern.
      stacks: by name, leaves [L, ...]. The layers after the last whole pattern run outside the scan.
    """
    period = len(kinds)
    num_layers = sum(_length(stack) for stack in stacks.values())
    rounds = num_layers // period
    if len(stacks) > 1 and rounds < 2:  # no pattern repeats
        return _in_runs(layer, [kinds[number % period] for number in range(num_layers)], carry, stacks)
    if period == 1:
        (stack,) = stacks.values()
        return jax.lax.scan(lambda carry, entry: (layer(kinds[0], None, carry, entry), None), carry, stack)[0]

    def some(carry: Tree, stacks: dict[str | None, Tree], count: int) -> Tree:
        done = Counter[str | None]()
        for kind in kinds[:count]:
            name = kind[1]
            carry = layer(kind, done[name], carry, stacks[name])
            done[name] += 1
        return carry

    each = Counter(name for _, name in kinds)
    whole: dict[str | None, Tree] = {}
    rest: dict[str | None, Tree] = {}
    for name, stack in stacks.items():
        num_whole = rounds * each[name]
        whole[name] = _in_rounds(_between(stack, 0, num_whole), rounds, each[name])
        rest[name] = _between(stack, num_whole, None)
    carry, _ = jax.lax.scan(lambda carry, stacks: (some(carry, stacks, period), None), carry, whole)
    return some(carry, rest, num_layers - rounds * period)


def _between(stack: Tree, first: int, end: int | None) -> Tree:
    """Some consecutive layers of a stack."""
    return jax.tree.map(lambda x: x[first:end], stack)


def _in_rounds(stack: Tree, rounds: int, each: int) -> Tree:
    return jax.tree.map(lambda x: x.reshape(rounds, each, *x.shape[1:]), stack)


def _length(stack: Tree) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def _in_runs(
    layer: Callable[[LayerKind, int | None, Tree, Tree], Tree],
    kinds: list[LayerKind],
    carry: Tree,
    stacks: dict[str | None, Tree],
) -> Tree:
    """`scan_pattern` for each run of consecutive layers with the same stack, and for the last layers if they repeat a
    pattern."""
    first_repeated, repeated = _repeated(kinds)
    done = Counter[str | None]()
    for name, group in itertools.groupby(kinds[:first_repeated], key=lambda kind: kind[1]):
        run = tuple(group)
        first = done[name]
        done[name] += len(run)
        part = _between(stacks[name], first, done[name])
        period = next(p for p in range(1, len(run) + 1) if run[p:] == run[: len(run) - p])
        carry = scan_pattern(layer, run[:period], carry, {name: part})
    rest = {name: _between(stack, done[name], None) for name, stack in stacks.items() if done[name] < _length(stack)}
    return scan_pattern(layer, repeated, carry, rest) if rest else carry


def _repeated(kinds: list[LayerKind]) -> tuple[int, tuple[LayerKind, ...]]:
    """The first layer from which all others repeat a pattern at least twice, and the pattern."""
    for first in range(len(kinds)):
        last = kinds[first:]
        for period in range(1, len(last) // 2 + 1):
            if last[period:] == last[:-period]:
                return first, tuple(last[:period])
    return len(kinds), ()


def first_states(shape: DecoderShape, kind: str, *sizes: int) -> dict[str, Array]:
    """The initial state of layers of a kind without attention, float32 [*sizes, ...] by name."""
    table = state_table(shape, kind)
    return {name: jnp.zeros((*sizes, *weight.sizes), jnp.float32) for name, weight in table.items()}


class Stream(NamedTuple):
    """The values that flow from layer to layer.

    Attributes:
      x_BTD: the residual stream, in `dtype`.
      segment_BT: document number of each token.
      position_BT: position of each token in its document.
      aux: sums over the layers so far of what `experts.ExpertShape.aux_axes` names, [B] or [B, T], and the
        EXPERT_COUNTS of the last L layers with experts; {} without experts. With qk_clip_threshold, LARGEST_LOGITS too.
      own_LBTY: each layer's own inputs; None: there are none.
    """

    x_BTD: Array
    segment_BT: Array
    position_BT: Array
    aux: dict[str, Array]
    own_LBTY: Array | None = None


def stream_axes(shape: DecoderShape) -> Tree:
    """Logical axes of a stream's arrays."""
    token_axes: Any = ("batch", "length")
    aux_axes: Any = {} if shape.experts is None else shape.experts.aux_axes
    if shape.keeps_largest_logits:
        aux_axes[LARGEST_LOGITS] = ("batch", None, "activation_heads")
    return Stream(RESIDUAL_AXES, token_axes, token_axes, aux_axes)  # type: ignore[arg-type]


def empty_aux(shape: DecoderShape, num_rows: int, num_tokens: int) -> dict[str, Array]:
    """The `aux` of a stream of rows of this many tokens before the first layer: zeros."""
    experts = shape.experts
    aux: dict[str, Array] = {}
    if experts is not None:
        sizes = (num_rows, num_tokens)
        aux = {name: jnp.zeros(sizes[: len(axes)], jnp.float32) for name, axes in experts.aux_axes.items()}
    if experts is not None and experts.counts:
        aux[EXPERT_COUNTS] = jnp.zeros((num_rows, shape.num_expert_layers, experts.num_experts), jnp.int32)
    if shape.keeps_largest_logits:
        num_layers = shape.num_layers + shape.mtp_num_layers
        aux[LARGEST_LOGITS] = jnp.zeros((num_rows, num_layers, shape.num_query_heads), jnp.float32)
    return aux


class _Modules(nnx.Module):
    def __init__(self, shape: DecoderShape, block: BlockFactory, *, rngs: nnx.Rngs):
        self.embedding = Embedding(shape, rngs=rngs)
        self.layers = _layers(shape, block, rngs)
        self.dense_layers = _stack(shape, "dense_layers", block, rngs) if shape.num_dense_layers else None
        self.final_norm = Norm(shape, part_of(end_weights(shape), "final_norm"))
        self.head = Head(shape, rngs=rngs) if part_of(end_weights(shape), "head") else None
        # Last, so the other parameters are drawn as without it.
        self.mtp_layers = _stack(shape, MTP_LAYERS, block, rngs) if shape.mtp_num_layers else None


def _layers(shape: DecoderShape, block: BlockFactory, rngs: nnx.Rngs) -> nnx.Module:
    """The layers after the first dense ones, in as many stacks as there are kinds with weights of their own."""
    if "layers" in shape.stacks:
        return _stack(shape, "layers", block, rngs)
    mixed = nnx.Module()
    for path in filter(lambda path: path.startswith("layers/"), shape.stacks):
        setattr(mixed, path.removeprefix("layers/"), _stack(shape, path, block, rngs))
    return mixed


def _stack(shape: DecoderShape, path: str, block: BlockFactory, rngs: nnx.Rngs) -> Any:
    """A layer whose parameters hold those of all layers of a stack, on a leading dim."""
    layer = _layer_of(shape, path, block)
    axis, _, _ = path.partition("/")

    def create(key: Array) -> Any:
        return nnx.state(layer(rngs=nnx.Rngs(params=key)))

    params = jax.vmap(create)(jax.random.split(rngs.params(), len(shape.stacks[path])))
    params = jax.tree.map(lambda param: param.replace(axes=(axis, *param.axes)), params, is_leaf=_is_param)
    return nnx.merge(graph_of(layer), params)


def _layer_of(shape: DecoderShape, path: str, block: BlockFactory) -> BlockFactory:
    """Makes a layer of a stack; one of multi-token prediction is a block with weights before and after it."""
    of_stack = shape.of_stack(path)
    if path != MTP_LAYERS:
        return functools.partial(block, of_stack)
    table = mtp_weights(shape)

    def make(*, rngs: nnx.Rngs) -> Any:
        layer: Any = block(of_stack, rngs=rngs)
        declare(layer, table, of_stack, rngs)
        for name in MTP_NORMS:
            setattr(layer, name, Norm(shape, part_of(table, name)))
        return layer

    return make


@functools.lru_cache(maxsize=64)
def _abstract(shape: DecoderShape, block: BlockFactory) -> tuple[Any, dict[str, Any], Any]:
    """The graph of the modules, that of a layer of each stack, and the abstract parameters; found once a process."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: _Modules(shape, block, rngs=nnx.Rngs(params=0))))
        layers = {path: graph_of(_layer_of(shape, path, block)) for path in shape.stacks}
    return graph, layers, state


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _lora() -> Any:
    from maxtext_lite.models import lora  # few runs need it

    return lora


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

    def __init__(self, shape: DecoderShape, pipeline: "Pipeline | None" = None, block: BlockFactory = DecoderLayer):
        self.shape = shape
        self.pipeline = pipeline
        self.block = block
        self._graph, self._layer_graphs, state = _abstract(shape, block)
        axes = nnx.to_pure_dict(jax.tree.map(lambda param: param.replace(param.axes), state, is_leaf=_is_param))
        if pipeline:
            axes["layers"] = jax.tree.map(pipeline.axes_in_stages, axes["layers"], is_leaf=_is_axes)
        self._plain_axes = axes
        self.axes = axes
        if shape.lora:
            self.axes = _lora().joined(shape.lora, _lora().adapter_axes(shape.lora, axes), axes)
        self.abstract_params: Params = jax.eval_shape(
            lambda params, key: self.with_adapters(self._in_stages(params), key),
            nnx.to_pure_dict(state),
            jax.eval_shape(lambda: jax.random.key(0)),  # without eval_shape it would be compiled and run
        )

    def init(self, key: Array) -> Params:
        """New parameters, normal with standard deviation `initializer_range`, norms 1; the same for any sharding."""
        with nnx.use_eager_sharding(False):
            params = nnx.to_pure_dict(nnx.state(_Modules(self.shape, self.block, rngs=nnx.Rngs(params=key))))
        return self.with_adapters(self._in_stages(params), key)

    def with_adapters(self, params: Params, key: Array) -> Params:
        """These parameters, as the pipeline stores them, with new adapters, and new layers of multi-token prediction if
        they lack them."""
        lora = self.shape.lora
        if self.shape.mtp_num_layers and MTP_LAYERS not in params:
            params = params | {MTP_LAYERS: self.init(key)[MTP_LAYERS]}
        if lora is None:
            return params
        return _lora().joined(lora, _lora().new_adapters(lora, self._plain_axes, params, key), params)

    def trained(self, tree: Tree) -> Tree:
        """The part of a tree like `params` that is trained: all of it, or with LoRA the adapters."""
        return tree if self.shape.lora is None else _lora().adapters_of(tree)

    def frozen(self, tree: Tree) -> Tree:
        """The part of a tree like `params` that is frozen; None without LoRA."""
        return None if self.shape.lora is None else _lora().frozen_of(tree)

    def joined(self, trained: Tree, frozen: Tree) -> Tree:
        """The tree like `params` with these two parts."""
        return trained if self.shape.lora is None else _lora().joined(self.shape.lora, trained, frozen)

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

        def cast_leaf(axes: tuple[str, ...], x: Array) -> Array:
            return x.astype(self.shape.dtype) if is_matrix(axes) and "router" not in axes else x

        return jax.tree.map(cast_leaf, self.axes, params, is_leaf=_is_axes)

    def hidden(self, params: Params, token_BT: Array, segment_BT: Array, position_BT: Array) -> Array:
        """Final hidden states [B, T, D], normed, in `dtype`.

        Args:
          segment_BT: document number of each token, 0 for padding; a token attends to its own document only.
          position_BT: position of each token in its document.
        """
        return self.hidden_and_aux(params, token_BT, segment_BT, position_BT)[0]

    def hidden_and_aux(
        self, params: Params, token_BT: Array, segment_BT: Array, position_BT: Array
    ) -> tuple[Array, dict[str, Array]]:
        """`hidden`, and the stream's `aux` after all layers."""
        aux = empty_aux(self.shape, *token_BT.shape)
        stream = self.embedded(params, token_BT, segment_BT, position_BT)._replace(aux=aux)
        stream = self.dense_layers(params, stream)
        if self.pipeline is None:
            stream = self.layers(params["layers"], stream)
        else:
            stream = self.pipeline.run(self.layers, params["layers"], stream, axes=stream_axes(self.shape))
        return self.final_norm(params, stream.x_BTD), stream.aux

    def embed(self, params: Params, token_BT: Array, position_BT: Array) -> Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        return nnx.merge(self._graph, params).embedding(token_BT, position_BT, self.shape.dtype)

    def embedded(self, params: Params, token_BT: Array, segment_BT: Array, position_BT: Array) -> Stream:
        """The stream before the first layer, without `aux`."""
        x_BTD = self.embed(params, token_BT, position_BT)
        own_LBTY = nnx.merge(self._graph, params).embedding.per_layer_inputs(token_BT, x_BTD)
        return Stream(x_BTD, segment_BT, position_BT, {}, own_LBTY)

    def dense_layers(self, params: Params, stream: Stream) -> Stream:
        """The stream after the first dense layers of a model with experts; most models have none.

        Like the embedding, they are on all pipeline stages.
        """
        if not self.shape.num_dense_layers:
            return stream
        return self.scan_layers(params["dense_layers"], stream, self._attend_to(stream), first=0)[0]

    def layers(self, layer_params: Params, stream: Stream) -> Stream:
        """The stream after a stack of layers: all of `params["layers"]`, or some consecutive ones."""
        return self.scan_layers(layer_params, stream, self._attend_to(stream), first=self.shape.num_dense_layers)[0]

    def predict_ahead(
        self, params: Params, stream: Stream, ahead: Sequence[tuple[Array, Array]]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Final hidden states of each layer of multi-token prediction, normed, and the stream's `aux` after them all.

        Layer k reads the states of layer k - 1 and the tokens k places ahead. Like the embedding, these layers are on
        all pipeline stages.

        Args:
          stream: with the final hidden states, normed.
          ahead: for each layer, token_BT k places ahead, and segment_BT, 0 where that is in another document.
        Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; published checkpoints read normed states.
        """
        found: list[Array] = []
        for number, (token_BT, segment_BT) in enumerate(ahead):
            stack = jax.tree.map(lambda x, number=number: x[number : number + 1], params[MTP_LAYERS])
            layer: Any = nnx.merge(self._layer_graphs[MTP_LAYERS], jax.tree.map(lambda x: x[0], stack))
            position_BT = jnp.where(segment_BT > 0, stream.position_BT + number + 1, 0)
            embedded_BTD = layer.embed_norm(self.embed(params, token_BT, position_BT))
            x_BTD = project(embedded_BTD, layer.embed_projection)
            x_BTD += project(layer.hidden_norm(stream.x_BTD), layer.hidden_projection)
            stream = stream._replace(x_BTD=constrain(x_BTD, RESIDUAL_AXES), segment_BT=segment_BT)
            attend_of = self._attend_to(stream)
            stream, _ = self.scan_layers(stack, stream, attend_of, first=self.shape.num_layers + number)
            stream = stream._replace(x_BTD=layer.final_norm(stream.x_BTD))
            found.append(stream.x_BTD)
        return found, stream.aux

    def _attend_to(self, stream: Stream) -> Callable[[str, Any, None], Attend | Memory]:
        """The attention or memory of each kind of layer over the stream's own tokens.

        It keeps the last layer's keys and values of each kind where others share them, or largest logits, or nothing.
        """

        def of_layer(kind: str, layer: Any, cache: Any) -> Attend | Memory:
            if mixer_of(kind) == kind:
                zeros = first_states(self.shape, kind, stream.segment_BT.shape[0])
                return Memory(stream.segment_BT, stream.position_BT, zeros, kind)
            segment_BT = stream.segment_BT
            scoring = self.shape.scoring(kind)
            if scoring.chunk is not None and scoring.chunk < segment_BT.shape[1]:
                segment_BT = _chunks(stream, scoring.chunk)

            def attend(q_BTNH: Array, k_BTKH: Any, v_BTKH: Any, sink_N: Array | None) -> Any:
                kernel = self.shape.of_kind(kind).attention
                strategy = self.shape.context_strategy
                if cache is not None and k_BTKH is None:
                    k_BTKH, v_BTKH = cache[kind]
                kept = None if cache is None else {**cache, kind: (k_BTKH, v_BTKH)}
                if self.shape.keeps_largest_logits:
                    from maxtext_lite.models.qk_clip import largest_logits

                    kept = largest_logits(q_BTNH, k_BTKH, segment_BT, scoring)
                return attention(
                    q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N, kernel=kernel, strategy=strategy, scoring=scoring
                ), kept

            return attend

        return of_layer

    def final_norm(self, params: Params, x_BTD: Array) -> Array:
        """The output projection's input: the last layer's hidden states [B, T, D], normed."""
        return nnx.merge(self._graph, params).final_norm(x_BTD)

    def head(self, params: Params) -> Array:
        """The output projection [D, V]."""
        return params["embedding"]["table"].T if self.shape.tied else params["head"]["projection"]

    def output_head(self, params: Params, dtype: DTypeLike) -> OutputHead:
        """The output projection in `dtype`, with its bias if there is one."""
        head_DV = self.head(params).astype(dtype)
        return OutputHead(head_DV, params["head"]["bias"] if self.shape.logits_bias else None)

    def logits(self, params: Params, x_BTD: Array) -> Array:
        """Logits [B, T, V] in float32 of hidden states."""
        logits_BTV = self.shape.logits_multiplier * projected(x_BTD, self.output_head(params, x_BTD.dtype))
        return soft_capped(logits_BTV, self.shape.final_soft_cap) if self.shape.final_soft_cap else logits_BTV

    def scan_layers(
        self,
        layer_params: Params,
        stream: Stream,
        attend_of: Callable[[str, Any, Any], Attend | Memory],
        *,
        first: int,
        cache: Any = None,
        drop: bool = True,
    ) -> tuple[Stream, Any]:
        """The stream and the cache after a stack of layers, scanned a whole pattern of kinds at a time.

        Args:
          attend_of: a layer's attention or memory, from its kind, its number and the cache.
          first: number of a layer of the model with the kind of the stack's first one, or of one of multi-token
            prediction.
        """
        shape = self.shape
        rotations = {kind: self._rotation(stream, kind) for kind in shape.pattern}
        real_BT = stream.segment_BT > 0
        path = "dense_layers" if first < shape.num_dense_layers else "layers"
        kinds_of = shape.layers_from(first)
        if first >= shape.num_layers:
            path = MTP_LAYERS
            kinds_of = ((shape.pattern[(shape.num_layers - 1) % len(shape.pattern)], None),)
        stacks: Tree = {None: layer_params} if path in shape.stacks else layer_params
        is_decoding = cache is not None

        def layer(kinds: LayerKind, place: int | None, carry: Tree, entry: Tree) -> Tree:
            kind, name = kinds
            # Indexed in here, a layer's weights are read from the stack again in the backward pass, not kept as copies.
            params, in_stack, number, own_BTY = jax.tree.map(lambda x: x if place is None else x[place], entry)
            x_BTD, aux, cache = carry
            if is_decoding:
                params = layer_of(stacks[name], in_stack)
            attend = attend_of(kind, number, shared if cache is None else cache)
            factor_BT = query_factor(shape, kind, stream.position_BT, number)
            if factor_BT is not None:
                attend = scaled_queries(cast(Attend, attend), factor_BT)
            graph = self._layer_graphs[f"layers/{name}" if name else path]
            if shape.lora:
                params = _lora().with_merged_experts(params)
            module = nnx.merge(graph, params)
            own = {} if own_BTY is None else {"own_BTY": own_BTY}
            x_BTD, kept, more = module(x_BTD, rotations[kind], attend, real_BT, drop=drop, **own)
            if cache is None and LARGEST_LOGITS in aux:
                more = {**more, LARGEST_LOGITS: jnp.zeros_like(aux[LARGEST_LOGITS][:, 0]) if kept is None else kept}
            return x_BTD, with_layer(aux, more), None if cache is None else kept

        if shape.saved is not None:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=shape.saved,
                names_which_can_be_offloaded=shape.offloaded,
                offload_src="device",
                offload_dst="pinned_host",
            )
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False, static_argnums=(0, 1))
        entries: dict[str | None, Tree] = {}
        for name, params in stacks.items():
            place_L = jnp.arange(_length(params))
            number_L = jnp.asarray(shape.stacks[f"layers/{name}"]) if name else first + place_L
            own_LBTY = None if stream.own_LBTY is None else stream.own_LBTY[number_L]
            if is_decoding:
                entries[name] = ({}, place_L, number_L, own_LBTY)
            else:  # only scores that are divided by it need a layer's number
                entries[name] = (params, None, number_L if shape.inverse_layer_scaling else None, own_LBTY)
        shared = None
        if shape.shared_kv is None:
            carry = scan_pattern(layer, kinds_of, (stream.x_BTD, stream.aux, cache), entries)
        else:
            sharing = {name: entries.pop(name) for name in (*entries,) if str(name).endswith("shared")}
            last = shape.num_caching_layers
            carry = (stream.x_BTD, stream.aux, cache if is_decoding else self._no_keys(stream))
            x_BTD, aux, cache = scan_pattern(layer, kinds_of[: last - first], carry, entries)
            if not is_decoding:  # not carried on, so one copy serves the backward pass of all layers that share
                shared, cache = cache, None
            kinds_of = shape.layers_from(last)[: shape.num_layers - last]
            carry = scan_pattern(layer, kinds_of, (x_BTD, aux, cache), sharing)
        x_BTD, aux, cache = carry
        return stream._replace(x_BTD=x_BTD, aux=aux), cache

    def _no_keys(self, stream: Stream) -> dict[str, tuple[Array, Array]]:
        """Keys and values of each kind of layer before any layer has some: zeros."""
        none: dict[str, tuple[Array, Array]] = {}
        for kind in self.shape.pattern:
            own = self.shape.of_kind(kind)
            sizes = (*stream.segment_BT.shape, own.num_kv_heads, own.head_dim)
            zeros_BTKH = constrain(jnp.zeros(sizes, stream.x_BTD.dtype), HEADS_AXES)
            none[kind] = (zeros_BTKH, zeros_BTKH)
        return none

    def _rotation(self, stream: Stream, kind: str) -> Rotation | None:
        rope = self.shape.rope(kind)
        return None if rope is None else rotary_angles(stream.position_BT, rope, stream.segment_BT)


def _chunks(stream: Stream, chunk: int) -> Array:
    """Document numbers [B, T] that make each chunk of this many tokens a document of its own; 0: padding."""
    chunks_of_row = -(-stream.segment_BT.shape[1] // chunk)
    segment_BT = stream.segment_BT * chunks_of_row + stream.position_BT // chunk
    return jnp.where(stream.segment_BT > 0, segment_BT, 0)
