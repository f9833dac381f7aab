"""Rollouts: responses sampled from the policy in training, by a `RolloutEngine`; `LocalEngine` is one.

The policy is softmax(logits / temperature) over the whole vocabulary. Top-k and top-p restrict the draws; reported
log-probabilities are still those of the policy.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from maxtext_lite.inference.cache import KVCache
from maxtext_lite.inference.decoding import Sampling, cache_axes, new_cache
from maxtext_lite.inference.sampler import first_token, next_token
from maxtext_lite.models import Decoder, root_key
from maxtext_lite.models.lora import merged
from maxtext_lite.parallel import (
    MESH_AXES,
    Params,
    make_mesh,
    num_shards,
    sharding,
    tree_shardings,
    vmap_over_data,
)

_PADDED_TO = 16  # tokens of prompts and caches; prompts to a power of 2 times this, to compile few shapes
_PREFILL_TOKENS = 8_192  # of one replica's prompts at a time; the attention scores of all of them fill memory at once

TRAINING = 0
HELD_OUT = 1
"""The first int of a request's key: what the response is for."""

ANSWER_SECONDS = 1800.0
"""The longest time for a server's answer, with all attempts."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to answer.

    Attributes:
      token_ids: the prompt.
      key: of its draws: equal keys, prompts, parameters and seeds give equal responses.
    """

    token_ids: Sequence[int]
    key: tuple[int, ...]


class Response(NamedTuple):
    """The response to a request.

    Attributes:
      token_ids: the new tokens, at least one, including the stop token that ended it.
      log_probabilities: of each token, under the policy.
      ended: by a stop token; False: truncated at the requested maximum of tokens.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    ended: bool


class RolloutEngine(Protocol):
    """A sampler of responses from the policy, wherever it runs."""

    def update(self, params: Params, step: int) -> None:
        """Sets the parameters to sample from: the trainer's after `step` optimizer steps."""
        ...

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, max_new_tokens: int) -> list[Response]:
        """The responses, in the order of the requests."""
        ...

    def close(self) -> None:
        """Releases its resources; no other method is called afterwards."""
        ...


def sampling_mesh(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of the devices that sample, with these sizes by axis (`batching.rollout_mesh`) and 1 for the others."""
    ones: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    return make_mesh(ones | dict(sizes), ones, devices)


class Transfer:
    """The transfer of a trainer's parameters to a sampling decoder, on the same devices or on others.

    On the trainer's devices, adapters are merged, the stages' layers put in order, and everything cast to the decoder's
    `dtype`, to send as little as possible. The result shares no memory with the argument.

    Args:
      decoder: the sampling one, without pipeline and adapters.
      mesh: of the devices that sample.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh):
        self._decoder = decoder
        self._mesh = mesh
        self._there = tree_shardings(mesh, decoder.axes)
        self._jitted: dict[Mesh, Any] = {}  # by the mesh of the parameters; one trainer has one

    def __call__(self, params: Params) -> Params:
        """The decoder's parameters on its mesh, from the trainer's on theirs."""
        here = jax.tree.leaves(params)[0].sharding.mesh
        stays = list(here.devices.flat) == list(self._mesh.devices.flat)
        if here not in self._jitted:
            where = self._there if stays else tree_shardings(here, self._decoder.axes)
            self._jitted[here] = jax.jit(self._plain, out_shardings=where)
        plain = self._jitted[here](params)
        return plain if stays else jax.device_put(plain, self._there, donate=True)

    def _plain(self, params: Params) -> Params:
        wanted = self._decoder.abstract_params

        def ordered(x: Array, like: jax.ShapeDtypeStruct) -> Array:
            return x.reshape(like.shape)

        def narrow(x: Array) -> Array:
            return x.astype(self._decoder.shape.dtype)

        in_order = jax.tree.map(ordered, merged(params), wanted)
        # The trainer keeps the tables wide for their gradients; their rows are cast at look-up anyway.
        tables = jax.tree.map(narrow, in_order["embedding"])
        # A copy, as an array that needs no cast would be the trainer's own, which its next step donates.
        return jax.tree.map(jnp.copy, self._decoder.cast(in_order) | {"embedding": tables})


