import pytest

from maxtext_lite.batching.activations import LayerOnDevice, activation_lines, offloaded_activations, splits_residual
from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import Accelerator

ONE = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
TPU = Accelerator("tpu")


def held(overrides, mesh=(), slots=16, pieces=1, accelerator=TPU):
    config = load_config(None, [*overrides, "dtype=bfloat16"])
    lines = activation_lines(config, ONE | dict(mesh), slots, pieces, config.pipeline_schedule, accelerator)
    return {line.name: line.bytes for line in lines}


def test_an_mlps_backward_pass_takes_six_arrays_of_its_width():
    """4,096 tokens; F 384, D 128, N 8, K 4, H 16: heads of a TPU's kernel are 128 wide."""
    found = held([])
    assert found["mlp of a layer"] == 6 * 4096 * 384 * 2
    assert held(["gated_mlp=false"])["mlp of a layer"] == 4 * 4096 * 384 * 2
    assert found["stream of a layer"] == 6 * 4096 * 128 * 2
    assert found["heads of a layer"] == 4096 * (4 * 8 + 3 * 4) * 128 * 2
    assert held([], accelerator=Accelerator("cpu"))["heads of a layer"] == 4096 * (4 * 8 + 3 * 4) * 16 * 2


@pytest.mark.parametrize(("more", "products"), [((), 3), (("expert_bias=true",), 5)])
def test_the_backward_pass_of_experts_takes_their_rows(more, products):
    """Two of 8 experts, 48 wide, for each of 4,096 tokens, and the router's input in float32."""
    keys = ["num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=48", *more]
    of_rows = 2 * 4096 * (2 * 128 * 2 + (4 * products + 3 * 2) * 48)
    assert held(keys)["mlp of a layer"] == of_rows + 4 * 4096 * 128
    for remat, of_stream in (("none", 2), ("minimal", 2), ("save_qkv_proj", 3), ("full", 3)):  # full goes forward again
        on_cpu = held([*keys, f"remat_policy={remat}"], accelerator=Accelerator("cpu"))["mlp of a layer"]
        each_expert = 8 * 2 * 4096 * (of_stream * 128 + 3 * 48) * 4
        assert on_cpu - held(keys)["mlp of a layer"] == each_expert, "all rows for each expert"
    # On four devices a round has room for 5/4 of the choices, sent while as many are received.
    sent = 2 * 2 * 4096 * 2 * 128 * 5 // 4
    assert held(keys, {"expert": 4}, slots=64)["mlp of a layer"] == of_rows * 5 // 4 + sent + 4 * 4096 * 128
    # With a capacity of 4/3, an expert has 86 slots of each 256 tokens, and its matmuls give `dtype` as an mlp's do.
    slots = 16 * 8 * 86
    with_capacity = held([*keys, "capacity_factor=1.3333"])["mlp of a layer"]
    assert with_capacity == slots * (2 * 128 * 2 + 6 * 2 * 48) + 4 * 4096 * 128
    on_gpu = held([*keys, "capacity_factor=1.3333"], accelerator=Accelerator("gpu"))["mlp of a layer"]
    assert on_gpu - with_capacity == slots * (5 * 4 + 2 * 2 - 6 * 2) * 48, "five of these seven in float32"
    # Two of the three weights of all 8 are whole where fsdp splits them; a GPU's gradients of a round of the pattern.
    assert held(keys, {"fsdp": 2}, slots=32)["experts' weights, gathered"] == 2 * 8 * 128 * 48 * 2
    keys, gpu = [*keys, "layer_pattern=local,global", "sliding_window_size=64"], Accelerator("gpu")
    assert held(keys, {"fsdp": 2}, 32, accelerator=gpu)["experts' gradients, whole"] == 2 * 3 * 8 * 128 * 48 * 4


def test_rotations_are_kept_of_every_tick_of_the_pipeline():
    """Two stages, 4 pieces of 4 x 256 tokens: 5 ticks, each with cosines and sines of 8 planes in float32."""
    keys, stages = ["num_layers_per_pipeline_stage=2", "remat_policy=full"], {"stage": 2}
    found = held(keys, stages, pieces=4, accelerator=Accelerator("cpu"))
    assert found["rotations of ticks"] == 2 * 5 * 1024 * 8 * 4
    assert held(keys, stages, pieces=4)["rotations of ticks"] == 2 * 5 * 1024 * 128 * 4, "a TPU's tiles are 128 wide"


