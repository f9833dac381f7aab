"""Predicted times follow from shapes, worked out by hand for round rates: 1 FLOP/s, 1 byte/s of memory and of links."""

import dataclasses

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.batching import Topology, flops_per_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.solve import resolve
from maxtext_lite.batching.step_time import StepModel

DEVICE = Device(
    "toy", "gpu", ("toy",), {"bfloat16": 1.0, "int8": 2.0}, 10**12, memory_bytes_per_second=1.0,
    link_bytes_per_second=1.0, clock_hz=None, source="made up", most_linked=64, host_bytes_per_second=0.5,
)  # fmt: skip
D, F, N, K, H, L, V, T = 64, 192, 4, 2, 16, 4, 512, 128
MODEL = [f"base_emb_dim={D}", f"base_mlp_dim={F}", f"base_num_query_heads={N}", f"base_num_kv_heads={K}",
         f"head_dim={H}", f"base_num_decoder_layers={L}", f"vocab_size={V}", f"max_target_length={T}",
         "dtype=bfloat16", "grad_dtype=bfloat16", "per_device_batch_size=2", "remat_policy=none"]  # fmt: skip
QKVO = D * N * H + 2 * D * K * H + N * H * D
LAYER = QKVO + 3 * D * F
ROWS = 2
SCORES = N * 2 * H * T**2 / 2  # products of scores and of values, of the keys that come no later


def step(*keys, devices=1, device=DEVICE):
    config = load_config(None, [*MODEL, *keys])
    plan = make_plan(config, num_devices=devices)
    sizes, _ = resolve(config, Topology(devices))
    model = StepModel(config, sizes.mesh, device, plan.memory)
    return model.step(config, plan.micro_batch_slots, plan.global_batch_to_train, plan.pipeline_shape)


def test_matmuls_are_the_models_and_the_scores_once_more():
    time, examples = step(), flops_per_example(load_config(None, MODEL), T)
    # Of attention's seven matmuls, model FLOPs count six.
    assert time.matmul_seconds == pytest.approx(ROWS * (examples + 2 * L * SCORES / 2))
    assert time.attention_seconds == pytest.approx(ROWS * L * 2 * 3.5 * SCORES)
    assert time.mfu == pytest.approx(ROWS * examples / time.seconds)


def test_frozen_weights_have_no_gradients_and_adapters_do():
    """The head and the layers' matrices in two passes instead of three; an adapter is in, rank and out."""
    lora = ("lora_rank=8", "lora_targets=query,down")
    plain, adapted = step(), step(*lora)
    frozen, adapters = L * LAYER + D * V, L * 8 * ((D + N * H) + (F + D))
    assert plain.matmul_seconds - adapted.matmul_seconds == pytest.approx(2 * ROWS * T * (frozen - 3 * adapters))
    examples = flops_per_example(load_config(None, [*MODEL, *lora]), T)
    assert adapted.matmul_seconds == pytest.approx(ROWS * (examples + 2 * L * SCORES / 2))


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_frozen_weights_have_no_bytes_of_gradients(platform, shards):
    """64 more columns of gate and up, which are made again, and rows of down, which is not."""
    device = dataclasses.replace(DEVICE, platform=platform)
    keys = ("lora_rank=1", "lora_targets=query", "remat_policy=full", f"ici_fsdp_parallelism={shards}")

    def memory(mlp):
        held = make_plan(load_config(None, [*MODEL, *keys, f"base_mlp_dim={mlp}"]), num_devices=shards).memory.params
        return step(*keys, f"base_mlp_dim={mlp}", devices=shards, device=device).memory_seconds - 2 * held

    weights = L * D * 64 * 2 * (3 + 3 + 2 + (2 * 3 if shards > 1 else 0))  # read in each pass, gathered in two
    tokens = ROWS * T * L * 64 * 2 * (3 + 3 + 2 + 4 * 3)  # read or written, and in four passes of the activation
    assert memory(F + 64) - memory(F) == pytest.approx(weights + tokens)


