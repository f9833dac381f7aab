"""The decoder: layers stacked and scanned, offered as pure functions of a nested dict of parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_lite.models.attention import attention
from maxtext_lite.models.decoding import KVCache, cached_attention
from maxtext_lite.models.layers import Attend, DecoderLayer, DecoderShape, Embedding, Head, RMSNorm
from maxtext_lite.models.ops import rotary_angles

Params = Any
"""A nested dict of arrays; every leaf under "layers" has a leading L."""

REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_dot_products": jax.checkpoint_policies.dots_saveable,
    "save_qkv_proj": jax.checkpoint_policies.save_only_these_names("query_proj", "key_proj", "value_proj"),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the forward pass keeps for the backward pass: "none" keeps all, "full" only the input of each layer,
"minimal" the outputs of the projections, "save_dot_products" the attention scores too."""


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

    Attributes:
      shape: the DecoderShape it was built from.
      axes: a tree like `params` whose leaves are the tuples of logical axes.
    """

    def __init__(self, shape: DecoderShape):
        self.shape = shape
        with nnx.use_eager_sharding(False):
            self._graph, state = nnx.split(nnx.eval_shape(lambda: _Modules(shape, rngs=nnx.Rngs(params=0))))
            self._layer_graph = nnx.graphdef(nnx.eval_shape(lambda: DecoderLayer(shape, rngs=nnx.Rngs(params=0))))
        self.abstract_params: Params = nnx.to_pure_dict(state)
        self.axes = nnx.to_pure_dict(
            jax.tree.map(
                lambda param: param.replace(param.axes), state, is_leaf=lambda node: isinstance(node, nnx.Param)
            )
        )

    def init(self, key: jax.Array) -> Params:
        """New parameters, normal with standard deviation `initializer_range`, norms 1; the same for any sharding."""
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(_Modules(self.shape, rngs=nnx.Rngs(params=key))))

    def cast(self, params: Params) -> Params:
        """The parameters as matmuls use them: in `dtype`, but norms and the embedding table as they are.

        Differentiating with respect to the cast copy rounds each micro-batch's gradient once, and lets sharded
        weights be gathered in `dtype`; the look-up's gradient is a sum over tokens and stays wide.
        """

        def cast_leaf(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
            return x if axes in (("norm",), ("layers", "norm"), ("vocab", "embed")) else x.astype(self.shape.dtype)

        return jax.tree.map(cast_leaf, self.axes, params, is_leaf=lambda node: isinstance(node, tuple))

    def hidden(self, params: Params, token_BT: jax.Array, segment_BT: jax.Array, position_BT: jax.Array) -> jax.Array:
        """Final hidden states [B, T, D], normed, in `dtype`.

        Args:
          segment_BT: document number of each token; a token attends to its own document only.
          position_BT: position of each token in its document.
        """

        def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, None]:
            kernel, strategy = self.shape.attention, self.shape.context_strategy
            return attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, kernel=kernel, strategy=strategy), None

        return self._run(params, token_BT, position_BT, lambda _: attend, None)[0]

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

        return self._run(params, token_BT, position_BT, attend_in, cache)

    def head(self, params: Params) -> jax.Array:
        """The output projection [D, V]."""
        return params["embedding"]["table"].T if self.shape.tied else params["head"]["projection"]

    def logits(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """Logits [B, T, V] in float32 of hidden states."""
        head_DV = self.head(params).astype(x_BTD.dtype)
        return jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=jnp.float32)

    def _run(self, params: Params, token_BT: jax.Array, position_BT: jax.Array, attend_in: Any, cache: Any) -> Any:
        """The whole stack; `attend_in(layer's slice of the cache)` is the attention of that layer."""
        shape = self.shape
        ends = nnx.merge(self._graph, params)
        rotation = rotary_angles(position_BT, shape.head_dim, shape.rope_max_timescale)

        def layer(x_BTD: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
            layer_params, layer_cache = scanned
            return nnx.merge(self._layer_graph, layer_params)(x_BTD, rotation, attend_in(layer_cache))

        if shape.remat_policy != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[shape.remat_policy], prevent_cse=False)
        x_BTD, kept = jax.lax.scan(layer, ends.embedding(token_BT, shape.dtype), (params["layers"], cache))
        return ends.final_norm(x_BTD), kept
