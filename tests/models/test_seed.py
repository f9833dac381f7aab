"""Each seed has a key of its own, those of 32 bits that of jax."""

import jax
import numpy as np

from maxtext_lite.models import root_key


def test_all_bits_of_a_seed_count():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**63 - 1]
    keys = {tuple(np.asarray(jax.random.key_data(root_key(seed)))) for seed in seeds}
    assert len(keys) == len(seeds)


def test_a_seed_of_32_bits_has_the_key_of_jax():
    for seed in (0, 7, 2**32 - 1):
        np.testing.assert_array_equal(jax.random.key_data(root_key(seed)), jax.random.key_data(jax.random.key(seed)))