def test_muon_makes_matrices_orthogonal_once_a_step():
    """Five steps of 2 m^2 n + m^3 products; with fsdp on m = D of mlp, query and out, and on n = D of key and value."""
    heads = "base_num_query_heads=8"
    shapes = [(D, 8 * H)] * 2 + [(K * H, D)] * 2 + [(D, F)] * 3
    for steps in (1, 2):
        times = [step(heads, f"optimizer={name}", f"gradient_accumulation_steps={steps}") for name in ("sgd", "muon")]
        more = times[1].matmul_seconds - times[0].matmul_seconds
        assert more == pytest.approx(2 * 5 * L * sum(2 * m * m * n + m**3 for m, n in shapes))
    plain, muon = (step(heads, f"optimizer={name}", "ici_fsdp_parallelism=4", devices=4) for name in ("sgd", "muon"))
    gathered = 5 * L * 4 * sum(2 * m * n + m * m for m, n in shapes if m == D)  # X twice and X X^T, in float32
    reduced = 5 * L * 2 * 4 * sum(m * m for m, _ in shapes if m != D)
    sent = muon.collectives_seconds - plain.collectives_seconds
    assert sent == pytest.approx((gathered + reduced) * 3 / 4)
    more = muon.matmul_seconds - plain.matmul_seconds
    products = [2 * m * m * n / 4 + m**3 / (4 if m == D else 1) for m, n in shapes]
    assert more == pytest.approx(2 * 5 * L * sum(products))


@pytest.mark.parametrize(("policy", "again"), [
    ("full", QKVO * T + 2 * D * F * T + SCORES),
    ("minimal", SCORES),
    ("save_qkv_proj", N * H * D * T + 2 * D * F * T + SCORES),
    ("save_dot_products", 0),
])  # fmt: skip
def test_what_is_not_kept_is_multiplied_again(policy, again):
    more = step(f"remat_policy={policy}").matmul_seconds - step().matmul_seconds
    assert more == pytest.approx(2 * ROWS * L * again)


def test_weights_are_gathered_twice_and_their_gradients_summed_in_every_micro_batch():
    matrices = L * LAYER + D * V
    for steps in (1, 3):
        time = step("ici_fsdp_parallelism=4", f"gradient_accumulation_steps={steps}", devices=4)
        assert time.collectives_seconds == pytest.approx(steps * 3 * 2 * matrices * 3 / 4)


def test_replicas_reduce_their_gradients_once_a_step():
    total = L * (LAYER + 2 * D) + 2 * D * V + D
    for steps in (1, 3):
        keys = ("ici_fsdp_parallelism=1", "ici_data_parallelism=4", f"gradient_accumulation_steps={steps}")
        assert step(*keys, devices=4).collectives_seconds == pytest.approx(2 * 2 * total * 3 / 4)


def test_tokens_cross_tensor_and_keys_cross_context():
    tokens = 2 * 2 * T  # of the rows of two devices
    time = step("ici_fsdp_parallelism=1", "ici_tensor_parallelism=2", devices=2)
    assert time.collectives_seconds == pytest.approx(L * 11 * tokens * D * 2 / 2)
    time = step("ici_fsdp_parallelism=1", "ici_context_parallelism=2", devices=2)
    keys, weights = 2 * tokens * K * H * (2 * 2 + 4) / 2, 3 * 2 * (L * LAYER + D * V) / 2
    assert time.collectives_seconds == pytest.approx(L * keys + weights)


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "context", "pipeline"])
def test_an_axis_beyond_the_links_known_is_refused_before_any_time_is_asked_for(axis):
    alone = dataclasses.replace(DEVICE, link_bytes_per_second=None, most_linked=1)
    keys = ["per_device_batch_size=1", "ici_fsdp_parallelism=1", f"ici_{axis}_parallelism=2"]
    config = load_config(None, [*MODEL, *keys])
    sizes, _ = resolve(config, Topology(2))
    with pytest.raises(ValueError, match="what it sends to others on a machine of so many is not known"):
        StepModel(config, sizes.mesh, alone, make_plan(config, num_devices=2).memory)


