import pytest

from maxtext_lite.batching.memory import estimate_memory, vocab_tiles
from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import Accelerator

ONE_DEVICE = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
# V 320, D 128, N 8, K 4, H 16, F 384, L 4, by hand: tables 2VD, attention 2DNH + 2DKH, mlp 3DF, norms (2L + 1)D.
TABLES = 2 * 320 * 128
MATRICES = 4 * (2 * 128 * 8 * 16 + 2 * 128 * 4 * 16 + 3 * 128 * 384)
NORMS = 9 * 128
ALL = TABLES + MATRICES + NORMS


def estimate(overrides=(), mesh=(), slots=16, accumulation=1, pieces=1, limit=None, accelerator=None):
    accelerator = accelerator or Accelerator.planned("gpu")
    config, mesh = load_config(None, overrides), ONE_DEVICE | dict(mesh)
    return estimate_memory(config, mesh, slots, accumulation, pieces, limit, accelerator=accelerator)


def held(memory, *names):
    return sum(line.bytes for line in memory.lines if line.name in names)


def test_activations_of_experts_have_room_for_the_rows_that_may_come():
    keys = ["num_experts=8", "num_experts_per_tok=2", "base_mlp_dim=64"]
    keys.append("remat_policy=none")
    one = held(estimate(keys), "kept of layers")
    three = ["num_experts=8", "num_experts_per_tok=3", "base_mlp_dim=64", "remat_policy=none"]
    per_row = held(estimate(three), "kept of layers") - one
    assert per_row == 4 * (128 + 2 * 64) * 4 * 4096  # of 4 layers: its token, 128 wide, and two projections
    # Two rows a token on one device. On two along the expert axis all tokens of both come, with two choices each; on
    # four, a round of the exchange has room for 5/4 of the 2 x 4096 choices that a device has.
    two = held(estimate(keys, {"expert": 2}, slots=32), "kept of layers")
    assert two - one == (2 * 2 - 2) * per_row
    four = held(estimate(keys, {"expert": 4}, slots=64), "kept of layers")
    assert four - one == pytest.approx((2.5 - 2) * per_row, rel=1e-3)
    capacity = held(estimate([*keys, "capacity_factor=1.5"], {"expert": 4}, slots=64), "kept of layers")
    # Kept in four layers: the outputs of two choices, 128 wide, in float32, and hidden values of 3 slots per token.
    assert capacity - one == (3 - 2) * per_row + 4 * (2 * 128 + 3 * 64) * 4 * 4096


def test_named_tensors_of_experts_are_kept():
    """Four experts of width 64, two a token; 16 rows of 256 tokens, 4 layers, D 128, float32."""
    keys, full = ["num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=64"], "remat_policy=full"
    nothing = held(estimate([*keys, full]), "kept of layers")
    # No backward pass needs the output of a layer's last matmul: the next layer's input is kept anyway.
    for name, width in (("mlpwi_0", 2 * 64), ("mlpwi_1", 2 * 64), ("mlpwo", 0), ("expert_rows", 2 * 128)):
        kept = held(estimate([*keys, "remat_policy=custom", f"remat_save={name}"]), "kept of layers")
        assert kept - nothing == 4 * 16 * 256 * width * 4, name


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


def test_muon_has_one_moment_of_matrices_and_adafactor_means_of_rows_and_columns():
    """Where both dims are at least 128: those of the mlp, and of the tables."""
    assert estimate(["optimizer=muon"]).optimizer_state == 4 * (MATRICES + 2 * (TABLES + NORMS))
    factored = ALL - 4 * 3 * 128 * 384 - TABLES + 4 * 3 * (128 + 384) + 2 * (320 + 128)
    assert estimate(["optimizer=adafactor"]).optimizer_state == 4 * factored