@pytest.mark.parametrize(("at_once", "layer_ticks"), [(2, 2 * 5), (1, 1 * 9)])
def test_activations_are_offloaded_in_every_tick(at_once, layer_ticks):
    """Two of four layers on a stage, 4 pieces of 4 x 256 tokens: they go through both at once, or round twice."""
    keys = ["remat_policy=qkv_proj_offloaded", f"num_layers_per_pipeline_stage={at_once}"]
    found = offloaded_activations(load_config(None, keys), ONE | {"stage": 2}, 16, 4)
    assert found == layer_ticks * 1024 * (8 + 4 + 4) * 16 * 4


@pytest.mark.parametrize(("placement", "width"), [("pre", 0), ("post", 128), ("both", 128)])
def test_an_mlps_output_is_kept_where_a_norm_asks_for_it(placement, width):
    config = load_config(None, [f"norm_placement={placement}"])
    assert LayerOnDevice(config, ONE, 4096).named_bytes()["mlpwo"] == 4 * width


def test_latent_attention_projects_a_part_of_its_keys():
    """deepseek-v2-lite: 16 heads of 128 + 64 dims, the 64 the same for all."""
    keys = ["model_name=deepseek-v2-lite", "tokenizer_type=byte", "vocab_size=320"]
    config = load_config(None, keys)
    assert LayerOnDevice(config, ONE, 4096).named_bytes()["key_proj"] == 2 * 16 * 128


def test_cudnns_context_is_kept_only_if_everything_is():
    """4,096 tokens in 4 layers, N 8, K 4, H 16; the log-partitions of other kernels go with the context."""
    gpu = Accelerator("gpu", "9.0")
    full, saved = (["packing=false", "remat_policy=custom", f"remat_save={name}"] for name in ("query_proj", "context"))
    kept = [
        held(keys, accelerator=each)["kept of layers"] // (4 * 4096) for keys in (full, saved) for each in (gpu, TPU)
    ]
    assert kept == [2 * (128 + 128), 2 * (128 + 8 * 128), 2 * 128, 2 * (128 + 8 * 128) + 4 * 8]


def test_a_tpus_kernel_keeps_heads_in_whole_tiles_and_its_context_twice():
    """N 8, K 4, H 16 as 128, D 128, F 384, bfloat16: four of the stream, what the kernel takes and gives, the mlp."""
    beside = 2 * (4 * 128 + 3 * 384) + 4 * 8
    kept = [held(["remat_policy=none"], accelerator=each)["kept of layers"] for each in (TPU, Accelerator("cpu"))]
    assert kept == [4 * 4096 * (beside + 2 * heads) for heads in (24 * 128 + 8 * 16, 24 * 16)]


@pytest.mark.parametrize(("strategy", "kept"), [("all_gather", 4), ("ring", 1)])
def test_a_tpus_kernel_keeps_the_gathered_keys_of_all_context_shards(strategy, kept):
    """K 4, H 16 as 128: keys and values of four shards instead of one, for each of 4,096 tokens and 4 layers."""
    keys = ["remat_policy=none", f"context_parallel_strategy={strategy}", "max_target_length=2048"]
    one, four = held(keys, slots=2), held(keys, {"context": 4}, slots=8)
    assert four["kept of layers"] - one["kept of layers"] == 4 * 4096 * 2 * (kept - 1) * 2 * 4 * 128


@pytest.mark.parametrize(
    ("keys", "elements"),
    [
        (["parallel_block=one_norm"], 2 * 128),
        (["parallel_block=two_norms"], 3 * 128),
        (["norm_placement=both"], 6 * 128),
        (["qk_norm=head"], 4 * 128 + (8 + 4) * 16),
    ],
)
def test_inputs_of_norms_are_kept_if_everything_is(keys, elements):
    """Beside queries, keys, values, context and three of an mlp; N 8, K 4, H 16, D 128, F 384."""
    kept = held(["remat_policy=none", *keys], accelerator=Accelerator("cpu"))["kept of layers"]
    assert kept == 4 * 4096 * (2 * (elements + 24 * 16 + 3 * 384) + 4 * 8)


def test_the_input_of_a_shared_experts_gate_is_kept():
    keys = ["num_experts=4", "num_experts_per_tok=2", "shared_experts=1", "remat_policy=minimal"]
    plain, gated = (held([*keys, f"shared_expert_gate={gate}"])["kept of layers"] for gate in ("false", "true"))
    assert gated - plain == 4 * 4096 * 128 * 2


def test_a_row_is_split_over_tensor_where_its_tokens_can_be():
    config, mesh = load_config(None, ["max_target_length=256"]), ONE
    assert splits_residual(config, mesh | {"tensor": 4, "context": 2})
    assert not splits_residual(config, mesh | {"tensor": 3})
