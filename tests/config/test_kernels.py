"""The kernels of attention and of experts' matmuls on each kind of device: the best one that does what is needed."""

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import (
    TOKAMAX_VERSIONS,
    Accelerator,
    attention_kernel,
    exchanged_rows,
    grouped_matmul_kernel,
    planned_kernel,
)
from tests.source_tree import REPOSITORY
from tests.tables import read_table

BFLOAT16 = "dtype=bfloat16"
CPU, BARE = Accelerator("cpu"), Accelerator("gpu", "9.0")  # without tokamax
H100, B200 = (
    Accelerator("gpu", capability, TOKAMAX_VERSIONS[-1])
    for capability in ("9.0", "10.0")
)
A100 = Accelerator("gpu", "8.0", TOKAMAX_VERSIONS[0])
DEVICES = {
    "a100": A100,
    "h100": H100,
    "b200": B200,
    "bare": BARE,
    "tpu": Accelerator("tpu"),
    "cpu": CPU,
}
TABLE = read_table("config/kernels.yml")
MODELS = sorted(path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yml"))


@pytest.mark.fast
@pytest.mark.parametrize(
    "row", TABLE["attention"], ids=lambda row: f"{row['device']} {row['keys']}"
)
def test_auto_names_a_kernel_that_runs_and_does_what_the_layers_need(row):
    config, shards = load_config(None, row["keys"]), row.get("shards", 1)
    device = DEVICES.get(row["device"]) or Accelerator(*row["device"].split())
    choice = attention_kernel(config, device, shards)
    assert (
        choice.name
        == choice.to_json()["name"]
        == planned_kernel(config, device, shards).name
        == row["kernel"]
    )
    reasons = row.get("passed_over")
    if reasons is not None:
        assert choice.passed_over.keys() == reasons.keys()
        assert all(
            reason in choice.passed_over[name] for name, reason in reasons.items()
        )
        assert all(str(choice).count(name) == 1 for name in (choice.name, *reasons))


def test_every_shipped_model_has_a_fused_kernel_on_hopper_and_blackwell_and_plain_ones_everywhere():
    plain = set()
    for name in MODELS:
        words = [
            f"model_name={name}",
            "max_target_length=8192",
            BFLOAT16,
            "dataset_path=x",
            "tokenizer_type=huggingface",
            "tokenizer_path=x",
            *(["trainable_position_size=8192"] if "gpt2" in name else ()),
        ]
        config = load_config(None, words)
        assert (
            attention_kernel(config, H100).name
            == attention_kernel(config, B200).name
            == "tokamax_mosaic"
        )
        elsewhere = attention_kernel(config, A100).name
        assert elsewhere in ("pallas_mha", "dot_product")
        if elsewhere == "pallas_mha":
            plain.add(name.split("-")[0].rstrip("0123456789."))
    assert plain == set(TABLE["plain"])


@pytest.mark.parametrize(
    ("name", "accelerator", "shards", "nearest"),
    [
        ("splash", CPU, 1, "dot_product"),
        ("cudnn_masked", H100, 2, "tokamax_mosaic"),
        ("tokamax_mosaic", Accelerator("gpu", "8.0"), 1, "pallas_mha"),
    ],
)
def test_a_kernel_that_does_not_run_here_is_refused(name, accelerator, shards, nearest):
    with pytest.raises(
        ValueError, match=rf"^attention={name} .*Nearest that works: {nearest}\.$"
    ):
        attention_kernel(
            load_config(None, [f"attention={name}", BFLOAT16]), accelerator, shards
        )


# ---- Experts: the kernel of their matmuls, and the exchange of tokens between devices ------------------------------


@pytest.mark.parametrize(
    ("accelerator", "dtype", "kernel"),
    [
        (Accelerator("cpu", tokamax="0.0.17"), "bfloat16", "ragged_dot"),
        (Accelerator("tpu", tokamax="0.0.17"), "bfloat16", "megablox"),
        (Accelerator("gpu", "9.0", "0.0.12"), "float16", "tokamax"),
        (
            Accelerator("gpu", "9.0", "0.0.13"),
            "float16",
            "blocks",
        ),  # an untested version
        (Accelerator("gpu", "10.0", "0.0.17"), "bfloat16", "blocks"),
        (Accelerator("gpu", "9.0", "0.0.17"), "float32", "blocks"),
        (Accelerator("gpu", "9.0"), "bfloat16", "blocks"),
    ],
)
def test_each_platform_has_its_kernel_for_experts(accelerator, dtype, kernel):
    assert grouped_matmul_kernel(accelerator, dtype) == kernel


@pytest.mark.parametrize(
    ("axis", "chosen", "element_bytes", "rows"),
    [
        (8, 2, 2, 1280),  # 4096 x 2 / 8 x 5/4
        (
            8,
            8,
            2,
            5120,
        ),  # 2 x 7 x 5,120 x 2 bytes for each dim, against 7 x 4,096 x (2 + 4)
        (8, 8, 4, None),
        (64, 64, 2, 4096),  # one expert each: a token comes once, or not at all
        (1, 8, 2, None),
    ],
)
def test_tokens_are_exchanged_where_that_moves_fewer_bytes(
    axis, chosen, element_bytes, rows
):
    sizes = {
        "num_tokens": 4096,
        "num_per_token": chosen,
        "num_experts": 64,
        "num_shards": axis,
    }
    assert exchanged_rows(**sizes, element_bytes=element_bytes) == rows
