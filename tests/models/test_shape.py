"""What a layer of each kind sees and how it rotates."""

import dataclasses
import math

from maxtext_lite.config import Mla, RopeScaling
from maxtext_lite.models import DecoderShape, Scoring
from maxtext_lite.models.rotary import Rope

SHAPE = DecoderShape(vocab_size=11, emb_dim=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, num_layers=7)
LINEAR = RopeScaling("linear", 8.0)
GEMMA = dataclasses.replace(
    SHAPE, pattern=("local", "local", "global"), window=5, rope_max_timescale=1e6, rope_local_max_timescale=1e4,
    rope_scaling=LINEAR, soft_cap=50.0, query_scalar=16.0,
)  # fmt: skip


def test_a_llama_has_one_kind_of_layer():
    assert SHAPE.kinds_from(3) == ("global",)
    assert SHAPE.rope("global") == Rope(4, 1e4)
    assert SHAPE.scoring("global") == Scoring()
    assert SHAPE.value_dim == 4


def test_local_layers_have_a_window_and_their_own_unscaled_rotation():
    assert GEMMA.rope("local") == Rope(4, 1e4)
    assert GEMMA.rope("global") == Rope(4, 1e6, LINEAR)
    assert GEMMA.scoring("local") == Scoring(scale=0.25, window=5, soft_cap=50.0)
    assert GEMMA.scoring("global") == Scoring(scale=0.25, soft_cap=50.0)
    as_others = dataclasses.replace(GEMMA, rope_local_max_timescale=0.0)
    assert as_others.rope("local") == as_others.rope("global")


def test_a_pattern_goes_on_where_dense_layers_end():
    assert GEMMA.kinds_from(2) == ("global", "local", "local")
    assert GEMMA.kinds_from(7) == ("local", "global", "local")
    assert dataclasses.replace(SHAPE, num_dense_layers=2).num_expert_layers == 5


def test_layers_without_rotation():
    assert SHAPE.rope("nope") is None
    assert dataclasses.replace(SHAPE, num_positions=9).rope("global") is None
    assert dataclasses.replace(SHAPE, rotary_dim=2).rope("global") == Rope(2, 1e4)


def test_latent_attention_scales_all_of_a_score_where_yarn_says_so():
    widths = Mla(q_lora_rank=0, kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    yarn = RopeScaling("yarn", 40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
    latent = dataclasses.replace(SHAPE, latent=widths, rope_scaling=yarn, num_kv_heads=4)
    assert latent.value_dim == 3
    assert math.isclose(latent.scoring("global").scale, (0.1 * math.log(40) + 1) ** 2 / 2)
    assert dataclasses.replace(SHAPE, rope_scaling=yarn).scoring("global") == Scoring()