def test_accumulation_adds_a_float32_copy_of_the_gradients():
    assert estimate().params == 4 * ALL
    assert estimate().gradients == 4 * ALL
    assert estimate(accumulation=2).gradients == estimate(accumulation=8).gradients == 8 * ALL
    narrow = estimate(["weight_dtype=bfloat16", "dtype=bfloat16"], accumulation=2)
    assert narrow.gradients == 6 * ALL
    # A micro-batch's gradients are in `dtype` for matrices, and in weight_dtype for tables.
    assert estimate(["dtype=bfloat16"]).gradients == 2 * MATRICES + 4 * (TABLES + NORMS)
    assert held(estimate(["dtype=bfloat16"]), "weights in dtype") == 2 * MATRICES
    assert narrow.most("weights") == 0


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


@pytest.mark.parametrize(
    ("optimizer", "copies"), [("adamw", 2), ("sgd", 0), ("lion", 1), ("muon", 1), ("adafactor", 1)]
)
def test_frozen_weights_have_no_gradients_and_no_optimizer_state(optimizer, copies):
    """Adapters of rank 2 beside the query, D 128 and N 8 x H 16, in 4 layers, in float32 whatever the weights are."""
    keys = ["lora_rank=2", "lora_targets=query", f"optimizer={optimizer}", "weight_dtype=bfloat16"]
    adapters = 4 * 2 * (128 + 8 * 16)
    memory = estimate(keys, accumulation=4)
    assert memory.params == 2 * ALL + 4 * adapters
    assert memory.gradients == 8 * adapters
    assert memory.optimizer_state == 4 * copies * adapters
    assert estimate([*keys, "shard_optimizer_over_data=true"], {"data": 2}).optimizer_state == 2 * copies * adapters
    local = estimate_memory(load_config(None, keys), ONE_DEVICE | {"data": 2}, 16, 1, 1, None, 4)
    assert local.params == 2 * ALL + (2 + 1) * 4 * adapters


def test_both_half_precisions_take_two_bytes():
    assert estimate(["dtype=float16"]) == estimate(["dtype=bfloat16"])


def test_activations_and_logits_follow_the_rows_of_a_device():
    one = estimate(slots=16)
    assert estimate(slots=32).activations == 2 * one.activations
    assert estimate(slots=32, mesh={"data": 2}).activations == one.activations
    tile = "logits of a tile"  # and their gradients
    assert held(one, tile) == 2 * 4 * 16 * 256 * 320
    assert held(estimate(["num_vocab_tiling=4"]), tile) == held(one, tile) // 4
    assert held(estimate(accelerator=Accelerator("cpu")), tile) == 3 * 4 * 16 * 256 * 320
    # Beside them four times the hidden states, 128 wide, and the head's gradient.
    assert one.logits == held(one, tile) + 4 * 4 * 16 * 256 * 128 + 4 * 320 * 128
    assert estimate(slots=16, accumulation=8).activations == one.activations


def test_logits_are_split_into_the_fewest_tiles_of_half_a_gib():
    """llama3-8b's 128,256 float32 logits of a token are 513,024 bytes: 1,046 tokens in 512 MiB."""
    cut = {(rows, tokens): vocab_tiles(-1, rows=rows, tokens=tokens, vocab_size=128_256)
           for rows, tokens in ((1, 1024), (1, 4096), (1, 8192), (3, 8192), (1, 1047), (2, 3), (10**6, 3))}  # fmt: skip
    assert list(cut.values()) == [1, 4, 8, 32, 3, 1, 3]
    assert vocab_tiles(-1, rows=8, tokens=1024, vocab_size=32_768) == 2
    assert vocab_tiles(5, rows=10**6, tokens=4096, vocab_size=128_256) == 5


