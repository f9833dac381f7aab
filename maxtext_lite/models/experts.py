"""Mixture of experts: routing, experts with a capacity or without, and the exchange of tokens between devices."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from maxtext_lite.config.kernels import GroupedMatmul, exchanged_rows
from maxtext_lite.config.registry import load
from maxtext_lite.config.weights import EXPERT_BIASES, EXPERT_WEIGHTS
from maxtext_lite.models.ops import (
    dtype_of_totals,
    mlp_hidden,
    number_format,
    project_array,
)
from maxtext_lite.models.shape import BALANCE, EXPERT_COUNTS, ROUTER_Z, ExpertShape
from maxtext_lite.parallel import (
    axes_in_use,
    constrain,
    context_order,
    context_shards,
    exchanged,
    gathered,
    largest,
    num_shards,
    over_experts,
    over_shards,
    scattered_sum,
    shard_index,
    summed,
)


class ExpertWeights(NamedTuple):
    """Gated mlps, one for each expert, with all biases or none."""

    gate_EDF: Array
    up_EDF: Array
    down_EFD: Array
    gate_EF: Array | None = None
    up_EF: Array | None = None
    down_ED: Array | None = None

    def arrays(self) -> list[Array]:
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

    expert_BTJ: Array
    share_BTJ: Array
    aux: dict[str, Array]


class Router(NamedTuple):
    """A router's parameters.

    Attributes:
      weight_DE: the projection of tokens to logits.
      bias_E: added to the scores for choosing alone; None: there is none.
      logit_E: added to the logits; None: there is none.
      load_E: each expert's share of the previous step's choices, times E and less 1: 0 for an even load. The balance
        loss takes it in place of the example's own choices; None: it does not.
    """

    weight_DE: Array
    bias_E: Array | None = None
    logit_E: Array | None = None
    load_E: Array | None = None


def route(x_BTD: Array, router: Router, real_BT: Array, shape: ExpertShape) -> Routing:
    """The experts of each token and the terms of the auxiliary losses, computed in float32.

    Args:
      real_BT: False for padding and empty slots, which get no expert and are not counted.
    Source: the balance loss is DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20, within an example, or with the
      choices of a whole batch Qiu et al. 2025, arXiv:2501.11873, section 3; the router z-loss is Zoph et al. 2022,
      arXiv:2202.08906, equation 5.
    """
    weight_DE = router.weight_DE.astype(jnp.float32)
    logits_BTE = jnp.einsum(
        "BTD,DE->BTE",
        x_BTD.astype(jnp.float32),
        weight_DE,
        precision=jax.lax.Precision.HIGHEST,
    )
    if router.logit_E is not None:
        logits_BTE += router.logit_E.astype(jnp.float32)
    score_BTE = jax.nn.sigmoid(logits_BTE) if shape.score == "sigmoid" else jax.nn.softmax(logits_BTE)
    judging_BTE = logits_BTE if shape.judges_logits else score_BTE
    bias_E = router.bias_E
    expert_BTJ = _choose(judging_BTE if bias_E is None else score_BTE + bias_E, shape)
    chosen_BTJE = _is_chosen(expert_BTJ, real_BT, shape)
    if shape.score == "sparsemixer":
        share_BTJ = jnp.sum(jnp.where(chosen_BTJE, _sparse_shares(logits_BTE, chosen_BTJE), 0), axis=-1)
    else:
        share_BTJ = jnp.sum(jnp.where(chosen_BTJE, score_BTE[:, :, None], 0), axis=-1)
    if shape.normalised:
        share_BTJ /= jnp.sum(share_BTJ, axis=-1, keepdims=True) + 1e-20
    count_BE = _count(chosen_BTJE)
    judged_BE = count_BE
    if bias_E is not None:
        # Equation 18 counts choices by the scores alone: the bias must not hide the imbalance that it corrects.
        judged_BE = _count(_is_chosen(_choose(judging_BTE, shape), real_BT, shape))
    aux = {
        BALANCE: _balance(score_BTE, judged_BE, router.load_E, real_BT, shape),
        ROUTER_Z: jnp.where(real_BT, jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)), 0),
    }
    if shape.counts:
        aux[EXPERT_COUNTS] = count_BE
    return Routing(
        jnp.where(real_BT[..., None], expert_BTJ, shape.num_experts),
        shape.scaling * share_BTJ,
        aux,
    )


def _choose(score_BTE: Array, shape: ExpertShape) -> Array:
    """Numbers of the J experts with the highest scores, in the best groups: [B, T, J].

    Source: groups are DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2 (by the best), and arXiv:2412.19437, section
    2.1.2 (by the best two).
    """
    # Each device chooses for its own tokens: the partitioner would gather all devices' scores.
    choose = over_shards(functools.partial(_choose_locally, shape), [TOKEN_AXES], TOKEN_AXES)
    return choose(jax.lax.stop_gradient(score_BTE))


def _choose_locally(shape: ExpertShape, score_BTE: Array) -> Array:
    if shape.num_groups > 1:
        judges = 2 if shape.score == "sigmoid" else 1
        group_E = jnp.arange(shape.num_experts) // (shape.num_experts // shape.num_groups)
        best, _ = jax.lax.top_k(score_BTE.reshape(*score_BTE.shape[:2], shape.num_groups, -1), judges)
        _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), shape.groups_per_token)
        in_chosen_BTE = jnp.any(chosen[..., None] == group_E, axis=-2)
        score_BTE = jnp.where(in_chosen_BTE, score_BTE, -jnp.inf)
    return jax.lax.top_k(score_BTE, shape.num_per_token)[1]


def _is_chosen(expert_BTJ: Array, real_BT: Array, shape: ExpertShape) -> Array:
    """True at each choice of a real token, [B, T, J, E]."""
    return (expert_BTJ[..., None] == jnp.arange(shape.num_experts)) & real_BT[..., None, None]


_JITTER = 0.01  # the value of every phimoe checkpoint


def _sparse_shares(logits_BTE: Array, chosen_BTJE: Array) -> Array:
    """A softmax for each choice in turn, [B, T, J, E], over remaining experts that are close to the best.

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


