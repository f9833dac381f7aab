"""The kernels of attention and of experts' matmuls on each kind of device: the best one that does what is needed."""

import importlib.util
from pathlib import Path

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import (
    KERNELS,
    TOKAMAX_VERSIONS,
    Accelerator,
    KernelChoice,
    Needs,
    attention_kernel,
    exchanged_rows,
    grouped_matmul_kernel,
    installed_tokamax,
    lacking,
    planned_kernel,
)

BFLOAT16, CAPPED, SINKS = "dtype=bfloat16", "attn_logits_soft_cap=50", "attention_sinks=true"
LATENT = ("mla={q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}",
          "base_num_kv_heads=8")
WINDOW = ("layer_pattern=local,global", "sliding_window_size=8")
CPU, TPU = Accelerator("cpu"), Accelerator("tpu")
H100, B200 = (Accelerator("gpu", capability, TOKAMAX_VERSIONS[-1]) for capability in ("9.0", "10.0"))
A100 = Accelerator("gpu", "8.0", TOKAMAX_VERSIONS[0])
BARE = Accelerator("gpu", "9.0")  # without tokamax
MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))


@pytest.mark.fast
@pytest.mark.parametrize(("words", "accelerator", "shards", "kernel"), [
    ([BFLOAT16], CPU, 1, "dot_product"),
    ([BFLOAT16], H100, 1, "tokamax_mosaic"),
    (["dtype=float16"], B200, 1, "tokamax_mosaic"),
    ([BFLOAT16, *WINDOW, CAPPED, SINKS], H100, 1, "tokamax_mosaic"),
    ([BFLOAT16, *LATENT], B200, 1, "tokamax_mosaic"),
    ([BFLOAT16, "head_dim=512"], H100, 1, "dot_product"),
    ([], H100, 1, "dot_product"),  # no kernel for GPUs has float32
    ([BFLOAT16], A100, 1, "pallas_mha"),
    ([BFLOAT16], BARE, 1, "pallas_mha"),
    ([BFLOAT16, "max_target_length=101"], A100, 1, "pallas_mha"),
    ([BFLOAT16], Accelerator("gpu", "9.0", "0.0.13"), 1, "pallas_mha"),  # an untested version
    ([BFLOAT16], Accelerator("gpu", "7.5"), 1, "dot_product"),
    ([BFLOAT16], Accelerator("gpu", "gfx942"), 1, "dot_product"),  # AMD's
    ([BFLOAT16, "packing=false"], A100, 1, "cudnn_flash"),
    ([BFLOAT16, "dataset_type=synthetic"], BARE, 1, "cudnn_flash"),  # rows of one document, even with packing
    ([BFLOAT16, "packing=false", *WINDOW], BARE, 1, "cudnn_flash"),
    ([BFLOAT16, *WINDOW], BARE, 1, "dot_product"),
    ([BFLOAT16, "layer_pattern=local", "sliding_window_size=256"], BARE, 1, "pallas_mha"),  # it reaches every key
    ([BFLOAT16, CAPPED], BARE, 1, "dot_product"),
    ([BFLOAT16, SINKS], BARE, 1, "dot_product"),
    ([BFLOAT16, *LATENT], BARE, 1, "dot_product"),
    ([BFLOAT16], TPU, 1, "splash"),
    ([BFLOAT16, "max_target_length=100"], TPU, 1, "dot_product"),  # splash works in blocks of 128
    ([BFLOAT16, *WINDOW, CAPPED, SINKS], TPU, 1, "splash"),
    ([BFLOAT16], H100, 2, "tokamax_mosaic"),
    ([BFLOAT16], A100, 2, "dot_product"),  # the others take whole examples
    ([BFLOAT16], TPU, 2, "dot_product"),  # 4 chunks of 64 tokens
    ([BFLOAT16, "max_target_length=1024"], TPU, 4, "splash"),
    (["attention=dot_product", BFLOAT16], TPU, 1, "dot_product"),
    (["attention=cudnn_masked", BFLOAT16], H100, 1, "cudnn_masked"),
])
def test_auto_names_a_kernel_that_runs_and_does_what_the_layers_need(words, accelerator, shards, kernel):
    config = load_config(None, words)
    assert attention_kernel(config, accelerator, shards).name == kernel
    assert planned_kernel(config, accelerator, shards).name == kernel


def test_every_shipped_model_has_a_fused_kernel_on_hopper_and_blackwell_and_plain_ones_everywhere():
    plain = set()
    for name in MODELS:
        words = [f"model_name={name}", "max_target_length=8192", BFLOAT16, "dataset_path=x",
                 "tokenizer_type=huggingface", "tokenizer_path=x",
                 *(["trainable_position_size=8192"] if "gpt2" in name else ())]
        config = load_config(None, words)
        assert attention_kernel(config, H100).name == attention_kernel(config, B200).name == "tokamax_mosaic"
        elsewhere = attention_kernel(config, A100).name
        assert elsewhere in ("pallas_mha", "dot_product")
        if elsewhere == "pallas_mha":
            plain.add(name.split("-")[0].rstrip("0123456789."))
    assert plain == set(
        "llama mistral mixtral qwen olmo phi gpt smollm tinyllama apertus command ernie exaone glm granite helium "
        "ministral minitron pythia seed stablelm minimax olmoe".split()
    )