def test_a_device_sums_the_whole_heads_gradient_before_its_shard_of_it():
    """16 rows of 256 tokens a device, D 128, V 320, in 64 tiles."""
    mesh, keys = {"fsdp": 4}, ["num_vocab_tiling=64", "dtype=bfloat16"]
    tile, head = 64 * 320, 128 * 320
    names = ("logits of a tile", "head as used", "head's gradient", "head's gradient, reduced")

    def loss(*arguments, **options):
        return [held(estimate(*arguments, **options), name) for name in names]

    # In float32; its shard is smaller than a tile's logits and their gradients in bfloat16.
    assert loss(keys, mesh, slots=64) == [(4 + 2) * tile, 2 * head, 4 * head, 0]
    assert loss(["num_vocab_tiling=64"]) == [(4 + 4) * tile, 0, 4 * head, 0]
    # In half the tiles' size it is larger. With grad_dtype the whole is cast, too, before it is reduced.
    assert loss([*keys, "num_vocab_tiling=256"], mesh, slots=64) == [0, 2 * head, 4 * head, head]
    assert loss([*keys, "grad_dtype=bfloat16"], mesh, slots=64) == [(4 + 2) * tile, 2 * head, 4 * head, 0]
    narrow = loss([*keys, "num_vocab_tiling=256", "grad_dtype=bfloat16"], mesh, slots=64)
    assert narrow == [0, 2 * head, 4 * head, head + 2 * head]
    # A frozen head has no gradient.
    assert loss([*keys, "lora_rank=4"], mesh, slots=64)[2:] == [0, 0]


def test_fsdp_shards_gather_the_widest_weights_of_a_layer():
    """D 128 and F 384, of which tensor leaves a half: two matrices in float32."""
    one, four = estimate(), estimate(mesh={"fsdp": 4}, slots=64)
    assert held(four, "weights, gathered") == 2 * 4 * 128 * 384
    assert held(one, "weights, gathered") == 0
    halves = estimate(mesh={"fsdp": 4, "tensor": 2}, slots=64)
    assert held(halves, "weights, gathered") == 4 * 128 * 384


def test_tensor_shards_of_gpus_gather_tokens_in_the_backward_pass():
    """16 rows of 256 tokens, D 128, float32: four arrays, and four more in attention's backward pass."""
    found = {
        name: estimate(["remat_policy=full"], {"tensor": 2}, accelerator=Accelerator(name)) for name in ("gpu", "tpu")
    }
    names = ("tokens, gathered", "tokens, to be shared out")
    assert [held(found["gpu"], name) for name in names] == [4 * 4 * 16 * 256 * 128] * 2
    assert [len(found["gpu"].at(moment)) - len(found["tpu"].at(moment)) for moment in ("mlp", "attention")] == [1, 2]


