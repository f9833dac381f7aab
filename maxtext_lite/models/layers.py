"""The parts of a decoder layer as NNX modules: norm, rotary positions, attention projections, gated mlp, experts.

Each weight is declared with its logical axes beside it, from which its sharding follows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.models.moe import DROPPED, ExpertShape, ExpertWeights, dropless, route, with_capacity
from maxtext_lite.models.ops import Rotation, project, rms_norm, rotate, silu_times
from maxtext_lite.parallel import constrain

RESIDUAL_AXES = ("batch", "residual_length", "activation_embed")
"""Logical axes of the stream between blocks: split over `tensor` along the tokens, so that no device holds or norms
all of it. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2."""

_HEADS_AXES = ("batch", "length", "activation_heads", None)

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(q_BTNH, k_BTKH, v_BTKH) -> (context_BTNH, whatever the caller keeps of the layer, such as its keys and values)."""


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """Everything that decides a decoder's parameters and arithmetic.

    Attributes:
      dtype: of activations and matmul inputs; norms, softmax and rotary angles are float32 whatever it is.
      weight_dtype: of the parameters as the optimizer holds them.
      tied: the output projection is the embedding table.
      initializer_range: standard deviation of the normal initial weights; norms start at 1.
      attention: name of the kernel, one of `attention.KERNELS`.
      saved: names (`checkpoint_name`) of a layer's tensors that the forward pass keeps for the backward pass, beside
        the layer's input; the others are made again. None: all are kept.
      offloaded: names of those that it keeps in pinned host memory.
      context_strategy: how the shards of a context axis exchange keys, one of `context_attention.STRATEGIES`.
      experts: in place of each layer's mlp; None: the mlp.
    """

    vocab_size: int
    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    rope_max_timescale: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    initializer_range: float = 0.02
    dtype: Any = jnp.float32
    weight_dtype: Any = jnp.float32
    saved: tuple[str, ...] | None = None
    offloaded: tuple[str, ...] = ()
    attention: str = "dot_product"
    context_strategy: str = "all_gather"
    experts: ExpertShape | None = None


