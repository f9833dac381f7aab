"""The train step in bfloat16 lowers for NVIDIA GPUs: each family and kind of mesh, by a fused kernel where one can.

No GPU is asked (tests/gpu.py answers for one): StableHLO says which kernels are called, how large arrays are, and that
no sum is in the order in which a GPU's threads arrive.
"""

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.config.kernels import TOKAMAX_VERSIONS, Accelerator
from maxtext_lite.kernels.mosaic import mosaic_attention
from maxtext_lite.models import Scoring
from tests.gpu import absent_gpu, kernels, squares, step_for_gpu, unordered_sums
from tests.meshes import mesh_of

T = 384
"""Tokens of a row: more than any other dim here, so that no square is anything but one of tokens."""
SMALL = (
    f"max_target_length={T}",
    "base_emb_dim=64",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "head_dim=16",
    "base_mlp_dim=96",
    "base_num_decoder_layers=2",
    "vocab_size=300",
    "dtype=bfloat16",
    "remat_policy=full",
    "dataset_path=README.md",
    "tokenizer_type=byte",
)
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=32")
WINDOW = "sliding_window_size=64"
LATENT = (
    "mla={q_lora_rank: 0, kv_lora_rank: 24, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16}",
    "head_dim=24",
    "base_num_kv_heads=8",
    "first_num_dense_layers=0",
    "shared_experts=1",
    *EXPERTS,
)
MHA = {"mha_forward", "mha_preprocess_backward", "mha_backward"}
CUDNN = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
A100, H100 = Accelerator("gpu", "8.0"), Accelerator("gpu", "9.0", TOKAMAX_VERSIONS[0])


def mesh(**axes):
    """Keys of a mesh whose other axes are 1."""
    return tuple(
        f"ici_{axis}_parallelism={size}" for axis, size in ({"fsdp": 1} | axes).items()
    )


def accumulating(steps):
    return (f"gradient_accumulation_steps={steps}",)


CASES = {
    "qwen3, data x fsdp x tensor": (
        8,
        ("model_name=qwen3-8b", *mesh(data=2, fsdp=2, tensor=2), *accumulating(4)),
        MHA,
    ),
    "olmo2, 1f1b": (
        8,
        (
            "model_name=olmo2-7b",
            *mesh(pipeline=2, data=2, tensor=2),
            "base_num_kv_heads=8",
            "num_pipeline_microbatches=2",
            "pipeline_schedule=1f1b",
        ),
        MHA,
    ),
    "llama, context shards": (
        8,
        ("model_name=llama3-8b", *mesh(context=2, fsdp=4)),
        set(),
    ),
    "gpt-oss": (
        8,
        (
            "model_name=gpt-oss-20b",
            WINDOW,
            "layer_pattern=local",
            *EXPERTS,
            *mesh(data=2, fsdp=2, tensor=2),
        ),
        set(),
    ),
    "deepseek": (
        8,
        (
            "model_name=deepseek-v2-lite",
            *LATENT,
            *mesh(data=2, fsdp=4),
            *accumulating(4),
        ),
        set(),
    ),
    "mistral, a document a row": (
        8,
        (
            "model_name=mistral-7b-v0.1",
            WINDOW,
            "packing=false",
            *mesh(data=2, fsdp=2, tensor=2),
            *accumulating(4),
        ),
        CUDNN,
    ),
}


def lower(monkeypatch, overrides, num_devices, accelerator):
    """StableHLO of the small model with the keys of a case."""
    return step_for_gpu(
        monkeypatch,
        [*SMALL, *overrides],
        num_devices=num_devices,
        accelerator=accelerator,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_step_lowers_by_the_kernel_that_can_run_on_ampere_and_makes_no_square_of_tokens(
    name, monkeypatch
):
    num_devices, overrides, expected = CASES[name]
    text = lower(monkeypatch, overrides, num_devices, A100)
    assert {
        kernel
        for kernel in kernels(text)
        if kernel.startswith(("mha", "__cudnn", "mosaic"))
    } == expected
    assert squares(text, T) == {}
    assert unordered_sums(text) == []


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # tokamax 0.0.12 calls Pallas as it was
@pytest.mark.parametrize(
    ("name", "keys", "calls"),
    [
        ("gpt-oss", (), 3),
        (
            "llama, context shards",
            ("context_parallel_strategy=ring", *mesh(context=2, data=2, tensor=2)),
            6,
        ),
        ("llama, context shards", mesh(context=2, fsdp=4), 6),  # keys gathered
    ],
    ids=["windows and sinks", "ring", "all_gather"],
)
def test_a_step_lowers_by_tokamax_on_hopper_on_context_shards_too(
    name, keys, calls, monkeypatch
):
    pytest.importorskip("tokamax", reason="tokamax is not installed")
    num_devices, overrides, _ = CASES[name]
    # What the forward kernel finds is kept: a third of the calls are forward.
    kept = (*accumulating(4), "remat_policy=custom", "remat_save=context")
    text = lower(monkeypatch, (*overrides, *kept, *keys), num_devices, H100)
    assert (
        sum(n for kernel, n in kernels(text).items() if kernel.startswith("mosaic_gpu"))
        == calls
    )
    assert squares(text, T) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_soft_caps_and_values_of_another_width_lower_by_tokamax_for_an_odd_length(
    monkeypatch,
):
    pytest.importorskip("tokamax", reason="tokamax is not installed")
    q, k, v = (
        jax.ShapeDtypeStruct((2, T + 1, *heads), jnp.bfloat16)
        for heads in ((8, 24), (4, 24), (4, 16))
    )
    segment = jax.ShapeDtypeStruct((2, T + 1), jnp.int32)
    scoring = Scoring(soft_cap=50.0, window=100)

    def total(*x):
        return jnp.sum(mosaic_attention(*x, scoring=scoring).astype(jnp.float32))

    with absent_gpu(monkeypatch, mesh_of()):
        traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, k, v, segment)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (
        sum(n for kernel, n in kernels(text).items() if kernel.startswith("mosaic_gpu"))
        == 3
    )
    assert squares(text, T) == {}


def test_a_dense_mask_is_found_where_it_is_asked_for(monkeypatch):
    """What the checker is for: cuDNN with a mask lowers too, and its mask is a square of tokens."""
    text = lower(
        monkeypatch,
        ("attention=cudnn_masked", *mesh(data=2, fsdp=2, tensor=2)),
        8,
        A100,
    )
    assert {
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    } <= kernels(text).keys()
    assert any(dims.endswith(f"{T}x{T}x") for dims in squares(text, T))
