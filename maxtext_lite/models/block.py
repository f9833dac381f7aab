"""A layer of the decoder: the protocol of every block, and the block of norms, attention and an mlp or experts."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.config.weights import layer_weights
from maxtext_lite.models.latent_attention import LatentAttention
from maxtext_lite.models.layers import RESIDUAL_AXES, Attend, Attention, Mlp, Norm, norm_in
from maxtext_lite.models.mixture import MixtureOfExperts
from maxtext_lite.models.ops import Rotation
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import constrain


class Block(Protocol):
    """A layer of the decoder, an `nnx.Module`: from the stream to the stream, the same in training and decoding.

    Its parameters are `nnx.Param` with the logical axes of their dims (`axes`, those of `parallel.axes`), which decide
    how they are sharded, decayed and rounded. Layers are stacked and scanned, whole or in pipeline stages: a stack's
    layers have parameters of the same shapes, and whatever else differs between layers comes from the caller.
    """

    def __call__(
        self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend, real_BT: jax.Array, *, drop: bool = True
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The stream after the block, what `attend` keeps, and what the block adds to the stream's `aux`.

        Args:
          rotation: of queries and keys, for the layer's kind; None: they are not rotated.
          attend: the only access to other tokens, for the layer's kind. It maps queries, keys, values and sinks to the
            context; with a cache it also returns the cache. A kind with a state beside the KV cache, as in a hybrid,
            gets a function with the arguments of that kind, which returns a cache with the state as one more leaf: a
            block passes on any tree.
          real_BT: False for padding.
          drop: apply the experts' capacity, if they have one.
        """
        ...


BlockFactory = Callable[..., Block]
"""(shape, *, rngs) -> a block with new parameters."""


class DecoderLayer(nnx.Module):
    """One block: attention and then the mlp, or both on the same stream. Each has a norm before it, after it or both,
    and is added to the stream.

    Args:
      attention: makes the layer's attention, from the shape.
    """

    def __init__(self, shape: DecoderShape, attention: Callable[..., nnx.Module] = Attention, *, rngs: nnx.Rngs):
        table = layer_weights(shape)
        self.attention_norm = norm_in(table, "attention_norm", shape)
        self.attention = attention(shape, rngs=rngs)
        self.attention_post_norm = norm_in(table, "attention_post_norm", shape)
        self.mlp_norm = norm_in(table, "mlp_norm", shape)
        if shape.experts is None:
            self.mlp = Mlp(shape, rngs=rngs)
        else:
            self.mlp = MixtureOfExperts(shape, shape.experts, rngs=rngs)
        self.mlp_post_norm = norm_in(table, "mlp_post_norm", shape)
        self.parallel, self.multiplier = shape.parallel_block, shape.residual_multiplier

    def __call__(
        self, x_BTD: jax.Array, rotation: Rotation | None, attend: Attend, real_BT: jax.Array, *, drop: bool = True
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The residual stream [B, T, D] after the layer, what `attend` keeps, and the experts' `aux`.

        Args:
          real_BT: False for padding; like `drop`, only experts use it (`MixtureOfExperts`).
        """
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        first_BTD = _normed(self.attention_norm, x_BTD)
        attended_BTD, kept = self.attention(first_BTD, rotation, attend)
        before_BTD = x_BTD
        x_BTD = self._plus(x_BTD, _normed(self.attention_post_norm, attended_BTD))
        read_BTD = {"none": x_BTD, "one_norm": first_BTD, "two_norms": before_BTD}[self.parallel]
        normed_BTD, aux = _normed(self.mlp_norm, read_BTD), {}
        if isinstance(self.mlp, MixtureOfExperts):
            y_BTD, aux = self.mlp(normed_BTD, real_BT, drop=drop)
        else:
            y_BTD = self.mlp(normed_BTD)
        return self._plus(x_BTD, _normed(self.mlp_post_norm, y_BTD)), kept, aux

    def _plus(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """The stream plus a block's output."""
        if self.multiplier != 1:  # which two bytes need not hold
            y_BTD = (y_BTD.astype(jnp.float32) * self.multiplier).astype(y_BTD.dtype)
        return constrain(x_BTD + y_BTD, RESIDUAL_AXES)


def _normed(norm: Norm | None, x_BTD: jax.Array) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def decoder_layer(shape: DecoderShape, *, rngs: nnx.Rngs) -> DecoderLayer:
    """The block of every family that a config describes."""
    return DecoderLayer(shape, Attention if shape.latent is None else LatentAttention, rngs=rngs)
