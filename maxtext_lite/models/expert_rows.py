"""Tokens brought to the devices of their experts, as rows sorted by expert, and the results brought back.

If the experts' axis splits the experts, tokens reach them in one of two ways, whichever moves fewer bytes
(`config.kernels.exchanged_rows`). Gathered: the devices along the axis gather each other's tokens, run those that chose
one of their own experts, and reduce-scatter the results to the tokens' devices. Exchanged: each choice is a row of an
all-to-all with a fixed number of rows for each device. If more choices are for a device's experts than the rows, which
only the data decide, another round follows.

Everything here is one device's part, inside `over_shards`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext_lite.config.kernels import exchanged_rows
from maxtext_lite.models.moe import ExpertShape
from maxtext_lite.parallel import exchanged, gathered, largest, num_shards, scattered_sum, shard_index


class GatheredRows(NamedTuple):
    """Rows for this device's experts, sorted by expert, from all tokens along the axis.

    Attributes:
      choice_U: number of each row's choice: token x J + its place among the token's choices.
      row_NJ: row of each choice; meaningless where is_here_NJ is False.
      is_here_NJ: True where the chosen expert is on this device.
      size_E: rows of each of this device's experts.
    """

    choice_U: jax.Array
    row_NJ: jax.Array
    is_here_NJ: jax.Array
    size_E: jax.Array

    def of_tokens(self, x_BTD: jax.Array) -> jax.Array:
        """The token of each row, [U, D]."""
        return _all_tokens(x_BTD)[self.choice_U // self.row_NJ.shape[1]]

    def of_choices(self, share_BTJ: jax.Array) -> jax.Array:
        """The value for each row's choice, [U]."""
        return _all_tokens(share_BTJ).reshape(-1)[self.choice_U]

    def sum_of_choices(self, y_UD: jax.Array, share_BTJ: jax.Array | None, x_BTD: jax.Array) -> jax.Array:
        """For each of this device's tokens x, the sum over its choices of share x row: [B, T, D] in float32.

        Args:
          share_BTJ: None: all are 1.
        """
        share_NJ = None if share_BTJ is None else _all_tokens(share_BTJ)
        return _sent_back(_sum_of_choices(y_UD, self.row_NJ, self.is_here_NJ, share_NJ), x_BTD)

    def to_choices(self, d_U: jax.Array, like_BTJ: jax.Array) -> jax.Array:
        """The rows' values for this device's choices, [B, T, J]."""
        return _sent_back(jnp.where(self.is_here_NJ, d_U[self.row_NJ], 0), like_BTJ)


def gather_rows(expert_BTJ: jax.Array, num_here: int) -> GatheredRows:
    """Sorts choices by expert. A token has at most min(J, E) choices here, and there are rows for all of them."""
    expert_NJ = _all_tokens(expert_BTJ)
    num_tokens, num_choices = expert_NJ.shape
    own_NJ = expert_NJ - num_here * shard_index("experts")
    is_here_NJ = (own_NJ >= 0) & (own_NJ < num_here)
    own = jnp.where(is_here_NJ, own_NJ, num_here).reshape(-1)
    choice, size_E = jnp.argsort(own, stable=True), _sizes(own, num_here)
    num_rows = num_tokens * min(num_choices, num_here)
    row_NJ = jnp.minimum(_inverse(choice), num_rows - 1).reshape(expert_NJ.shape)
    return GatheredRows(choice[:num_rows], row_NJ, is_here_NJ, size_E)


def _all_tokens(x_BTD: jax.Array) -> jax.Array:
    """The tokens of all devices along the experts' axis, [N, D]."""
    return gathered(x_BTD, "experts", 0).reshape(-1, x_BTD.shape[-1])


def _own_tokens(x_BTD: jax.Array) -> jax.Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _sum_of_choices(
    y_UD: jax.Array, row_NJ: jax.Array, is_there_NJ: jax.Array, share_NJ: jax.Array | None
) -> jax.Array:
    """For each token, the sum over its choices of share x row, added one by one: [N, D] in float32.

    TPUs read the choices several times more slowly for a sum over their dim.
    """
    y_JND = y_UD[row_NJ.T]

    def part(choice: int) -> jax.Array:
        y_ND = jnp.where(is_there_NJ[:, choice, None], y_JND[choice], 0).astype(jnp.float32)
        return y_ND if share_NJ is None else share_NJ[:, choice, None] * y_ND

    # The part is the first term, so that its product is fused into a multiply-add, as in a reduction.
    return functools.reduce(lambda total_ND, y_ND: y_ND + total_ND, map(part, range(len(y_JND))))


def _sent_back(x_ND: jax.Array, like_BTD: jax.Array) -> jax.Array:
    """The sums over the devices along the axis, each on its token's device."""
    return scattered_sum(x_ND.reshape(-1, *like_BTD.shape[1:]), "experts", 0)


