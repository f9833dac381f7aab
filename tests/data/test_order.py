import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maxtext_lite.data.order import FILE_ORDER, example_ids, examples_hash

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The published C code, in unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("num_examples", [1, 2, 1000, 2**16 + 1])
def test_every_epoch_has_every_example_once(num_examples):
    for epoch, seed in ((0, 0), (1, 0), (1, 2**63)):
        ids = example_ids(
            epoch * num_examples, num_examples, num_examples=num_examples, seed=seed
        )
        assert ids.dtype == np.int64
        assert sorted(ids) == list(range(num_examples))


def test_the_largest_id_of_one_more_than_a_power_of_two_is_not_the_first_ones():
    """index_shuffle by itself takes 2**32 where it takes 0."""
    num_examples = 2**32 + 1
    first, last = (
        int(example_ids(at, 1, num_examples=num_examples, seed=0)[0])
        for at in (0, num_examples - 1)
    )
    assert first != last


def test_epochs_and_seeds_have_different_orders_near_chance():
    orders = [np.arange(1000)]
    orders += [
        example_ids(e * 1000, 1000, num_examples=1000, seed=seed)
        for seed in (0, 1, 2)
        for e in (0, 1, 2)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two random permutations agree in 1 place on average; 10 or more has probability 1e-7.
            assert np.sum(one == other) < 10


@pytest.mark.parametrize(
    ("num_examples", "seed"), [(5, FILE_ORDER), (100, 9), (2**16 + 1, 9)]
)
def test_an_id_depends_on_its_position_only_not_on_how_it_is_asked_for(
    num_examples, seed
):
    keys = {"num_examples": num_examples, "seed": seed}
    whole = example_ids(0, 333, **keys)
    for count in (1, 4, 100):
        parts = [
            example_ids(first, min(count, 333 - first), **keys)
            for first in range(0, 333, count)
        ]
        assert_array_equal(np.concatenate(parts), whole)
    assert example_ids(5, 0, **keys).shape == (0,)


@pytest.mark.fast
def test_the_order_of_earlier_versions_still_holds():
    # Recorded. A checkpoint stores no order: if this changes, runs that resume see other examples than they should.
    small, large = (
        [248, 645, 871, 998, 272, 18, 916, 4],
        [911195518, 1990298159, 572095244, 898367037],
    )
    assert_array_equal(example_ids(0, 8, num_examples=1000, seed=0), small)
    assert_array_equal(
        example_ids(3_000_000_000, 4, num_examples=2**31 - 1, seed=5), large
    )


@pytest.mark.fast
def test_the_hash_adds_splitmix64_of_each_id():
    # First outputs of splitmix64 for the seeds 0 and 1234567, as Vigna's and Rosetta Code's pages give them.
    assert examples_hash(np.array([0])) == "e220a8397b1dcdaf"
    assert examples_hash(np.array([1234567])) == f"{6457827717110365317:016x}"
    ids = np.random.default_rng(0).integers(2**31, size=1000)
    for some in (ids, ids[:-1], ids.repeat(2), ids[:0]):
        assert (
            examples_hash(some)
            == f"{sum(splitmix64(int(i)) for i in some) & MASK:016x}"
        )
