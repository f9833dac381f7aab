"""The decoder: layers stacked and scanned, offered as pure functions of a nested dict of parameters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_lite.models.attention import attention
from maxtext_lite.models.decoding import KVCache, cached_attention
from maxtext_lite.models.layers import RESIDUAL_AXES, Attend, DecoderLayer, DecoderShape, Embedding, Head, RMSNorm
from maxtext_lite.models.ops import rotary_angles
from maxtext_lite.parallel import Pipeline

Params = Any
"""A nested dict of arrays; every leaf under "layers" has a leading L, or [repeats, L / repeats] in a pipeline that
goes round several times."""


def unstacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's parameter, from those of a stack of layers; any others as they are."""
    return tuple(axis for axis in axes if axis not in ("repeats", "layers"))


_WIDE_AXES = (("norm",), ("vocab", "embed"), ("embed", "router"), ("router_bias",))


class Stream(NamedTuple):
    """What flows from layer to layer.

    Attributes:
      x_BTD: the residual stream, in `dtype`.
      segment_BT: document number of each token.
      position_BT: position of each token in its document.
      aux: sums over the layers so far of what `moe.ExpertShape.aux_axes` names, [B] or [B, T]; {} without experts.
    """

    x_BTD: jax.Array
    segment_BT: jax.Array
    position_BT: jax.Array
    aux: dict[str, jax.Array]


def stream_axes(shape: DecoderShape) -> Any:
    """Logical axes of a stream's arrays."""
    token_axes: Any = ("batch", "length")
    aux_axes: Any = {} if shape.experts is None else shape.experts.aux_axes
    return Stream(RESIDUAL_AXES, token_axes, token_axes, aux_axes)  # type: ignore[arg-type]


class _Modules(nnx.Module):
    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.embedding = Embedding(shape, rngs=rngs)
        self.layers = self._stacked_layers(shape, rngs)
        self.final_norm = RMSNorm(shape)
        if not shape.tied:
            self.head = Head(shape, rngs=rngs)

    @staticmethod
    def _stacked_layers(shape: DecoderShape, rngs: nnx.Rngs) -> DecoderLayer:
        """A layer whose every parameter holds all L layers' values, stacked on a leading dim."""

        def create(key: jax.Array) -> Any:
            return nnx.split(DecoderLayer(shape, rngs=nnx.Rngs(params=key)))[1]

        graph = nnx.graphdef(nnx.eval_shape(lambda: DecoderLayer(shape, rngs=nnx.Rngs(params=0))))
        stacked = jax.vmap(create)(jax.random.split(rngs.params(), shape.num_layers))
        stacked = jax.tree.map(
            lambda param: param.replace(axes=("layers", *param.axes)),
            stacked,
            is_leaf=lambda node: isinstance(node, nnx.Param),
        )
        return nnx.merge(graph, stacked)