def test_rows_cross_the_expert_axis_there_and_back():
    keys = ("num_experts=4", "num_experts_per_tok=2", "ici_fsdp_parallelism=1", "ici_expert_parallelism=2")
    time = step(*keys, devices=2)
    rows, rest = 2 * T * 2 * D * 2, 3 * 2 * (L * (QKVO + D * 4) + D * V)
    assert time.collectives_seconds == pytest.approx((4 * L * rows + rest) / 2)


def test_stages_wait_for_each_other():
    keys = ("ici_fsdp_parallelism=1", "ici_pipeline_parallelism=2", "num_layers_per_pipeline_stage=2")
    few, many = (step(*keys, f"num_pipeline_microbatches={pieces}", devices=2) for pieces in (2, 4))
    # (S - 1) / (M + S - 1) of the ticks, beside those that work
    assert few.bubble_seconds > many.bubble_seconds > 0
    busy = few.seconds - few.bubble_seconds
    update = step(*keys, "gradient_accumulation_steps=2", devices=2)
    passes = update.seconds - update.bubble_seconds - busy  # one more
    assert few.bubble_seconds == pytest.approx(passes / 2, rel=0.05)


def test_stages_share_rows_for_the_loss_and_pass_on_pieces():
    """Matmuls hide no exchange between stages. Each sends every piece forward and back in each round, one of five ticks
    in vain, shares out and gathers the rows five times, and all-reduces the head's gradient of its rows."""
    device = dataclasses.replace(DEVICE, memory_bytes_per_second=1e30)
    for per_stage, rounds in ((2, 1), (1, 2)):
        keys = (f"num_layers_per_pipeline_stage={per_stage}", "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1")
        time = step(*keys, "num_pipeline_microbatches=2", devices=2, device=device)
        rows = 2 * ROWS * T * D * 2  # of both devices
        ticks = (2 * rounds + 1) / (2 * rounds)
        sent = ticks * (2 * rounds * rows + 5 * rows / 2 + 2 * 2 * D * V / 2)
        assert time.collectives_seconds == pytest.approx(sent)
        assert time.seconds == pytest.approx(time.matmul_seconds + sent)


def test_a_tpu_gathers_keys_beside_matmuls_and_reduces_their_gradients_in_the_activations_dtype():
    for platform, waits in (("gpu", 2 * 2 + 4), ("tpu", 2)):  # bytes per element: a gather in both passes, a reduction
        device = dataclasses.replace(DEVICE, platform=platform, memory_bytes_per_second=1e30)
        time = step("ici_context_parallelism=4", devices=4, device=device)
        gathered = 4 * ROWS * T * L * K * 2 * H  # keys and values of all four shards
        head = 3 * 2 * D * V  # gathered in both passes, and its gradient
        assert time.seconds - time.matmul_seconds == pytest.approx((waits * gathered + head) * 3 / 4)


def test_with_several_rounds_a_stage_copies_the_weights_of_each_tick():
    keys = "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1", "num_pipeline_microbatches=4", "remat_policy=full"
    one, two = (step(*keys, f"num_layers_per_pipeline_stage={layers}", devices=2) for layers in (2, 1))
    idle = {1: 5 / 4, 2: 9 / 8}  # of four pieces in each round, one tick more in all
    held = make_plan(load_config(None, [*MODEL, *keys, "num_layers_per_pipeline_stage=2"]), num_devices=2).memory
    update = 2 * (held.params + held.optimizer_state) + 8 * count_parameters(load_config(None, MODEL), stage=2).total
    copies = 4 * 10 * 2 * L / 2 * LAYER
    assert (two.memory_seconds - update) / idle[2] - (one.memory_seconds - update) / idle[1] == pytest.approx(copies)


