"""The outputs of a forward pass as objectives use them: likelihoods, logits, and the experts' auxiliary losses."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from maxtext_lite.config import NumericsConfig
from maxtext_lite.models import BALANCE, DROPPED, EXPERT_COUNTS, ROUTER_Z, Decoder
from maxtext_lite.models.layers import BiasedHead, OutputHead
from maxtext_lite.parallel import Params, axes_in_use, constrain, gathered_for_use
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.loss import HEAD_AXES, LossSums, Readout, cross_entropy, token_losses, token_nll


class TokenSplit(NamedTuple):
    """How tokens are split over devices for the loss: [B, T, ...] to the shares, and back."""

    split: Callable[[jax.Array], jax.Array]
    merge: Callable[[jax.Array], jax.Array]


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
    """

    decoder: Decoder
    params: Params
    x_BTD: jax.Array
    aux: dict[str, jax.Array]
    config: NumericsConfig
    tokens: TokenSplit = WHOLE

    def _head_inputs(self) -> tuple[jax.Array, OutputHead]:
        """The final hidden states and the output projection [D, V], sharded for the loss."""
        # Gathered here, once each: logits and gradient, their two uses, could each gather them again.
        x_BTD = constrain(self.x_BTD, ("end_batch", "length", "activation_embed"))
        head_DV = self.decoder.head(self.params).astype(x_BTD.dtype)
        head_DV = cast(jax.Array, gathered_for_use(head_DV, axes_in_use(HEAD_AXES), HEAD_AXES))
        is_biased = self.decoder.shape.logits_bias
        return x_BTD, BiasedHead(head_DV, self.params["head"]["bias"]) if is_biased else head_DV

    def _readout(self, temperature: float = 1.0, z_loss_multiplier: float = 0.0) -> Readout:
        config, shape = self.config, self.decoder.shape
        how = config.num_vocab_tiling, shape.final_soft_cap, temperature, jnp.dtype(config.grad_dtype)
        return Readout(*how, z_loss_multiplier, shape.logits_multiplier)

    def cross_entropy(self, target_BT: jax.Array, weight_BT: jax.Array) -> tuple[jax.Array, LossSums]:
        """The weighted sum of the targets' losses with the config's z-loss, and its parts."""
        how = self._readout(z_loss_multiplier=self.config.z_loss_multiplier)
        return cross_entropy(*self._head_inputs(), self.tokens.split(target_BT), self.tokens.split(weight_BT), how)

    def nll(self, target_BT: jax.Array, temperature: float = 1.0) -> jax.Array:
        """The differentiable negative log-likelihood [B, T], float32, of each target: see `loss.token_nll`."""
        found = token_nll(*self._head_inputs(), self.tokens.split(target_BT), self._readout(temperature))
        return self.tokens.merge(cast(jax.Array, found))

    def logits(self) -> jax.Array:
        """The logits [B, T, V] of all tokens at once, float32."""
        return self.tokens.merge(self._readout().logits(*self._head_inputs()))

    def scored_nll(self, target_BT: jax.Array) -> jax.Array:
        """`nll` for evaluations, not sharded for a gradient."""
        head = self.decoder.output_head(self.params, self.x_BTD.dtype)
        return token_losses(self.x_BTD, head, target_BT, self._readout())

    @property
    def expert_counts(self) -> jax.Array | None:
        """The tokens that chose each expert of each layer, int32 [L, E]; None where no router's bias needs them."""
        counts_BLE = self.aux.get(EXPERT_COUNTS)
        return None if counts_BLE is None else jnp.sum(counts_BLE, axis=0)

    def auxiliary_loss(
        self, weight_BT: jax.Array, example_weight_B: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
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
    return Outputs(decoder, params, x_BTD, aux, config)


def target_tokens(rows: Rows) -> jax.Array:
    """Target tokens of each row, int32 [..., B]."""
    return jnp.sum(rows["weights"] > 0, axis=-1, dtype=jnp.int32)


def zero_sums(decoder: Decoder, zero: jax.Array, *names: str) -> LossSums:
    """The sums before the first micro-batch: `zero` for the loss, the experts' sums and those of these names."""
    return LossSums(zero, zero, dict.fromkeys((*auxiliary_names(decoder), *names), zero))


def spread_over_targets(example_weight_B: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The arguments of `Outputs.auxiliary_loss` for rows with weights of their own, split evenly over target tokens."""
    is_target_BT = rows["weights"] > 0
    share_B = example_weight_B / jnp.maximum(jnp.sum(is_target_BT, axis=-1), 1)
    return is_target_BT * share_B[:, None], example_weight_B


AUXILIARY_METRICS = (BALANCE, "moe_balance_loss", "router_z_loss", DROPPED)
"""Metrics of a model with experts: moe_balance is 1 where all experts are chosen equally often; the two losses include
their multipliers, where those are not 0; moe_dropped_fraction is the share of dropped choices, with a capacity."""


def auxiliary_metrics(aux: dict[str, jax.Array], config: NumericsConfig) -> Metrics:
    """The AUXILIARY_METRICS that apply, from a step's means; {} without experts."""
    metrics = {name: aux[name] for name in (BALANCE, DROPPED) if name in aux}
    if aux and config.load_balance_loss_weight:
        metrics["moe_balance_loss"] = config.load_balance_loss_weight * aux[BALANCE]
    if aux and config.router_z_loss_multiplier:
        metrics["router_z_loss"] = config.router_z_loss_multiplier * aux[ROUTER_Z]
    return metrics


def auxiliary_names(decoder: Decoder) -> list[str]:
    """The names of the sums of `Outputs.auxiliary_loss`."""
    experts = decoder.shape.experts
    return [] if experts is None else [name for name in experts.aux_axes if name != EXPERT_COUNTS]
