import pytest

from maxtext_lite.batching.memory import bytes_text, count_parameters, estimate_memory
from maxtext_lite.config import load_config

ONE_DEVICE = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
# V 320, D 128, N 8, K 4, H 16, F 384, L 4, by hand: tables 2VD, attention 2DNH + 2DKH, mlp 3DF, norms (2L + 1)D.
TABLES = 2 * 320 * 128
MATRICES = 4 * (2 * 128 * 8 * 16 + 2 * 128 * 4 * 16 + 3 * 128 * 384)
NORMS = 9 * 128
ALL = TABLES + MATRICES + NORMS


def estimate(overrides=(), mesh=(), slots=16, accumulation=1, pieces=1, limit=None):
    return estimate_memory(load_config(None, overrides), ONE_DEVICE | dict(mesh), slots, accumulation, pieces, limit)


def test_parameters_are_counted_by_hand():
    count = count_parameters(load_config())
    assert (count.matrices, count.tables, count.norms, count.total) == (MATRICES, TABLES, NORMS, ALL)
    assert count_parameters(load_config(None, ["logits_via_embedding=true"])).tables == TABLES // 2
    assert count_parameters(load_config(), fsdp=4, tensor=2, stage=2).total == TABLES // 8 + MATRICES // 16 + 5 * 128


def test_experts_are_counted_by_hand_and_split_over_their_axis_too():
    """8 experts of 3 D 64, 2 shared ones, a router of 8 D and a bias of 8 in each of 4 layers, in place of the mlp."""
    keys = ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=64", "shared_experts=2", "routed_bias=true"]
    attention = 2 * 128 * 8 * 16 + 2 * 128 * 4 * 16
    one = 3 * 128 * 64
    count = count_parameters(load_config(None, keys))
    assert count.matrices == 4 * (attention + 10 * one + 8 * 128)
    assert count.norms == NORMS + 4 * 8
    part = count_parameters(load_config(None, keys), fsdp=2, tensor=2, stage=2, expert=4)
    assert part.matrices == 2 * (attention // 4 + (2 * one + 8 * one // 4) // 4 + 8 * 128 // 2)
    mesh = ONE_DEVICE | {"expert": 4}
    assert estimate(keys, mesh).params == 4 * count_parameters(load_config(None, keys), expert=4).total


def test_activations_of_experts_have_room_for_the_worst_that_may_come():
    keys = ["num_experts=8", "num_experts_per_tok=2", "base_mlp_dim=64"]
    one = estimate(keys).activations
    # Two rows a token on one device; on four along the expert axis, with two experts each, tokens of all with two each.
    per_row = estimate(["num_experts=8", "num_experts_per_tok=3", "base_mlp_dim=64"]).activations - one
    four = estimate(keys, {"expert": 4}, slots=64).activations
    assert four - one == (4 * 2 - 2) * per_row
    capacity = estimate([*keys, "capacity_factor=1.5"], {"expert": 4}, slots=64).activations
    assert capacity - one == (3 - 2) * per_row


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["optimizer=adamw"], 2),
        (["optimizer=sgd"], 0),
        (["optimizer=sgd", "sgd_momentum=0.9"], 1),
        (["optimizer=lion"], 1),
    ],
)
def test_optimizer_state_is_counted_exactly(overrides, copies):
    assert estimate(overrides).optimizer_state == 4 * copies * ALL


def test_gradients_are_one_float32_copy_and_with_accumulation_one_more():
    assert estimate().params == 4 * ALL
    assert estimate().gradients == 4 * ALL
    assert estimate(accumulation=2).gradients == estimate(accumulation=8).gradients == 8 * ALL
    assert estimate(["weight_dtype=bfloat16"], accumulation=2).gradients == 6 * ALL


@pytest.mark.parametrize(("replicas", "copies"), [(2, 1), (4, 2), (8, 4)])
def test_replicas_hold_copies_beside_the_outer_parameters_and_their_momentum(replicas, copies):
    mesh = ONE_DEVICE | {"data": 2}
    plain = estimate(mesh=mesh, accumulation=2)
    local = estimate_memory(load_config(), mesh, 16, 2, 1, None, replicas)
    assert local.params == (copies + 1) * 4 * ALL
    assert local.optimizer_state == copies * 8 * ALL + 4 * ALL
    assert local.gradients == copies * 8 * ALL
    assert (local.activations, local.logits) == (plain.activations, plain.logits)
    averaging = estimate_memory(load_config(None, ["diloco_outer_momentum=0"]), mesh, 16, 2, 1, None, replicas)
    assert averaging.optimizer_state == copies * 8 * ALL


def test_half_precision_is_two_bytes_whichever_it_is():
    assert estimate(["dtype=float16"]) == estimate(["dtype=bfloat16"])


def test_estimates_shrink_in_the_order_of_what_is_recomputed():
    sizes = [estimate([f"remat_policy={policy}"]).activations
             for policy in ("none", "save_dot_products", "minimal", "save_qkv_proj", "full")]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True)


def test_activations_and_logits_follow_the_rows_of_a_device():
    one = estimate(slots=16)
    assert estimate(slots=32).activations == 2 * one.activations
    assert estimate(slots=32, mesh={"data": 2}).activations == one.activations
    assert one.logits == 2 * 4 * 16 * 256 * 320
    assert estimate(["num_vocab_tiling=4"]).logits == one.logits // 4
    assert estimate(slots=16, accumulation=8).activations == one.activations


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_estimated_optimizer_state_lies_below_adams(optimizer):
    assert 0 < estimate([f"optimizer={optimizer}"]).optimizer_state < estimate().optimizer_state


def test_the_total_is_the_sum_and_the_limit_is_in_bytes():
    memory = estimate(limit=95)
    assert memory.total == sum(
        (memory.params, memory.optimizer_state, memory.gradients, memory.activations, memory.logits)
    )
    assert memory.limit == 95_000_000_000
    assert list(memory.to_json()) == [
        "params", "optimizer_state", "gradients", "activations", "logits", "total", "limit"]  # fmt: skip


def test_bytes_are_shown_in_a_unit_that_suits():
    assert [bytes_text(size) for size in (95_000_000_000, 1_500_000, 400)] == ["95.0 GB", "1.5 MB", "0.4 kB"]


def test_a_sharded_optimizer_state_is_divided_by_the_data_axis():
    four = {"data": 4}
    whole = estimate(mesh=four).optimizer_state
    assert estimate(["shard_optimizer_over_data=true"], four).optimizer_state == whole // 4
    narrow = estimate(["shard_optimizer_over_data=true", "weight_dtype=bfloat16"], four)
    assert narrow.optimizer_state == (whole + whole // 2) // 4  # two moments and a master copy, each float32