def test_what_is_offloaded_goes_to_the_host_in_every_micro_batch_and_the_optimizer_once():
    time = step("remat_policy=qkv_proj_offloaded", "gradient_accumulation_steps=3")
    assert time.host_seconds == pytest.approx(3 * ROWS * T * L * (N + 2 * K) * H * 2 / 0.5)
    state = 2 * 4 * (L * (LAYER + 2 * D) + 2 * D * V + D)
    assert step("optimizer_memory_host_offload=true").host_seconds == pytest.approx(state / 0.5)


def test_eight_bits_take_half_the_time_outside_of_attention_and_head():
    plain, narrow = step(), step("quantization=int8")
    assert plain.matmul_seconds - narrow.matmul_seconds == pytest.approx(ROWS * T * L * 6 * LAYER / 2)


def test_an_operation_takes_the_longer_of_its_matmul_and_its_memory():
    fast = dataclasses.replace(DEVICE, peak_flops={"bfloat16": 1e30})
    time = step(device=fast)
    assert time.seconds == pytest.approx(time.memory_seconds)
    slow = dataclasses.replace(DEVICE, memory_bytes_per_second=1e30)
    assert step(device=slow).seconds == pytest.approx(time_of := step(device=slow).matmul_seconds)
    assert time_of < step().seconds


@pytest.mark.parametrize("shards", [2, 4])
def test_a_tpu_computes_gradients_for_more_than_two_shards_one_by_one(shards):
    """One byte a second: seconds are bytes. Each shard reads the side that is not split once more."""

    def memory(platform):
        device = dataclasses.replace(DEVICE, platform=platform)
        keys = f"ici_fsdp_parallelism={shards}", "remat_policy=full"
        return step(*keys, devices=shards, device=device).memory_seconds

    tokens = ROWS * T
    beside = tokens * L * (N * H + 2 * K * H + N * H + 3 * F) * 2 * (shards - 1) if shards > 2 else 0
    # Sums in float32 are read, added to, sent and received; all of a gradient would be written in float32 and read.
    gradients = (4 * 2 - (4 + 2)) * L * LAYER if shards > 2 else 0
    logits = tokens * V * 4  # read once less in float32, as one of a TPU's matmuls writes their gradient
    assert memory("tpu") - memory("gpu") == pytest.approx(beside + gradients - logits)


def test_a_tpu_waits_for_gradients_of_two_shards_and_any_device_for_the_head():
    """Where matmuls take longer than links: what waits comes on top. Two shards all-reduce all of each gradient."""
    device = dataclasses.replace(DEVICE, platform="tpu", memory_bytes_per_second=1e30)
    for shards, gradients in ((2, 2 * 2 * L * LAYER / 2), (4, 0)):
        time = step(f"ici_fsdp_parallelism={shards}", devices=shards, device=device)
        head = 3 * 2 * D * V * (shards - 1) / shards
        assert time.seconds - time.matmul_seconds == pytest.approx(head + gradients)


def test_a_gpu_merges_the_attention_of_each_other_context_shard():
    """With each other shard, a forward pass moves 15 bytes per element of queries and 14 of keys and values, the
    backward pass 2.2 times as much; a recomputed forward pass as much again."""

    def more(platform, policy, shards):
        device = dataclasses.replace(DEVICE, platform=platform)
        keys = (f"ici_context_parallelism={shards}", f"ici_fsdp_parallelism={8 // shards}")
        return step(*keys, f"remat_policy={policy}", devices=8, device=device).memory_seconds

    for policy, passes in (("none", 3.2), ("full", 4.2)):
        of_gpu, of_tpu = (more(platform, policy, 4) - more(platform, policy, 2) for platform in ("gpu", "tpu"))
        tokens = ROWS * T  # of a device, whatever splits them
        merged = passes * L * H * (15 * N + 14 * 2 * K) * tokens
        assert of_gpu - of_tpu == pytest.approx(merged * (3 - 1))


