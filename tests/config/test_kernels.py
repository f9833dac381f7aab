"""The attention kernel of a config on each kind of device, and why it is none of the better ones."""

import importlib.util
from pathlib import Path

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.kernels import (
    ASSUMED_CAPABILITY,
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

BFLOAT16 = "dtype=bfloat16"
LATENT = ("mla={q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}",
          "base_num_kv_heads=8")  # fmt: skip
CAPPED, SINKS, WINDOW = "attn_logits_soft_cap=50", "attention_sinks=true", ("layer_pattern=local,global",
                                                                            "sliding_window_size=8")  # fmt: skip
CPU, TPU = Accelerator("cpu"), Accelerator("tpu")
H100, B200 = (Accelerator("gpu", capability, TOKAMAX_VERSIONS[-1]) for capability in ("9.0", "10.0"))
A100 = Accelerator("gpu", "8.0", TOKAMAX_VERSIONS[0])
BARE = Accelerator("gpu", "9.0")  # without tokamax
SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))


@pytest.mark.parametrize(("overrides", "accelerator", "shards", "kernel"), [
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
])  # fmt: skip
def test_auto_names_a_kernel_that_runs_and_does_what_the_layers_need(overrides, accelerator, shards, kernel):
    config = load_config(None, overrides)
    assert attention_kernel(config, accelerator, shards).name == kernel


def test_every_shipped_model_has_a_fused_kernel_on_hopper_and_blackwell_and_plain_ones_everywhere():
    plain = set()
    for name in SHIPPED:
        config = load_config(None, [f"model_name={name}", "max_target_length=8192", BFLOAT16, "dataset_path=x",
                                    "tokenizer_type=huggingface", "tokenizer_path=x",
                                    *(["trainable_position_size=8192"] if "gpt2" in name else ())])  # fmt: skip
        assert attention_kernel(config, H100).name == attention_kernel(config, B200).name == "tokamax_mosaic"
        elsewhere = attention_kernel(config, A100).name
        assert elsewhere in ("pallas_mha", "dot_product")
        if elsewhere == "pallas_mha":
            plain.add(name.split("-")[0].rstrip("0123456789."))
    assert plain == {
        "llama", "mistral", "mixtral", "qwen", "olmo", "phi", "gpt", "smollm", "tinyllama", "apertus", "command",
        "ernie", "exaone", "glm", "granite", "helium", "ministral", "minitron", "pythia", "seed",
        "stablelm", "minimax", "olmoe",
    }  # fmt: skip


@pytest.mark.parametrize(("overrides", "accelerator", "shards", "reasons"), [
    ([BFLOAT16, CAPPED, "packing=false"], BARE, 1, {
        "tokamax_mosaic": "tokamax is not installed",
        "cudnn_flash": "it does not support a soft cap of scores (50.0)",
        "pallas_mha": "it does not support a soft cap of scores (50.0)"}),
    ([BFLOAT16, SINKS], Accelerator("gpu", "8.9", "0.0.17"), 1, {
        "tokamax_mosaic": "it runs on compute capability 9.0 or 10.0, not on 8.9",
        "cudnn_flash": "it does not support several documents in a row or attention sinks",
        "pallas_mha": "it does not support attention sinks"}),
    ([BFLOAT16], Accelerator("gpu", "10.0", "0.0.13"), 1, {
        "tokamax_mosaic": "it needs tokamax 0.0.12 or 0.0.17, not 0.0.13",
        "cudnn_flash": "it does not support several documents in a row"}),
    ([BFLOAT16], TPU, 4, {"splash": "max_target_length=256 is not a multiple of 1024"}),
    ([BFLOAT16], H100, 1, {}),
    ([BFLOAT16], CPU, 1, {}),
])  # fmt: skip
def test_better_kernels_are_passed_over_for_a_reason(overrides, accelerator, shards, reasons):
    assert attention_kernel(load_config(None, overrides), accelerator, shards).passed_over == reasons


def test_a_choice_is_said_in_one_line_with_a_reason_once():
    config, wide = load_config(None, []), load_config(None, [BFLOAT16])
    assert str(attention_kernel(config, H100)) == (
        "dot_product (tokamax_mosaic, cudnn_flash, pallas_mha: it does not compute in dtype=float32)"
    )
    assert str(attention_kernel(wide, BARE)) == (
        "pallas_mha (tokamax_mosaic: tokamax is not installed; cudnn_flash: it does not support several documents in a "
        "row)"
    )
    assert str(attention_kernel(wide, CPU)) == "dot_product"
    planned = attention_kernel(wide, Accelerator.planned("gpu"))
    assert str(planned) == f"tokamax_mosaic (compute capability {ASSUMED_CAPABILITY} with tokamax is assumed)"
    assert planned.to_json() == {
        "name": "tokamax_mosaic",
        "passed_over": {},
        "assumed": "compute capability 9.0 with tokamax",
    }


def test_a_plan_takes_a_kernel_that_is_named_at_its_word():
    config = load_config(None, ["attention=splash", BFLOAT16])
    assert planned_kernel(config, CPU, 1) == KernelChoice("splash")
    assert planned_kernel(load_config(None, [BFLOAT16]), TPU, 1).name == "splash"


