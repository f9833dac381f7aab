"""From example sources to batches on the devices.

The plan and the number of examples seen decide which examples a step consumes (`order`); the layout decides which of
their rows this process reads (`layout`), in one or several loads per step. Grain reads ahead, in threads or processes
(so all is numpy before the transfer), and the next batch is transferred while the current step runs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import absl.flags
import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.batching import BatchPlan
from maxtext_lite.config import UserError
from maxtext_lite.data.balance import Balance
from maxtext_lite.data.excluded import left_out
from maxtext_lite.data.mixture import ids_of_run
from maxtext_lite.data.rows import field_dtype
from maxtext_lite.data.sources import ExampleSource
from maxtext_lite.parallel import devices_share_threads, over_all_devices

Index = tuple[slice, ...]
"""A device's part of a global array."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The rows of one batch shape, [A, B, T] or [B, T]: B row slots, of which the first `filled_slots` have examples.

    Attributes:
      sharding: sharding of a step's arrays.
      slots_of_host: for each host, the row slots of every micro-batch that it reads; increasing and disjoint.
      load_positions: for each filled slot, its row in the load array; None if there is no load array.
      load_rows: rows of the load array.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    slots_of_host: tuple[np.ndarray, ...]
    load_positions: np.ndarray | None
    load_rows: int

    @property
    def slot_dim(self) -> int:
        """The dim that counts row slots."""
        return len(self.shape) - 2

    @property
    def load_sharding(self) -> NamedSharding:
        """Sharding of the load array, whose rows are split over all devices in the order of the mesh."""
        return over_all_devices(_mesh(self.sharding), self.slot_dim)

    def to_devices(self, host: int, fields: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This host's part of the global arrays, on its devices: the step's arrays, or load arrays for `reshard`.

        Args:
          fields: this host's rows, in the shape `shape` with only the slots `slots_of_host[host]`.
        """
        if self.load_positions is None:
            return {name: self._own_slots(rows, self.slots_of_host[host]) for name, rows in fields.items()}
        return {name: self._load_array(rows, host) for name, rows in fields.items()}

    def reshard(self, loaded: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of the step. All hosts call it, in the same order as their other device work."""
        if self.load_positions is None:
            return loaded
        handed_out = self._handing_out(loaded)
        if devices_share_threads():
            jax.block_until_ready(handed_out)
        return handed_out

    @functools.cached_property
    def _handing_out(self) -> Callable[..., Any]:
        assert self.load_positions is not None
        return _hand_out(self.sharding, self.shape, self.slot_dim, tuple(self.load_positions.tolist()))

    def _own_slots(self, rows: np.ndarray, host_slots: np.ndarray) -> jax.Array:
        dim = self.slot_dim

        def part(index: Index | None) -> np.ndarray:
            assert index is not None
            # The host's slots are increasing and contain every device's whole range, so that range is contiguous here.
            start, stop, _ = index[dim].indices(self.shape[dim])
            first, last = np.searchsorted(host_slots, (start, stop))
            return rows[(*index[:dim], slice(first, last), *index[dim + 1 :])]

        return jax.make_array_from_callback(self.shape, self.sharding, part)

    def _load_array(self, rows: np.ndarray, host: int) -> jax.Array:
        assert self.load_positions is not None
        dim = self.slot_dim
        shape = (*self.shape[:dim], self.load_rows, *self.shape[dim + 1 :])
        whole = np.zeros(shape, rows.dtype)  # only this host's rows are ever read
        slots = self.slots_of_host[host]
        whole[(*[slice(None)] * dim, self.load_positions[slots])] = rows
        return jax.make_array_from_callback(shape, self.load_sharding, lambda index: whole[index])


@functools.cache
def _hand_out(
    sharding: NamedSharding, shape: tuple[int, ...], slot_dim: int, positions: tuple[int, ...]
) -> Callable[..., Any]:
    first, count = positions[0], len(positions)
    in_order = positions == tuple(range(first, first + count))

    def rows_of(loaded: jax.Array) -> jax.Array:
        if in_order:
            rows = jax.lax.slice_in_dim(loaded, first, first + count, axis=slot_dim)
        else:
            rows = jnp.take(loaded, np.asarray(positions), axis=slot_dim)
        empty = [(0, 0)] * len(shape)
        empty[slot_dim] = (0, shape[slot_dim] - count)
        return jnp.pad(rows, empty)

    return jax.jit(lambda loaded: jax.tree.map(rows_of, loaded), out_shardings=sharding)


def row_layout(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    *,
    filled_slots: int,
    loading_hosts: Sequence[int],
    host_of: Callable[[Any], int] = lambda device: device.process_index,
) -> RowLayout:
    """The layout of [A, B, T] or [B, T] arrays whose first `filled_slots` row slots have examples.

    Args:
      loading_hosts: the hosts that read.
      host_of: number of the host of a device; all hosts have equally many devices.
    """
    dim = len(shape) - 2
    indices = sharding.devices_indices_map(shape)
    hosts = sorted({host_of(device) for device in indices})
    held = [
        slots_of((at for device, at in indices.items() if host_of(device) == host), slot_dim=dim, num_slots=shape[dim])
        for host in hosts
    ]
    if len(loading_hosts) == len(hosts) and sum(map(len, held)) == shape[dim]:
        return RowLayout(shape, sharding, tuple(held), None, 0)
    shares = dict(zip(loading_hosts, np.array_split(np.arange(filled_slots), len(loading_hosts)), strict=True))
    nothing = np.zeros(0, np.int64)
    slots_of_host = tuple(shares.get(host, nothing) for host in hosts)

    devices = list(_mesh(sharding).devices.flat)
    rows_of_device = -(-max(map(len, slots_of_host)) * len(hosts) // len(devices))  # enough for the largest share
    positions = np.zeros(filled_slots, np.int64)
    for host, slots in zip(hosts, slots_of_host, strict=True):
        own = np.array([at for at, device in enumerate(devices) if host_of(device) == host])
        rows = (own[:, None] * rows_of_device + np.arange(rows_of_device)).ravel()
        positions[slots] = rows[: len(slots)]
    return RowLayout(shape, sharding, slots_of_host, positions, len(devices) * rows_of_device)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)  # of devices, not an abstract one
    return sharding.mesh


def slots_of(indices: Iterable[Index], *, slot_dim: int, num_slots: int) -> np.ndarray:
    """The row slots of a set of devices, each once: int64, increasing.

    Args:
      indices: each device's part of the global array, as in `Sharding.devices_indices_map`.
      slot_dim: the dim of the array that counts row slots.
    """
    held = np.zeros(num_slots, bool)
    for index in indices:
        held[index[slot_dim]] = True
    return np.flatnonzero(held)


_READ_AHEAD_THREADS = 2
_READ_AHEAD_STEPS = 4  # per reading process; host memory: the host's rows of this many steps, 20 bytes per token
_MOST_READS = 2**62  # each load is an item of a sequence, and a Python sequence has fewer than 2**63 items
# Bytes from which Grain passes an array in shared memory: never. It was no faster than a pipe (27 against 26
# milliseconds for 64 x 4096 tokens), leaves segments behind, and the /dev/shm of a container often has only 64 MB.
_NO_SHARED_MEMORY = 2**62


class UnreadError(UserError):
    """Examples cannot be read."""


@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """One step's examples.

    Attributes:
      arrays: the source's fields; global arrays [A, B, T] for training, [B, T] for evaluation. B counts row slots, and
        empty slots are all 0; T is the source's `num_tokens`.
      example_ids: int64 [num_examples], of the whole step over all hosts. Example j of a training step is in
        micro-batch j % M, slot j // M (M: num_micro_batches); a host that does not read knows the unbalanced order.
      num_examples: examples of the whole step, without empty slots.
      num_micro_batches: the first micro-batches of A that are in use; 1 for evaluation.
      data_seconds: how long the consumer waited for this batch.
      attention_imbalance: see `Balance.arranged`; None if unknown.
    """

    arrays: dict[str, jax.Array]
    example_ids: np.ndarray
    num_examples: int
    num_micro_batches: int
    data_seconds: float
    attention_imbalance: float | None = None


def training_batches(
    source: ExampleSource,
    plan: BatchPlan,
    *,
    sharding: NamedSharding,
    examples_seen: int,
    num_steps: int,
    seed: int,
    worker_count: int,
    balance: Balance | None = None,
    excluded: Mapping[int, int] | None = None,
) -> BatchIterator:
    """The batches of the `num_steps` steps that follow the first `examples_seen` examples of a run.

    Args:
      sharding: sharding of [A, B, T].
      seed: data_shuffle_seed.
      worker_count: processes that read ahead; 0: threads of this process.
      balance: assigns a step's rows to shards; None: rows stay in the order of the run.
      excluded: ids of examples whose slots are empty, each with the position of the run from which this holds.
    Returns:
      An iterator of DeviceBatch [A, B, T]; close it, or use it as a context manager. B is that of the
      ramp's stage; A that of the target batch, whose later micro-batches are empty.
    """
    segments: list[_Segment] = []
    num_steps = min(num_steps, _MOST_READS // plan.loads_per_step)  # no run has that many
    host = jax.process_index()
    balance = balance if balance and (balance.is_on or host == 0) else None  # if off, host 0 measures the imbalance
    while num_steps > 0 or not segments:
        stage = plan.stage_at(examples_seen)
        step_examples = plan.length.step_examples(examples_seen)
        # A stage ends with the step that reaches its end, wherever a resumed run starts within it.
        steps = num_steps
        if stage.samples is not None:
            left = stage.samples_before + stage.samples - examples_seen
            steps = min(steps, -(-left // step_examples))
        while steps > 1 and plan.length.step_examples(examples_seen + (steps - 1) * step_examples) != step_examples:
            steps -= 1  # a short last batch is a segment of its own
        layout = row_layout(
            (plan.gradient_accumulation_steps, plan.slots_for(stage.micro_batch_to_train), source.num_tokens),
            sharding,
            filled_slots=stage.micro_batch_to_train,
            loading_hosts=plan.loading_hosts,
        )
        reads = TrainingReads(
            source,
            host_slots=layout.slots_of_host[host],
            first_example=examples_seen,
            num_steps=steps,
            step_examples=step_examples,
            loads_per_step=plan.loads_per_step,
            micro_batches=stage.gradient_accumulation_steps,
            seed=seed,
            balance=balance and dataclasses.replace(balance, num_slots=layout.shape[1]),
            excluded=excluded,
        )
        segments.append(_Segment(reads, layout, plan.loads_per_step, stage.gradient_accumulation_steps))
        num_steps -= steps
        examples_seen += steps * step_examples
    return BatchIterator(segments, worker_count=worker_count)


def evaluation_batches(
    source: ExampleSource, plan: BatchPlan, *, sharding: NamedSharding, eval_steps: int
) -> BatchIterator:
    """Every example of the source once, in order; the last batch is padded with empty slots.

    Args:
      sharding: sharding of [B, T].
      eval_steps: stop after this many batches; -1: after the last example.
    Returns:
      An iterator of DeviceBatch [B, T]; close it, or use it as a context manager.
    """
    layout = row_layout(
        (plan.eval_batch_slots, source.num_tokens),
        sharding,
        filled_slots=plan.eval_batch_examples,
        loading_hosts=plan.loading_hosts,
    )
    reads = EvaluationReads(
        source,
        host_slots=layout.slots_of_host[jax.process_index()],
        batch_examples=plan.eval_batch_examples,
        max_batches=eval_steps,
    )
    return BatchIterator([_Segment(reads, layout, 1, 1)], worker_count=0)


class HostRows(NamedTuple):
    """What one host reads in one load.

    Attributes:
      example_ids: of the whole step or evaluation batch, over all hosts and loads.
      cells: int64 [2, n]: each row's micro-batch (0 for evaluation) and its index among the host's slots.
      rows: the fields of `rows.build_row`, [n, T].
      attention_imbalance: as in DeviceBatch.
    """

    example_ids: np.ndarray
    cells: np.ndarray
    rows: dict[str, np.ndarray]
    attention_imbalance: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainingReads:
    """The loads of one host for steps of one batch size: a picklable sequence, a pure function of the step.

    The host's examples of a step are divided among its loads in order, in numbers that differ by at most one.

    Attributes:
      host_slots: row slots of every micro-batch that this host fills; int64, increasing.
      first_example: position in the run of the first step's first example.
      step_examples: examples of a step over all hosts; consecutive ones go to consecutive micro-batches.
      loads_per_step: loads that make up one step.
      micro_batches: micro-batches in use.
      seed: data_shuffle_seed.
      balance, excluded: as in `training_batches`.
    """

    source: ExampleSource
    host_slots: np.ndarray
    first_example: int
    num_steps: int
    step_examples: int
    loads_per_step: int
    micro_batches: int
    seed: int
    balance: Balance | None = None
    excluded: Mapping[int, int] | None = None

    def __len__(self) -> int:
        return self.num_steps * self.loads_per_step

    def __getitem__(self, index: int) -> HostRows:
        step, load = divmod(index, self.loads_per_step)
        first = self.first_example + step * self.step_examples
        ids, imbalance = ids_of_run(self.source, first, self.step_examples, seed=self.seed), None
        is_out = left_out(ids, first, self.excluded or {})
        if self.balance:
            order, imbalance = self.balance.arranged(self.source, ids, self.micro_batches)
            ids, is_out = ids[order], is_out[order]
        # Example j is in micro-batch j % M, slot j // M: without balancing, a device has the same examples for every M.
        slots, micro_batches = np.divmod(np.arange(self.step_examples), self.micro_batches)
        is_own = np.isin(slots, self.host_slots) & ~is_out  # the slots of examples that are left out stay empty
        own = np.array_split(np.flatnonzero(is_own), self.loads_per_step)[load]
        read = _read_rows(self.source, ids, own, np.stack([micro_batches[own], slots[own]]), self.host_slots)
        return read._replace(attention_imbalance=imbalance)


@dataclasses.dataclass(frozen=True)
class EvaluationReads:
    """The batches of an evaluation as one host reads them; attributes as in `TrainingReads`."""

    source: ExampleSource
    host_slots: np.ndarray
    batch_examples: int
    max_batches: int

    def __len__(self) -> int:
        num_batches = -(-len(self.source) // self.batch_examples)
        return num_batches if self.max_batches < 0 else min(num_batches, self.max_batches)

    def __getitem__(self, index: int) -> HostRows:
        first = index * self.batch_examples
        ids = np.arange(first, min(first + self.batch_examples, len(self.source)), dtype=np.int64)
        own = self.host_slots[self.host_slots < len(ids)]
        return _read_rows(self.source, ids, own, np.stack([np.zeros_like(own), own]), self.host_slots)


class _Segment(NamedTuple):
    """Batches of one shape: what this host reads for them, and how its rows reach the devices."""

    reads: TrainingReads | EvaluationReads
    layout: RowLayout
    loads_per_batch: int
    num_micro_batches: int


class _HostBatch(NamedTuple):
    """One batch as this host has read it.

    Attributes:
      fields: this host's rows, the arrays of `RowLayout.to_devices`.
    """

    example_ids: np.ndarray
    attention_imbalance: float | None
    fields: dict[str, Any]
    segment: _Segment


class BatchIterator(Iterator[DeviceBatch]):
    """Keeps one batch transferred ahead of the one that `next` returned.

    Reading starts with the iterator, so that it overlaps compilation.
    """

    def __init__(self, segments: Sequence[_Segment], *, worker_count: int) -> None:
        # A generator, because a list would have an entry for each step of the run.
        self._segments = (segment for segment in segments for _ in range(len(segment.reads) // segment.loads_per_batch))
        self._reader = read_ahead([segment.reads for segment in segments], worker_count)
        # A single thread reads and transfers in order, and overlaps the transfer with the current step.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="next-batch")
        self._ahead = self._thread.submit(self._load)

    def __next__(self) -> DeviceBatch:
        """The next batch. Where rows change hosts, all hosts must call it together.

        Raises:
          UnreadError: it cannot be read.
        """
        if self._ahead is None:
            raise StopIteration
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None  # stays None after an error or the end
        try:
            loaded = ahead.result()
        except UserError as error:
            raise UnreadError(error.problems) from None
        data_seconds = time.perf_counter() - started
        if loaded is None:
            raise StopIteration
        self._ahead = self._thread.submit(self._load)
        ids, imbalance, fields, segment = loaded
        # Not in the thread: all hosts must begin their collective operations in the same order.
        arrays = segment.layout.reshard(fields)
        return DeviceBatch(arrays, ids, len(ids), segment.num_micro_batches, data_seconds, imbalance)

    def close(self) -> None:
        """Stops threads and worker processes; from now on `next` raises StopIteration."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self) -> _HostBatch | None:
        segment = next(self._segments, None)
        if segment is None:
            return None
        host, (*outer, _, num_tokens) = jax.process_index(), segment.layout.shape
        shape = (*outer, len(segment.layout.slots_of_host[host]), num_tokens)
        fields = {name: np.zeros(shape, field_dtype(name)) for name in segment.reads.source.fields}
        ids, imbalance = np.zeros(0, np.int64), None
        for _ in range(segment.loads_per_batch):
            ids, (micro_batches, places), rows, imbalance = next(self._reader)
            for name, values in rows.items():
                fields[name][(micro_batches, places) if outer else places] = values
        return _HostBatch(ids, imbalance, segment.layout.to_devices(host, fields), segment)


def _read_rows(
    source: ExampleSource, ids: np.ndarray, own: np.ndarray, cells: np.ndarray, host_slots: np.ndarray
) -> HostRows:
    """The examples `ids[own]`, whose micro-batches and slots are `cells` [2, n], all of them this host's."""
    rows = {name: np.zeros((len(own), source.num_tokens), field_dtype(name)) for name in source.fields}
    for row, example_id in enumerate(ids[own]):
        for name, values in source[int(example_id)].items():
            rows[name][row] = values
    return HostRows(ids, np.stack([cells[0], np.searchsorted(host_slots, cells[1])]), rows)


def read_ahead(reads: Sequence[TrainingReads | EvaluationReads], worker_count: int) -> grain.DatasetIterator[HostRows]:
    """All loads in order, read ahead by threads (worker_count=0) or processes; close it."""
    dataset = grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in reads])
    if worker_count == 0:
        threads = grain.ReadOptions(num_threads=_READ_AHEAD_THREADS, prefetch_buffer_size=_READ_AHEAD_STEPS)
        return iter(dataset.to_iter_dataset(threads))
    if not absl.flags.FLAGS.is_parsed():
        # Grain reads its settings from absl flags. Nobody parses them here, so their defaults apply.
        absl.flags.FLAGS.mark_as_parsed()
    ahead = grain.experimental.WithOptionsIterDataset(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        grain.experimental.DatasetOptions(min_shm_size=_NO_SHARED_MEMORY),
    )
    options = grain.MultiprocessingOptions(num_workers=worker_count, per_worker_buffer_size=_READ_AHEAD_STEPS)
    return iter(ahead.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(worker_index: int, worker_count: int) -> None:
    """Makes a reading process end with its parent, and only then.

    Ctrl-C reaches every process of the terminal, and some schedulers send SIGTERM to every process of a job; only the
    training loop decides what then happens, because it saves first. A killed parent cannot stop its workers.
    """
    del worker_index, worker_count
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
