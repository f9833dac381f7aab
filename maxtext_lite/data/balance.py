"""The assignment of a step's rows to shards that makes attention cost all shards the same.

The cost of a row follows from the lengths of its documents. Shards wait for each other in every *turn*: one pipeline
microbatch of a micro-batch, in which each shard has some rows. So the rows of a step are first divided among its turns,
rows of similar cost into the same turn, and then within each turn among the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable

import numpy as np

from maxtext_lite.batching import BatchPlan, attended_pairs
from maxtext_lite.config import Config
from maxtext_lite.data.source import ExampleSource

_EVEN_ENOUGH = 1.002  # rows stop changing places once the costliest shard is this close to the mean


@dataclasses.dataclass(frozen=True)
class Balance:
    """The assignment of a step's rows to the batch's shards, or their imbalance without one; picklable.

    Attributes:
      is_on: whether rows are assigned; otherwise they stay where they are.
      cost: lengths of documents -> cost of attention over each.
      num_shards: equal consecutive parts of the row slots, computed at the same time.
      num_replicas: replicas of local updates, which keep their own rows; otherwise 1.
      num_pieces: pipeline microbatches, equal consecutive parts of a shard's slots.
      num_slots: row slots of a micro-batch.
    """

    is_on: bool
    cost: Callable[[np.ndarray], np.ndarray]
    num_shards: int
    num_replicas: int
    num_pieces: int
    num_slots: int

    @classmethod
    def of(cls, config: Config, plan: BatchPlan) -> Balance:
        """The balance for a run's largest batch."""
        return cls(
            is_on=config.balance_attention,
            cost=functools.partial(attended_pairs, config),
            num_shards=plan.layout_shards,
            num_replicas=plan.diloco_num_replicas or 1,
            num_pieces=plan.num_pipeline_microbatches,
            num_slots=plan.micro_batch_slots,
        )

    def arranged(
        self,
        source: ExampleSource,
        ids: np.ndarray,
        micro_batches: int,
    ) -> tuple[np.ndarray, float | None]:
        """The layout order of a step's examples, and the imbalance of attention.

        The imbalance says how much longer attention takes than if all shards had equal work: the cost of the costliest
        shard, summed over turns, divided by that of the mean shard, minus 1. None if the source does not know it.

        Args:
          ids: of the examples.
        Returns:
          For each place its example, as an index of `ids`; place j is in micro-batch j % micro_batches, slot
          j // micro_batches.
        """
        order = np.arange(len(ids))
        documents = source.documents(ids)
        if documents is None:
            return order, None
        cost_of_document = self.cost(documents.lengths)
        costs = np.bincount(documents.rows, weights=cost_of_document, minlength=len(ids))
        slots, micro_batch = np.divmod(np.arange(len(ids)), micro_batches)
        piece_slots = self.num_slots // (self.num_shards * self.num_pieces)
        shards, piece = np.divmod(slots // piece_slots, self.num_pieces)
        turns = micro_batch * self.num_pieces + piece
        if self.is_on:
            replicas = shards * self.num_replicas // self.num_shards
            for replica in range(self.num_replicas):
                own = np.flatnonzero(replicas == replica)
                order[own] = own[assign_rows(costs[own], turns[own], shards[own])]
            costs = costs[order]
        num_turns = micro_batches * self.num_pieces
        cells = turns * self.num_shards + shards
        totals = np.bincount(cells, weights=costs, minlength=num_turns * self.num_shards)
        waiting_shards = self.num_shards // self.num_replicas  # that wait for each other
        waited = totals.reshape(-1, waiting_shards).max(axis=1).sum()
        return order, float(waited * waiting_shards / totals.sum() - 1)


def assign_rows(
    costs: np.ndarray,
    turns: np.ndarray,
    shards: np.ndarray,
) -> np.ndarray:
    """For each place, the row to put there: a permutation that makes shards cost about the same in each turn.

    Args:
      costs: cost of each row.
      turns: turn of each place; `shards`: its shard. A shard gets as many rows of a turn as it has places in it.
    """
    order = np.empty(len(costs), np.int64)
    by_cost = np.argsort(-costs, kind="stable")
    rows_of_turn = _turns_of_rows(turns, len(np.unique(shards)))
    paid = np.zeros(shards.max(initial=0) + 1)  # by each shard, in the turns so far
    for turn in np.unique(turns):
        rows = by_cost[rows_of_turn == turn]
        places = np.flatnonzero(turns == turn)
        room = np.bincount(shards[places], minlength=len(paid))
        owners = _owners(costs[rows], room, paid)
        paid += np.bincount(owners, weights=costs[rows], minlength=len(paid))
        places_by_shard = places[np.argsort(shards[places], kind="stable")]
        order[places_by_shard] = rows[np.argsort(owners, kind="stable")]
    return order


def _turns_of_rows(turns: np.ndarray, num_shards: int) -> np.ndarray:
    """The turn of each row, in the order of falling cost: each turn in succession gets one row per shard.

    Each round over the turns reverses the direction of the last, which keeps the turns' costs close too.
    """
    by_turn = np.sort(turns, kind="stable")
    counts = np.unique(turns, return_counts=True)[1]
    first_places = np.cumsum(counts) - counts
    place = np.arange(len(turns)) - np.repeat(first_places, counts)
    layer = place // num_shards
    direction = np.where(layer % 2, -by_turn, by_turn)
    return by_turn[np.lexsort((direction, layer))]


def _owners(
    costs: np.ndarray,
    room: np.ndarray,
    paid: np.ndarray,
) -> np.ndarray:
    """Assigns each row of a turn to a shard. Rows are in order of falling cost; shards have limited room.

    Each row goes to the shard with the lowest cost so far; among shards without rows, to the one that `paid` least.
    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), with limited room.
    """
    least: list[tuple[float, float, int, int]] = []
    for shard in np.flatnonzero(room).tolist():
        heapq.heappush(least, (0.0, paid[shard], shard, int(room[shard])))
    owners = np.empty(len(costs), np.int64)
    for row, cost in enumerate(costs.tolist()):
        total, before, shard, left = least[0]
        owners[row] = shard
        if left > 1:
            heapq.heapreplace(least, (total + cost, before, shard, left - 1))
        else:
            heapq.heappop(least)
    _swap(owners, costs, np.flatnonzero(room))
    return owners


def _swap(
    owners: np.ndarray,
    costs: np.ndarray,
    shards: np.ndarray,
) -> None:
    """Swaps the two rows that bring the costliest and the cheapest shard closest, as long as this helps."""
    totals = np.bincount(owners, weights=costs)[shards]
    for _ in range(2 * len(shards)):
        most = totals.argmax()
        least = totals.argmin()
        apart = totals[most] - totals[least]
        if totals[most] <= _EVEN_ENOUGH * totals.mean():
            return
        ours = np.flatnonzero(owners == shards[most])
        theirs = np.flatnonzero(owners == shards[least])
        moved = costs[ours][:, None] - costs[theirs]
        best = np.abs(moved - apart / 2).argmin()
        one, other = np.unravel_index(best, moved.shape)
        if not 0 < moved[one, other] < apart:
            return
        owners[ours[one]] = shards[least]
        owners[theirs[other]] = shards[most]
        totals[most] -= moved[one, other]
        totals[least] += moved[one, other]
