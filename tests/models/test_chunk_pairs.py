"""Two pairs of chunks cover the keys of another shard that a device's queries may see, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.chunk_pairs import Pairs
from maxtext_lite.parallel import MESH_AXES, context_order, make_mesh, over_shards

CHUNK = 2


@pytest.mark.parametrize("shards", [2, 3])
def test_pairs_are_all_and_only_the_queries_and_keys_where_the_key_is_earlier(shards):
    mesh = make_mesh(
        dict.fromkeys(MESH_AXES, 1) | {"context": shards}, dict.fromkeys(MESH_AXES, 1), jax.devices()[:shards]
    )
    order = context_order(2 * CHUNK * shards, shards).astype(np.int32)

    def local(token_1T):
        """[shards, 2 pairs, 2, chunk]: the tokens of queries, and the places of keys on the other shard."""
        pairs = [Pairs.of(jnp.int32(other), CHUNK) for other in range(shards)]
        places = jnp.arange(2 * CHUNK, dtype=jnp.int32)[None]
        found = [jnp.stack([p.queries(token_1T, 1), p.keys(places, 1)], axis=1) for p in pairs]
        return jnp.stack(found)[None]

    with jax.set_mesh(mesh):
        run = over_shards(local, ((None, "length"),), ("length", None, None, None, None))
        found = np.asarray(jax.jit(run)(order[None]))
    for own in range(shards):
        held = {shard: order[2 * CHUNK * shard :][: 2 * CHUNK] for shard in range(shards)}
        for other in set(range(shards)) - {own}:
            got = {
                (int(q), int(held[other][key])) for queries, keys in found[own, other] for q in queries for key in keys
            }
            assert got == {(int(q), int(s)) for q in held[own] for s in held[other] if s < q}
