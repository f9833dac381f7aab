"""A layer's experts as an NNX module: a router, its experts and a shared expert."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.config.weights import expert_weights
from maxtext_lite.models.capacity import with_capacity
from maxtext_lite.models.dropless import dropless
from maxtext_lite.models.layers import RESIDUAL_AXES, Mlp, declare
from maxtext_lite.models.moe import DROPPED, ExpertShape, ExpertWeights, Router, route
from maxtext_lite.models.shape import DecoderShape
from maxtext_lite.parallel import constrain


class MixtureOfExperts(nnx.Module):
    """Gated mlps, of which a router chooses a few for each token, and possibly one that all tokens share."""

    router: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    shared_gate: nnx.Param | None = None
    router_bias: nnx.Param | None = None
    router_logit_bias: nnx.Param | None = None
    gate_bias: nnx.Param | None = None
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None

    def __init__(self, shape: DecoderShape, experts: ExpertShape, *, rngs: nnx.Rngs):
        self.experts = experts
        declare(self, expert_weights(shape), shape, rngs)
        self.shared = Mlp(shape, "S", rngs=rngs) if experts.shared_dim else None

    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array, *, drop: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' output [B, T, D], in the dtype of x_BTD, and what the layer adds to the stream's `aux`.

        Args:
          real_BT: False for padding, which goes to no expert.
          drop: apply the capacity, if there is one.
        """
        experts = self.experts
        router = Router(self.router[...], *map(_array, (self.router_bias, self.router_logit_bias)))
        routing = route(x_BTD, router, real_BT, experts)
        biases = map(_array, (self.gate_bias, self.up_bias, self.down_bias))
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...], *biases)
        aux = routing.aux
        if experts.capacity_factor is None or not drop:
            y_BTD: Any = dropless(x_BTD, routing.expert_BTJ, routing.share_BTJ, weights, experts)
        else:
            y_BTD, dropped_B = with_capacity(x_BTD, routing, weights, experts)
            aux = aux | {DROPPED: dropped_B}
        y_BTD = checkpoint_name(constrain(y_BTD, RESIDUAL_AXES), "mlpwo")
        return y_BTD if self.shared is None else y_BTD + self._shared(self.shared, x_BTD), aux

    def _shared(self, shared: Mlp, x_BTD: jax.Array) -> jax.Array:
        """The shared expert's output."""
        y_BTD = shared(x_BTD)
        if self.shared_gate is None:
            return y_BTD
        gate_D1 = self.shared_gate[...].astype(jnp.float32)
        gate_BT1 = jax.nn.sigmoid(jnp.einsum("BTD,DU->BTU", x_BTD.astype(jnp.float32), gate_D1))
        return (gate_BT1 * y_BTD.astype(jnp.float32)).astype(y_BTD.dtype)


def _array(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]