def test_gpipe_keeps_every_tick_and_1f1b_the_inputs_of_twice_the_stages():
    mesh, keys = {"stage": 2}, ["remat_policy=full", "num_layers_per_pipeline_stage=2"]
    names = ("kept of layers", "inputs under way", "pieces")
    sizes = {
        schedule: {
            pieces: held(
                estimate([*keys, f"pipeline_schedule={schedule}"], mesh, slots=4 * pieces, pieces=pieces), *names
            )
            for pieces in (2, 4, 16)
        }
        for schedule in ("gpipe", "1f1b")
    }
    piece = 4 * 256 * 128 * 4  # bytes of the input of a layer, for a pipeline microbatch of 4 rows
    # Two layers in each of M + 1 ticks, and twice the M pieces themselves.
    assert sizes["gpipe"] == {pieces: (2 * (pieces + 1) + 2 * pieces) * piece for pieces in (2, 4, 16)}
    # One piece in two layers, the inputs of 3 ticks, and those on their way to the next and the previous stage.
    assert sizes["1f1b"] == dict.fromkeys((2, 4, 16), (2 + 3 + 2) * piece)
    # Stages share the tokens for the loss: those of a whole micro-batch, or of one piece at a time.
    logits = [held(estimate([*keys, f"pipeline_schedule={schedule}"], mesh, slots=8, pieces=2), "logits of a tile")
              for schedule in ("gpipe", "1f1b")]  # fmt: skip
    assert logits == [(4 + 4) * 8 * 256 * 320 // 2, (4 + 4) * 4 * 256 * 320 // 2]


def test_circular_stages_keep_their_weights_of_every_tick():
    """Four layers on two stages, one at a time: 2 x 4 + 1 ticks, each with a copy of a layer's matrices."""
    keys = ["remat_policy=full", "num_layers_per_pipeline_stage=1", "dtype=bfloat16"]
    round_twice = estimate(keys, {"stage": 2}, slots=16, pieces=4)
    assert held(round_twice, "weights of ticks") == 9 * 2 * MATRICES // 4
    assert held(round_twice, "kept of layers") == 9 * 4 * 256 * 128 * 2
    once = estimate([*keys[:1], "num_layers_per_pipeline_stage=2"], {"stage": 2}, pieces=4)
    assert held(once, "weights of ticks") == 0


def test_context_shards_keep_their_tokens_and_the_scores_of_a_tile():
    """8,192 tokens, 16 rows: the scores of one tile, four times, and with shards the arrays of the others."""
    keys = ["max_target_length=8192", "remat_policy=full"]
    one, ring = estimate(keys), estimate([*keys, "context_parallel_strategy=ring"], {"context": 4})
    gathered, split = estimate(keys, {"context": 4}), estimate(keys, {"fsdp": 4})
    assert held(ring, "logits of a tile") == held(one, "logits of a tile") // 4
    assert ring.params == split.params < one.params / 3.9  # parameters lie over context as over fsdp
    heads, keys_and_values = 8, 2 * 4 * 16
    tile = 4 * 4 * 16 * heads * 512**2
    of_one, of_ring, of_gathered = (held(memory, "attention of a layer") for memory in (one, ring, gathered))
    assert (of_one - tile) // 4 == of_ring - tile - 16 * 2 * 2048 * keys_and_values * (4 + 4)
    assert of_gathered - of_ring == 16 * (8192 - 2 * 2048) * keys_and_values * (4 + 4)
    for name in ("kept of layers", "stream of a layer", "heads of a layer", "mlp of a layer"):
        assert held(one, name) == 4 * held(ring, name) > 0, name


def test_muon_updates_with_whole_matrices():
    """Each before and after a step, and on four shards of fsdp a quarter in two layouts; with tensor 2 halves."""
    for mesh, elements in (({"fsdp": 4}, 2 * MATRICES + 2 * MATRICES // 4), ({"tensor": 2}, 2 * MATRICES // 2)):
        line = next(
            each for each in estimate(["optimizer=muon"], mesh).lines if each.name == "matrices made orthogonal"
        )
        assert (line.bytes, line.moments) == (4 * elements, ("update",))
    assert held(estimate(), "matrices made orthogonal") == 0
    shared = estimate(["optimizer=muon", "shard_optimizer_over_data=true"], {"data": 4})  # each has one of four layers
    assert held(shared, "matrices made orthogonal") == 4 * 2 * MATRICES // 4


def test_the_total_is_what_is_held_at_the_fullest_moment():
    """One layer of many tokens peaks in its backward pass, a large vocabulary at the loss."""
    layers, loss = estimate(limit=95), estimate(["vocab_size=32000", "remat_policy=full"])
    lasting = layers.params + layers.optimizer_state
    assert layers.total == lasting + layers.gradients + layers.most("weights") + layers.activations
    kept = held(loss, "kept of layers")
    assert loss.total == loss.params + loss.optimizer_state + 4 * MATRICES + kept + loss.logits
    tpu = estimate(["vocab_size=32000", "remat_policy=full"], accelerator=Accelerator("tpu"))
    assert tpu.at_peak("gradients") == 0, "there no stack is filled with zeros before the layers go back"
    assert (layers.peak, loss.peak) == ("attention", "loss")
    assert layers.limit == 95_000_000_000


def test_offloaded_tensors_leave_the_device():
    """D 128, N 8, K 4, H 16, F 384, 4 layers, 16 rows of 256 tokens, float32."""
    tokens, full = 16 * 256, estimate(["remat_policy=full"])
    heads = (8 + 4 + 4) * 16
    for policy, elements in (("qkv_proj_offloaded", heads), ("minimal_offloaded", heads + 128 + 2 * 384)):
        memory = estimate([f"remat_policy={policy}"])
        assert memory.activations == full.activations
        assert memory.offloaded == 4 * tokens * 4 * elements
    kept = estimate(["remat_policy=custom", "remat_save=query_proj, context", "remat_offload=decoder_layer_input"])
    assert kept.activations - full.activations == 4 * tokens * 4 * (2 * 8 * 16 + 8 - 128)
    assert kept.offloaded == 4 * tokens * 4 * 128
    assert full.offloaded == 0


def test_offloaded_optimizer_state_is_not_held_with_activations():
    here, there = estimate(), estimate(["optimizer_memory_host_offload=true"])
    assert there.offloaded == here.optimizer_state == there.optimizer_state
    others = here.total - here.optimizer_state
    assert there.total == max(others, here.params + here.gradients + here.optimizer_state)


def test_a_sharded_optimizer_state_is_divided_by_the_data_axis():
    four = {"data": 4}
    whole = estimate(mesh=four).optimizer_state
    assert estimate(["shard_optimizer_over_data=true"], four).optimizer_state == whole // 4
    narrow = estimate(["shard_optimizer_over_data=true", "weight_dtype=bfloat16"], four)
    assert narrow.optimizer_state == (whole + whole // 2) // 4  # two moments and a master copy, each float32


def test_scores_are_counted_only_for_kernels_that_have_them():
    """gemma2-9b caps its scores, as tokamax's kernel can: elsewhere 4 float32 copies of a strip of 16 heads."""
    keys = ["model_name=gemma2-9b", "dtype=bfloat16", "tokenizer_type=huggingface", "tokenizer_path=x"]
    hopper, ampere = Accelerator("gpu", "9.0", "0.0.17"), Accelerator("gpu", "8.0", "0.0.17")

    def activations(*overrides, accelerator=ampere):
        config = load_config(None, [*keys, *overrides])
        return held(estimate_memory(config, ONE_DEVICE, 1, 1, 1, None, accelerator=accelerator), "attention of a layer")

    flash = activations(accelerator=hopper)
    assert activations() - flash == 4 * 4 * 16 * 128 * 256
    assert activations(accelerator=Accelerator("cpu")) == activations()
    assert activations(accelerator=Accelerator("tpu")) == flash  # splash attention knows caps
    assert activations("attention=dot_product", accelerator=hopper) == activations()


def test_the_arrays_of_kernels_are_counted():
    """Of 8 query heads of 16 dims and 256 tokens: jax's kernel has keys and values for each, cuDNN's a mask."""
    gpu = Accelerator("gpu", "8.0")

    def activations(*overrides):
        config = load_config(None, ["dtype=bfloat16", *overrides])
        return held(estimate_memory(config, ONE_DEVICE, 1, 1, 1, None, accelerator=gpu), "attention of a layer")

    fused = activations("packing=false")
    assert activations() - fused == 2 * 4 * 8 * 16 * 256
    assert activations("attention=cudnn_masked") - fused == (1 + 2) * 256**2


def test_narrow_weights_have_masters_wherever_their_state_is():
    narrow = ["weight_dtype=bfloat16", "optimizer=sgd"]
    for more, mesh, copies in (([], {}, 1), ([], {"data": 4}, 1), (["shard_optimizer_over_data=true"], {"data": 4}, 4)):
        memory = estimate([*narrow, *more], mesh)
        assert (memory.params, memory.optimizer_state) == (2 * ALL, 4 * ALL // copies)
        without = estimate([*narrow, *more, "master_weights=false"], mesh)
        assert (without.params, without.optimizer_state) == (2 * ALL, 0)
    local = estimate_memory(load_config(None, narrow), ONE_DEVICE | {"data": 2}, 16, 1, 1, None, 4)
    assert local.params == (2 + 1) * 2 * ALL
    assert local.optimizer_state == (2 + 1) * 4 * ALL + 4 * ALL  # masters, those of all, the outer momentum
    there = estimate([*narrow, "optimizer_memory_host_offload=true"])
    assert there.offloaded == 4 * ALL
