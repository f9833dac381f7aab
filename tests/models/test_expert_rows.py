"""Rows on their way to experts and back: every choice comes once, in some round, and what is made of it returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.expert_rows import gather_rows, queue_up, rows_of_round
from maxtext_lite.models.moe import TOKEN_AXES, ExpertShape
from maxtext_lite.parallel import MESH_AXES, make_mesh, over_shards

B, T, E, J, N = 4, 6, 8, 2, 4  # N devices, each with 6 tokens and two experts
RNG = np.random.default_rng(0)
CHOICES = {
    "even": np.stack([RNG.permutation(E)[:J] for _ in range(B * T)]).reshape(B, T, J),
    "one expert": np.broadcast_to([5, E], (B, T, J)),
    "one device": np.broadcast_to([2, 3], (B, T, J)),
    "none": np.full((B, T, J), E),
}


def _seen(expert, rows, num_rows):
    """For each choice, 100 x its expert + its token as the row of its expert has them, and the number of rounds."""
    here = E // N
    device = jax.lax.axis_index("expert")
    token_BT1 = (jnp.arange(T, dtype=jnp.float32) + T * device).reshape(1, T, 1)

    def of(moved):
        token_U = moved.of_tokens(token_BT1)[:, 0]
        ends = jnp.cumsum(moved.size_E)
        own_U = jnp.searchsorted(ends, jnp.arange(len(token_U)), side="right") + here * device
        value_U = 100.0 * own_U + token_U
        one_share = jnp.zeros((1, T, J)).at[..., 0].set(1.0)
        summed = moved.sum_of_choices(value_U[:, None], one_share, token_BT1)
        return moved.to_choices(value_U, one_share), summed

    if rows == "gathered":
        return *of(gather_rows(expert, here)), jnp.ones([1, 1, 1])
    queues = queue_up(expert, here, num_rows)
    rounds = queues.num_rounds()
    found = [of(queues.round(number)) for number in range(-(-T * J // num_rows) + 1)]
    choices, first = (sum(parts) for parts in zip(*found, strict=True))
    late = sum(jnp.sum(jnp.where(number >= rounds, jnp.abs(part), 0)) for number, (part, _) in enumerate(found))
    return choices, first, (rounds + 1000 * (late > 0)).astype(jnp.float32).reshape(1, 1, 1)


@pytest.mark.parametrize(("rows", "num_rows"), [("gathered", 0), ("exchanged", 3), ("exchanged", 12)])
def test_every_choice_meets_its_expert_once_and_comes_back(rows, num_rows):
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"expert": N}, dict.fromkeys(MESH_AXES, 1), jax.devices()[:N])
    with jax.set_mesh(mesh):
        function = jax.jit(over_shards(lambda e: _seen(e, rows, num_rows), [TOKEN_AXES], [TOKEN_AXES] * 3))
        for name, expert in CHOICES.items():
            choices, first, rounds = jax.device_get(function(jnp.asarray(expert, jnp.int32)))
            token = np.arange(B * T).reshape(B, T, 1)
            want = np.where(expert < E, 100.0 * expert + token, 0)
            np.testing.assert_array_equal(choices, want, name)
            np.testing.assert_array_equal(first[..., 0], want[..., 0], name)
            if rows == "exchanged":  # the longest queue of one device for another's experts
                queues = [np.count_nonzero(row // (E // N) == d) for row in expert for d in range(N)]
                assert set(rounds.ravel()) == {-(-max(queues) // num_rows)}, name


def test_without_a_mesh_there_is_nothing_to_exchange():
    assert rows_of_round(B * T, ExpertShape(E, J, 4), jnp.bfloat16) is None
