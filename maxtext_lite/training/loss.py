"""Cross-entropy over the vocabulary as sums, without materialising all logits at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.batching import vocab_tiles
from maxtext_lite.config import NumericsConfig
from maxtext_lite.models import BALANCE, DROPPED, EXPERT_COUNTS, LARGEST_LOGITS, ROUTER_Z, Decoder, Stream, soft_capped
from maxtext_lite.models.layers import OutputHead, projected
from maxtext_lite.models.ops import product
from maxtext_lite.parallel import (
    AS_IT_IS,
    Params,
    Tree,
    all_gather_for_compute,
    axes_in_use,
    constrain,
    context_shards,
    num_shards,
)
from maxtext_lite.training.arrays import Metrics, Rows

HEAD_AXES = ("embed", "vocab")
"""Logical axes of the output projection, tied or not."""


class LossSums(NamedTuple):
    """Float32 sums of loss x weight over tokens, pairs or responses.

    In a train step every weight includes 1 / the step's divisor, so the sum over all micro-batches is the mean.

    Attributes:
      z_loss: of the squared log-partition, before its multiplier.
      aux: the experts' sums by name (see `Outputs.auxiliary_loss`), and an objective's own.
    """

    loss: Array
    z_loss: Array
    aux: dict[str, Array]


MicroBatchSums: TypeAlias = tuple[LossSums, Array | None, Array | None]
"""The sums of losses and the expert counts of the rows of one forward pass."""


@dataclasses.dataclass(frozen=True)
class Readout:
    """How likelihoods are computed from hidden states.

    Attributes:
      num_tiles: tiles of the sequence; one has logits at a time. A divisor of a context shard's tokens, or -1
        (`batching.vocab_tiles`).
      soft_cap: of the logits; 0: none.
      temperature: divides the capped logits.
      grad_dtype: dtype in which partial sums of the head's gradient cross `fsdp`.
      z_loss_multiplier: of the squared log-partition, in `cross_entropy`.
      multiplier: of the logits, before the cap.
    """

    num_tiles: int = 1
    soft_cap: float = 0.0
    temperature: float = 1.0
    grad_dtype: DTypeLike = jnp.float32
    z_loss_multiplier: float = 0.0
    multiplier: float = 1.0

    def logits(self, x_BTD: Array, head: OutputHead) -> Array:
        """Logits [B, T, V] in float32: multiplied, then capped, then divided by the temperature."""
        logits_BTV = constrain(projected(x_BTD, head), ("end_batch", "length", "activation_vocab"))
        if self.multiplier != 1:
            logits_BTV *= self.multiplier
        if self.soft_cap:
            logits_BTV = soft_capped(logits_BTV, self.soft_cap)
        if self.temperature != 1:
            logits_BTV /= self.temperature
        return logits_BTV


class _TileLosses(NamedTuple):
    """The nll and log-partition of one tile, its softmax numerators and their sum, and the mask of its targets."""

    nll_BT: Array
    log_partition_BT: Array
    exponential_BTV: Array
    sum_BT: Array
    is_target_BTV: Array


def _tile_losses(logits_BTV: Array, target_BT: Array) -> _TileLosses:
    max_BT = jnp.max(logits_BTV, axis=-1)
    exponential_BTV = jnp.exp(logits_BTV - max_BT[..., None])
    sum_BT = jnp.sum(exponential_BTV, axis=-1)
    log_partition_BT = max_BT + jnp.log(sum_BT)
    # A comparison shards over the vocabulary like the logits; a look-up would not.
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == target_BT[..., None]
    target_logit_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
    return _TileLosses(log_partition_BT - target_logit_BT, log_partition_BT, exponential_BTV, sum_BT, is_target_BTV)


def _split_tiles(x: Array, num_tiles: int) -> Array:
    """[B, T, ...] as [tiles, B, T / tiles, ...], each tile with equally many tokens of every context shard."""
    B, T = x.shape[:2]
    shards = context_shards()
    x = x.reshape(B, shards, num_tiles, T // (shards * num_tiles), *x.shape[2:])
    return jnp.moveaxis(x, 2, 0).reshape(num_tiles, B, T // num_tiles, *x.shape[4:])


def _join_tiles(x: Array) -> Array:
    """The inverse of `_split_tiles`."""
    num_tiles, B, T = x.shape[:3]
    x = x.reshape(num_tiles, B, context_shards(), -1, *x.shape[3:])
    return jnp.moveaxis(x, 0, 2).reshape(B, num_tiles * T, *x.shape[4:])


def scan_tiles(
    function: Callable[[Tree, tuple[Array, ...]], tuple[Tree, Tree]],
    carry: Tree,
    how: "Readout",
    head: OutputHead,
    *arrays: Array,
) -> tuple[Tree, Tree]:
    """A scan of function(carry, tiles) over tiles of the sequence; results come back in token order.

    Args:
      arrays: [B, T, ...]; one device has as many tiles as `batching.vocab_tiles` says.
    """
    B, T = arrays[0].shape[:2]
    num_tiles = vocab_tiles(
        how.num_tiles,
        rows=-(-B // num_shards("end_batch")),
        tokens=T // context_shards(),
        vocab_size=head.projection_DV.shape[1] // num_shards("activation_vocab"),
    )
    if num_tiles == 1:
        return function(carry, arrays)
    carry, results = jax.lax.scan(function, carry, tuple(_split_tiles(x, num_tiles) for x in arrays))
    return carry, jax.tree.map(_join_tiles, results)


def _token_shards(num_rows: int) -> tuple[int, int]:
    """The shards of that many rows, and of their sequence."""
    return math.gcd(num_rows, num_shards("end_batch")), context_shards()


def _own_gradient(x_BTD: Array, dlogits_BTV: Array) -> Array:
    """The head's gradient [Z, D, V], float32, from each shard's own tokens."""
    B, T = x_BTD.shape[:2]
    X, Y = _token_shards(len(x_BTD))

    def own(x: Array) -> Array:
        return constrain(x.reshape(X, B // X, Y, T // Y, -1), ("end_batch", None, "length", None, AS_IT_IS))

    sums_XYDV = jnp.einsum("XBYTD,XBYTV->XYDV", own(x_BTD), own(dlogits_BTV), preferred_element_type=jnp.float32)
    return constrain(sums_XYDV.reshape(X * Y, *sums_XYDV.shape[2:]), ("token_shards", None, HEAD_AXES[1]))


def token_losses(x_BTD: Array, head: OutputHead, target_BT: Array, how: Readout = Readout()) -> Array:
    """The negative log-likelihood [B, T], float32, of each target; to differentiate, use `token_nll`.

    Args:
      head: the output projection, in the dtype of x_BTD, and the logits' bias.
    """

    def tile(carry: None, arrays: tuple[Array, ...]) -> tuple[None, Array]:
        x, target = arrays
        return carry, _tile_losses(how.logits(x, head), target).nll_BT

    _, nll_BT = scan_tiles(tile, None, how, head, x_BTD, target_BT)
    return nll_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    x_BTD: Array, head: OutputHead, target_BT: Array, weight_BT: Array, how: Readout = Readout()
) -> tuple[Array, LossSums]:
    """sum(weight * (nll + z_loss_multiplier * log_partition**2)), and its two parts.

    The forward pass computes the gradient together with the loss, tile by tile: each tile's logits are computed once,
    and only one tile's exist at a time. Only the first result is differentiated, with respect to x_BTD and the head.

    Each device sums the head's gradient of its own tokens over all tiles, in float32, before the devices' sums are
    reduced once.

    Args:
      weight_BT: float32 loss weight of each target; 0 without one.
    Source: the z-loss is Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """

    return _cross_entropy_forward(x_BTD, head, target_BT, weight_BT, how)[0]


def _cross_entropy_forward(
    x_BTD: Array, head: OutputHead, target_BT: Array, weight_BT: Array, how: Readout = Readout()
) -> tuple[tuple[Array, LossSums], tuple[Array, OutputHead]]:
    def tile(carry: Tree, arrays: tuple[Array, ...]) -> tuple[Tree, Array]:
        loss, z_loss, own_ZDV, dbias_V = carry
        x_BTD, target_BT, weight_BT = arrays
        logits_BTV = how.logits(x_BTD, head)
        losses = _tile_losses(logits_BTV, target_BT)
        # The gradient of the loss by the logits: weight * (softmax - target), with the z-loss's part.
        scale_BT = weight_BT * (1 + 2 * how.z_loss_multiplier * losses.log_partition_BT) / losses.sum_BT
        dlogits_BTV = scale_BT[..., None] * losses.exponential_BTV
        dlogits_BTV -= jnp.where(losses.is_target_BTV, weight_BT[..., None], 0)
        if how.temperature != 1:
            dlogits_BTV /= how.temperature
            logits_BTV *= how.temperature
        if how.soft_cap:  # the derivative of c tanh(x / c), from its value
            dlogits_BTV *= 1 - jnp.square(logits_BTV / how.soft_cap)
        if how.multiplier != 1:
            dlogits_BTV *= how.multiplier
        dlogits_BTV = dlogits_BTV.astype(x_BTD.dtype)
        dx_BTD = product("BTV,DV->BTD", dlogits_BTV, head.projection_DV, "vocab")
        own_ZDV += _own_gradient(x_BTD, dlogits_BTV)
        if dbias_V is not None:
            dbias_V += jnp.sum(dlogits_BTV, axis=(0, 1), dtype=jnp.float32)
        loss += jnp.sum(weight_BT * losses.nll_BT)
        z_loss += jnp.sum(weight_BT * jnp.square(losses.log_partition_BT))
        return (loss, z_loss, own_ZDV, dbias_V), dx_BTD

    zero = jnp.zeros([], jnp.float32)
    own_ZDV = jnp.zeros((math.prod(_token_shards(len(x_BTD))), *head.projection_DV.shape), jnp.float32)
    dbias_V = None if head.bias_V is None else jnp.zeros(head.bias_V.shape, jnp.float32)
    carry, dx_BTD = scan_tiles(tile, (zero, zero, own_ZDV, dbias_V), how, head, x_BTD, target_BT, weight_BT)
    loss, z_loss, own_ZDV, dbias_V = carry

    dtype = how.grad_dtype if num_shards("embed") > 1 else jnp.float32
    dhead_DV = constrain(jnp.sum(own_ZDV.astype(dtype), axis=0, dtype=dtype), HEAD_AXES)
    if head.bias_V is not None:
        dbias_V = dbias_V.astype(head.bias_V.dtype)
    dhead = OutputHead(dhead_DV.astype(head.projection_DV.dtype), dbias_V)
    return (loss + how.z_loss_multiplier * z_loss, LossSums(loss, z_loss, {})), (dx_BTD, dhead)


def _cross_entropy_backward(
    how: Readout, residuals: tuple[Array, OutputHead], cotangents: tuple[Array, LossSums]
) -> tuple[Array, OutputHead, None, None]:
    del how
    scale = cotangents[0]  # float32, because bfloat16 would round the step's 1 / target_tokens

    dx_BTD, dhead = jax.tree.map(lambda gradient: (gradient * scale).astype(gradient.dtype), residuals)
    return dx_BTD, dhead, None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_nll(x_BTD: Array, head: OutputHead, target_BT: Array, how: Readout) -> Array:
    """`token_losses` with the backward pass of `cross_entropy`, the losses' gradients being the weights.

    The backward pass recomputes each tile's logits; only one tile's exist at a time.
    """
    return token_losses(x_BTD, head, target_BT, how)


def _token_nll_forward(
    x_BTD: Array, head: OutputHead, target_BT: Array, how: Readout
) -> tuple[Array, tuple[Array, OutputHead, Array]]:
    return token_nll(x_BTD, head, target_BT, how), (x_BTD, head, target_BT)


def _token_nll_backward(
    how: Readout, residuals: tuple[Array, OutputHead, Array], weight_BT: Array
) -> tuple[Array, OutputHead, None]:
    _, (dx_BTD, dhead) = _cross_entropy_forward(*residuals, weight_BT, how)
    return dx_BTD, dhead, None


token_nll.defvjp(_token_nll_forward, _token_nll_backward)


class TokenSplit(NamedTuple):
    """How tokens are split over devices for the loss: [B, T, ...] to the shares, and back."""

    split: Callable[[Array], Array]
    merge: Callable[[Array], Array]


WHOLE = TokenSplit(lambda x: x, lambda x: x)
"""Tokens that are not split."""


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The final hidden states of rows; everything else is computed on demand.

    Attributes:
      params: the decoder's parameters as `Decoder.cast` gives them.
      x_BTD: final hidden states after the norm, split as `tokens` says.
      aux: the streams' auxiliary values after all layers; {} without experts.
      config: tiles, number formats, and multipliers of auxiliary losses.
      ahead: final hidden states of each layer of multi-token prediction, like x_BTD.
    """

    decoder: Decoder
    params: Params
    x_BTD: Array
    aux: dict[str, Array]
    config: NumericsConfig
    tokens: TokenSplit = WHOLE
    ahead: Sequence[Array] = ()

    def _head_inputs(self) -> tuple[Array, OutputHead]:
        """The final hidden states and the output projection [D, V], sharded for the loss."""
        # Gathered here, once each: logits and gradient, their two uses, could each gather them again.
        x_BTD = constrain(self.x_BTD, ("end_batch", "length", "activation_embed"))
        head_DV = self.decoder.head(self.params).astype(x_BTD.dtype)
        head_DV = cast(Array, all_gather_for_compute(head_DV, axes_in_use(HEAD_AXES), HEAD_AXES))
        return x_BTD, OutputHead(head_DV, self.params["head"]["bias"] if self.decoder.shape.logits_bias else None)

    def _readout(self, temperature: float = 1.0, z_loss_multiplier: float = 0.0) -> Readout:
        return Readout(
            num_tiles=self.config.num_vocab_tiling,
            soft_cap=self.decoder.shape.final_soft_cap,
            temperature=temperature,
            grad_dtype=jnp.dtype(self.config.grad_dtype),
            z_loss_multiplier=z_loss_multiplier,
            multiplier=self.decoder.shape.logits_multiplier,
        )

    def cross_entropy(self, target_BT: Array, weight_BT: Array) -> tuple[Array, LossSums]:
        """The weighted sum of the targets' losses with the config's z-loss, and its parts."""
        how = self._readout(z_loss_multiplier=self.config.z_loss_multiplier)
        return cross_entropy(*self._head_inputs(), self.tokens.split(target_BT), self.tokens.split(weight_BT), how)

    def mtp_loss(self, rows: Rows, factor: Array) -> Array:
        """The loss of multi-token prediction, mean over its layers, each with a count of its own.

        Args:
          factor: as the objective's.
        """
        total = jnp.zeros([], jnp.float32)
        for number, x_BTD in enumerate(self.ahead, start=1):
            here = dataclasses.replace(self, x_BTD=x_BTD)
            weight_BT = rows[f"weights+{number}"] * factor / len(self.ahead)
            target_BT = self.tokens.split(rows[f"targets+{number}"])
            found: tuple[Array, LossSums] = cross_entropy(
                *here._head_inputs(), target_BT, self.tokens.split(weight_BT), self._readout()
            )
            total += found[0]
        return total

    def nll(self, target_BT: Array, temperature: float = 1.0) -> Array:
        """The differentiable negative log-likelihood [B, T], float32, of each target."""
        nll_BT = token_nll(*self._head_inputs(), self.tokens.split(target_BT), self._readout(temperature))
        return self.tokens.merge(cast(Array, nll_BT))

    def logits(self) -> Array:
        """The logits [B, T, V] of all tokens at once, float32."""
        return self.tokens.merge(self._readout().logits(*self._head_inputs()))

    def scored_nll(self, target_BT: Array) -> Array:
        """`nll` for evaluations, not sharded for a gradient."""
        head = self.decoder.output_head(self.params, self.x_BTD.dtype)
        return token_losses(self.x_BTD, head, target_BT, self._readout())

    @property
    def expert_counts(self) -> Array | None:
        """The tokens that chose each expert of each layer, int32 [L, E]; None where no router's bias needs them."""
        counts_BLE = self.aux.get(EXPERT_COUNTS)
        return None if counts_BLE is None else jnp.sum(counts_BLE, axis=0)

    @property
    def largest_logits(self) -> Array | None:
        """The largest logit of each head of each layer, [L, N]; None without qk_clip_threshold."""
        largest_BLN = self.aux.get(LARGEST_LOGITS)
        return None if largest_BLN is None else jnp.max(largest_BLN, axis=0)

    def auxiliary_loss(self, weight_BT: Array, example_weight_B: Array) -> tuple[Array, dict[str, Array]]:
        """The experts' part of the summed loss, and sums by name.

        Values per token have the token's weight in the loss, values per example that of its target tokens. The sums are
        means over layers with experts, before their multipliers.

        Args:
          weight_BT, example_weight_B: divided as the loss is.
        """
        multipliers = {BALANCE: self.config.load_balance_loss_weight, ROUTER_Z: self.config.router_z_loss_multiplier}
        loss = jnp.zeros([], jnp.float32)
        sums = {}
        for name in auxiliary_names(self.decoder):
            weights = weight_BT if self.aux[name].ndim == 2 else example_weight_B
            sums[name] = jnp.sum(weights * self.aux[name]) / self.decoder.shape.num_expert_layers
            loss += multipliers.get(name, 0) * sums[name]
        return loss, sums