def _sizes(expert: jax.Array, num_experts: int) -> jax.Array:
    return jnp.sum(expert.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def _inverse(order: jax.Array) -> jax.Array:
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

    choice_S: jax.Array
    slot_NJ: jax.Array
    is_sent_NJ: jax.Array
    from_U: jax.Array
    size_E: jax.Array

    def of_tokens(self, x_BTD: jax.Array) -> jax.Array:
        """The token of each row, [U, D]."""
        return exchanged(_own_tokens(x_BTD)[self.choice_S // self.slot_NJ.shape[1]], "experts")[self.from_U]

    def of_choices(self, share_BTJ: jax.Array) -> jax.Array:
        """The value for each row's choice, [U]."""
        return exchanged(share_BTJ.reshape(-1)[self.choice_S], "experts")[self.from_U]

    def sum_of_choices(self, y_UD: jax.Array, share_BTJ: jax.Array | None, x_BTD: jax.Array) -> jax.Array:
        """For each of this device's tokens x, the sum over its choices of share x row: [B, T, D] in float32.

        Rows return in the dtype of x_BTD.

        Args:
          share_BTJ: None: all are 1.
        """
        y_SD = exchanged(y_UD.astype(x_BTD.dtype)[_inverse(self.from_U)], "experts")
        share_NJ = None if share_BTJ is None else _own_tokens(share_BTJ)
        return _sum_of_choices(y_SD, self.slot_NJ, self.is_sent_NJ, share_NJ).reshape(x_BTD.shape)

    def to_choices(self, d_U: jax.Array, like_BTJ: jax.Array) -> jax.Array:
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

    expert_NJ: jax.Array
    num_here: int
    num_rows: int
    choice: jax.Array
    start_n: jax.Array
    count_n: jax.Array
    place_NJ: jax.Array
    device_NJ: jax.Array

    @property
    def may_need_more_rounds(self) -> bool:
        """Whether there can be more choices than the rows of one round."""
        return self.expert_NJ.shape[0] * min(self.expert_NJ.shape[1], self.num_here) > self.num_rows

    def num_rounds(self) -> jax.Array:
        """Rounds after which the queues of all devices along the axis are empty."""
        return largest(jnp.max(-(-self.count_n // self.num_rows)), "experts")

    def round(self, number: jax.Array | int) -> ExchangedRows:
        """A round of the exchange, by its number: the next `num_rows` choices of each queue."""
        num_rows = self.num_rows
        num_devices = len(self.count_n)
        place_nC = number * num_rows + jnp.arange(num_rows) + jnp.zeros((num_devices, 1), jnp.int32)
        is_filled_nC = place_nC < self.count_n[:, None]
        choice_nC = self.choice[jnp.where(is_filled_nC, self.start_n[:, None] + place_nC, 0)]
        own_nC = jnp.where(is_filled_nC, self.expert_NJ.reshape(-1)[choice_nC] % self.num_here, self.num_here)
        own_U = exchanged(own_nC.reshape(-1), "experts")
        return ExchangedRows(
            choice_S=choice_nC.reshape(-1),
            slot_NJ=jnp.minimum(self.device_NJ, num_devices - 1) * num_rows + self.place_NJ % num_rows,
            is_sent_NJ=(self.device_NJ < num_devices) & (self.place_NJ // num_rows == number),
            from_U=jnp.argsort(own_U, stable=True),
            size_E=_sizes(own_U, self.num_here),
        )


def queue_up(expert_BTJ: jax.Array, num_here: int, num_rows: int) -> Queues:
    """The queues of this device's choices for the devices along the experts' axis, with `num_here` experts each."""
    num_devices, expert_NJ = num_shards("experts"), _own_tokens(expert_BTJ)
    device_NJ = expert_NJ // num_here
    choice = jnp.argsort(device_NJ.reshape(-1), stable=True)
    count_n = _sizes(device_NJ, num_devices)
    start_n = jnp.cumsum(count_n) - count_n
    place_NJ = _inverse(choice).reshape(device_NJ.shape) - start_n[jnp.minimum(device_NJ, num_devices - 1)]
    return Queues(expert_NJ, num_here, num_rows, choice, start_n, count_n, place_NJ, device_NJ)


def rows_of_round(num_tokens: int, shape: ExpertShape, dtype: DTypeLike) -> int | None:
    """`exchanged_rows` of a device with this many tokens; None if all tokens are gathered."""
    return exchanged_rows(
        num_tokens=num_tokens,
        num_per_token=shape.num_per_token,
        num_experts=shape.num_experts,
        num_shards=num_shards("experts"),
        element_bytes=jnp.dtype(dtype).itemsize,
    )
