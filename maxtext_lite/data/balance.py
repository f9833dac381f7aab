"""Which shard computes which rows of a step, so that attention costs all shards as much.

What a row costs follows from the lengths of its documents. Shards wait for each other in every *turn*: a pipeline
microbatch of a micro-batch, of which each shard has some rows. So rows of a step are first shared out among its turns,
neighbours in cost going to one turn, and then within each turn to the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable

import numpy as np

from maxtext_lite.batching import BatchPlan, attended_pairs
from maxtext_lite.config import Config
from maxtext_lite.data.sources import ExampleSource

_EVEN_ENOUGH = 1.002  # the costliest shard's share of the mean from which on rows change places no more


@dataclasses.dataclass(frozen=True)
class Balance:
    """How the rows of a step are dealt to the shards of the batch, or are found to lie; picklable.

    Attributes:
      is_on: they are dealt; otherwise they stay where they are.
      cost: lengths of documents -> what attention over each costs.
      num_shards: equal parts of the row slots, one after the other, that are computed at the same time.
      num_replicas: of local updates, whose rows stay their own; otherwise 1.
      num_pieces: pipeline microbatches, equal parts of a shard's slots, one after the other.
      num_slots: row slots of a micro-batch.
    """

    is_on: bool
    cost: Callable[[np.ndarray], np.ndarray]
    num_shards: int
    num_replicas: int
    num_pieces: int
    num_slots: int

    @classmethod
    def of(cls, config: Config, plan: BatchPlan) -> Balance | None:
        """That of a run's largest batch; None where no shard waits for another."""
        replicas, cost = plan.diloco_num_replicas or 1, functools.partial(attended_pairs, config)
        if plan.layout_shards == replicas:
            return None
        sizes = plan.layout_shards, replicas, plan.num_pipeline_microbatches, plan.micro_batch_slots
        return cls(config.balance_attention, cost, *sizes)

    def dealt(self, source: ExampleSource, ids: np.ndarray, micro_batches: int) -> tuple[np.ndarray, float | None]:
        """The examples of a step in the order in which they are laid out, and how uneven attention then is.

        The second is the attention that is waited for, turn by turn that of the costliest shard, over what it would be
        if all shards had as much, less 1: how much longer attention takes. None where the source does not know.

        Args:
          ids: example j is in micro-batch j % micro_batches, slot j // micro_batches; so are those that are returned.
        """
        documents = source.documents(ids)
        if documents is None:
            return ids, None
        costs = np.bincount(documents.rows, weights=self.cost(documents.lengths), minlength=len(ids))
        slots, micro_batch = np.divmod(np.arange(len(ids)), micro_batches)
        shards, piece = np.divmod(slots // (self.num_slots // (self.num_shards * self.num_pieces)), self.num_pieces)
        turns = micro_batch * self.num_pieces + piece
        if self.is_on:
            order = np.arange(len(ids))
            replicas = shards * self.num_replicas // self.num_shards
            for replica in range(self.num_replicas):
                own = np.flatnonzero(replicas == replica)
                order[own] = own[deal(costs[own], turns[own], shards[own])]
            ids, costs = ids[order], costs[order]
        num_cells, together = micro_batches * self.num_pieces * self.num_shards, self.num_shards // self.num_replicas
        totals = np.bincount(turns * self.num_shards + shards, weights=costs, minlength=num_cells)
        waited = totals.reshape(-1, together).max(axis=1).sum()
        return ids, float(waited * together / totals.sum() - 1)


def deal(costs: np.ndarray, turns: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """For each place the row that it is to hold, a permutation, so that in each turn shards cost as much as each other.

    Args:
      costs: of each row.
      turns: of each place, and `shards` its shard; a shard gets as many rows of a turn as it has places in it.
    """
    order, by_cost = np.empty(len(costs), np.int64), np.argsort(-costs, kind="stable")
    rows_of_turn = _shared_out(turns, len(np.unique(shards)))
    paid = np.zeros(shards.max(initial=0) + 1)  # by each shard in the turns so far
    for turn in np.unique(turns):
        rows, places = by_cost[rows_of_turn == turn], np.flatnonzero(turns == turn)
        room = np.bincount(shards[places], minlength=len(paid))
        owners = _owners(costs[rows], room, paid)
        paid += np.bincount(owners, weights=costs[rows], minlength=len(paid))
        order[places[np.argsort(shards[places], kind="stable")]] = rows[np.argsort(owners, kind="stable")]
    return order


def _shared_out(turns: np.ndarray, num_shards: int) -> np.ndarray:
    """The turn of each row, from the costliest down: as many in a row as there are shards, then the next turn's.

    Turns come in order, then in reverse order, and so on, so that they do not differ much either.
    """
    by_turn, counts = np.argsort(turns, kind="stable"), np.unique(turns, return_counts=True)[1]
    place = np.arange(len(turns)) - np.repeat(np.cumsum(counts) - counts, counts)
    layer, turn = place // num_shards, turns[by_turn]
    return turn[np.lexsort((np.where(layer % 2, -turn, turn), layer))]


def _owners(costs: np.ndarray, room: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """The shard of each of a turn's rows, of which the costliest come first; each shard has room for so many.

    Each row in turn goes to the shard with the least so far; of those without any, to the one that `paid` least before.
    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), here with room.
    """
    least = [(0.0, paid[shard], shard, int(room[shard])) for shard in np.flatnonzero(room).tolist()]
    heapq.heapify(least)
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


def _swap(owners: np.ndarray, costs: np.ndarray, shards: np.ndarray) -> None:
    """The shards with the most and the least swap the rows that bring them closest, for as long as this helps."""
    totals = np.bincount(owners, weights=costs)[shards]
    for _ in range(2 * len(shards)):
        most, least = totals.argmax(), totals.argmin()
        apart = totals[most] - totals[least]
        if totals[most] <= _EVEN_ENOUGH * totals.mean():
            return
        ours, theirs = (np.flatnonzero(owners == shards[which]) for which in (most, least))
        moved = costs[ours][:, None] - costs[theirs]
        one, other = np.unravel_index(np.abs(moved - apart / 2).argmin(), moved.shape)
        if not 0 < moved[one, other] < apart:
            return
        owners[ours[one]], owners[theirs[other]] = shards[least], shards[most]
        totals[most] -= moved[one, other]
        totals[least] += moved[one, other]
