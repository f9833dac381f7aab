from fractions import Fraction

import pytest

from maxtext_lite.batching.loading import Loading, loading_hosts
from maxtext_lite.config import load_config
from maxtext_lite.config.violation import Violation

BASE = load_config()


def loading_of(factor, num_hosts):
    return loading_hosts(BASE.model_copy(update={"expansion_factor_real_data": Fraction(factor)}), num_hosts)


@pytest.mark.parametrize("factor", [-1, 1])
def test_all_hosts_read_their_own_share(factor):
    loading = loading_of(factor, 4)
    assert loading == Loading(Fraction(1), (0, 1, 2, 3), 1)
    assert loading.global_batch_to_load(64) == 64
    assert loading.examples_per_loading_host(64) == 16


def test_above_one_fewer_hosts_read_more_and_each_example_once():
    loading = loading_of(2, 8)
    assert loading.loading_hosts == (0, 1, 2, 3)
    assert loading.global_batch_to_load(64) == 128
    assert loading.examples_per_loading_host(64) * len(loading.loading_hosts) == 64


# D4: MaxText multiplies the batch by the factor and trains on a part of it.
@pytest.mark.parametrize(("factor", "loads"), [("0.5", 2), ("0.25", 4), ("1/3", 3)])
def test_below_one_several_loads_feed_one_step(factor, loads):
    loading = loading_of(factor, 2)
    assert isinstance(loading, Loading)
    assert (loading.loading_hosts, loading.loads_per_step) == ((0, 1), loads)
    assert loading.global_batch_to_load(48) == 48 // loads
    assert loading.examples_per_loading_host(48) * 2 * loads == 48


# D5: the number of hosts is an integer, whatever the factor was written as.
@pytest.mark.parametrize("factor", ["2", "1.5", "3", "6"])
def test_hosts_are_counted_in_integers(factor):
    loading = loading_of(factor, 6)
    assert isinstance(loading, Loading)
    assert all(type(host) is int for host in loading.loading_hosts)
    assert len(loading.loading_hosts) * Fraction(factor) == 6


# D6: 8 hosts / 3 passes MaxText's check, and placeholders are trained on.
@pytest.mark.parametrize(
    ("factor", "num_hosts", "message"),
    [
        ("3", 8, "expansion_factor_real_data=3: 8 hosts / 3 = 2.667 loading hosts, not a whole number."),
        ("2", 1, "expansion_factor_real_data=2: 1 hosts / 2 = 0.5 loading hosts, not a whole number."),
        (
            "2.6667",
            8,
            "expansion_factor_real_data=2.6667: 8 hosts / 2.6667 = 2.99996 loading hosts, not a whole number.",
        ),
        ("0.3333", 8, "expansion_factor_real_data=0.3333 is 1/x = 3.0003 loads per step, not a whole number."),
        ("0.3", 8, "expansion_factor_real_data=0.3 is 1/x = 3.333 loads per step, not a whole number."),
        ("2/3", 8, "expansion_factor_real_data=2/3 is 1/x = 1.5 loads per step, not a whole number."),
    ],
)
def test_a_factor_without_a_whole_number_of_hosts_or_loads_is_refused(factor, num_hosts, message):
    problem = loading_of(factor, num_hosts)
    assert isinstance(problem, Violation)
    assert problem.message == message


def test_a_rounded_factor_is_suggested_as_a_fraction():
    assert loading_of("2.6667", 8).nearest == (Fraction(8, 3),)
    assert isinstance(loading_of("8/3", 8), Loading)
    below, above = loading_of("3", 8).nearest[0]()
    assert (next(iter(below)), next(iter(above))) == (
        {"expansion_factor_real_data": Fraction(2)},
        {"expansion_factor_real_data": Fraction(4)},
    )


def test_a_load_of_a_batch_that_does_not_divide_has_an_empty_slot():
    assert loading_of("0.5", 1).global_batch_to_load(3) == 2
    assert loading_of("1.5", 3).global_batch_to_load(3) == 5
