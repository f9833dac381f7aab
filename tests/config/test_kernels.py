"""The attention kernel that a config gets on each platform."""

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.kernels import attention_kernel, lacking

BFLOAT16 = "dtype=bfloat16"
LATENT = ("mla={q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}",
          "base_num_kv_heads=8")  # fmt: skip
CAPPED, SINKS, WINDOW = "attn_logits_soft_cap=50", "attention_sinks=true", ("layer_pattern=local,global",
                                                                            "sliding_window_size=8")  # fmt: skip


@pytest.mark.parametrize(("overrides", "platform", "shards", "kernel"), [
    ([BFLOAT16], "cpu", 1, "dot_product"),
    ([BFLOAT16], "gpu", 1, "cudnn_flash"),
    (["dtype=float16"], "gpu", 1, "cudnn_flash"),
    ([], "gpu", 1, "dot_product"),  # cuDNN's has no float32
    ([BFLOAT16], "tpu", 1, "splash"),
    ([BFLOAT16, "max_target_length=100"], "tpu", 1, "dot_product"),  # splash works in blocks of 128
    ([BFLOAT16], "gpu", 2, "dot_product"),  # cuDNN's takes whole examples
    ([BFLOAT16], "tpu", 2, "dot_product"),  # 4 chunks of 64 tokens
    ([BFLOAT16, "max_target_length=1024"], "tpu", 4, "splash"),
    (["attention=dot_product", BFLOAT16], "tpu", 1, "dot_product"),
    ([BFLOAT16, *WINDOW, "query_pre_attn_scalar=100"], "gpu", 1, "cudnn_flash"),
    ([BFLOAT16, CAPPED], "gpu", 1, "dot_product"),
    ([BFLOAT16, SINKS], "gpu", 1, "dot_product"),
    ([BFLOAT16, *LATENT], "gpu", 1, "dot_product"),
    ([BFLOAT16, *WINDOW, CAPPED, SINKS], "tpu", 1, "splash"),
])  # fmt: skip
def test_auto_names_a_kernel_that_runs_and_does_what_the_layers_need(overrides, platform, shards, kernel):
    config = load_config(None, overrides)
    assert attention_kernel(config, platform=platform, num_context_shards=shards) == kernel


def test_a_kernel_that_does_not_run_here_is_refused():
    splash, flash = (load_config(None, [f"attention={name}", BFLOAT16]) for name in ("splash", "cudnn_flash"))
    with pytest.raises(ValueError, match=r"attention=splash needs a TPU, .* Nearest that works: dot_product."):
        attention_kernel(splash, platform="cpu")
    with pytest.raises(ValueError, match=r"one context shard; here are gpu, bfloat16, 256 tokens and 2 context shards"):
        attention_kernel(flash, platform="gpu", num_context_shards=2)


@pytest.mark.parametrize(("overrides", "message"), [
    ([CAPPED, SINKS], "attention=cudnn_flash does not know a soft cap of scores (50.0) or attention sinks. Nearest "
                      "that works: dot_product."),
    (LATENT, "attention=cudnn_flash does not know values of another width than keys. Nearest that works: dot_product."),
    (["attention=splash", "max_target_length=100"],
     "attention=splash needs max_target_length=100 to be a multiple of 128. Nearest that works: dot_product."),
])  # fmt: skip
def test_a_named_kernel_that_cannot_run_anywhere_is_refused_before_there_is_a_machine(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(None, ["attention=cudnn_flash", BFLOAT16, *overrides])
    assert refused.value.problems == (message,)


def test_what_a_kernel_lacks_is_said_in_words():
    needs = {"soft_caps": [2.0], "sinks": True, "values_differ": True}
    assert lacking("cudnn_flash", **needs) == [
        "a soft cap of scores (2.0)", "attention sinks", "values of another width than keys"]  # fmt: skip
    assert lacking("splash", **needs) == lacking("dot_product", **needs) == []
