"""Mixture of experts: shape, weights and routing.

The experts themselves run in `dropless`, which computes every choice, and in `capacity`, where an expert takes a
limited number of tokens of each example.
"""

import dataclasses
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext_lite.config import Quantization
from maxtext_lite.config.kernels import GroupedMatmul
from maxtext_lite.config.weights import EXPERT_BIASES, EXPERT_WEIGHTS, ExpertSizes
from maxtext_lite.models.ops import Activation
from maxtext_lite.parallel import over_shards

BALANCE, ROUTER_Z, DROPPED = "moe_balance", "router_z", "moe_dropped_fraction"
"""Names of a layer's entries in the stream's `aux`, float32: the balance loss of each example [B]; the squared
log-partition of the router for each token [B, T]; and the share of each example's choices that were dropped [B]."""

EXPERT_COUNTS = "expert_counts"
"""Likewise, int32: the tokens of each example that chose each expert; [B, E] of a layer, [B, L, E] in the stream, for
the L layers with experts."""


def with_layer(aux: dict[str, jax.Array], more: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The stream's `aux` after a layer that adds `more`; its expert counts enter at the end, whichever layer it is."""
    return aux | {
        name: jnp.concatenate([aux[name][:, 1:], x[:, None]], axis=1) if name == EXPERT_COUNTS else aux[name] + x
        for name, x in more.items()
        if name in aux
    }


@dataclasses.dataclass(frozen=True)
class ExpertShape(ExpertSizes):
    """Everything that decides a layer's experts and routing.

    Attributes: those of ExpertSizes, and
      score: of an expert's logit: the softmax over all experts, or its own sigmoid; with sparsemixer, for a token's
        first expert and then for its second, a softmax over the experts near the largest.
      normalised: a token's chosen scores are divided by their sum.
      scaling: a factor of the chosen scores.
      on_input: they multiply an expert's input, not its output.
      capacity_factor: an expert takes the first ceil(factor x tokens of the example x J / E) tokens of each example;
        None: all (dropless).
      num_groups: groups of neighbouring experts.
      groups_per_token: a token chooses among the experts of this many groups, those whose best expert (softmax) or best
        two together (sigmoid) score highest.
      activation: of the experts' gated mlps.
      matmul: kernel of the grouped matmuls of `dropless`.
      grad_dtype: of their weights' gradients as these cross `fsdp`.
      quantization: of the matmuls with their weights.
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    on_input: bool = False
    capacity_factor: Fraction | None = None
    num_groups: int = 1
    groups_per_token: int = 1
    activation: Activation = "silu"
    matmul: GroupedMatmul = "ragged_dot"
    grad_dtype: DTypeLike = jnp.float32
    quantization: Quantization = "none"

    @property
    def judges_logits(self) -> bool:
        """Whether experts are chosen by logits, because several scores may round to 1; groups need sums of scores."""
        return self.score == "sparsemixer" or (self.on_input and self.num_groups == 1)

    @property
    def aux_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the entries of the stream's `aux`."""
        axes: dict[str, tuple[str | None, ...]] = {BALANCE: ("batch",), ROUTER_Z: ("batch", "length")}
        if self.capacity_factor is not None:
            axes[DROPPED] = ("batch",)
        if self.biased:
            axes[EXPERT_COUNTS] = ("batch", None, None)
        return axes


class ExpertWeights(NamedTuple):
    """Gated mlps, one for each expert, with all biases or none."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None = None
    up_EF: jax.Array | None = None
    down_ED: jax.Array | None = None

    def arrays(self) -> list[jax.Array]:
        """The arrays that are not None."""
        return [weight for weight in self if weight is not None]

    def axes(self) -> list[tuple[str, ...]]:
        """The logical axes of `arrays`."""
        return _WEIGHT_AXES[: len(self.arrays())]


TOKEN_AXES = ("batch", "length", None)
"""Logical axes of tokens, and of values for each token, if each device has its own tokens."""

_WEIGHT_AXES = [tuple(axes.split()) for _, axes in (*EXPERT_WEIGHTS.values(), *EXPERT_BIASES.values())]


class Routing(NamedTuple):
    """The tokens' experts.

    Attributes:
      expert_BTJ: int32 numbers of a token's experts, likeliest first; E, no expert, for padding.
      share_BTJ: float32 factor of each expert's output, or input; 0 for padding.
      aux: the entries of ExpertShape.aux_axes except DROPPED.
    """

    expert_BTJ: jax.Array
    share_BTJ: jax.Array
    aux: dict[str, jax.Array]


class Router(NamedTuple):
    """A router's parameters.

    Attributes:
      weight_DE: the projection of tokens to logits.
      bias_E: added to the scores for choosing alone; None: there is none.
      logit_E: added to the logits; None: there is none.
    """

    weight_DE: jax.Array
    bias_E: jax.Array | None = None
    logit_E: jax.Array | None = None


def route(x_BTD: jax.Array, router: Router, real_BT: jax.Array, shape: ExpertShape) -> Routing:
    """The experts of each token and the terms of the auxiliary losses, computed in float32.

    Args:
      real_BT: False for padding and empty slots, which get no expert and are not counted.
    Source: the balance loss is DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20, within an example; the router
      z-loss is Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    bias_E, weight_DE = router.bias_E, router.weight_DE.astype(jnp.float32)
    logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD.astype(jnp.float32), weight_DE, precision=jax.lax.Precision.HIGHEST)
    if router.logit_E is not None:
        logits_BTE += router.logit_E.astype(jnp.float32)
    score_BTE = jax.nn.sigmoid(logits_BTE) if shape.score == "sigmoid" else jax.nn.softmax(logits_BTE)
    judging_BTE = logits_BTE if shape.judges_logits else score_BTE
    chosen_BTJE, expert_BTJ = _choose(judging_BTE if bias_E is None else score_BTE + bias_E, shape)
    chosen_BTJE &= real_BT[..., None, None]
    if shape.score == "sparsemixer":
        share_BTJ = jnp.sum(jnp.where(chosen_BTJE, _sparse_shares(logits_BTE, chosen_BTJE), 0), axis=-1)
    else:
        share_BTJ = jnp.sum(jnp.where(chosen_BTJE, score_BTE[:, :, None], 0), axis=-1)
    if shape.normalised:
        share_BTJ /= jnp.sum(share_BTJ, axis=-1, keepdims=True) + 1e-20
    count_BE = _count(chosen_BTJE)
    # Equation 18 counts choices by the scores alone: the bias must not hide the imbalance that it corrects.
    judged_BE = count_BE if bias_E is None else _count(_choose(judging_BTE, shape)[0] & real_BT[..., None, None])
    aux = {
        BALANCE: _balance(score_BTE, judged_BE, real_BT, shape),
        ROUTER_Z: jnp.where(real_BT, jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)), 0),
    }
    if bias_E is not None:
        aux[EXPERT_COUNTS] = count_BE
    return Routing(jnp.where(real_BT[..., None], expert_BTJ, shape.num_experts), shape.scaling * share_BTJ, aux)


