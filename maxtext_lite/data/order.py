"""Which example is the i-th of a run: a pure function of (seed, i).

Nothing is drawn, stored or replayed, so hosts, devices, batch sizes and restarts cannot change the order: a checkpoint
keeps the number of examples seen and nothing else. Order and hash are computed on positions in the whole run, so every
host knows both without asking another.
"""

from __future__ import annotations

import functools

import numpy as np
from grain import experimental as grain_experimental

FILE_ORDER = -1
"""The `data_shuffle_seed` that keeps the order of the files in every epoch."""

_ROUNDS = 4  # of the cipher behind index_shuffle; the fewest it accepts

# index_shuffle encrypts numbers of at least 16 bits until one is below num_examples: 4 microseconds for large data, but
# 0.1 milliseconds an id for 1,000 examples and 12 for 2. Small permutations are made whole, by sorting random keys.
_LARGEST_SORTED = 2**16


def example_ids(first: int, count: int, *, num_examples: int, seed: int) -> np.ndarray:
    """The ids of the examples `first .. first + count - 1` of a run.

    Epoch e is the positions from e * num_examples to (e + 1) * num_examples - 1 and holds each id once, in the order of
    a permutation that (seed, e) selects.

    Args:
      first: position in the run, which counts on through the epochs.
      num_examples: examples in the data; ids are below it.
      seed: from 0 to 2**64 - 1, or FILE_ORDER for position modulo num_examples.
    Returns:
      int64 [count].
    Raises:
      ValueError: num_examples < 1, first or count is negative, or seed out of range.
    """
    if num_examples < 1 or first < 0 or count < 0 or not FILE_ORDER <= seed < 2**64:
        raise ValueError(f"no order for first={first}, count={count}, num_examples={num_examples}, seed={seed}")
    if seed == FILE_ORDER:
        return np.arange(first, first + count, dtype=np.int64) % num_examples
    ids = np.empty(count, np.int64)
    done = 0
    while done < count:
        epoch, start = divmod(first + done, num_examples)
        stop = min(start + count - done, num_examples)
        epoch_key = _epoch_key(seed, epoch)
        if num_examples <= _LARGEST_SORTED:
            ids[done : done + stop - start] = _sorted_permutation(num_examples, epoch_key)[start:stop]
        else:
            ids[done : done + stop - start] = [
                _shuffled(i, num_examples=num_examples, seed=epoch_key >> 32) for i in range(start, stop)
            ]
        done += stop - start
    return ids


def _shuffled(index: int, *, num_examples: int, seed: int) -> int:
    """Where a permutation of the numbers below num_examples takes one of them."""
    largest = num_examples - 1
    if largest & (largest - 1) == 0:
        # A power of two is too large for the cipher's domain (2^16 goes where 0 does); one more, and it has the next.
        largest += 1
    while True:
        index = grain_experimental.index_shuffle(index, max_index=largest, seed=seed, rounds=_ROUNDS)
        if index < num_examples:
            return index


def examples_hash(ids: np.ndarray) -> str:
    """A hash of the ids consumed, in which their order does not count but repetitions do.

    The sum of splitmix64(id) over the ids, modulo 2**64, as 16 hexadecimal digits. Hashes of disjoint parts of a batch
    add up to the hash of the whole.
    """
    with np.errstate(over="ignore"):
        total = _splitmix64(np.asarray(ids).astype(np.uint64)).sum(dtype=np.uint64)
    return f"{int(total):016x}"


def _epoch_key(seed: int, epoch: int) -> int:
    """64 bits in which every bit of seed and epoch counts."""
    with np.errstate(over="ignore"):
        return int(_splitmix64(_splitmix64(np.uint64(seed)) ^ np.uint64(epoch)))


@functools.lru_cache(maxsize=8)  # of every step of an epoch; readers ahead may be in the next one
def _sorted_permutation(num_examples: int, key: int) -> np.ndarray:
    """The numbers below num_examples, in the order of splitmix64(key + number), which are all different."""
    with np.errstate(over="ignore"):
        permutation = np.argsort(_splitmix64(np.uint64(key) + np.arange(num_examples, dtype=np.uint64)))
    permutation.flags.writeable = False
    return permutation


def _splitmix64(x: np.ndarray | np.uint64) -> np.ndarray | np.uint64:
    """One output of the splitmix64 generator from state x; arithmetic modulo 2**64.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 16 (Stafford's mix 13).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