def _weight(shape: DecoderShape, rngs: nnx.Rngs, sizes: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    values = shape.initializer_range * jax.random.normal(rngs.params(), sizes, jnp.float32)
    return nnx.Param(values.astype(shape.weight_dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale per dim."""

    def __init__(self, shape: DecoderShape):
        self.epsilon = shape.norm_epsilon
        self.scale = nnx.Param(jnp.ones((shape.emb_dim,), shape.weight_dtype), axes=("norm",))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The normed vectors, in the dtype of x_BTD."""
        return rms_norm(x_BTD, self.scale[...], self.epsilon)


class Attention(nnx.Module):
    """Grouped-query attention's four projections around an `attend` that the caller chooses."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        D, N, K, H = shape.emb_dim, shape.num_query_heads, shape.num_kv_heads, shape.head_dim
        self.query = _weight(shape, rngs, (D, N, H), ("embed", "heads", "head_dim"))
        self.key = _weight(shape, rngs, (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.value = _weight(shape, rngs, (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.out = _weight(shape, rngs, (N, H, D), ("heads", "head_dim", "embed"))

    def __call__(self, x_BTD: jax.Array, rotation: Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        """The projected context [B, T, D], and what `attend` keeps."""

        def heads(weight: nnx.Param, name: str) -> jax.Array:
            y_BTNH = constrain(project(x_BTD, weight[...]), _HEADS_AXES)
            return checkpoint_name(y_BTNH, name)

        q_BTNH = rotate(heads(self.query, "query_proj"), rotation)
        k_BTKH = rotate(heads(self.key, "key_proj"), rotation)
        context_BTNH, kept = attend(q_BTNH, k_BTKH, heads(self.value, "value_proj"))
        context_BTNH = constrain(context_BTNH, _HEADS_AXES)  # and its gradient, which could follow the tokens instead
        return checkpoint_name(constrain(project(context_BTNH, self.out[...], 2), RESIDUAL_AXES), "out_proj"), kept


class GatedMlp(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x). Source: Shazeer 2020, arXiv:2002.05202, eq. 6."""

    def __init__(self, shape: DecoderShape, mlp_dim: int, *, rngs: nnx.Rngs):
        D, F = shape.emb_dim, mlp_dim
        self.gate = _weight(shape, rngs, (D, F), ("embed", "mlp"))
        self.up = _weight(shape, rngs, (D, F), ("embed", "mlp"))
        self.down = _weight(shape, rngs, (F, D), ("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The mlp's output [B, T, D], in the dtype of x_BTD."""
        gate_BTF = checkpoint_name(project(x_BTD, self.gate[...]), "mlpwi_0")
        up_BTF = checkpoint_name(project(x_BTD, self.up[...]), "mlpwi_1")
        hidden_BTF = constrain(silu_times(gate_BTF, up_BTF), ("batch", "length", "activation_mlp"))
        return checkpoint_name(constrain(project(hidden_BTF, self.down[...]), RESIDUAL_AXES), "mlpwo")


class MixtureOfExperts(nnx.Module):
    """Gated mlps of which each token uses a few, chosen by a router, and one that all share where there is such."""

    def __init__(self, shape: DecoderShape, experts: ExpertShape, *, rngs: nnx.Rngs):
        D, E, F = shape.emb_dim, experts.num_experts, experts.mlp_dim
        self.experts = experts
        self.router = _weight(shape, rngs, (D, E), ("embed", "router"))
        if experts.biased:  # float32 always: its steps are small
            self.router_bias = nnx.Param(jnp.zeros(E, jnp.float32), axes=("router_bias",))
        self.gate = _weight(shape, rngs, (E, D, F), ("experts", "embed", "mlp"))
        self.up = _weight(shape, rngs, (E, D, F), ("experts", "embed", "mlp"))
        self.down = _weight(shape, rngs, (E, F, D), ("experts", "mlp", "embed"))
        if experts.num_shared:
            self.shared = GatedMlp(shape, experts.num_shared * F, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array, *, drop: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' output [B, T, D], in the dtype of x_BTD, and what the layer adds to the stream's `aux`.

        Args:
          real_BT: False for padding, which goes to no expert.
          drop: obey the capacity, where there is one.
        """
        experts = self.experts
        bias_E = self.router_bias[...] if experts.biased else None
        routing = route(x_BTD, self.router[...], bias_E, real_BT, experts)
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...])
        aux = routing.aux
        if experts.capacity_factor is None or not drop:
            y_BTD = dropless(x_BTD, routing.expert_BTJ, routing.share_BTJ, weights)
        else:
            y_BTD, dropped_B = with_capacity(x_BTD, routing, weights, experts)
            aux = aux | {DROPPED: dropped_B}
        y_BTD = checkpoint_name(constrain(y_BTD, RESIDUAL_AXES), "mlpwo")
        return y_BTD + self.shared(x_BTD) if experts.num_shared else y_BTD, aux


class DecoderLayer(nnx.Module):
    """One pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), with experts where the shape has them."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(shape)
        self.attention = Attention(shape, rngs=rngs)
        self.mlp_norm = RMSNorm(shape)
        if shape.experts is None:
            self.mlp = GatedMlp(shape, shape.mlp_dim, rngs=rngs)
        else:
            self.mlp = MixtureOfExperts(shape, shape.experts, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, rotation: Rotation, attend: Attend, real_BT: jax.Array, *, drop: bool = True
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The residual stream [B, T, D] after the layer, what `attend` keeps, and the experts' `aux`.

        Args:
          real_BT: False for padding; only experts look at it, as only they look at `drop` (`MixtureOfExperts`).
        """
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        attended_BTD, kept = self.attention(self.attention_norm(x_BTD), rotation, attend)
        x_BTD = constrain(x_BTD + attended_BTD, RESIDUAL_AXES)
        normed_BTD, aux = self.mlp_norm(x_BTD), {}
        if isinstance(self.mlp, MixtureOfExperts):
            y_BTD, aux = self.mlp(normed_BTD, real_BT, drop=drop)
        else:
            y_BTD = self.mlp(normed_BTD)
        return constrain(x_BTD + y_BTD, RESIDUAL_AXES), kept, aux


class Embedding(nnx.Module):
    """The token table [V, D]."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.table = _weight(shape, rngs, (shape.vocab_size, shape.emb_dim), ("vocab", "embed"))

    def __call__(self, token_BT: jax.Array, dtype: Any) -> jax.Array:
        """The tokens' vectors [B, T, D], in `dtype`."""
        # Gathered over `embed` first: a look-up in a table split both ways is what partitioners do worst.
        table_VD = constrain(self.table[...], ("vocab", None))
        # Each device finds what its part of the vocabulary has, and only then are tokens split over `tensor`: asked for
        # its own tokens at once, it would be given the whole table.
        x_BTD = constrain(table_VD[token_BT].astype(dtype), ("end_batch", "length", "activation_embed"))
        return constrain(x_BTD, ("end_batch", *RESIDUAL_AXES[1:]))


class Head(nnx.Module):
    """The output projection [D, V] of a decoder whose embeddings are not tied."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.projection = _weight(shape, rngs, (shape.emb_dim, shape.vocab_size), ("embed", "vocab"))