def _count(chosen_BTJE: Array) -> Array:
    """Tokens of each example that chose each expert, int32."""
    return jnp.sum(chosen_BTJE, axis=(1, 2), dtype=jnp.int32)


def _balance(
    score_BTE: Array,
    count_BE: Array,
    load_E: Array | None,
    real_BT: Array,
    shape: ExpertShape,
) -> Array:
    """E x sum over experts of its share of choices x its mean probability; 1 where either is even.

    The choices are the example's own, or those of the previous step. The latter are constants, so the loss is a sum
    over tokens, and the same however a batch is split.
    """
    tokens_B1 = jnp.maximum(jnp.sum(real_BT, axis=1, dtype=jnp.float32), 1)[:, None]
    probability_BTE = score_BTE / (jnp.sum(score_BTE, axis=-1, keepdims=True) + 1e-20)
    mean_BE = jnp.sum(jnp.where(real_BT[..., None], probability_BTE, 0), axis=1) / tokens_B1
    if load_E is not None:
        return jnp.sum((1 + jax.lax.stop_gradient(load_E)) * mean_BE, axis=1)
    share_BE = count_BE / (shape.num_per_token * tokens_B1)
    return shape.num_experts * jnp.sum(share_BE * mean_BE, axis=1)


def expert_capacity(shape: ExpertShape, num_tokens: int) -> np.ndarray:
    """Tokens that an expert takes of an example of 0, 1, ..., num_tokens tokens, int32, rounded up exactly."""
    factor = shape.capacity_factor
    assert factor is not None, "a capacity belongs to a factor"
    tokens = np.arange(num_tokens + 1, dtype=np.int64)
    slots = -(-tokens * shape.num_per_token * factor.numerator // (shape.num_experts * factor.denominator))
    return np.minimum(slots, tokens).astype(np.int32)


def with_capacity(x_BTD: Array, routing: Routing, weights: ExpertWeights, shape: ExpertShape) -> tuple[Array, Array]:
    """`dropless` for the choices with a slot, earlier tokens first, and the share of dropped choices, [B] float32.

    Choices compete only within an example, and only with those of earlier tokens: nothing depends on how a batch is
    split or on later tokens.
    Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3.2, with the example as their group.
    """
    B, T, D = x_BTD.shape
    E = shape.num_experts
    J = shape.num_per_token
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
        share_BS1 = _looked_up(share_BTJ1.reshape(B, T * J, 1), choice_BS)
        share_BTJ1 = jnp.ones_like(share_BTJ1)
        x_BSD *= share_BS1.astype(x_BSD.dtype)
    x_EBCD = x_BSD.reshape(B, E, num_slots, D).swapaxes(0, 1)
    # Slots of all experts for some rows become all rows' slots of some experts: an all-to-all.
    x_EBCD = constrain(
        constrain(x_EBCD, (None, "batch", None, None)),
        ("experts", "exchanged_batch", None, None),
    )
    x_EBCD = checkpoint_name(x_EBCD, "expert_rows")
    gate_EBCF = _experts_matmul(shape, _INWARDS, x_EBCD, weights.gate_EDF, weights.gate_EF)
    gate_EBCF = checkpoint_name(gate_EBCF, "mlpwi_0")
    up_EBCF = _experts_matmul(shape, _INWARDS, x_EBCD, weights.up_EDF, weights.up_EF)
    up_EBCF = checkpoint_name(up_EBCF, "mlpwi_1")
    hidden_EBCF = mlp_hidden(shape.activation, gate_EBCF, up_EBCF)
    y_EBCD = _experts_matmul(shape, _OUTWARDS, hidden_EBCF, weights.down_EFD, weights.down_ED)
    y_EBCD = constrain(
        constrain(y_EBCD, ("experts", "exchanged_batch", None, None)),
        (None, "batch", None, None),
    )
    y_BSD = y_EBCD.swapaxes(0, 1).reshape(B, E * num_slots, D)
    y_BTJD = checkpoint_name(_out_of_slots(y_BSD, *slots), "mlpwo")
    y_BTD = jnp.sum(share_BTJ1 * y_BTJD.astype(jnp.float32), axis=2).astype(x_BTD.dtype)
    kept_B = jnp.sum(is_kept_Bt, axis=1, dtype=jnp.float32)
    dropped_B = 1 - kept_B / jnp.maximum(J * tokens_B, 1)
    return y_BTD, jnp.where(tokens_B > 0, dropped_B, 0)


def _earlier_choices(expert_BTJ: Array, num_experts: int) -> Array:
    """Earlier choices of the same expert in the example, counted in the true order of tokens: [B, T, J]."""
    B, T, J = expert_BTJ.shape
    order_T = context_order(T, context_shards()) if context_shards() > 1 else np.arange(T)
    true_order_Bt = expert_BTJ[:, np.argsort(order_T)].reshape(B, T * J)
    is_chosen_BtE = true_order_Bt[..., None] == jnp.arange(num_experts)
    before_BtE = jnp.cumsum(is_chosen_BtE, axis=1, dtype=jnp.int32) - 1
    return jnp.sum(jnp.where(is_chosen_BtE, before_BtE, 0), axis=-1).reshape(B, T, J)[:, order_T]


def _experts_matmul(
    shape: ExpertShape,
    axes: tuple[str, str],
    x_EBCi: Array,
    weight_Eio: Array,
    bias_Eo: Array | None,
) -> Array:
    if shape.quantization == "none":
        weight = weight_Eio.astype(x_EBCi.dtype)
        y_EBCo: Any = jnp.einsum("EBCi,Eio->EBCo", x_EBCi, weight, preferred_element_type=jnp.float32)
    else:  # an example's slots with an expert are its row

        def of_expert(x_BCi: Array, weight_io: Array) -> Array:
            slots = ("exchanged_batch", None, None)
            return project_array(x_BCi, weight_io, axes, slots, shape.grad_dtype, shape.quantization)

        y_EBCo = over_experts(of_expert)(x_EBCi, weight_Eio)
    if bias_Eo is not None:
        y_EBCo += bias_Eo.astype(jnp.float32)[:, None, None]
    return y_EBCo.astype(x_EBCi.dtype)


def _inverse_permutation(slot_Bt: Array, num_slots: int) -> Array:
    """Number of the choice in each slot, [B, S]; the count of choices for an empty slot."""

    def of_example(slot_t: Array) -> Array:
        num_choices = len(slot_t)
        empty = jnp.full(num_slots, num_choices, jnp.int32)
        return empty.at[slot_t].set(jnp.arange(num_choices, dtype=jnp.int32), mode="drop")

    return jax.vmap(of_example)(slot_Bt)


@jax.custom_vjp
def _into_slots(x_BTD: Array, slot_BTJ: Array, choice_BS: Array) -> Array:
    """The token in each slot, [B, S, D]; 0 for an empty one. Both directions are look-ups in a fixed order."""
    return _looked_up(x_BTD, choice_BS // slot_BTJ.shape[-1])


@jax.custom_vjp
def _out_of_slots(y_BSD: Array, slot_BTJ: Array, choice_BS: Array) -> Array:
    """The slot of each choice, [B, T, J, D]; zeros for a choice without one."""
    del choice_BS
    return _looked_up(y_BSD, slot_BTJ)


def _looked_up(table_BSD: Array, number: Array) -> Array:
    return jax.vmap(functools.partial(jnp.take, axis=0, mode="fill", fill_value=0))(table_BSD, number)


def _into_slots_backward(slots: tuple[Array, ...], g_BSD: Array) -> tuple[Array, None, None]:
    return (
        jnp.sum(_out_of_slots(g_BSD, *slots).astype(jnp.float32), axis=2).astype(g_BSD.dtype),
        None,
        None,
    )


def _out_of_slots_backward(slots: tuple[Array, ...], g_BTJD: Array) -> tuple[Array, None, None]:
    choice_BS = slots[1]
    return (
        _looked_up(g_BTJD.reshape(g_BTJD.shape[0], -1, g_BTJD.shape[-1]), choice_BS),
        None,
        None,
    )


_into_slots.defvjp(lambda x, *slots: (_into_slots(x, *slots), slots), _into_slots_backward)
_out_of_slots.defvjp(lambda y, *slots: (_out_of_slots(y, *slots), slots), _out_of_slots_backward)


class GatheredRows(NamedTuple):
    """Rows for this device's experts, sorted by expert, from all tokens along the axis.

    Attributes:
      choice_U: number of each row's choice: token x J + its place among the token's choices.
      row_NJ: row of each choice; meaningless where is_here_NJ is False.
      is_here_NJ: True where the chosen expert is on this device.
      size_E: rows of each of this device's experts.
    """

    choice_U: Array
    row_NJ: Array
    is_here_NJ: Array
    size_E: Array

    def of_tokens(self, x_BTD: Array) -> Array:
        """The token of each row, [U, D]."""
        return _all_tokens(x_BTD)[self.choice_U // self.row_NJ.shape[1]]

    def of_choices(self, share_BTJ: Array) -> Array:
        """The value for each row's choice, [U]."""
        return _all_tokens(share_BTJ).reshape(-1)[self.choice_U]

    def sum_of_choices(self, y_UD: Array, share_BTJ: Array | None, x_BTD: Array) -> Array:
        """For each of this device's tokens x, the sum over its choices of share x row: [B, T, D] in float32.

        Args:
          share_BTJ: None: all are 1.
        """
        share_NJ = None if share_BTJ is None else _all_tokens(share_BTJ)
        return _sent_back(_sum_of_choices(y_UD, self.row_NJ, self.is_here_NJ, share_NJ), x_BTD)

    def to_choices(self, d_U: Array, like_BTJ: Array) -> Array:
        """The rows' values for this device's choices, [B, T, J]."""
        return _sent_back(jnp.where(self.is_here_NJ, d_U[self.row_NJ], 0), like_BTJ)


def gather_rows(expert_BTJ: Array, num_here: int) -> GatheredRows:
    """Sorts choices by expert. A token has at most min(J, E) choices here, each with a row."""
    expert_NJ = _all_tokens(expert_BTJ)
    num_tokens, num_choices = expert_NJ.shape
    own_NJ = expert_NJ - num_here * shard_index("experts")
    is_here_NJ = (own_NJ >= 0) & (own_NJ < num_here)
    own = jnp.where(is_here_NJ, own_NJ, num_here).reshape(-1)
    choice = jnp.argsort(own, stable=True)
    size_E = _sizes(own, num_here)
    num_rows = num_tokens * min(num_choices, num_here)
    row_NJ = jnp.minimum(_inverse(choice), num_rows - 1).reshape(expert_NJ.shape)
    return GatheredRows(choice[:num_rows], row_NJ, is_here_NJ, size_E)


def _all_tokens(x_BTD: Array) -> Array:
    """The tokens of all devices along the experts' axis, [N, D]."""
    return gathered(x_BTD, "experts", 0).reshape(-1, x_BTD.shape[-1])


def _own_tokens(x_BTD: Array) -> Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _sum_of_choices(y_UD: Array, row_NJ: Array, is_there_NJ: Array, share_NJ: Array | None) -> Array:
    """For each token, the sum over its choices of share x row, added one by one: [N, D] in float32.

    TPUs read the choices several times more slowly for a sum over their dim.
    """
    y_JND = y_UD[row_NJ.T]

    def part(choice: int) -> Array:
        y_ND = jnp.where(is_there_NJ[:, choice, None], y_JND[choice], 0).astype(jnp.float32)
        return y_ND if share_NJ is None else share_NJ[:, choice, None] * y_ND

    # The part is the first term: its product is then fused into a multiply-add, as in a reduction.
    return functools.reduce(lambda total_ND, y_ND: y_ND + total_ND, map(part, range(len(y_JND))))


def _sent_back(x_ND: Array, like_BTD: Array) -> Array:
    """The sums over the devices along the axis, each on its token's device."""
    return scattered_sum(x_ND.reshape(-1, *like_BTD.shape[1:]), "experts", 0)


def _sizes(expert: Array, num_experts: int) -> Array:
    return jnp.sum(expert.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def _inverse(order: Array) -> Array:
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)


class ExchangedRows(NamedTuple):
    """Rows for this device's experts, sorted by expert, from one round of an all-to-all.

    Attributes:
      choice_S: number of the choice that this device sends in each slot; the first slots are the first device's.
      slot_NJ: slot of each choice; meaningless where is_sent_NJ is False.
      is_sent_NJ: True where the choice has a slot in this round.
      from_U: slot that each row arrived in; empty slots come last.
      size_E: rows of each expert.
    """

    choice_S: Array
    slot_NJ: Array
    is_sent_NJ: Array
    from_U: Array
    size_E: Array

    def of_tokens(self, x_BTD: Array) -> Array:
        """The token of each row, [U, D]."""
        return exchanged(_own_tokens(x_BTD)[self.choice_S // self.slot_NJ.shape[1]], "experts")[self.from_U]

    def of_choices(self, share_BTJ: Array) -> Array:
        """The value for each row's choice, [U]."""
        return exchanged(share_BTJ.reshape(-1)[self.choice_S], "experts")[self.from_U]

    def sum_of_choices(self, y_UD: Array, share_BTJ: Array | None, x_BTD: Array) -> Array:
        """For each of this device's tokens x, the sum over its choices of share x row: [B, T, D] in float32.

        Rows return in the dtype of x_BTD.

        Args:
          share_BTJ: None: all are 1.
        """
        y_SD = exchanged(y_UD.astype(x_BTD.dtype)[_inverse(self.from_U)], "experts")
        share_NJ = None if share_BTJ is None else _own_tokens(share_BTJ)
        return _sum_of_choices(y_SD, self.slot_NJ, self.is_sent_NJ, share_NJ).reshape(x_BTD.shape)

    def to_choices(self, d_U: Array, like_BTJ: Array) -> Array:
        """The rows' values for this device's choices, [B, T, J]."""
        d_S = exchanged(d_U[_inverse(self.from_U)], "experts")
        return jnp.where(self.is_sent_NJ, d_S[self.slot_NJ], 0).reshape(like_BTJ.shape)


class Queues(NamedTuple):
    """This device's choices in queues, one for each device with experts.

    Attributes:
      expert_NJ: the chosen experts; E for padding.
      num_here: experts of a device.
      num_rows: rows between two devices in a round.
      choice: numbers of all choices, sorted by device.
      start_n, count_n: start and length of each device's queue in `choice`.
      place_NJ: each choice's place in its queue.
      device_NJ: the device of the chosen expert; n for padding.
    """

    expert_NJ: Array
    num_here: int
    num_rows: int
    choice: Array
    start_n: Array
    count_n: Array
    place_NJ: Array
    device_NJ: Array

    @property
    def may_need_more_rounds(self) -> bool:
        """Whether there can be more choices than the rows of one round."""
        return self.expert_NJ.shape[0] * min(self.expert_NJ.shape[1], self.num_here) > self.num_rows

    def num_rounds(self) -> Array:
        """The rounds that empty the queues of all devices along the axis."""
        return largest(jnp.max(-(-self.count_n // self.num_rows)), "experts")

    def round(self, number: Array | int) -> ExchangedRows:
        """A round of the exchange, by its number: the next `num_rows` choices of each queue."""
        num_rows = self.num_rows
        num_devices = len(self.count_n)
        place_nC = number * num_rows + jnp.arange(num_rows) + jnp.zeros((num_devices, 1), jnp.int32)
        is_filled_nC = place_nC < self.count_n[:, None]
        choice_nC = self.choice[jnp.where(is_filled_nC, self.start_n[:, None] + place_nC, 0)]
        own_nC = jnp.where(
            is_filled_nC,
            self.expert_NJ.reshape(-1)[choice_nC] % self.num_here,
            self.num_here,
        )
        own_U = exchanged(own_nC.reshape(-1), "experts")
        return ExchangedRows(
            choice_S=choice_nC.reshape(-1),
            slot_NJ=jnp.minimum(self.device_NJ, num_devices - 1) * num_rows + self.place_NJ % num_rows,
            is_sent_NJ=(self.device_NJ < num_devices) & (self.place_NJ // num_rows == number),
            from_U=jnp.argsort(own_U, stable=True),
            size_E=_sizes(own_U, self.num_here),
        )


def _queue_up(shape: ExpertShape, expert_BTJ: Array, num_here: int, dtype: DTypeLike) -> Queues | None:
    """The queues of this device's choices for the devices along the experts' axis; None if all tokens are gathered.

    Args:
      num_here: experts of a device.
      dtype: of the tokens.
    """
    num_rows = _rows_of_round(expert_BTJ.size, shape, dtype)
    if num_rows is None:
        return None
    num_devices = num_shards("experts")
    expert_NJ = _own_tokens(expert_BTJ)
    device_NJ = expert_NJ // num_here
    choice = jnp.argsort(device_NJ.reshape(-1), stable=True)
    count_n = _sizes(device_NJ, num_devices)
    start_n = jnp.cumsum(count_n) - count_n
    place_NJ = _inverse(choice).reshape(device_NJ.shape) - start_n[jnp.minimum(device_NJ, num_devices - 1)]
    return Queues(expert_NJ, num_here, num_rows, choice, start_n, count_n, place_NJ, device_NJ)


def _rows_of_round(num_choices: int, shape: ExpertShape, dtype: DTypeLike) -> int | None:
    """`exchanged_rows` of a device with this many choices; None if all tokens are gathered."""
    return exchanged_rows(
        num_tokens=num_choices // shape.num_per_token,
        num_per_token=shape.num_per_token,
        num_experts=shape.num_experts,
        num_shards=num_shards("experts"),
        element_bytes=jnp.dtype(dtype).itemsize,
    )


# ---- Grouped matmuls ------------------------------------------------------------------------------------------------

BY_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
BY_ROWS_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

Layout = Literal["io", "oi"]
"""The memory order of a weight's in and out dims: an all-gather puts the dim that it gathers first."""


class GroupedKernel(NamedTuple):
    """Matmuls of rows that are sorted by group; size_E counts the rows of each, at most U in all.

    Attributes:
      by_rows: (x_Ui, weight_Eio, size_E) -> each row times its group's weight, [U, o]; undefined after the last group.
      by_rows_transposed: (g_Uo, weight_Eio, size_E) -> the same with transposed weights, [U, i].
      over_rows: (x_Ui, g_Uo, size_E) -> each group's x^T g, [E, i, o]; rows after the last group are not counted.
    """

    by_rows: Callable[..., Array]
    by_rows_transposed: Callable[..., Array]
    over_rows: Callable[..., Array]


def _ragged(dims: jax.lax.RaggedDotDimensionNumbers) -> Callable[..., Array]:
    def function(left: Array, right: Array, size_E: Array) -> Array:
        totals = dtype_of_totals(left.dtype)
        return jax.lax.ragged_dot_general(left, right, size_E, dims, preferred_element_type=totals)

    return function


RAGGED_DOT = GroupedKernel(_ragged(BY_ROWS), _ragged(BY_ROWS_TRANSPOSED), _ragged(OVER_ROWS))
"""jax's own kernel."""


class _Block(NamedTuple):
    """The next rows of one group, from `first` to `end`, within the block of rows that begins at `start`."""

    group: Array
    first: Array
    end: Array
    start: Array


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: about a group's, as a power of two from 128 to 512, and at most all rows.

    Smaller blocks would read a weight repeatedly for little work, larger ones would multiply rows of other groups.
    """
    even = 1 << max(num_rows // num_groups - 1, 0).bit_length()
    return min(max(128, min(even, 512)), num_rows)


def _blocks(size_E: Array, num_rows: int, rows_of_block: int) -> tuple[Array, Callable[[Array], _Block]]:
    """The number of blocks that cover all groups, and a function from number to block. A block has one group."""
    blocks_E = -(-size_E // rows_of_block)
    end_block_E = jnp.cumsum(blocks_E)
    end_row_E = jnp.cumsum(size_E)

    def of(number: Array) -> _Block:
        group = jnp.searchsorted(end_block_E, number, side="right")
        end = end_row_E[group]
        first = end - size_E[group] + rows_of_block * (number - end_block_E[group] + blocks_E[group])
        start = jnp.minimum(first, num_rows - rows_of_block)
        return _Block(group, first, jnp.minimum(first + rows_of_block, end), start)

    return end_block_E[-1], of


def _rows_in_blocks(equation: str, x_Ui: Array, weight_Eio: Array, size_E: Array, rows_of_block: int) -> Array:
    num_rows = len(x_Ui)
    totals = dtype_of_totals(x_Ui.dtype)
    count, block = _blocks(size_E, num_rows, rows_of_block)
    times = functools.partial(jnp.einsum, equation, preferred_element_type=totals)
    width = jax.eval_shape(times, x_Ui, weight_Eio[0]).shape[1]

    def step(number: Array, y_Uo: Array) -> Array:
        at = block(number)
        x = jax.lax.dynamic_slice_in_dim(x_Ui, at.start, rows_of_block)
        y = times(x, weight_Eio[at.group])
        # Rows before are another group's and done; rows after are another group's too, which comes next.
        is_new = (at.start + jnp.arange(rows_of_block) >= at.first)[:, None]
        y = jnp.where(is_new, y, jax.lax.dynamic_slice_in_dim(y_Uo, at.start, rows_of_block))
        return jax.lax.dynamic_update_slice_in_dim(y_Uo, y, at.start, 0)

    return jax.lax.fori_loop(0, count, step, jnp.zeros((num_rows, width), totals))


def _sum_over_blocks(x_Ui: Array, g_Uo: Array, size_E: Array, rows_of_block: int) -> Array:
    count, block = _blocks(size_E, len(x_Ui), rows_of_block)

    def step(number: Array, sum_Eio: Array) -> Array:
        at = block(number)
        row = at.start + jnp.arange(rows_of_block)
        is_own = ((row >= at.first) & (row < at.end))[:, None]
        x = jnp.where(is_own, jax.lax.dynamic_slice_in_dim(x_Ui, at.start, rows_of_block), 0)
        g = jnp.where(is_own, jax.lax.dynamic_slice_in_dim(g_Uo, at.start, rows_of_block), 0)
        return sum_Eio.at[at.group].add(jnp.einsum("ui,uo->io", x, g, preferred_element_type=jnp.float32))

    return jax.lax.fori_loop(
        0,
        count,
        step,
        jnp.zeros((len(size_E), x_Ui.shape[1], g_Uo.shape[1]), jnp.float32),
    )


def in_blocks(rows_of_block: int | None = None) -> GroupedKernel:
    """The kernel in plain jax: a loop over the blocks of rows that the groups need, each in one group.

    Nothing is larger than its operands and its result. Rows are multiplied only by their own weights, except the rows
    that a group's last block has beyond the group.

    Args:
      rows_of_block: None: `block_rows`.
    """

    def rows(left: Array, size_E: Array) -> int:
        return rows_of_block or block_rows(len(left), len(size_E))

    return GroupedKernel(
        lambda x, w, size: _rows_in_blocks("ui,io->uo", x, w, size, rows(x, size)),
        lambda g, w, size: _rows_in_blocks("uo,io->ui", g, w, size, rows(g, size)),
        lambda x, g, size: _sum_over_blocks(x, g, size, rows(x, size)),
    )


def _folded(size_RE: Array, num_rows: int) -> tuple[Array, Array]:
    """The permutation of the R*U rows that puts all groups one after another, and its inverse: [R * U] each.

    Rows after a set's last group go to the very end.
    """
    used_R = jnp.sum(size_RE, axis=1)
    before_R = jnp.cumsum(used_R) - used_R
    unused_before_R = jnp.cumsum(num_rows - used_R) - (num_rows - used_R)
    row_U = jnp.arange(num_rows)
    to_RU = jnp.where(
        row_U < used_R[:, None],
        before_R[:, None] + row_U,
        jnp.sum(used_R) + unused_before_R[:, None] + row_U - used_R[:, None],
    )
    to = to_RU.reshape(-1)
    return to, _inverse(to)


def _mappable(function: Callable[..., Array], rows_out: bool) -> Callable[..., Array]:
    """`function(left, right, size_E)` with a rule for vmap, whose sets of rows become more groups of one call.

    Args:
      rows_out: whether the result has rows, as `left` has; `right` has them if the result has none.
    """
    folded = custom_vmap(function)

    @folded.def_vmap
    def rule(num_sets: int, is_mapped: list[bool], *operands: Array) -> tuple[Array, bool]:
        whole = [
            x if mapped else jnp.broadcast_to(x, (num_sets, *x.shape))
            for x, mapped in zip(operands, is_mapped, strict=True)
        ]
        num_rows = whole[0].shape[1]
        size_RE = whole[2]
        left, right, size = (x.reshape(-1, *x.shape[2:]) for x in whole)
        if num_sets == 1:
            result = folded(left, right, size)
        else:
            to, source = _folded(size_RE, num_rows)
            result = folded(left[source], right if rows_out else right[source], size)
            result = result[to] if rows_out else result
        return result.reshape(num_sets, -1, *result.shape[1:]), True

    return folded


@functools.cache
def _mappable_kernel(name: GroupedMatmul, layout: Layout, dtype: DTypeLike) -> GroupedKernel:
    """The named kernel with results in `dtype` and a rule for vmap."""
    plain = {"ragged_dot": RAGGED_DOT, "blocks": in_blocks()}
    kernel = plain.get(name) or load("grouped_matmul", name)(layout, dtype)

    def rounded(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *operands: function(*operands).astype(dtype)

    return GroupedKernel(
        _mappable(rounded(kernel.by_rows), rows_out=True),
        _mappable(rounded(kernel.by_rows_transposed), rows_out=True),
        _mappable(rounded(kernel.over_rows), rows_out=False),
    )


_OF_EIGHT_BITS: dict[GroupedMatmul, GroupedMatmul] = {
    "tokamax": "blocks",
    "megablox": "ragged_dot",
}
"""What replaces kernels without eight bits."""


def grouped_kernel(
    name: GroupedMatmul,
    operands: DTypeLike,
    layout: Layout = "io",
    dtype: DTypeLike = jnp.float32,
) -> GroupedKernel:
    """The named kernel for operands of a dtype, which may be mapped over.

    Args:
      layout: of the weights and their gradients; kernels that know both layouts need no transposed copy.
      dtype: the float32 sums are rounded to it, in the kernel where it can. For operands of eight bits the results are
        not rounded: int32 for int8, and float32 for float8.
    """
    if jnp.dtype(operands).itemsize == 1:
        name = _OF_EIGHT_BITS.get(name, name)
        dtype = dtype_of_totals(operands)
    return _mappable_kernel(name, layout, jnp.dtype(dtype))


FURTHER_ROUNDS = "further_rounds"
"""Part of the names of operations after an exchange's first round. Evenly chosen experts never need them."""

# ---- Experts on rows ------------------------------------------------------------------------------------------------

_INWARDS, _OUTWARDS = ("expert_embed", "mlp"), ("mlp", "expert_embed")
_LAYOUTS: dict[tuple[str, str], Layout] = {_INWARDS: "io", _OUTWARDS: "oi"}


class _ExpertRows(NamedTuple):
    """This device's experts on rows that are sorted by expert.

    Attributes:
      w: from `_whole_weights`.
      size_E: rows of each expert.
    """

    shape: ExpertShape
    w: ExpertWeights
    size_E: Array

    def project(self, x_UD: Array) -> tuple[Array, Array]:
        """The two projections of each row, in the dtype of x_UD."""
        w = self.w
        if w.gate_EF is None or w.up_EF is None:
            gate_UF = self._times(x_UD, w.gate_EDF, _INWARDS, x_UD.dtype)
            up_UF = self._times(x_UD, w.up_EDF, _INWARDS, x_UD.dtype)
        else:  # biases are added before sums are rounded
            gate_UF = self._times(x_UD, w.gate_EDF, _INWARDS)
            up_UF = self._times(x_UD, w.up_EDF, _INWARDS)
            expert_U = self._expert_of_rows(len(x_UD))
            gate_UF += w.gate_EF[expert_U]
            up_UF += w.up_EF[expert_U]
        return gate_UF.astype(x_UD.dtype), up_UF.astype(x_UD.dtype)

    def output(self, gate_UF: Array, up_UF: Array) -> Array:
        """Each row's output from its two projections, [U, D] in float32."""
        hidden_UF: Any = mlp_hidden(self.shape.activation, gate_UF, up_UF)
        y_UD = self._times(hidden_UF, self.w.down_EFD, _OUTWARDS)
        return y_UD if self.w.down_ED is None else y_UD + self._out_bias(len(gate_UF))

    def gradients(
        self,
        x_UD: Array,
        gate_UF: Array,
        up_UF: Array,
        share_U: Array,
        g_UD: Array,
        weight_dtype: DTypeLike,
    ) -> tuple[Array, Array, list[Array]]:
        """The gradients of x and share, float32, and of the weights, given the gradients g_UD of share x `output`.

        Args:
          weight_dtype: of the matrices' gradients.
        """
        w = self.w
        dtype = x_UD.dtype
        share_U1 = share_U[:, None]
        hidden_UF, hidden_backward = jax.vjp(functools.partial(mlp_hidden, self.shape.activation), gate_UF, up_UF)
        # <y, g> = <hidden, g down^T>: the share's derivative needs no y.
        unweighted_UF = self._times_transposed(g_UD, w.down_EFD, _OUTWARDS)
        dshare_U = jnp.sum(hidden_UF.astype(jnp.float32) * unweighted_UF, axis=-1)
        if w.down_ED is not None:
            dshare_U += jnp.sum(self._out_bias(len(g_UD)) * g_UD.astype(jnp.float32), axis=-1)
        dgate_UF, dup_UF = hidden_backward((share_U1 * unweighted_UF).astype(dtype))
        dx_UD = self._times_transposed(dgate_UF, w.gate_EDF, _INWARDS)
        dx_UD += self._times_transposed(dup_UF, w.up_EDF, _INWARDS)
        dy_UD = (share_U1 * g_UD).astype(dtype)
        # Never in eight bits: an expert's rows are of many examples, so their scales would depend on how these split.
        inwards = grouped_kernel(self.shape.matmul, dtype, "io", weight_dtype).over_rows
        outwards = grouped_kernel(self.shape.matmul, dtype, "oi", weight_dtype).over_rows
        dweights = [
            inwards(x_UD, dgate_UF, self.size_E),
            inwards(x_UD, dup_UF, self.size_E),
            outwards(hidden_UF, dy_UD, self.size_E),
        ]
        if w.down_ED is not None:
            over_rows = grouped_kernel(self.shape.matmul, dtype).over_rows
            one_U1 = jnp.ones_like(x_UD[:, :1])
            dweights += [over_rows(one_U1, d, self.size_E)[:, 0] for d in (dgate_UF, dup_UF, dy_UD)]
        return dx_UD, dshare_U, dweights

    def _times(
        self,
        x_Ui: Array,
        weight: Any,
        axes: tuple[str, str],
        dtype: DTypeLike = jnp.float32,
    ) -> Array:
        """Each row times its expert's weight: [U, o] in `dtype`, or in float32 with eight bits."""

        def matmul(x_Ui: Array, weight_Eio: Array) -> Array:
            kernel = grouped_kernel(self.shape.matmul, x_Ui.dtype, _LAYOUTS[axes], dtype)
            return kernel.by_rows(x_Ui, weight_Eio, self.size_E)

        numbers = number_format(self.shape.quantization)
        if numbers is None:
            return matmul(x_Ui, weight)
        return numbers.rows_times(x_Ui, weight, self._expert_of_rows(len(x_Ui)), matmul, axes_in_use(axes)[0])

    def _times_transposed(self, g_Uo: Array, weight: Any, axes: tuple[str, str]) -> Array:
        """Each row times its expert's transposed weight: [U, i] in float32."""

        def matmul(g_Uo: Array, weight_Eio: Array) -> Array:
            kernel = grouped_kernel(self.shape.matmul, g_Uo.dtype, _LAYOUTS[axes])
            return kernel.by_rows_transposed(g_Uo, weight_Eio, self.size_E)

        numbers = number_format(self.shape.quantization)
        if numbers is None:
            return matmul(g_Uo, weight)
        expert_U = self._expert_of_rows(len(g_Uo))
        return numbers.rows_times_transposed(g_Uo, weight, expert_U, matmul, axes_in_use(axes)[1])

    def _expert_of_rows(self, num_rows: int) -> Array:
        """Number of each row's expert among this device's; the last one for rows without an expert."""
        end_E = jnp.cumsum(self.size_E)
        return jnp.minimum(jnp.searchsorted(end_E, jnp.arange(num_rows), side="right"), len(end_E) - 1)

    def _out_bias(self, num_rows: int) -> Array:
        """The bias of each row's output, [U, D]; zero on all but one of the devices whose outputs are summed."""
        assert self.w.down_ED is not None
        bias_UD = self.w.down_ED.astype(jnp.float32)[self._expert_of_rows(num_rows)]
        return jnp.where(shard_index("mlp") == 0, bias_UD, 0)


# ---- One device -----------------------------------------------------------------------------------------------------


def _whole_weights(weights: ExpertWeights, shape: ExpertShape) -> ExpertWeights:
    """This device's experts, gathered along `expert_embed`, with matrices in the form that `_times` takes."""
    numbers = number_format(shape.quantization)

    def whole(weight: Array, axes: tuple[str, ...]) -> Any:
        if "expert_embed" not in axes:
            return weight
        if numbers:
            return numbers.whole_weight(weight, axes)
        return gathered(weight, "expert_embed", axes.index("expert_embed"))

    return ExpertWeights(*map(whole, weights.arrays(), weights.axes()))


def _weight_sum(dw: Array, axes: tuple[str, ...], dtype: DTypeLike) -> Array:
    """The sum over devices with other tokens, on the device with this part of the weight."""
    if "expert_embed" not in axes:
        return summed(dw, "expert_embed")
    parts = dw.astype(dtype) if num_shards("expert_embed") > 1 else dw
    return scattered_sum(parts, "expert_embed", axes.index("expert_embed"))


def _local_forward(
    shape: ExpertShape,
    x_BTD: Array,
    expert_BTJ: Array,
    share_BTJ: Array,
    *weights: Array,
) -> tuple[Array, ...]:
    """The tokens' outputs, and the first round's rows with the values that the backward pass needs again."""
    w = _whole_weights(ExpertWeights(*weights), shape)
    share = None if shape.on_input else share_BTJ

    def run(rows: GatheredRows | ExchangedRows) -> tuple[Array, ...]:
        x_UD = rows.of_tokens(x_BTD)
        experts = _ExpertRows(shape, w, rows.size_E)
        inner = experts.project(_given(shape, x_UD, rows, share_BTJ))
        return rows.sum_of_choices(experts.output(*inner), share, x_BTD), x_UD, *inner

    num_here = len(weights[0])
    queues = _queue_up(shape, expert_BTJ, num_here, x_BTD.dtype)
    rows = gather_rows(expert_BTJ, num_here) if queues is None else queues.round(0)
    y_BTD, *kept = run(rows)
    y_BTD = _further_rounds(queues, lambda rows, y_BTD: y_BTD + run(rows)[0], y_BTD)
    return summed(y_BTD, "mlp").astype(x_BTD.dtype), *rows, *kept


def _given(
    shape: ExpertShape,
    x_UD: Array,
    rows: GatheredRows | ExchangedRows,
    share_BTJ: Array,
) -> Array:
    """The experts' inputs: rows' tokens, multiplied by their shares if these belong to the input."""
    if not shape.on_input:
        return x_UD
    return x_UD * rows.of_choices(share_BTJ)[:, None].astype(x_UD.dtype)


def _further_rounds(queues: Queues | None, run: Callable[[ExchangedRows, Any], Any], start: Any) -> Any:
    """The sums after `run(rows, sums)` for each round but the first; `start` if there can be no further round."""
    if queues is None or not queues.may_need_more_rounds:
        return start
    num_rounds = queues.num_rounds()
    with jax.named_scope(FURTHER_ROUNDS):
        return jax.lax.fori_loop(1, num_rounds, lambda number, sums: run(queues.round(number), sums), start)


def _local_backward(
    shape: ExpertShape,
    x_BTD: Array,
    expert_BTJ: Array,
    share_BTJ: Array,
    g_BTD: Array,
    *rest: Array,
) -> tuple[Array, ...]:
    num_weights = 6 if shape.with_bias else 3
    weights = ExpertWeights(*rest[:num_weights])
    *rows, x_UD, gate_UF, up_UF = rest[num_weights:]
    w = _whole_weights(weights, shape)
    queues = _queue_up(shape, expert_BTJ, len(weights.gate_EDF), x_BTD.dtype)
    # A device's own sums, if nothing is added to them, are rounded as they are written, not in an extra pass.
    is_whole = queues is None or not queues.may_need_more_rounds
    weight_dtype = shape.grad_dtype if is_whole and num_shards("expert_embed") > 1 else jnp.float32

    def run(rows: GatheredRows | ExchangedRows, x_UD: Array, gate_UF: Array, up_UF: Array) -> list[Array]:
        g_UD = rows.of_tokens(g_BTD)
        share_U = rows.of_choices(share_BTJ)
        experts = _ExpertRows(shape, w, rows.size_E)
        given_UD = _given(shape, x_UD, rows, share_BTJ)
        out_share_U = jnp.ones_like(share_U) if shape.on_input else share_U
        dx_UD, dshare_U, dweights = experts.gradients(given_UD, gate_UF, up_UF, out_share_U, g_UD, weight_dtype)
        if shape.on_input:
            dshare_U = jnp.sum(x_UD.astype(jnp.float32) * dx_UD, axis=-1)
            dx_UD = share_U[:, None] * dx_UD
        return [
            rows.sum_of_choices(dx_UD, None, x_BTD),
            rows.to_choices(dshare_U, share_BTJ),
            *dweights,
        ]

    def next_round(rows: ExchangedRows, sums: list[Array]) -> list[Array]:
        x_UD = rows.of_tokens(x_BTD)
        inner = _ExpertRows(shape, w, rows.size_E).project(_given(shape, x_UD, rows, share_BTJ))
        return jax.tree.map(jnp.add, sums, run(rows, x_UD, *inner))

    kind = GatheredRows if queues is None else ExchangedRows
    sums = run(kind(*rows), x_UD, gate_UF, up_UF)
    dx_BTD, dshare_BTJ, *dweights = _further_rounds(queues, next_round, sums)
    dweights = [
        _weight_sum(dw, axes, shape.grad_dtype).astype(weight.dtype)
        for dw, axes, weight in zip(dweights, weights.axes(), weights.arrays(), strict=True)
    ]
    return (
        summed(dx_BTD, "mlp").astype(x_BTD.dtype),
        summed(dshare_BTJ, "mlp"),
        *dweights,
    )


# ---- All devices ----------------------------------------------------------------------------------------------------

_FLAT, _PER_TOKEN = ("routed_rows",), ("routed_rows", None)
_INNER_AXES = ("routed_rows", "activation_mlp")


def _kept_axes(expert_BTJ: Array, shape: ExpertShape, dtype: DTypeLike) -> list[tuple[str | None, ...]]:
    """Logical axes of `GatheredRows` or `ExchangedRows`, of the rows' tokens and of the two inner results."""
    num_shards_of_tokens = num_shards("batch") * num_shards("length")
    is_gathered = _rows_of_round(expert_BTJ.size // num_shards_of_tokens, shape, dtype) is None
    rows = [_FLAT, _PER_TOKEN, _PER_TOKEN, _FLAT]
    if not is_gathered:
        rows.append(_FLAT)
    return [*rows, _PER_TOKEN, _INNER_AXES, _INNER_AXES]


_Residuals = tuple[Array, Array, Array, ExpertWeights, list[Array]]


def _forward(
    x_BTD: Array,
    expert_BTJ: Array,
    share_BTJ: Array,
    weights: ExpertWeights,
    shape: ExpertShape,
) -> tuple[Array, _Residuals]:
    axes = _kept_axes(expert_BTJ, shape, x_BTD.dtype)
    local = functools.partial(_local_forward, shape)
    run = over_shards(local, [TOKEN_AXES] * 3 + weights.axes(), [TOKEN_AXES, *axes])
    y_BTD, *rows, gate, up = run(x_BTD, expert_BTJ, share_BTJ, *weights.arrays())
    kept = [checkpoint_name(array, "expert_rows") for array in rows]
    kept += [checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")]
    return y_BTD, (x_BTD, expert_BTJ, share_BTJ, weights, kept)


def _backward(shape: ExpertShape, residuals: _Residuals, g_BTD: Array) -> tuple[Array, None, Array, ExpertWeights]:
    x_BTD, expert_BTJ, share_BTJ, weights, kept = residuals
    run = over_shards(
        functools.partial(_local_backward, shape),
        [TOKEN_AXES] * 4 + [*weights.axes(), *_kept_axes(expert_BTJ, shape, x_BTD.dtype)],
        [TOKEN_AXES, TOKEN_AXES, *weights.axes()],
    )
    dx_BTD, dshare_BTJ, *dweights = run(x_BTD, expert_BTJ, share_BTJ, g_BTD, *weights.arrays(), *kept)
    return dx_BTD, None, dshare_BTJ, ExpertWeights(*dweights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def dropless(
    x_BTD: Array,
    expert_BTJ: Array,
    share_BTJ: Array,
    weights: ExpertWeights,
    shape: ExpertShape,
) -> Array:
    """Sum over each token's experts of share x mlp(x), or of mlp(share x), [B, T, D] in the dtype of x_BTD.

    No choice is ever dropped.

    Each device sorts rows by expert and runs grouped matmuls. The derivatives are written by hand: both directions look
    rows up, where automatic ones would scatter-add them in an undefined order, and the backward pass gathers sharded
    weights again instead of keeping them whole. Its residuals have names for rematerialisation: expert_rows, mlpwi_0
    and mlpwi_1.

    Args:
      expert_BTJ: distinct for a token; E for no expert.
    Source: sorting and grouped matmuls are Gale et al. 2022, arXiv:2211.15841.
    """
    return _forward(x_BTD, expert_BTJ, share_BTJ, weights, shape)[0]


dropless.defvjp(_forward, _backward)