def forward(decoder: Decoder, params: Params, rows: Rows, config: NumericsConfig) -> Outputs:
    """The outputs for rows [B, T]; `params` as `Decoder.cast` gives them."""
    x_BTD, aux = decoder.hidden_and_aux(params, rows["tokens"], rows["segments"], rows["positions"])
    stream = Stream(x_BTD, rows["segments"], rows["positions"], aux)
    ahead, aux = decoder.predict_ahead(params, stream, tokens_ahead(rows))
    return Outputs(decoder, params, x_BTD, aux, config, ahead=ahead)


def tokens_ahead(rows: Rows) -> list[tuple[Array, Array]]:
    """The tokens and document numbers that layers of multi-token prediction read; none in rows without them."""
    count = sum(name.startswith("tokens+") for name in rows)
    return [(rows[f"tokens+{number}"], rows[f"segments+{number}"]) for number in range(1, count + 1)]


def target_tokens(rows: Rows) -> Array:
    """Target tokens of each row, int32 [..., B]."""
    return jnp.sum(rows["weights"] > 0, axis=-1, dtype=jnp.int32)


def zero_sums(decoder: Decoder, zero: Array, *names: str) -> LossSums:
    """The sums before the first micro-batch: `zero` for the loss, the experts' sums and these names."""
    return LossSums(zero, zero, dict.fromkeys((*auxiliary_names(decoder), *names), zero))