@pytest.mark.parametrize(("name", "accelerator", "shards", "message"), [
    ("splash", CPU, 1, "attention=splash cannot run: it runs on tpu, not on cpu. Nearest that works: dot_product."),
    ("cudnn_masked", H100, 2, "attention=cudnn_masked cannot run: it takes whole examples, not those of 2 context "
                              "shards. Nearest that works: tokamax_mosaic."),
    ("tokamax_mosaic", Accelerator("gpu", "8.0"), 1,
     "attention=tokamax_mosaic cannot run: it runs on compute capability 9.0 or 10.0, not on 8.0 and tokamax is not "
     "installed. Nearest that works: pallas_mha."),
])  # fmt: skip
def test_a_kernel_that_does_not_run_here_is_refused(name, accelerator, shards, message):
    with pytest.raises(ValueError) as refused:
        attention_kernel(load_config(None, [f"attention={name}", BFLOAT16]), accelerator, shards)
    assert str(refused.value) == message


@pytest.mark.parametrize(("overrides", "message"), [
    ([CAPPED, SINKS, "packing=false"],
     "attention=cudnn_flash does not support a soft cap of scores (50.0) or attention sinks. Nearest that works: "
     "dot_product."),
    ([], "attention=cudnn_flash does not support several documents in a row. Nearest that work: attention=cudnn_masked "
         "or packing=false."),
    ((*LATENT, "packing=false"),
     "attention=cudnn_flash does not support values of another width than keys. Nearest that works: dot_product."),
    (["attention=pallas_mha", *WINDOW],
     "attention=pallas_mha does not support windows. Nearest that works: dot_product."),
    (["attention=tokamax_mosaic", "head_dim=12"],
     "attention=tokamax_mosaic does not support heads whose dims are no multiple of 8 (12). Nearest that works: "
     "dot_product."),
    (["attention=pallas_mha", "head_dim=192"],
     "attention=pallas_mha does not support heads of more than 128 dims (192). Nearest that works: dot_product."),
    (["attention=cudnn_masked", "max_target_length=101"],
     "attention=cudnn_masked needs max_target_length=101 to be a multiple of 2. Nearest that works: dot_product."),
    (["attention=splash", "max_target_length=100"],
     "attention=splash needs max_target_length=100 to be a multiple of 128. Nearest that works: dot_product."),
])  # fmt: skip
def test_a_named_kernel_that_cannot_run_anywhere_is_refused_before_there_is_a_machine(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(None, ["attention=cudnn_flash", BFLOAT16, *overrides])
    assert refused.value.problems == (message,)


def test_what_a_kernel_lacks_is_said_in_words():
    needs = Needs(head_dim=64, window=True, soft_cap=2.0, sinks=True, values_differ=True, documents=True)
    of_scores = ["a soft cap of scores (2.0)", "attention sinks", "values of another width than keys"]
    assert lacking("cudnn_flash", needs) == ["several documents in a row", *of_scores]
    assert lacking("pallas_mha", needs) == ["windows", *of_scores]
    assert lacking("cudnn_masked", needs) == of_scores
    assert lacking("splash", needs) == lacking("dot_product", needs) == lacking("tokamax_mosaic", needs) == []


def test_what_is_installed_is_found_without_importing_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed_tokamax() is Accelerator.of("gpu").tokamax is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 7")
    assert installed_tokamax() == Accelerator.of("gpu").tokamax == "tokamax 7"
    assert Accelerator.planned("gpu").tokamax == TOKAMAX_VERSIONS[-1]  # for another machine, where an extra installs it
    assert Accelerator.of(BARE) is Accelerator.planned(BARE) is BARE


def test_the_key_attention_has_every_kernel():
    for name in KERNELS:
        assert load_config(None, [f"attention={name}", BFLOAT16, "packing=false"]).attention == name


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
])  # fmt: skip
def test_each_platform_has_its_kernel(accelerator, dtype, kernel):
    assert grouped_matmul_kernel(accelerator, dtype) == kernel


def _by_bytes(axis, chosen, element_bytes, num_tokens=4096, num_experts=64):
    """Five quarters of an even share, in whole tiles, if both ways take fewer bytes than tokens and their sums."""
    rows = min(-(-5 * num_tokens * chosen // (4 * axis) // 128) * 128, num_tokens * min(chosen, num_experts // axis))
    exchanged = 2 * (axis - 1) * rows * element_bytes
    gathered = (axis - 1) * num_tokens * (element_bytes + 4)
    return rows if exchanged < gathered else None


@pytest.mark.parametrize(("axis", "chosen", "element_bytes", "rows"), [
    (8, 2, 2, 1280),  # 4096 x 2 / 8 x 5/4
    (8, 8, 2, 5120),
    (4, 8, 2, None),  # ten rows both ways against four tokens and six bytes
    (8, 8, 4, None),
    (2, 1, 2, 2560),
    (64, 64, 2, 4096),  # one expert each: a token comes once, or not at all
    (1, 8, 2, None),
])  # fmt: skip
def test_tokens_are_exchanged_where_that_moves_fewer_bytes(axis, chosen, element_bytes, rows):
    sizes = {"num_tokens": 4096, "num_per_token": chosen, "num_experts": 64, "num_shards": axis}
    assert exchanged_rows(**sizes, element_bytes=element_bytes) == rows
    assert rows == (None if axis == 1 else _by_bytes(axis, chosen, element_bytes))
