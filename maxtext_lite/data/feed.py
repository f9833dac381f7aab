"""From example sources to batches on the devices.

Which examples a step consumes follows from the plan and the number of examples seen (`order`); which of their rows this
process reads follows from the sharding; Grain reads ahead, in threads or processes; and the next batch is transferred
while the current step runs. Everything up to the transfer is numpy, so that reading can happen in worker processes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import absl.flags
import grain
import jax
import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.sources import ExampleSource

Index = tuple[slice, ...]
"""A device's part of a global array."""

_EMPTY = -1  # the id of a slot without an example
_FIELD_DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "weights": np.float32,
}
_READ_AHEAD_THREADS = 2
_READ_AHEAD_STEPS = 4  # of each reading process; host memory: this many steps of this host's rows, 20 bytes a token

# Bytes from which Grain hands an array over in shared memory: never. It was no faster than a pipe (27 against 26
# milliseconds for 64 x 4096 tokens), leaves segments behind, and a container's /dev/shm is often only 64 MB.
_NO_SHARED_MEMORY = 2**62


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's examples.

    Attributes:
      arrays: tokens, targets, segments, positions (int32) and weights (float32), as in `packing.build_row`; global
        arrays [A, B, T] for training, [B, T] for evaluation, B counting row slots. Empty slots are all 0.
      example_ids: int64 [num_examples], of the whole step over all hosts. Example j of a training step is in
        micro-batch j % A, slot j // A.
      num_examples: examples of the whole step, without empty slots.
      data_seconds: how long the consumer waited for this batch.
    """

    arrays: dict[str, jax.Array]
    example_ids: np.ndarray
    num_examples: int
    data_seconds: float


def training_batches(
    source: ExampleSource,
    plan: BatchPlan,
    *,
    sharding: jax.sharding.Sharding,
    examples_seen: int,
    num_steps: int,
    seed: int,
    worker_count: int,
) -> BatchIterator:
    """The batches of the `num_steps` steps that follow the first `examples_seen` examples of a run.

    Args:
      sharding: of [A, B, T]; this process reads the rows of its own devices, each once.
      seed: data_shuffle_seed.
      worker_count: processes that read ahead; 0: threads of this process.
    Returns:
      An iterator of Batch [A, B, T]; close it, or use it as a context manager.
    """
    stages: list[TrainingReads] = []
    while num_steps > 0 or not stages:
        stage = plan.stage_at(examples_seen)
        # A stage ends with the step that reaches its end, wherever in it a resumed run starts.
        steps_in_stage = num_steps
        if stage.samples is not None:
            left = stage.samples_before + stage.samples - examples_seen
            steps_in_stage = min(num_steps, -(-left // stage.global_batch_to_train))
        micro_batch_slots = plan.slots_for(stage.micro_batch_to_train)
        shape = (stage.gradient_accumulation_steps, micro_batch_slots, source.num_tokens)
        stages.append(
            TrainingReads(
                source,
                host_slots=_host_slots(sharding, shape),
                first_example=examples_seen,
                num_steps=steps_in_stage,
                step_examples=stage.global_batch_to_train,
                micro_batches=stage.gradient_accumulation_steps,
                micro_batch_slots=micro_batch_slots,
                seed=seed,
            )
        )
        num_steps -= steps_in_stage
        examples_seen += steps_in_stage * stage.global_batch_to_train
    return BatchIterator(stages, sharding, worker_count=worker_count)


def evaluation_batches(
    source: ExampleSource, plan: BatchPlan, *, sharding: jax.sharding.Sharding, eval_steps: int
) -> BatchIterator:
    """Every example of the source once, in order; the last batch is filled up with empty slots.

    Args:
      sharding: of [B, T].
      eval_steps: stop after this many batches; -1: after the last example.
    Returns:
      An iterator of Batch [B, T]; close it, or use it as a context manager.
    """
    reads = EvaluationReads(
        source,
        host_slots=_host_slots(sharding, (plan.eval_batch_slots, source.num_tokens)),
        batch_examples=plan.eval_batch_examples,
        batch_slots=plan.eval_batch_slots,
        max_batches=eval_steps,
    )
    return BatchIterator([reads], sharding, worker_count=0)


class HostRows(NamedTuple):
    """What one host reads for one batch.

    Attributes:
      example_ids: of the whole batch, over all hosts.
      shape: of the global arrays, [A, B, T] or [B, T].
      host_slots: the row slots that this host fills, those of its devices; int64, increasing.
      rows: the fields of `packing.build_row`, of `shape` but with this host's slots only.
    """

    example_ids: np.ndarray
    shape: tuple[int, ...]
    host_slots: np.ndarray
    rows: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TrainingReads:
    """What one host reads for each step of one batch size: a picklable sequence, a pure function of the step.

    Attributes:
      host_slots: the row slots, of every micro-batch, that this host fills; int64, increasing.
      first_example: position in the run of the first step's first example.
      step_examples: examples of a step over all hosts, in equal numbers in each micro-batch's first slots.
      micro_batches: A.
      micro_batch_slots: B; those without an example are empty.
      seed: data_shuffle_seed.
    """

    source: ExampleSource
    host_slots: np.ndarray
    first_example: int
    num_steps: int
    step_examples: int
    micro_batches: int
    micro_batch_slots: int
    seed: int

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, index: int) -> HostRows:
        ids = example_ids(
            self.first_example + index * self.step_examples,
            self.step_examples,
            num_examples=len(self.source),
            seed=self.seed,
        )
        # Example j is in micro-batch j % A, slot j // A: with any other A, a device still holds the same examples.
        ids_AB = ids.reshape(-1, self.micro_batches).T
        slots_AB = np.full((self.micro_batches, self.micro_batch_slots), _EMPTY, np.int64)
        slots_AB[:, : ids_AB.shape[1]] = ids_AB
        return _read_rows(self.source, ids, slots_AB, self.host_slots)


@dataclasses.dataclass(frozen=True)
class EvaluationReads:
    """What one host reads for each batch of an evaluation; attributes as of `TrainingReads`, for one micro-batch."""

    source: ExampleSource
    host_slots: np.ndarray
    batch_examples: int
    batch_slots: int
    max_batches: int

    def __len__(self) -> int:
        num_batches = -(-len(self.source) // self.batch_examples)
        return num_batches if self.max_batches < 0 else min(num_batches, self.max_batches)

    def __getitem__(self, index: int) -> HostRows:
        first = index * self.batch_examples
        ids = np.arange(first, min(first + self.batch_examples, len(self.source)), dtype=np.int64)
        slots_B = np.full(self.batch_slots, _EMPTY, np.int64)
        slots_B[: len(ids)] = ids
        return _read_rows(self.source, ids, slots_B, self.host_slots)


def slots_of(indices: Iterable[Index], *, slot_dim: int, num_slots: int) -> np.ndarray:
    """The row slots that a set of devices holds, each once: int64, increasing.

    Args:
      indices: each device's part of the global array, as `Sharding.devices_indices_map` gives it.
      slot_dim: the dim of the array that counts row slots.
    """
    held = np.zeros(num_slots, bool)
    for index in indices:
        held[index[slot_dim]] = True
    return np.flatnonzero(held)


class BatchIterator(Iterator[Batch]):
    """Reads and transfers one batch ahead of the one that `next` returned.

    Reading starts when the iterator is made, so that it overlaps compilation.
    """

    def __init__(
        self,
        stages: Sequence[TrainingReads | EvaluationReads],
        sharding: jax.sharding.Sharding,
        *,
        worker_count: int,
    ) -> None:
        self._sharding = sharding
        self._reader = _grain_iterator(stages, worker_count)
        # One thread: it reads and transfers in order, and the transfer of the next batch overlaps the current step.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="next-batch")
        self._ahead: concurrent.futures.Future[tuple[np.ndarray, dict[str, jax.Array]] | None] | None
        self._ahead = self._thread.submit(self._load)

    def __next__(self) -> Batch:
        """The next batch. Raises what reading it raised."""
        if self._ahead is None:
            raise StopIteration
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None  # stays None after an error or the end
        loaded = ahead.result()
        data_seconds = time.perf_counter() - started
        if loaded is None:
            raise StopIteration
        self._ahead = self._thread.submit(self._load)
        ids, arrays = loaded
        return Batch(arrays, ids, len(ids), data_seconds)

    def close(self) -> None:
        """Stops threads and worker processes; `next` raises StopIteration from here on."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self) -> tuple[np.ndarray, dict[str, jax.Array]] | None:
        read = next(self._reader, None)
        if read is None:
            return None
        return read.example_ids, {name: _to_devices(rows, read, self._sharding) for name, rows in read.rows.items()}


