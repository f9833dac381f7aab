"""The i-th example of a run: a pure function of (seed, i).

Nothing is drawn, stored or replayed, so hosts, devices, batch sizes and restarts cannot change the order: a checkpoint
keeps only the number of examples seen. Order and hash are computed from positions in the whole run, so every host knows
both without asking another.
"""

from __future__ import annotations

import functools

import numpy as np

FILE_ORDER = -1
"""The `data_shuffle_seed` that keeps the order of the files in every epoch."""

_ROUNDS = 4
_LEAST_BITS = 16  # of the encrypted numbers
_AT_A_TIME = 2**16  # ids; few enough for intermediate arrays to stay in the cache

# Numbers of at least 16 bits are encrypted until they are below num_examples: a few times for a large num_examples, 65
# times for 1,000. Small permutations are instead made whole by sorting random keys.
_LARGEST_SORTED = 2**16
_MOST_KEPT = 256  # permutations: two epochs of each source of a mixture; 32 MB if all are of the largest size


def example_ids(
    first: int,
    count: int,
    *,
    num_examples: int,
    seed: int,
) -> np.ndarray:
    """The ids of the examples `first .. first + count - 1` of a run.

    Epoch e consists of positions e * num_examples to (e + 1) * num_examples - 1. It contains each id once, in the order
    of a permutation selected by (seed, e).

    Args:
      first: position in the run, counted on through the epochs.
      num_examples: examples in the data; ids are smaller.
      seed: 0 to 2**64 - 1, or FILE_ORDER for position modulo num_examples.
    Returns:
      int64 [count].
    Raises:
      ValueError: num_examples < 1, first or count is negative, or seed out of range.
    """
    if num_examples < 1 or first < 0 or count < 0 or not FILE_ORDER <= seed < 2**64:
        raise ValueError(f"no order for first={first}, count={count}, num_examples={num_examples}, seed={seed}")
    if seed == FILE_ORDER:
        return (first % num_examples + np.arange(count, dtype=np.int64)) % num_examples
    ids = np.empty(count, np.int64)
    done = 0
    while done < count:
        epoch, start = divmod(first + done, num_examples)
        stop = min(start + count - done, num_examples)
        epoch_key = _epoch_key(seed, epoch)
        if num_examples <= _LARGEST_SORTED:
            ids[done : done + stop - start] = _sorted_permutation(num_examples, epoch_key)[start:stop]
        else:
            for first_here in range(start, stop, _AT_A_TIME):
                here = np.arange(first_here, min(first_here + _AT_A_TIME, stop), dtype=np.uint64)
                at = done + first_here - start
                shuffled = _shuffled(here, num_examples=num_examples, seed=epoch_key >> 32)
                ids[at : at + len(here)] = shuffled
        done += stop - start
    return ids


def _shuffled(
    indices: np.ndarray,
    *,
    num_examples: int,
    seed: int,
) -> np.ndarray:
    """The images of these indices under grain.experimental.index_shuffle's permutation of range(num_examples).

    Numbers of an even number of bits are encrypted, repeatedly until they are below num_examples.
    Source: Beaulieu et al. 2013, "The SIMON and SPECK families of lightweight block ciphers", section 3.1, for the
      rounds; their keys are Grain's, from C++'s std::seed_seq.
    """
    # A power of two gets a block one number larger than necessary, because Grain's cannot represent 2**32 itself.
    largest = num_examples - 1 + ((num_examples - 1) & (num_examples - 2) == 0)
    half = (max((largest - 1).bit_length(), _LEAST_BITS) + 1) // 2
    kind = np.uint32 if half <= 16 else np.uint64
    width = kind(half)
    mask = kind(2**half - 1)
    keys = [kind(key) & mask for key in _round_keys(seed)]

    def encrypted(x: np.ndarray) -> np.ndarray:
        left = x >> width
        right = x & mask
        for key in keys:
            twice = right | (right << width)  # shifting this to the right rotates `right` to the left
            by_1 = twice >> (width - kind(1))
            by_2 = twice >> (width - kind(2))
            by_8 = twice >> (width - kind(8))
            mixed = ((by_1 & by_8) ^ by_2) & mask
            left, right = right, left ^ mixed ^ key
        return (left << width) | right

    found = encrypted(indices.astype(kind))
    walking = np.flatnonzero(found >= num_examples)
    while len(walking):
        further = encrypted(found[walking])
        found[walking] = further
        walking = walking[further >= num_examples]
    return found


@functools.lru_cache(maxsize=_MOST_KEPT)
def _round_keys(seed: int) -> tuple[int, ...]:
    """The 32-bit numbers that std::seed_seq{seed} generates, one for each round.

    Source: ISO C++ 2011, [rand.util.seedseq], for 4 numbers from 1.
    """
    keys = [0x8B8B8B8B] * _ROUNDS
    word = 2**32 - 1
    for k in range(2 * _ROUNDS):
        here = k % _ROUNDS
        before = (k - 1) % _ROUNDS
        after = (k + 1) % _ROUNDS
        second = (k + 2) % _ROUNDS
        if k < _ROUNDS:
            x = keys[here] ^ keys[after] ^ keys[before]
            step = 1664525 * (x ^ (x >> 27)) & word
            new = step + (1 if k == 0 else k)
            if k == 1:
                new += seed
            keys[after] = (keys[after] + step) & word
            keys[second] = (keys[second] + new) & word
        else:
            x = (keys[here] + keys[after] + keys[before]) & word
            step = 1566083941 * (x ^ (x >> 27)) & word
            new = step - here
            keys[after] ^= step
            keys[second] ^= new & word
        keys[here] = new & word
    return tuple(keys)


def examples_hash(ids: np.ndarray) -> str:
    """A hash of the consumed ids that depends on repetitions but not on order.

    It is the sum of splitmix64(id) over the ids, modulo 2**64, as 16 hexadecimal digits. The hashes of disjoint parts
    of a batch add up to the hash of the whole.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix64(np.asarray(ids).astype(np.uint64))
        total = mixed.sum(dtype=np.uint64)
    return f"{int(total):016x}"


def _epoch_key(seed: int, epoch: int) -> int:
    """64 bits that depend on every bit of seed and epoch."""
    with np.errstate(over="ignore"):
        return int(_splitmix64(_splitmix64(np.uint64(seed)) ^ np.uint64(epoch)))


@functools.lru_cache(maxsize=_MOST_KEPT)
def _sorted_permutation(num_examples: int, key: int) -> np.ndarray:
    """The numbers below num_examples, ordered by splitmix64(key + number), whose values are all different."""
    with np.errstate(over="ignore"):
        numbers = np.arange(num_examples, dtype=np.uint64)
        order = np.argsort(_splitmix64(np.uint64(key) + numbers))
    permutation = order.astype(np.uint16)
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
