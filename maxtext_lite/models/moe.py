"""The mixture of experts of a decoder layer, as an NNX module."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.config.weights import expert_weights
from maxtext_lite.models.experts import ExpertWeights, Router, dropless, route, with_capacity
from maxtext_lite.models.layers import RESIDUAL_AXES, Mlp, declare, norm_in, normed
from maxtext_lite.models.ops import rms_norm
from maxtext_lite.models.shape import DROPPED, DecoderShape
from maxtext_lite.parallel import constrain


class MixtureOfExperts(nnx.Module):
    """Gated mlps: a router chooses a few for each token, and all tokens may share one more."""

    router: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    shared_gate: nnx.Param | None = None
    router_scale: nnx.Param | None = None
    expert_scale: nnx.Param | None = None
    router_bias: nnx.Param | None = None
    router_load: nnx.Param | None = None
    router_logit_bias: nnx.Param | None = None
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        assert shape.experts is not None
        self.experts = shape.experts
        table = expert_weights(shape)
        declare(self, table, shape, rngs)
        self.norm = norm_in(table, "norm", shape)
        self.post_norm = norm_in(table, "post_norm", shape)
        self.shared_post_norm = norm_in(table, "shared_post_norm", shape)
        self.epsilon = shape.norm_epsilon
        self.shared = Mlp(shape, "S", rngs=rngs) if shape.experts.shared_dim else None

    def __call__(
        self, x_BTD: Array, stream_BTD: Array, real_BT: Array, *, drop: bool
    ) -> tuple[Array, dict[str, Array]]:
        """The experts' output [B, T, D], in the dtype of x_BTD, and what the layer adds to the stream's `aux`.

        Args:
          stream_BTD: x_BTD before its norm, for experts with norms of their own.
          real_BT: False for padding, which goes to no expert.
          drop: apply the capacity, if there is one.
        """
        experts = self.experts
        of_experts = _array(self.router_bias), _array(self.router_logit_bias), _array(self.router_load)
        router = Router(self.router[...], *of_experts)
        shared_BTD = x_BTD
        judged_BTD: Any = x_BTD
        if self.router_scale is not None:
            x_BTD = normed(self.norm, stream_BTD)
            scale_D = self.router_scale[...].astype(jnp.float32) * x_BTD.shape[-1] ** -0.5
            judged_BTD = rms_norm(stream_BTD, scale_D, self.epsilon)
        routing = route(judged_BTD, router, real_BT, experts)
        if self.expert_scale is not None:
            factor_BTJ = self.expert_scale[...].astype(jnp.float32)[routing.expert_BTJ]
            routing = routing._replace(share_BTJ=routing.share_BTJ * factor_BTJ)
        biases = (_array(self.gate_bias), _array(self.up_bias), _array(self.down_bias))
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...], *biases)
        aux = routing.aux
        if experts.capacity_factor is None or not drop:
            y_BTD: Any = dropless(x_BTD, routing.expert_BTJ, routing.share_BTJ, weights, experts)
        else:
            y_BTD, aux[DROPPED] = with_capacity(x_BTD, routing, weights, experts)
        y_BTD = normed(self.post_norm, checkpoint_name(constrain(y_BTD, RESIDUAL_AXES), "mlpwo"))
        if self.shared is None:
            return y_BTD, aux
        of_shared_BTD = normed(self.shared_post_norm, self.shared(shared_BTD))
        if self.shared_gate is not None:
            gate_D1 = self.shared_gate[...].astype(jnp.float32)
            gate_BT1 = jax.nn.sigmoid(jnp.einsum("BTD,DU->BTU", shared_BTD.astype(jnp.float32), gate_D1))
            of_shared_BTD = (gate_BT1 * of_shared_BTD.astype(jnp.float32)).astype(of_shared_BTD.dtype)
        return y_BTD + of_shared_BTD, aux


def _array(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]