def spread_over_targets(example_weight_B: Array, rows: Rows) -> tuple[Array, Array]:
    """The arguments of `Outputs.auxiliary_loss` for rows with weights of their own, split evenly over target tokens."""
    is_target_BT = rows["weights"] > 0
    share_B = example_weight_B / jnp.maximum(jnp.sum(is_target_BT, axis=-1), 1)
    return is_target_BT * share_B[:, None], example_weight_B


AUXILIARY_METRICS = (BALANCE, "moe_balance_loss", "router_z_loss", DROPPED)
"""Metrics of a model with experts. moe_balance is 1 where all experts are chosen equally often; the two losses include
their multipliers, where those are not 0; moe_dropped_fraction is the share of dropped choices, with a capacity."""


def auxiliary_metrics(aux: dict[str, Array], config: NumericsConfig) -> Metrics:
    """The AUXILIARY_METRICS that apply, from a step's means; {} without experts."""
    metrics = {name: aux[name] for name in (BALANCE, DROPPED) if name in aux}
    if BALANCE in aux and config.load_balance_loss_weight:
        metrics["moe_balance_loss"] = config.load_balance_loss_weight * aux[BALANCE]
    if ROUTER_Z in aux and config.router_z_loss_multiplier:
        metrics["router_z_loss"] = config.router_z_loss_multiplier * aux[ROUTER_Z]
    return metrics


def auxiliary_names(decoder: Decoder) -> list[str]:
    """The names of the sums of `Outputs.auxiliary_loss`."""
    experts = decoder.shape.experts
    return [] if experts is None else [name for name in experts.aux_axes if name != EXPERT_COUNTS]