class _Slots(NamedTuple):
    """The sequences in progress, B for each of R replicas; a slot whose sequence has ended does not change.

    Inside `vmap_over_data` they are one replica's, without the R.

    Attributes:
      cache: [R, L, B, K, S, H].
      token_RB: the last token of each sequence, not in the cache yet.
      length_RB: number of tokens in the cache.
      key_RB: of the draws.
      count_RB: number of new tokens.
      running_RB: False: the sequence has ended, or the slot is empty.
      new_RBT: the new tokens.
      log_probability_RBT: their log-probabilities.
    """

    cache: KVCache
    token_RB: Array
    length_RB: Array
    key_RB: Array
    count_RB: Array
    running_RB: Array
    new_RBT: Array
    log_probability_RBT: Array


class _Prompts(NamedTuple):
    """Prompts to put into slots; a row without a prompt has a slot number past the last.

    Attributes:
      token_RBT: padded at the end.
      length_RB: number of tokens, at least one.
      slot_RB: slot in the same replica.
      key_int_RBI: the ints of the request's key.
    """

    token_RBT: np.ndarray
    length_RB: np.ndarray
    slot_RB: np.ndarray
    key_int_RBI: np.ndarray


class LocalEngine:
    """A sampler on devices of this run: many sequences at once, each in a slot of a preallocated cache.

    As sequences end, others take their slots, so a long response blocks only its own slot. A request's draws depend on
    the seed, its key, the tokens before and their logits, not on its slot or its neighbours.

    Args:
      decoder: without pipeline and adapters, from `make_plain_decoder`.
      mesh: of the devices that sample (`sampling_mesh`).
      num_slots: sequences at once, a multiple of the shards over which they are split.
      max_prompt_tokens, max_new_tokens: limits of `generate`.
      stop_token_ids: tokens after which a response ends.
      refill_fraction: the fraction of the slots that must end before they are refilled; 0: any.

    Attributes:
      decode_steps: decode steps of all slots in the last call of `generate`.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        *,
        num_slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int,
        refill_fraction: float = 0.125,
    ):
        self._decoder = decoder
        self._mesh = mesh
        self._max_prompt_tokens = max_prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._stop_token_ids = tuple(stop_token_ids)
        self._seed = seed
        with jax.set_mesh(mesh):
            self._num_replicas = num_shards("replica")
            self._row_shards = num_shards("batch")
        self._slots_per_replica = num_slots // self._num_replicas
        self._refill_at = max(1, int(refill_fraction * num_slots))
        self._num_positions = _round_up(max_prompt_tokens + max_new_tokens)
        self._transfer = Transfer(decoder, mesh)
        self._params: Params | None = None
        where_RB = sharding(mesh, ("replica", "batch"))
        where_RBT = sharding(mesh, ("replica", "batch", None))
        axes_of_cache = cache_axes(decoder)
        of_cache = jax.tree.map(
            lambda axes: sharding(mesh, ("replica", *axes)), axes_of_cache, is_leaf=lambda node: type(node) is tuple
        )
        where: Any = _Slots(of_cache, *[where_RB] * 5, where_RBT, where_RBT)  # type: ignore[arg-type]
        reported = (where, sharding(mesh))
        self._empty = jax.jit(self._empty_slots, out_shardings=where)
        jitted = functools.partial(jax.jit, donate_argnums=1, static_argnames=("sampling",))
        self._fill = jitted(self._filled, out_shardings=where)
        self._decode = jitted(self._decoded, out_shardings=reported)
        self.decode_steps = 0

    def update(self, params: Params, step: int) -> None:
        """Sets the parameters to sample from: the trainer's, on any mesh, with or without adapters and stages."""
        del step  # the parameters are in place when this returns
        self._params = None  # frees the old ones first
        self._params = self._transfer(params)

    def close(self) -> None:
        """Drops the parameters."""
        self._params = None

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, max_new_tokens: int) -> list[Response]:
        """The responses to any number of requests, in their order."""
        assert self._params is not None, "generate() before update()"
        responses: dict[int, Response] = {}
        waiting = deque(range(len(requests)))
        free = [list(range(self._slots_per_replica)) for _ in range(self._num_replicas)]
        taken: dict[tuple[int, int], int] = {}  # (replica, slot): number of its request
        self.decode_steps = 0
        with jax.set_mesh(self._mesh):
            slots = self._empty()
            while waiting or taken:
                for prompts in self._prompts(requests, self._take(waiting, free, taken)):
                    slots = self._fill(self._params, slots, prompts, max_new_tokens, sampling=sampling)
                # While requests wait, decode until some sequences have ended; at last, until all have.
                leave_running = max(len(taken) - self._refill_at, 0) if waiting else 0
                slots, report = self._decode(self._params, slots, leave_running, max_new_tokens, sampling=sampling)
                steps, running_RB, count_RB, new_RBT, log_probability_RBT = (np.asarray(x) for x in report)
                self.decode_steps += int(steps)
                for at in [at for at in taken if not running_RB[at]]:
                    token_ids = new_RBT[at][: count_RB[at]].tolist()
                    log_probabilities = log_probability_RBT[at][: count_RB[at]].tolist()
                    ended = token_ids[-1] in self._stop_token_ids
                    responses[taken.pop(at)] = Response(token_ids, log_probabilities, ended)
                    replica, slot = at
                    free[replica].append(slot)
        return [responses[number] for number in range(len(requests))]

    def _take(
        self, waiting: deque[int], free: list[list[int]], taken: dict[tuple[int, int], int]
    ) -> list[list[tuple[int, int]]]:
        """Assigns waiting requests to free slots; returns (slot, number of the request) by replica."""
        chosen: list[list[tuple[int, int]]] = [[] for _ in free]
        while waiting and any(free):
            replica = max(range(len(free)), key=lambda replica: len(free[replica]))
            slot = free[replica].pop()
            number = waiting.popleft()
            taken[replica, slot] = number
            chosen[replica].append((slot, number))
        return chosen

    def _prompts(self, requests: Sequence[Request], chosen: list[list[tuple[int, int]]]) -> list[_Prompts]:
        """The prompts of the chosen requests, in batches of few shapes."""
        numbers = [number for rows in chosen for _, number in rows]
        if not numbers:
            return []
        num_tokens = _PADDED_TO
        while num_tokens < max(len(requests[number].token_ids) for number in numbers):
            num_tokens = min(2 * num_tokens, _round_up(self._max_prompt_tokens))
        most = max(map(len, chosen))
        num_rows = self._row_shards
        while num_rows < min(most, self._slots_per_replica) and 4 * num_rows * num_tokens <= _PREFILL_TOKENS:
            num_rows = min(4 * num_rows, self._slots_per_replica)
        key_ints = len(requests[numbers[0]].key)
        batches: list[_Prompts] = []
        for first in range(0, most, num_rows):
            size = (self._num_replicas, num_rows)
            batch = _Prompts(
                np.zeros((*size, num_tokens), np.int32),
                np.ones(size, np.int32),
                np.full(size, self._slots_per_replica, np.int32),
                np.zeros((*size, key_ints), np.uint32),
            )
            for replica, rows in enumerate(chosen):
                for row, (slot, number) in enumerate(rows[first : first + num_rows]):
                    token_ids = requests[number].token_ids
                    batch.token_RBT[replica, row, : len(token_ids)] = token_ids
                    batch.length_RB[replica, row] = len(token_ids)
                    batch.slot_RB[replica, row] = slot
                    batch.key_int_RBI[replica, row] = requests[number].key
            batches.append(batch)
        return batches

    def _empty_slots(self) -> _Slots:
        rows = (self._num_replicas, self._slots_per_replica)
        new = new_cache(self._decoder, self._slots_per_replica, self._num_positions)
        cache = jax.tree.map(lambda x: jnp.zeros((self._num_replicas, *x.shape), x.dtype), new)
        zero_RB = jnp.zeros(rows, jnp.int32)
        return _Slots(
            cache,
            zero_RB,
            zero_RB,
            jnp.broadcast_to(root_key(self._seed), rows),
            zero_RB,
            jnp.zeros(rows, bool),
            jnp.zeros((*rows, self._max_new_tokens), jnp.int32),
            jnp.zeros((*rows, self._max_new_tokens), jnp.float32),
        )

    def _filled(
        self, params: Params, slots: _Slots, prompts: _Prompts, max_new_tokens: Array, *, sampling: Sampling
    ) -> _Slots:
        """The slots after new prompts have been put into some of them, with the first token of each."""

        def of_replica(params: Params, slots: _Slots, prompts: _Prompts) -> _Slots:
            token_BT, length_B, slot_B, key_int_BI = (jnp.asarray(x) for x in prompts)
            key_B = jnp.broadcast_to(root_key(self._seed), slot_B.shape)
            for place in range(key_int_BI.shape[1]):
                key_B = jax.vmap(jax.random.fold_in)(key_B, key_int_BI[:, place])
            cache = new_cache(self._decoder, *token_BT.shape)
            token_B, log_probability_B, cache = first_token(
                self._decoder, params, token_BT, cache, length_B, key_B,
                sampling=sampling, scored_at=sampling.policy_temperature,
            )  # fmt: skip

            def put(all_B: Array, x_B: Array) -> Array:
                return all_B.at[slot_B].set(x_B.astype(all_B.dtype), mode="drop")

            def put_tokens(all_LB: Array, x_LB: Array) -> Array:
                rest = (slice(size) for size in x_LB.shape[2:])  # of keys, the positions of the prompts
                return all_LB.at[:, slot_B, *rest].set(x_LB, mode="drop")

            return _Slots(
                jax.tree.map(put_tokens, slots.cache, cache),
                put(slots.token_RB, token_B),
                put(slots.length_RB, length_B),
                put(slots.key_RB, key_B),
                put(slots.count_RB, jnp.ones_like(slot_B)),
                put(slots.running_RB, ~self._stops(token_B) & (max_new_tokens > 1)),
                slots.new_RBT.at[slot_B, 0].set(token_B, mode="drop"),
                slots.log_probability_RBT.at[slot_B, 0].set(log_probability_B, mode="drop"),
            )

        return vmap_over_data(of_replica, self._num_replicas, own=(1, 2))(params, slots, prompts)

    def _decoded(
        self, params: Params, slots: _Slots, leave_running: Array, max_new_tokens: Array, *, sampling: Sampling
    ) -> tuple[_Slots, tuple[Array, ...]]:
        """The slots once at most `leave_running` sequences run; and for the host the number of steps and the tokens."""

        def of_replica(params: Params, slots: _Slots) -> _Slots:
            running_B = slots.running_RB
            count_B = slots.count_RB
            token_B, log_probability_B, cache = next_token(
                self._decoder, params, slots.token_RB, slots.cache, slots.length_RB, slots.key_RB,
                sampling=sampling, scored_at=sampling.policy_temperature,
            )  # fmt: skip
            row_B = jnp.arange(running_B.shape[0])
            at_B = jnp.where(running_B, count_B, self._max_new_tokens)  # a place past the end is not written
            more_B = running_B.astype(jnp.int32)
            return _Slots(
                cache,
                jnp.where(running_B, token_B, slots.token_RB),
                slots.length_RB + more_B,
                slots.key_RB,
                count_B + more_B,
                running_B & ~self._stops(token_B) & (count_B + 1 < max_new_tokens),
                slots.new_RBT.at[row_B, at_B].set(token_B, mode="drop"),
                slots.log_probability_RBT.at[row_B, at_B].set(log_probability_B, mode="drop"),
            )

        step = vmap_over_data(of_replica, self._num_replicas, own=(1,))

        def more(carry: tuple[_Slots, Array]) -> Array:
            return jnp.sum(carry[0].running_RB) > leave_running

        slots, steps = jax.lax.while_loop(
            more, lambda carry: (step(params, carry[0]), carry[1] + 1), (slots, jnp.zeros([], jnp.int32))
        )
        return slots, (steps, slots.running_RB, slots.count_RB, slots.new_RBT, slots.log_probability_RBT)

    def _stops(self, token_B: Array) -> Array:
        return jnp.isin(token_B, jnp.asarray(self._stop_token_ids, jnp.int32))


def _round_up(count: int) -> int:
    return -(-count // _PADDED_TO) * _PADDED_TO
