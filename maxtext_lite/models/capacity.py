"""Experts with a capacity: each has a number of slots for an example, and choices without a slot are dropped.

Slots reach their expert's device and return by two all-to-alls.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.models.moe import ExpertShape, ExpertWeights, Routing
from maxtext_lite.models.ops import mlp_hidden, project_array
from maxtext_lite.parallel import constrain, context_order, context_shards, over_experts


def expert_capacity(shape: ExpertShape, num_tokens: int) -> np.ndarray:
    """Tokens that an expert takes of an example of 0, 1, ..., num_tokens tokens, int32, rounded up exactly."""
    factor = shape.capacity_factor
    assert factor is not None, "a capacity belongs to a factor"
    tokens = np.arange(num_tokens + 1, dtype=np.int64)
    slots = -(-tokens * shape.num_per_token * factor.numerator // (shape.num_experts * factor.denominator))
    return np.minimum(slots, tokens).astype(np.int32)


def with_capacity(
    x_BTD: jax.Array, routing: Routing, weights: ExpertWeights, shape: ExpertShape
) -> tuple[jax.Array, jax.Array]:
    """`dropless` for the choices with a slot, earlier tokens first, and the share of dropped choices, [B] float32.

    Choices compete only within an example, and only with those of earlier tokens: nothing depends on how a batch is
    split or on later tokens.
    Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3.2, with the example as their group.
    """
    B, T, D = x_BTD.shape
    E, J = shape.num_experts, shape.num_per_token
    real_BT = routing.expert_BTJ[..., 0] < E
    capacity_T = expert_capacity(shape, T)
    num_slots = int(capacity_T[-1])
    tokens_B = jnp.sum(real_BT, axis=1, dtype=jnp.int32)
    expert_BTJ = constrain(routing.expert_BTJ, ("batch", None, None))
    expert_Bt = expert_BTJ.reshape(B, T * J)  # choices in order
    before_Bt = _earlier_choices(expert_BTJ, E).reshape(B, T * J)
    is_kept_Bt = (expert_Bt < E) & (before_Bt < jnp.asarray(capacity_T)[tokens_B][:, None])
    slot_Bt = jnp.where(is_kept_Bt, expert_Bt * num_slots + before_Bt, E * num_slots)
    choice_BS = _inverse_permutation(slot_Bt, E * num_slots)
    slots = (slot_Bt.reshape(B, T, J), choice_BS)
    x_BSD = _into_slots(constrain(x_BTD, ("batch", None, "activation_embed")), *slots)
    share_BTJ1 = routing.share_BTJ[..., None]
    if shape.on_input:
        share_BS1, share_BTJ1 = _looked_up(share_BTJ1.reshape(B, T * J, 1), choice_BS), jnp.ones_like(share_BTJ1)
        x_BSD *= share_BS1.astype(x_BSD.dtype)
    x_EBCD = x_BSD.reshape(B, E, num_slots, D).swapaxes(0, 1)
    # Slots of all experts for some rows become all rows' slots of some experts: an all-to-all.
    x_EBCD = constrain(constrain(x_EBCD, (None, "batch", None, None)), ("experts", "exchanged_batch", None, None))
    x_EBCD = checkpoint_name(x_EBCD, "expert_rows")
    inwards = functools.partial(_experts_matmul, shape, ("expert_embed", "mlp"))
    outwards = functools.partial(_experts_matmul, shape, ("mlp", "expert_embed"))
    gate_EBCF = checkpoint_name(inwards(x_EBCD, weights.gate_EDF, weights.gate_EF), "mlpwi_0")
    up_EBCF = checkpoint_name(inwards(x_EBCD, weights.up_EDF, weights.up_EF), "mlpwi_1")
    y_EBCD = outwards(mlp_hidden(shape.activation, gate_EBCF, up_EBCF), weights.down_EFD, weights.down_ED)
    y_EBCD = constrain(constrain(y_EBCD, ("experts", "exchanged_batch", None, None)), (None, "batch", None, None))
    y_BTJD = checkpoint_name(_out_of_slots(y_EBCD.swapaxes(0, 1).reshape(B, E * num_slots, D), *slots), "mlpwo")
    y_BTD = jnp.sum(share_BTJ1 * y_BTJD.astype(jnp.float32), axis=2).astype(x_BTD.dtype)
    kept_B = jnp.sum(is_kept_Bt, axis=1, dtype=jnp.float32)
    dropped_B = 1 - kept_B / jnp.maximum(J * tokens_B, 1)
    return y_BTD, jnp.where(tokens_B > 0, dropped_B, 0)


def _earlier_choices(expert_BTJ: jax.Array, num_experts: int) -> jax.Array:
    """The number of earlier choices of the same expert in the example, in the true order of tokens: [B, T, J]."""
    B, T, J = expert_BTJ.shape
    order_T = context_order(T, context_shards()) if context_shards() > 1 else np.arange(T)
    true_order_Bt = expert_BTJ[:, np.argsort(order_T)].reshape(B, T * J)
    is_chosen_BtE = true_order_Bt[..., None] == jnp.arange(num_experts)
    before_BtE = jnp.cumsum(is_chosen_BtE, axis=1, dtype=jnp.int32) - 1
    return jnp.sum(jnp.where(is_chosen_BtE, before_BtE, 0), axis=-1).reshape(B, T, J)[:, order_T]


def _experts_matmul(
    shape: ExpertShape, axes: tuple[str, str], x_EBCi: jax.Array, weight_Eio: jax.Array, bias_Eo: jax.Array | None
) -> jax.Array:
    if shape.quantization == "none":
        weight = weight_Eio.astype(x_EBCi.dtype)
        y_EBCo: Any = jnp.einsum("EBCi,Eio->EBCo", x_EBCi, weight, preferred_element_type=jnp.float32)
    else:  # an example's slots with an expert are its row

        def of_expert(x_BCi: jax.Array, weight_io: jax.Array) -> jax.Array:
            slots = ("exchanged_batch", None, None)
            return project_array(x_BCi, weight_io, axes, slots, shape.grad_dtype, shape.quantization)

        y_EBCo = over_experts(of_expert)(x_EBCi, weight_Eio)
    if bias_Eo is not None:
        y_EBCo += bias_Eo.astype(jnp.float32)[:, None, None]
    return y_EBCo.astype(x_EBCi.dtype)


def _inverse_permutation(slot_Bt: jax.Array, num_slots: int) -> jax.Array:
    """Number of the choice in each slot, [B, S]; the count of choices for an empty slot."""

    def of_example(slot_t: jax.Array) -> jax.Array:
        empty = jnp.full(num_slots, slot_t.shape[0], jnp.int32)
        return empty.at[slot_t].set(jnp.arange(slot_t.shape[0], dtype=jnp.int32), mode="drop")

    return jax.vmap(of_example)(slot_Bt)


@jax.custom_vjp
def _into_slots(x_BTD: jax.Array, slot_BTJ: jax.Array, choice_BS: jax.Array) -> jax.Array:
    """The token in each slot, [B, S, D], zeros for an empty slot; both directions are look-ups, in a fixed order."""
    return _looked_up(x_BTD, choice_BS // slot_BTJ.shape[-1])


@jax.custom_vjp
def _out_of_slots(y_BSD: jax.Array, slot_BTJ: jax.Array, choice_BS: jax.Array) -> jax.Array:
    """The slot of each choice, [B, T, J, D]; zeros for a choice without one."""
    del choice_BS
    return _looked_up(y_BSD, slot_BTJ)


def _looked_up(table_BSD: jax.Array, number: jax.Array) -> jax.Array:
    return jax.vmap(functools.partial(jnp.take, axis=0, mode="fill", fill_value=0))(table_BSD, number)


def _into_slots_backward(slots: tuple[jax.Array, ...], g_BSD: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(_out_of_slots(g_BSD, *slots).astype(jnp.float32), axis=2).astype(g_BSD.dtype), None, None


def _out_of_slots_backward(slots: tuple[jax.Array, ...], g_BTJD: jax.Array) -> tuple[jax.Array, None, None]:
    choice_BS = slots[1]
    return _looked_up(g_BTJD.reshape(g_BTJD.shape[0], -1, g_BTJD.shape[-1]), choice_BS), None, None


_into_slots.defvjp(lambda x, *slots: (_into_slots(x, *slots), slots), _into_slots_backward)
_out_of_slots.defvjp(lambda y, *slots: (_out_of_slots(y, *slots), slots), _out_of_slots_backward)