def test_of_an_array_that_fits_on_the_chip_its_share_of_that_size_is_moved():
    def memory(on_chip):
        return step(device=dataclasses.replace(DEVICE, on_chip_bytes=on_chip)).memory_seconds

    assert memory(1) == memory(0)
    large = ROWS * T * V * 2  # no array is larger: what is moved of them halves with each doubling
    first, second, third = (memory(large * times) for times in (1, 2, 4))
    assert first < memory(0)
    assert first - second == pytest.approx(2 * (second - third))


def test_each_micro_batch_casts_the_head_where_weights_are_wider():
    def besides_the_update(dtype):
        key = f"weight_dtype={dtype}"
        held = make_plan(load_config(None, [*MODEL, key]), num_devices=1).memory
        return step(key).memory_seconds - 2 * (held.params + held.optimizer_state)

    assert besides_the_update("float32") - besides_the_update("bfloat16") == pytest.approx(D * V * (4 + 2))


def test_reads_of_logits_without_a_matmul_take_time_of_their_own():
    """Where matmuls take far longer than memory traffic. A TPU's last matmul reads logits and writes gradients."""
    slow = dataclasses.replace(DEVICE, peak_flops={"bfloat16": 1e-3})
    gpu, tpu = (
        step("remat_policy=full", device=dataclasses.replace(slow, platform=platform)) for platform in ("gpu", "tpu")
    )
    assert gpu.seconds - tpu.seconds == pytest.approx(ROWS * T * V * (3 * 4 + 2 - 4), rel=1e-3)


def test_every_tile_of_the_loss_reads_the_head_and_adds_to_its_gradient():
    one, four = (step(f"num_vocab_tiling={tiles}").memory_seconds for tiles in (1, 4))
    assert four - one == pytest.approx(3 * D * V * (2 * 2 + 8))  # read forward and for the inputs' gradient


SHAPES = [(D, N * H), (D, K * H), (D, K * H), (N * H, D), (D, F), (D, F), (F, D)]
"""Inputs and outputs of a layer's matrices."""


def test_heads_with_a_norm_of_their_own_are_read_once_more_and_on_a_tpu_pass_in_float32():
    def memory(platform, *keys):
        return step(*keys, device=dataclasses.replace(DEVICE, platform=platform)).memory_seconds

    heads = ROWS * T * L * (N + K) * H * 2
    for platform, times in (("gpu", 1), ("tpu", 4)):
        more = memory(platform, "qk_norm=head") - memory(platform)
        passes, kept, weights = 3 * times * heads, 3 * heads, 2 * L * H * 40  # at most; the norms are small
        assert passes + kept <= more <= passes + kept + weights


def test_what_is_kept_is_copied_to_where_it_waits_on_the_device_or_the_host():
    keeps, nothing = (step(f"remat_policy={policy}").memory_seconds for policy in ("save_qkv_proj", "full"))
    made_again = 2 * ROWS * T * L * (3 * D + (N + 2 * K) * H) + 2 * L * D * (N + 2 * K) * H  # read and written
    kept = ROWS * T * L * (N + 2 * K) * H * 2
    assert keeps - nothing == pytest.approx(3 * kept - made_again)
    assert step("remat_policy=qkv_proj_offloaded").memory_seconds == pytest.approx(keeps)


def test_an_unknown_rate_is_refused_where_it_is_needed():
    alone = dataclasses.replace(DEVICE, most_linked=1)
    assert step(device=alone).collectives_seconds == 0
    with pytest.raises(ValueError, match="what it sends"):
        step(devices=4, device=alone)
    with pytest.raises(ValueError, match="its peak in bfloat16"):
        step(device=dataclasses.replace(DEVICE, peak_flops={}))
    cut_off = dataclasses.replace(DEVICE, host_bytes_per_second=None)
    assert step("remat_policy=full", device=cut_off).host_seconds == 0
    for key in ("remat_policy=minimal_offloaded", "optimizer_memory_host_offload=true"):
        with pytest.raises(ValueError, match="what it sends to its host"):
            step(key, device=cut_off)
