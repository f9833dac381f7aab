"""From example sources to batches on the devices.

The plan and the number of examples seen decide which examples a step consumes (`order`). The layout decides which of
their rows this process reads, in one or several loads per step. Grain reads ahead, in threads or processes (so all is
numpy before the transfer), and the next batch is transferred while the current step runs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import absl.flags
import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.batching import BatchPlan
from maxtext_lite.config import Config, UserError
from maxtext_lite.data.excluded import left_out
from maxtext_lite.data.order import FILE_ORDER
from maxtext_lite.data.rows import field_dtype
from maxtext_lite.data.source import ExampleSource
from maxtext_lite.parallel import devices_share_threads, over_all_devices

if TYPE_CHECKING:
    from maxtext_lite.data.balance import Balance

_READ_AHEAD_THREADS = 2
_READ_AHEAD_STEPS = 4  # per reading process; host memory: the host's rows of this many steps, 20 bytes per token
# Bytes from which Grain passes an array in shared memory: never. It was no faster than a pipe (27 against 26
# milliseconds for 64 x 4096 tokens), leaves segments behind, and the /dev/shm of a container often has only 64 MB.
_NO_SHARED_MEMORY = 2**62


class UnreadError(UserError):
    """Examples cannot be read."""


# ---- Which host reads which rows --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the rows of a batch [A, B, T] or [B, T] are read. B counts row slots; the first ones have examples.

    Either every host reads the rows of its own devices, or the hosts that read put rows anywhere into a larger load
    array, from which `reshard` moves them to the devices that need them.

    Attributes:
      sharding: sharding of a step's arrays.
      slots_of_host: for each host, the row slots of every micro-batch that it reads, empty ones on its own devices
        included; increasing and disjoint.
      load_positions: for each filled slot, its row in the load array; None if there is no load array.
      load_rows: rows of the load array.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    slots_of_host: Sequence[np.ndarray]
    load_positions: np.ndarray | None = None
    load_rows: int = 0

    @property
    def load_sharding(self) -> NamedSharding:
        """Sharding of the load array, whose rows are split over all devices in the order of the mesh."""
        return over_all_devices(_mesh(self.sharding), len(self.shape) - 2)

    def to_devices(self, host: int, fields: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This host's part of the global arrays, on its devices: the step's arrays, or load arrays for `reshard`.

        Args:
          fields: this host's rows, in the shape `shape` with only the slots `slots_of_host[host]`.
        """
        put = self._own_rows if self.load_positions is None else self._load_array
        return {name: put(rows, self.slots_of_host[host]) for name, rows in fields.items()}

    def reshard(self, loaded: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of the step. All hosts call it, in the same order as their other device work."""
        if self.load_positions is None:
            return loaded
        arrays = _resharding(self.sharding, self.shape, tuple(self.load_positions.tolist()))(loaded)
        if devices_share_threads():
            jax.block_until_ready(arrays)
        return arrays

    def _own_rows(self, rows: np.ndarray, host_slots: np.ndarray) -> jax.Array:
        def rows_of_device(index: Any) -> np.ndarray:
            *micro_batches, slots, tokens = index
            start, stop, _ = slots.indices(self.shape[-2])
            # The host's slots are increasing and contain every device's whole range, so that range is contiguous here.
            first, last = np.searchsorted(host_slots, (start, stop))
            return rows[(*micro_batches, slice(first, last), tokens)]

        return jax.make_array_from_callback(self.shape, self.sharding, rows_of_device)

    def _load_array(self, rows: np.ndarray, host_slots: np.ndarray) -> jax.Array:
        assert self.load_positions is not None
        shape = (*self.shape[:-2], self.load_rows, self.shape[-1])
        loaded = np.zeros(shape, rows.dtype)  # only this host's rows are ever read
        loaded[..., self.load_positions[host_slots], :] = rows
        return jax.make_array_from_callback(shape, self.load_sharding, lambda index: loaded[index])


@functools.cache
def _resharding(sharding: NamedSharding, shape: tuple[int, ...], positions: tuple[int, ...]) -> Callable[..., Any]:
    """Compiles a function that takes rows at these positions of load arrays and pads them to the step's shape."""
    first = positions[0]
    count = len(positions)
    padding = [(0, 0)] * len(shape)
    padding[-2] = (0, shape[-2] - count)

    def reshard(loaded: jax.Array) -> jax.Array:
        if positions == tuple(range(first, first + count)):
            rows = jax.lax.slice_in_dim(loaded, first, first + count, axis=-2)
        else:
            rows = jnp.take(loaded, np.asarray(positions), axis=-2)
        return jnp.pad(rows, padding)

    return jax.jit(lambda loaded: jax.tree.map(reshard, loaded), out_shardings=sharding)


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
    indices = sharding.devices_indices_map(shape)
    hosts = sorted({host_of(device) for device in indices})
    is_held = np.zeros((len(hosts), shape[-2]), bool)  # whether a host's devices have a slot
    for device, index in indices.items():
        is_held[hosts.index(host_of(device)), index[-2]] = True
    if len(loading_hosts) == len(hosts) and is_held.sum() == shape[-2]:
        return RowLayout(shape, sharding, [np.flatnonzero(slots) for slots in is_held])

    shares = np.array_split(np.arange(filled_slots), len(loading_hosts))
    slots_of_host = [np.zeros(0, np.int64) for _ in hosts]
    for host, share in zip(loading_hosts, shares, strict=True):
        slots_of_host[hosts.index(host)] = share
    devices = list(_mesh(sharding).devices.flat)
    rows_of_device = -(-len(shares[0]) * len(hosts) // len(devices))  # enough for the largest share
    positions = np.zeros(filled_slots, np.int64)
    for host, slots in zip(hosts, slots_of_host, strict=True):
        own = np.array([at for at, device in enumerate(devices) if host_of(device) == host])
        rows = (own[:, None] * rows_of_device + np.arange(rows_of_device)).ravel()
        positions[slots] = rows[: len(slots)]
    return RowLayout(shape, sharding, slots_of_host, positions, len(devices) * rows_of_device)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)  # of devices, not an abstract one
    return sharding.mesh


# ---- What a host reads ------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What one host reads in one load.

    Attributes:
      example_ids: of the whole step, over all hosts and loads.
      micro_batches: of each row that this host has read; `places`: its index among the host's slots. int64 [n].
      rows: the fields of `Rows.build`, [n, T].
      attention_imbalance: as in DeviceBatch.
    """

    example_ids: np.ndarray
    micro_batches: np.ndarray
    places: np.ndarray
    rows: dict[str, np.ndarray]
    attention_imbalance: float | None


@dataclasses.dataclass(frozen=True)
class HostReads:
    """One host's loads for steps of one batch size: a picklable sequence and pure function of the load's number.

    The host's examples of a step are divided among its loads in order, in numbers that differ by at most one.

    Attributes:
      host_slots: row slots of every micro-batch that this host fills; int64, increasing.
      first_example: position in the run of the first step's first example.
      num_examples: examples of all steps; the last step may have fewer than the others.
      step_examples: examples of a step over all hosts; consecutive ones go to consecutive micro-batches.
      loads_per_step: loads that make up one step.
      micro_batches: micro-batches in use.
      seed: data_shuffle_seed.
      balance, excluded: as in `training_batches`.
    """

    source: ExampleSource
    host_slots: np.ndarray
    first_example: int
    num_examples: int
    step_examples: int
    loads_per_step: int = 1
    micro_batches: int = 1
    seed: int = FILE_ORDER
    balance: Balance | None = None
    excluded: Mapping[int, int] | None = None

    @property
    def num_steps(self) -> int:
        """Steps or batches."""
        return -(-self.num_examples // self.step_examples)

    def __len__(self) -> int:
        return self.num_steps * self.loads_per_step

    def __getitem__(self, index: int) -> Load:
        step, load = divmod(index, self.loads_per_step)
        done = step * self.step_examples
        first = self.first_example + done
        ids = self.source.ids_of_run(first, min(self.step_examples, self.num_examples - done), self.seed)
        is_empty = left_out(ids, first, self.excluded or {})
        imbalance = None
        if self.balance:
            order, imbalance = self.balance.arranged(self.source, ids, self.micro_batches)
            ids = ids[order]
            is_empty = is_empty[order]
        # Example j is in micro-batch j % M, slot j // M: without balancing, a device has the same examples for every M.
        slots, micro_batches = np.divmod(np.arange(len(ids)), self.micro_batches)
        is_own = np.isin(slots, self.host_slots) & ~is_empty
        own = np.array_split(np.flatnonzero(is_own), self.loads_per_step)[load]
        rows = {name: np.zeros((len(own), self.source.num_tokens), field_dtype(name)) for name in self.source.fields}
        for row, example_id in enumerate(ids[own].tolist()):
            for name, values in self.source[example_id].items():
                rows[name][row] = values
        places = np.searchsorted(self.host_slots, slots[own])
        return Load(ids, micro_batches[own], places, rows, imbalance)


def read_ahead(reads: Sequence[HostReads], worker_count: int) -> grain.DatasetIterator[Load]:
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


# ---- Batches on the devices -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """One step's examples.

    Attributes:
      arrays: the source's fields; global arrays [A, B, T] for training, [B, T] for evaluation. B counts row slots, and
        empty slots are all 0; T is the source's `num_tokens`.
      example_ids: int64 [num_examples], of the whole step over all hosts. Example j of a training step is in
        micro-batch j % M, slot j // M (M: num_micro_batches); a host that does not read knows the unbalanced order.
      num_micro_batches: the first micro-batches of A that are in use; 1 for evaluation.
      attention_imbalance: see `Balance.arranged`; None if unknown.
      data_seconds: how long the consumer waited for this batch.
    """

    arrays: dict[str, jax.Array]
    example_ids: np.ndarray
    num_micro_batches: int
    attention_imbalance: float | None = None
    data_seconds: float = 0.0

    @property
    def num_examples(self) -> int:
        """Examples of the whole step, without empty slots."""
        return len(self.example_ids)


def balance_of(config: Config, plan: BatchPlan) -> Balance | None:
    """The balance for a run's largest batch; None if no shard waits for another."""
    if plan.layout_shards == (plan.diloco_num_replicas or 1):
        return None
    from maxtext_lite.data.balance import Balance

    return Balance.of(config, plan)


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
      An iterator of DeviceBatch [A, B, T]; close it, or use it as a context manager. B is the stage's; A is the largest
      of the stages with this B, and micro-batches beyond the stage's own are empty.
    """
    parts: list[tuple[HostReads, RowLayout]] = []
    host = jax.process_index()
    if balance and not balance.is_on and host > 0:
        balance = None  # host 0 alone measures the imbalance
    while num_steps > 0 or not parts:
        stage, steps = next(plan.length.ahead(examples_seen))
        step_examples = plan.length.step_examples(examples_seen)
        steps = min(steps, num_steps)
        while steps > 1 and plan.length.step_examples(examples_seen + (steps - 1) * step_examples) != step_examples:
            steps -= 1  # a short last batch is a part of its own
        slots = plan.slots_for(stage.micro_batch_to_train)
        layout = row_layout(
            (plan.array_micro_batches(slots), slots, source.num_tokens),
            sharding,
            filled_slots=stage.micro_batch_to_train,
            loading_hosts=plan.loading_hosts,
        )
        reads = HostReads(
            source,
            host_slots=layout.slots_of_host[host],
            first_example=examples_seen,
            num_examples=steps * step_examples,
            step_examples=step_examples,
            loads_per_step=plan.loads_per_step,
            micro_batches=stage.gradient_accumulation_steps,
            seed=seed,
            balance=balance and dataclasses.replace(balance, num_slots=layout.shape[1]),
            excluded=excluded,
        )
        parts.append((reads, layout))
        num_steps -= steps
        examples_seen += reads.num_examples
    return BatchIterator(parts, worker_count=worker_count)


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
    examples = plan.eval_batch_examples
    layout = row_layout(
        (plan.eval_batch_slots, source.num_tokens),
        sharding,
        filled_slots=examples,
        loading_hosts=plan.loading_hosts,
    )
    num_examples = len(source)
    if eval_steps >= 0:
        num_examples = min(num_examples, eval_steps * examples)
    host_slots = layout.slots_of_host[jax.process_index()]
    reads = HostReads(source, host_slots, first_example=0, num_examples=num_examples, step_examples=examples)
    return BatchIterator([(reads, layout)], worker_count=0)


class BatchIterator(Iterator[DeviceBatch]):
    """Keeps one batch transferred ahead of the one that `next` returned.

    Reading starts with the iterator, and so overlaps compilation.
    """

    def __init__(self, parts: Sequence[tuple[HostReads, RowLayout]], *, worker_count: int) -> None:
        # A generator, because a list would have an entry for each step of the run.
        self._parts = (part for part in parts for _ in range(part[0].num_steps))
        self._reader = read_ahead([reads for reads, _ in parts], worker_count)
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
        ahead = self._ahead
        self._ahead = None  # and it stays None after an error or the end
        try:
            loaded = ahead.result()
        except UserError as error:
            raise UnreadError(error.problems) from None
        data_seconds = time.perf_counter() - started
        if loaded is None:
            raise StopIteration
        self._ahead = self._thread.submit(self._load)
        batch, layout = loaded
        # Not in the thread: all hosts must begin their collective operations in the same order.
        return dataclasses.replace(batch, arrays=layout.reshard(batch.arrays), data_seconds=data_seconds)

    def close(self) -> None:
        """Stops threads and worker processes; from now on `next` raises StopIteration."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self) -> tuple[DeviceBatch, RowLayout] | None:
        """Reads all loads of the next batch and transfers this host's rows; None after the last batch."""
        part = next(self._parts, None)
        if part is None:
            return None
        reads, layout = part
        *micro_batches, _, num_tokens = layout.shape
        shape = (math.prod(micro_batches), len(reads.host_slots), num_tokens)
        fields = {name: np.zeros(shape, field_dtype(name)) for name in reads.source.fields}
        loads = [next(self._reader) for _ in range(reads.loads_per_step)]
        for load in loads:
            for name, rows in load.rows.items():
                fields[name][load.micro_batches, load.places] = rows
        shape = (*micro_batches, *shape[1:])
        fields = {name: rows.reshape(shape) for name, rows in fields.items()}
        arrays = layout.to_devices(jax.process_index(), fields)
        batch = DeviceBatch(arrays, loads[0].example_ids, reads.micro_batches, loads[0].attention_imbalance)
        return batch, layout