@pytest.mark.parametrize(("words", "accelerator", "shards", "reasons"), [
    ([BFLOAT16, CAPPED, "packing=false"], BARE, 1,
     {"tokamax_mosaic": "tokamax", "cudnn_flash": "50.0", "pallas_mha": "50.0"}),
    ([BFLOAT16, SINKS], Accelerator("gpu", "8.9", "0.0.17"), 1,
     {"tokamax_mosaic": "8.9", "cudnn_flash": "documents", "pallas_mha": "sinks"}),
    ([BFLOAT16], Accelerator("gpu", "10.0", "0.0.13"), 1, {"tokamax_mosaic": "0.0.13", "cudnn_flash": "documents"}),
    ([BFLOAT16], TPU, 4, {"splash": "max_target_length=256"}),
    ([BFLOAT16], H100, 1, {}),
    ([BFLOAT16], CPU, 1, {}),
])
def test_better_kernels_are_passed_over_for_a_reason(words, accelerator, shards, reasons):
    choice = attention_kernel(load_config(None, words), accelerator, shards)
    assert choice.passed_over.keys() == reasons.keys()
    assert all(reason in choice.passed_over[name] for name, reason in reasons.items())
    assert all(str(choice).count(name) == 1 for name in (choice.name, *reasons))
    assert choice.to_json()["name"] == choice.name


def test_a_plan_takes_a_kernel_that_is_named_at_its_word_and_assumes_tokamax():
    for name in KERNELS:
        assert load_config(None, [f"attention={name}", BFLOAT16, "packing=false"]).attention == name
    config = load_config(None, ["attention=splash", BFLOAT16])
    assert planned_kernel(config, CPU, 1) == KernelChoice("splash")
    planned = attention_kernel(load_config(None, [BFLOAT16]), Accelerator.planned("gpu"))
    assert planned.to_json() == {
        "name": "tokamax_mosaic", "passed_over": {}, "assumed": "compute capability 9.0 with tokamax",
    }


@pytest.mark.parametrize(("name", "accelerator", "shards", "nearest"), [
    ("splash", CPU, 1, "dot_product"), ("cudnn_masked", H100, 2, "tokamax_mosaic"),
    ("tokamax_mosaic", Accelerator("gpu", "8.0"), 1, "pallas_mha"),
])
def test_a_kernel_that_does_not_run_here_is_refused(name, accelerator, shards, nearest):
    with pytest.raises(ValueError, match=rf"^attention={name} .*Nearest that works: {nearest}\.$"):
        attention_kernel(load_config(None, [f"attention={name}", BFLOAT16]), accelerator, shards)


def test_what_each_kernel_lacks():
    needs = Needs(head_dim=64, window=True, soft_cap=2.0, sinks=True, values_differ=True, documents=True)
    words = ("documents", "windows", "soft cap", "sinks", "another width")
    found = {name: [word for word in words if word in " ".join(lacking(name, needs))] for name in KERNELS}
    of_scores = ["soft cap", "sinks", "another width"]
    assert found == {
        "cudnn_flash": ["documents", *of_scores], "pallas_mha": ["windows", *of_scores], "cudnn_masked": of_scores,
        "splash": [], "dot_product": [], "tokamax_mosaic": [],
    }


def test_what_is_installed_is_found_without_importing_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed_tokamax() is Accelerator.of("gpu").tokamax is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 7")
    assert installed_tokamax() == Accelerator.of("gpu").tokamax == "tokamax 7"
    assert Accelerator.planned("gpu").tokamax == TOKAMAX_VERSIONS[-1]  # for another machine, where an extra installs it
    assert Accelerator.of(BARE) is Accelerator.planned(BARE) is BARE


# ---- Experts: the kernel of their matmuls, and the exchange of tokens between devices ------------------------------


@pytest.mark.parametrize(("accelerator", "dtype", "kernel"), [
    (Accelerator("cpu", tokamax="0.0.17"), "bfloat16", "ragged_dot"),
    (Accelerator("tpu", tokamax="0.0.17"), "bfloat16", "megablox"),
    (Accelerator("gpu", "9.0", "0.0.17"), "bfloat16", "tokamax"),
    (Accelerator("gpu", "9.0", "0.0.12"), "float16", "tokamax"),
    (Accelerator("gpu", "9.0", "0.0.13"), "float16", "blocks"),  # an untested version
    (Accelerator("gpu", "8.0", "0.0.17"), "float16", "blocks"),
    (Accelerator("gpu", "10.0", "0.0.17"), "bfloat16", "blocks"),
    (Accelerator("gpu", "9.0", "0.0.17"), "float32", "blocks"),
    (Accelerator("gpu", "9.0"), "bfloat16", "blocks"),
])
def test_each_platform_has_its_kernel_for_experts(accelerator, dtype, kernel):
    assert grouped_matmul_kernel(accelerator, dtype) == kernel


@pytest.mark.parametrize(("axis", "chosen", "element_bytes", "rows"), [
    (8, 2, 2, 1280),  # 4096 x 2 / 8 x 5/4
    (8, 8, 2, 5120),  # 2 x 7 x 5,120 x 2 bytes for each dim, against 7 x 4,096 x (2 + 4)
    (4, 8, 2, None),  # ten rows both ways against four tokens and six bytes
    (8, 8, 4, None),
    (2, 1, 2, 2560),
    (64, 64, 2, 4096),  # one expert each: a token comes once, or not at all
    (1, 8, 2, None),
])
def test_tokens_are_exchanged_where_that_moves_fewer_bytes(axis, chosen, element_bytes, rows):
    sizes = {"num_tokens": 4096, "num_per_token": chosen, "num_experts": 64, "num_shards": axis}
    assert exchanged_rows(**sizes, element_bytes=element_bytes) == rows