class Decoder:
    """A Llama-family decoder (arXiv:2302.13971): pure functions of `params`, which `init` makes.

    Args:
      shape: decides parameters and arithmetic.
      pipeline: how the layers are dealt to stages; None: every device has all of them.

    Attributes:
      abstract_params: shapes and dtypes of the parameters.
      axes: a tree like `params` whose leaves are the tuples of logical axes.
    """

    def __init__(self, shape: DecoderShape, pipeline: Pipeline | None = None):
        self.shape, self.pipeline = shape, pipeline
        with nnx.use_eager_sharding(False):
            self._graph, state = nnx.split(nnx.eval_shape(lambda: _Modules(shape, rngs=nnx.Rngs(params=0))))
            self._layer_graph = nnx.graphdef(nnx.eval_shape(lambda: DecoderLayer(shape, rngs=nnx.Rngs(params=0))))
        self.axes = nnx.to_pure_dict(
            jax.tree.map(
                lambda param: param.replace(param.axes), state, is_leaf=lambda node: isinstance(node, nnx.Param)
            )
        )
        self.abstract_params: Params = jax.eval_shape(self._dealt, nnx.to_pure_dict(state))
        if pipeline:
            self.axes["layers"] = jax.tree.map(
                pipeline.dealt_axes, self.axes["layers"], is_leaf=lambda node: isinstance(node, tuple)
            )

    def init(self, key: jax.Array) -> Params:
        """New parameters, normal with standard deviation `initializer_range`, norms 1; the same for any sharding."""
        with nnx.use_eager_sharding(False):
            return self._dealt(nnx.to_pure_dict(nnx.state(_Modules(self.shape, rngs=nnx.Rngs(params=key)))))

    def _dealt(self, params: Params) -> Params:
        """The parameters with the layers as the pipeline stores them."""
        if self.pipeline is None:
            return params
        return params | {"layers": jax.tree.map(self.pipeline.dealt, params["layers"])}

    def cast(self, params: Params) -> Params:
        """The parameters as matmuls use them: in `dtype`, but norms, routers and the embedding table as they are.

        Differentiating with respect to the cast copy rounds each micro-batch's gradient once, and lets sharded
        weights be gathered in `dtype`; the look-up's gradient is a sum over tokens and stays wide.
        """

        def cast_leaf(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
            return x if unstacked(axes) in _WIDE_AXES else x.astype(self.shape.dtype)

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
        aux_axes = stream_axes(self.shape).aux
        aux = {name: jnp.zeros(token_BT.shape[: len(axes)], jnp.float32) for name, axes in aux_axes.items()}
        stream = Stream(self.embed(params, token_BT), segment_BT, position_BT, aux)
        run = (
            self.layers
            if self.pipeline is None
            else functools.partial(self.pipeline.run, self.layers, axes=stream_axes(self.shape))
        )
        stream = run(params["layers"], stream)
        return self.final_norm(params, stream.x_BTD), stream.aux

    def embed(self, params: Params, token_BT: jax.Array) -> jax.Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        return nnx.merge(self._graph, params).embedding(token_BT, self.shape.dtype)

    def layers(self, layer_params: Params, stream: Stream) -> Stream:
        """The stream after a stack of layers, all of `params["layers"]` or some of them in a row."""

        def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, None]:
            kernel, strategy = self.shape.attention, self.shape.context_strategy
            return attention(q_BTNH, k_BTKH, v_BTKH, stream.segment_BT, kernel=kernel, strategy=strategy), None

        return self._scan(layer_params, stream, lambda _: attend, None)[0]

    def final_norm(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """What the output projection is given: the last layer's hidden states [B, T, D], normed."""
        return nnx.merge(self._graph, params).final_norm(x_BTD)

    def decode(
        self, params: Params, token_BT: jax.Array, start_B: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states [B, T, D] of T more tokens of B sequences, of which `start_B` are in the cache already.

        Tokens past a sequence's true length may stand at the end of `token_BT`: what they write is overwritten
        by the tokens that come in their place, and no earlier token looks at it.
        """
        position_BT = start_B[:, None] + jnp.arange(token_BT.shape[1])[None, :]

        def attend_in(layer_cache: KVCache) -> Attend:
            return lambda q, k, v: cached_attention(q, k, v, position_BT, layer_cache)

        assert self.pipeline is None, "a cache belongs to all layers, a stage has some"
        one_document_BT = jnp.ones_like(token_BT)
        stream = Stream(self.embed(params, token_BT), one_document_BT, position_BT, {})
        # A capacity is for training: with one, a token's output would depend on how many are decoded at once.
        stream, cache = self._scan(params["layers"], stream, attend_in, cache, drop=False)
        return self.final_norm(params, stream.x_BTD), cache

    def head(self, params: Params) -> jax.Array:
        """The output projection [D, V]."""
        return params["embedding"]["table"].T if self.shape.tied else params["head"]["projection"]

    def logits(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """Logits [B, T, V] in float32 of hidden states."""
        head_DV = self.head(params).astype(x_BTD.dtype)
        return jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=jnp.float32)

    def _scan(
        self, layer_params: Params, stream: Stream, attend_in: Any, cache: Any, *, drop: bool = True
    ) -> tuple[Stream, Any]:
        """A stack of layers; `attend_in(layer's slice of the cache)` is the attention of that layer."""
        shape = self.shape
        rotation = rotary_angles(stream.position_BT, shape.head_dim, shape.rope_max_timescale)
        real_BT = stream.segment_BT > 0

        def layer(carry: Any, scanned: Any) -> tuple[Any, Any]:
            (x_BTD, aux), (layer_params, layer_cache) = carry, scanned
            module = nnx.merge(self._layer_graph, layer_params)
            x_BTD, kept, more = module(x_BTD, rotation, attend_in(layer_cache), real_BT, drop=drop)
            return (x_BTD, {name: aux[name] + more[name] for name in aux}), kept

        if shape.saved is not None:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=shape.saved,
                names_which_can_be_offloaded=shape.offloaded,
                offload_src="device",
                offload_dst="pinned_host",
            )
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        (x_BTD, aux), kept = jax.lax.scan(layer, (stream.x_BTD, stream.aux), (layer_params, cache))
        return stream._replace(x_BTD=x_BTD, aux=aux), kept
