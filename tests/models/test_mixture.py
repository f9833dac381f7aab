"""A layer of experts against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.models import DecoderShape
from maxtext_lite.models.mixture import MixtureOfExperts
from maxtext_lite.models.moe import ExpertShape

D, F = 6, 5


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=["no groups", "2 of 4 groups"])
def test_a_layer_equals_transformers_deepseek_v3(groups):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    num_groups, groups_per_token = groups
    config = transformers.DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=8, num_local_experts=8, num_experts_per_tok=3,
        n_shared_experts=2, n_group=num_groups, topk_group=groups_per_token, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = DeepseekV3MoE(config).eval()
    shape = DecoderShape(
        vocab_size=7, emb_dim=D, num_query_heads=1, num_kv_heads=1, head_dim=2, mlp_dim=0, num_layers=1,
        experts=ExpertShape(8, 3, F, shared_dim=2 * F, score="sigmoid", scaling=2.5, biased=True, num_groups=num_groups,
                            groups_per_token=groups_per_token),
    )  # fmt: skip
    ours = MixtureOfExperts(shape, shape.experts, rngs=nnx.Rngs(params=0))
    rng = np.random.default_rng(5)
    for owner, name in ((ours, "router"), (ours, "router_bias"), (ours, "gate"), (ours, "up"), (ours, "down"),
                        (ours.shared, "gate"), (ours.shared, "up"), (ours.shared, "down")):  # fmt: skip
        weight = getattr(owner, name)
        weight[...] = jnp.asarray(
            rng.normal(size=weight[...].shape) * (0.2 if name == "router_bias" else 1), jnp.float32
        )

    def put(parameter, array):
        with torch.no_grad():
            assert parameter.shape == array.shape
            parameter.copy_(torch.tensor(np.array(array)))

    put(theirs.gate.weight, ours.router[...].T)
    put(theirs.gate.e_score_correction_bias, ours.router_bias[...])
    put(theirs.experts.gate_up_proj, np.concatenate([ours.gate[...], ours.up[...]], axis=2).swapaxes(1, 2))
    put(theirs.experts.down_proj, np.swapaxes(ours.down[...], 1, 2))
    for name in ("gate", "up", "down"):
        put(getattr(theirs.shared_experts, f"{name}_proj").weight, getattr(ours.shared, name)[...].T)
    x = rng.normal(size=(2, 40, D)).astype(np.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(x)).numpy()
    with jax.default_matmul_precision("highest"):
        got, _ = ours(jnp.asarray(x), jnp.ones((2, 40), bool), drop=True)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
