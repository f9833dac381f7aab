import numpy as np
import pytest
from grain.experimental import index_shuffle

from maxtext_lite.data.order import FILE_ORDER, example_ids, examples_hash

MASK = 2**64 - 1


def splitmix64_in_python(state: int) -> int:
    """The published C code, in unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 2**63])
@pytest.mark.parametrize("num_examples", [1, 2, 3, 7, 64, 1000, 2**16 + 1, 2**16 + 2, 2**16 + 3])
def test_every_epoch_has_every_example_once(num_examples, seed):
    for epoch in range(2):
        ids = example_ids(epoch * num_examples, num_examples, num_examples=num_examples, seed=seed)
        assert ids.dtype == np.int64
        assert sorted(ids) == list(range(num_examples))


def test_the_largest_id_of_one_more_than_a_power_of_two_is_not_the_first_ones():
    """index_shuffle by itself takes 2**32 where it takes 0."""
    num_examples = 2**32 + 1
    first, last = (int(example_ids(at, 1, num_examples=num_examples, seed=0)[0]) for at in (0, num_examples - 1))
    assert first != last


def test_epochs_and_seeds_have_different_orders_near_chance():
    orders = [
        example_ids(epoch * 1000, 1000, num_examples=1000, seed=seed) for seed in (0, 1, 2) for epoch in (0, 1, 2)
    ]
    for i, one in enumerate(orders):
        assert np.mean(one == np.arange(1000)) < 0.01
        for other in orders[:i]:
            # Two random permutations agree in 1 place on average; 10 or more has probability 1e-7.
            assert np.sum(one == other) < 10


def test_two_examples_come_in_both_orders():
    firsts = [int(example_ids(2 * epoch, 1, num_examples=2, seed=0)[0]) for epoch in range(64)]
    assert 16 < sum(firsts) < 48  # a fair coin is outside with probability 3e-5


@pytest.mark.parametrize("num_examples", [1, 2, 5, 100, 2**16 + 1])
@pytest.mark.parametrize("seed", [FILE_ORDER, 0, 9])
def test_an_id_depends_on_its_position_only_not_on_how_it_is_asked_for(num_examples, seed):
    whole = example_ids(0, 333, num_examples=num_examples, seed=seed)
    for count in (1, 4, 7, 100, 333):
        parts = [
            example_ids(first, min(count, 333 - first), num_examples=num_examples, seed=seed)
            for first in range(0, 333, count)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_file_order_repeats_the_files_in_every_epoch():
    np.testing.assert_array_equal(example_ids(3, 7, num_examples=4, seed=FILE_ORDER), [3, 0, 1, 2, 3, 0, 1])


def test_a_request_for_no_ids_is_an_empty_array():
    assert example_ids(5, 0, num_examples=4, seed=0).shape == (0,)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**40, 12)])
def test_the_order_of_a_large_epoch_is_grains_permutation(seed, epoch):
    num_examples = 2**16 + 3
    key = splitmix64_in_python(splitmix64_in_python(seed) ^ epoch)
    expected = [index_shuffle(i, max_index=num_examples - 1, seed=key >> 32, rounds=4) for i in range(100)]
    np.testing.assert_array_equal(
        example_ids(epoch * num_examples, 100, num_examples=num_examples, seed=seed), expected
    )


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**40, 12)])
def test_the_order_of_a_small_epoch_is_that_of_random_keys(seed, epoch):
    key = splitmix64_in_python(splitmix64_in_python(seed) ^ epoch)
    expected = sorted(range(100), key=lambda i: splitmix64_in_python((key + i) & MASK))
    np.testing.assert_array_equal(example_ids(epoch * 100, 100, num_examples=100, seed=seed), expected)


def test_the_order_of_earlier_versions_still_holds():
    # Recorded. A checkpoint stores no order: if this changes, runs that resume see other examples than they should.
    np.testing.assert_array_equal(example_ids(0, 8, num_examples=1000, seed=0), PINNED_SMALL)
    np.testing.assert_array_equal(example_ids(3_000_000_000, 4, num_examples=2**31 - 1, seed=5), PINNED_LARGE)


PINNED_SMALL = [248, 645, 871, 998, 272, 18, 916, 4]
PINNED_LARGE = [911195518, 1990298159, 572095244, 898367037]


def test_a_source_of_two_billion_examples_has_an_order():
    ids = example_ids(2**31 - 50, 100, num_examples=2**31 - 1, seed=3)
    assert len(set(ids.tolist())) == 100
    assert ids.min() >= 0
    assert ids.max() < 2**31 - 1
    assert ids.max() > 2**30


@pytest.mark.parametrize(
    "wrong", [{"first": -1}, {"count": -1}, {"num_examples": 0}, {"seed": -2}, {"seed": 2**64}], ids=str
)
def test_an_impossible_request_is_refused(wrong):
    request = {"first": 0, "count": 1, "num_examples": 1, "seed": 0} | wrong
    with pytest.raises(ValueError, match="no order for"):
        example_ids(request["first"], request["count"], num_examples=request["num_examples"], seed=request["seed"])


def test_the_hash_of_one_id_is_the_published_splitmix64_output():
    # First outputs of splitmix64 for the seeds 0 and 1234567, as Vigna's and Rosetta Code's pages give them.
    assert examples_hash(np.array([0])) == "e220a8397b1dcdaf"
    assert examples_hash(np.array([1234567])) == f"{6457827717110365317:016x}"


def test_the_hash_does_not_depend_on_order_but_on_ids_and_repetitions():
    ids = np.random.default_rng(0).integers(2**31, size=1000)
    expected = sum(splitmix64_in_python(int(i)) for i in ids) & MASK
    assert examples_hash(ids) == f"{expected:016x}"
    assert examples_hash(np.random.default_rng(1).permutation(ids)) == examples_hash(ids)
    assert examples_hash(ids[:-1]) != examples_hash(ids)
    assert examples_hash(np.array([4, 4])) != examples_hash(np.array([4, 4, 4, 4])) != examples_hash(np.array([]))


def test_hashes_of_parts_add_up():
    ids = np.arange(100)
    parts = int(examples_hash(ids[:37]), 16) + int(examples_hash(ids[37:]), 16)
    assert examples_hash(ids) == f"{parts & MASK:016x}"
    assert examples_hash(np.array([], np.int64)) == "0" * 16