def _choose(score_BTE: jax.Array, shape: ExpertShape) -> tuple[jax.Array, jax.Array]:
    """The J largest, in the best groups: True at each, [B, T, J, E], and their numbers [B, T, J].

    Source: groups are DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2 (by the best), and arXiv:2412.19437, section
    2.1.2 (by the best two).
    """
    judges = 2 if shape.score == "sigmoid" else 1

    def largest(score_BTE: jax.Array) -> jax.Array:
        if shape.num_groups > 1:
            group = jnp.arange(shape.num_experts) // (shape.num_experts // shape.num_groups)
            best = jax.lax.top_k(score_BTE.reshape(*score_BTE.shape[:2], shape.num_groups, -1), judges)[0]
            _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), shape.groups_per_token)
            in_chosen_BTE = jnp.any(chosen[..., None] == group, axis=-2)
            score_BTE = jnp.where(in_chosen_BTE, score_BTE, -jnp.inf)
        return jax.lax.top_k(score_BTE, shape.num_per_token)[1]

    # Each device chooses for its own tokens: the partitioner would gather all devices' scores.
    expert_BTJ = over_shards(largest, [TOKEN_AXES], TOKEN_AXES)(jax.lax.stop_gradient(score_BTE))
    return expert_BTJ[..., None] == jnp.arange(shape.num_experts), expert_BTJ


_JITTER = 0.01  # the value of every phimoe checkpoint


def _sparse_shares(logits_BTE: jax.Array, chosen_BTJE: jax.Array) -> jax.Array:
    """A softmax for each choice in turn, [B, T, J, E], over the experts that are left and near the best of them.

    In training as in inference the largest are chosen, and the shares have their own derivative: nothing is sampled,
    and none of the estimates that belong to samples is made.
    Source: Liu et al. 2024, arXiv:2409.12136, section 2.2, as Phi-3.5-MoE has it.
    """
    taken_BTJE = (jnp.cumsum(chosen_BTJE, axis=2) - chosen_BTJE) > 0
    left_BTJE = jnp.where(taken_BTJE, -jnp.inf, logits_BTE[:, :, None])
    largest_BTJ1 = jax.lax.stop_gradient(jnp.max(left_BTJE, axis=-1, keepdims=True))
    logits_BT1E = jax.lax.stop_gradient(logits_BTE)[:, :, None]
    distance_BTJE = (largest_BTJ1 - logits_BT1E) / jnp.maximum(jnp.abs(logits_BT1E), largest_BTJ1)
    return jax.nn.softmax(jnp.where(distance_BTJE > 2 * _JITTER, -jnp.inf, left_BTJE))


def _count(chosen_BTJE: jax.Array) -> jax.Array:
    """Tokens of each example that chose each expert, int32."""
    return jnp.sum(chosen_BTJE, axis=(1, 2), dtype=jnp.int32)


def _balance(score_BTE: jax.Array, count_BE: jax.Array, real_BT: jax.Array, shape: ExpertShape) -> jax.Array:
    """E x sum over experts of its share of an example's choices x its mean probability; 1 where either is even."""
    tokens_B1 = jnp.maximum(jnp.sum(real_BT, axis=1, dtype=jnp.float32), 1)[:, None]
    probability_BTE = score_BTE / (jnp.sum(score_BTE, axis=-1, keepdims=True) + 1e-20)
    mean_BE = jnp.sum(jnp.where(real_BT[..., None], probability_BTE, 0), axis=1) / tokens_B1
    share_BE = count_BE / (shape.num_per_token * tokens_B1)
    return shape.num_experts * jnp.sum(share_BE * mean_BE, axis=1)