def _to_devices(rows: np.ndarray, read: HostRows, sharding: jax.sharding.Sharding) -> jax.Array:
    """The global array of which this host holds `rows`."""
    slot_dim = len(read.shape) - 2

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        # The host's slots are increasing and contain every device's whole range, so the range stays one range.
        start, stop, _ = index[slot_dim].indices(read.shape[slot_dim])
        first, last = np.searchsorted(read.host_slots, (start, stop))
        return rows[(*index[:slot_dim], slice(first, last), *index[slot_dim + 1 :])]

    return jax.make_array_from_callback(read.shape, sharding, part)


def _host_slots(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> np.ndarray:
    slot_dim = len(shape) - 2
    indices = sharding.addressable_devices_indices_map(shape).values()
    return slots_of((i for i in indices if i is not None), slot_dim=slot_dim, num_slots=shape[slot_dim])


def _read_rows(source: ExampleSource, ids: np.ndarray, slots: np.ndarray, host_slots: np.ndarray) -> HostRows:
    """The host's part of a batch whose slots, [A, B] or [B], hold these example ids or _EMPTY."""
    host_ids = slots[..., host_slots]
    rows = {name: np.zeros((*host_ids.shape, source.num_tokens), dtype) for name, dtype in _FIELD_DTYPES.items()}
    for slot, example_id in np.ndenumerate(host_ids):
        if example_id != _EMPTY:
            for name, values in source[int(example_id)].items():
                rows[name][slot] = values
    return HostRows(ids, (*slots.shape, source.num_tokens), host_slots, rows)


def _grain_iterator(
    stages: Sequence[TrainingReads | EvaluationReads], worker_count: int
) -> grain.DatasetIterator[HostRows]:
    dataset = grain.MapDataset.concatenate([grain.MapDataset.source(reads) for reads in stages])
    if worker_count == 0:
        return iter(
            dataset.to_iter_dataset(
                grain.ReadOptions(num_threads=_READ_AHEAD_THREADS, prefetch_buffer_size=_READ_AHEAD_STEPS)
            )
        )
    if not absl.flags.FLAGS.is_parsed():
        # Grain reads its settings from absl flags, which nobody parses here: their defaults hold.
        absl.flags.FLAGS.mark_as_parsed()
    ahead = grain.experimental.WithOptionsIterDataset(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        grain.experimental.DatasetOptions(min_shm_size=_NO_SHARED_MEMORY),
    )
    options = grain.MultiprocessingOptions(num_workers=worker_count, per_worker_buffer_size=_READ_AHEAD_STEPS)
    return iter(ahead.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(worker_index: int, worker_count: int) -> None:
    """Makes a reading process end with its parent, and only then.

    Ctrl-C reaches every process of the terminal, and some schedulers send SIGTERM to every process of a job; what
    happens then is for the training loop to decide, which saves first. And a parent that is killed cannot stop its
    workers, which would stay for ever.
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
