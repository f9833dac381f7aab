"""The runs of the golden record: about forty-five tiny ones that between them use what training consists of."""

import dataclasses
from pathlib import Path

HERE = Path(__file__).parent

SIZES = (
    "vocab_size=264",
    "base_emb_dim=16",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=4",
    "base_mlp_dim=24",
    "base_num_decoder_layers=2",
    "max_target_length=32",
)
COMMON = (
    "steps=5",
    "warmup_steps=2",
    "learning_rate=0.01",
    "eval_interval=-1",
    "matmul_precision=highest",
    "dtype=float32",
    "enable_checkpointing=false",
    "per_device_batch_size=-1",
    "global_batch_size=8",
    "tokenizer_type=byte",
)
TEXT = (f"dataset_path={HERE}/data/documents.jsonl",)
EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8")
LATENT = "mla={q_lora_rank: 12, kv_lora_rank: 8, qk_nope_head_dim: 4, qk_rope_head_dim: 4, v_head_dim: 6}"
RL = (
    "learning_rate_schedule=constant",
    "learning_rate=3e-3",
    "warmup_steps=0",
    "dataset_type=arithmetic",
    "arithmetic_largest=9",
    "arithmetic_operations=+",
    "max_target_length=16",
    "max_prefill_predict_length=6",
    "batch_size=4",
    "num_generations=4",
    "micro_batch_size=8",
    "reward_functions=format",
    "reward_format=(?s)[^@-~].*",
)


@dataclasses.dataclass(frozen=True)
class GoldenRun:
    """One run of the record.

    Attributes:
      legs: the overrides of each command that the run takes: every one but the first resumes in its run directory.
      devices: simulated devices of the process that it runs in.
      file: the config file.
      tolerance: relative, of losses, where machines or versions differ.
    """

    name: str
    legs: tuple[tuple[str, ...], ...]
    devices: int = 1
    file: str = "configs/base.yml"
    tolerance: float = 1e-5


def _pretrained(name: str, *overrides: str, tolerance: float = 1e-5) -> GoldenRun:
    return GoldenRun(name, ((*SIZES, *COMMON, *TEXT, *overrides),), tolerance=tolerance)


def _family(model: str, *overrides: str) -> GoldenRun:
    """A named model, made tiny."""
    return _pretrained(
        f"family {model}", f"model_name={model}", "initializer_range=0.1", *overrides
    )


def _on_mesh(name: str, *axes: str) -> GoldenRun:
    """On 8 devices: `axes` as data=2, expert=4, and other overrides."""
    overrides = ["ici_fsdp_parallelism=1"]
    for word in axes:
        axis, _, size = word.partition("=")
        overrides.append(
            f"ici_{axis}_parallelism={size}"
            if size.isdigit() and "_" not in axis
            else word
        )
    return GoldenRun(f"mesh {name}", ((*SIZES, *COMMON, *TEXT, *overrides),), devices=8)


def _resumed(
    name: str, *legs: tuple[str, ...], shared: tuple[str, ...] = ()
) -> GoldenRun:
    """Interrupted after step 3 by its own `steps`, under a schedule that does not look at them."""
    saved = (
        *SIZES,
        *COMMON,
        *TEXT,
        "enable_checkpointing=true",
        "learning_rate_schedule=constant",
        *shared,
    )
    last = len(legs) - 1
    steps = ["steps=3" if number < last else "steps=6" for number in range(len(legs))]
    return GoldenRun(
        f"resume {name}",
        tuple((*saved, each, *leg) for each, leg in zip(steps, legs, strict=True)),
        8,
    )


def _post_trained(
    name: str, file: str, data: str, *overrides: str, devices: int = 1
) -> GoldenRun:
    paths = (f"dataset_path={HERE}/data/{data}",) if data else ()
    return GoldenRun(
        name,
        ((*SIZES, *COMMON, *paths, *overrides),),
        devices,
        f"configs/post_train/{file}",
    )


def _grpo(name: str, *overrides: str, devices: int = 8) -> GoldenRun:
    keys = [
        word
        for word in COMMON
        if not word.startswith(("per_device_batch_size", "global_batch_size"))
    ]
    return GoldenRun(
        f"grpo {name}",
        ((*SIZES, *keys, *RL, *overrides),),
        devices,
        "configs/post_train/rl.yml",
    )


FAMILIES = (
    _family("llama3.2-1b"),
    _family("gemma2-2b", "sliding_window_size=5", "query_pre_attn_scalar=6"),
    _family("gemma3-1b", "sliding_window_size=5", "layer_pattern=local,global"),
    _family("qwen2.5-0.5b"),
    _family("qwen3-4b"),
    _family("gpt2", "base_num_kv_heads=4", "trainable_position_size=32"),
    _family("phi4", "partial_rotary_factor=0.5"),
    _family("olmo2-7b"),
    _family("smollm3-3b", "layer_pattern=global,nope"),
    _family("gpt-oss-20b", *EXPERTS, "sliding_window_size=5"),
    _family("mixtral-8x7b", *EXPERTS),
    _family("qwen3-30b-a3b", *EXPERTS, "router_z_loss_multiplier=0.05"),
    _family(
        "deepseek-v3",
        *EXPERTS,
        LATENT,
        "head_dim=8",
        "base_num_kv_heads=4",
        "n_routing_groups=2",
        "topk_routing_group=1",
        "first_num_dense_layers=1",
    ),
)
TRAINING = (
    _pretrained(
        "cosine, A=4, z-loss",
        "gradient_accumulation_steps=4",
        "z_loss_multiplier=1e-3",
        "num_vocab_tiling=2",
    ),
    _pretrained(
        "wsd by examples",
        "learning_rate_schedule=wsd",
        "wsd_decay_steps_fraction=0.4",
        "schedule_unit=examples",
        "gradient_accumulation_steps=2",
    ),
    _pretrained(
        "linear by tokens",
        "learning_rate_schedule=linear",
        "schedule_unit=tokens",
        "steps=-1",
        "num_epochs=0.125",
        "last_batch=train",
        "seed=3",
        "data_shuffle_seed=7",
    ),
    _pretrained(
        "sgd",
        "optimizer=sgd",
        "sgd_momentum=0.9",
        "learning_rate_schedule=constant",
        "gradient_clipping_threshold=0",
        "remat_policy=full",
    ),
    _pretrained("adafactor", "optimizer=adafactor"),
    _pretrained("muon", "optimizer=muon"),
    _pretrained(
        "lion",
        "optimizer=lion",
        "learning_rate=1e-3",
        "weight_decay_on_norms_and_embeddings=true",
    ),
    _pretrained(
        "scaled learning rate",
        "learning_rate_scaling=sqrt",
        "base_global_batch_size=4",
        "scale_adam_with_batch=true",
    ),
    _pretrained(
        "ramp of the batch",
        "enable_rampup_batch_size=true",
        "global_rampup_samples=16",
        "per_device_batch_size_start=4",
        "per_device_batch_size_increment=4",
    ),
    _pretrained(
        "ramp of the accumulation",
        "enable_rampup_batch_size=true",
        "global_rampup_samples=16",
        "rampup_mode=gradient_accumulation_steps",
        "gradient_accumulation_steps=4",
        "per_device_batch_size_start=1",
        "per_device_batch_size_increment=0.5",
    ),
    _pretrained(
        "not packed, evaluated", "packing=false", "eval_interval=2", "eval_fraction=0.1"
    ),
    _pretrained("bfloat16", "dtype=bfloat16", "grad_dtype=bfloat16", tolerance=5e-3),
    _pretrained(
        "bfloat16 weights", "dtype=bfloat16", "weight_dtype=bfloat16", tolerance=5e-3
    ),
    _pretrained(
        "float16, loss scale",
        "dtype=float16",
        "loss_scale_growth_interval=2",
        "skip_nonfinite_updates=true",
        tolerance=2e-3,
    ),
    _pretrained(
        "a capacity",
        *EXPERTS,
        "capacity_factor=1.0",
        "shared_experts=1",
        "load_balance_loss_weight=0.5",
    ),
    _pretrained("lora", "lora_rank=2"),
)
MESHES = (
    _on_mesh(
        "data 8", "data=8", "gradient_accumulation_steps=2", "global_batch_size=16"
    ),
    _on_mesh("fsdp 8", "fsdp=8"),
    _on_mesh(
        "data 2 fsdp 2 tensor 2",
        "data=2",
        "fsdp=2",
        "tensor=2",
        "gradient_accumulation_steps=2",
    ),
    _on_mesh("fsdp 2 context 4, gathered", "fsdp=2", "context=4"),
    _on_mesh(
        "fsdp 2 context 4, ring",
        "fsdp=2",
        "context=4",
        "context_parallel_strategy=ring",
    ),
    _on_mesh("expert 4 tensor 2", "expert=4", "tensor=2", *EXPERTS, "shared_experts=1"),
    _on_mesh("fsdp 4 stages 2, gpipe", "fsdp=4", "pipeline=2"),
    _on_mesh(
        "data 2 fsdp 2 stages 2, 1f1b",
        "data=2",
        "fsdp=2",
        "pipeline=2",
        "pipeline_schedule=1f1b",
    ),
    _on_mesh(
        "fsdp 4 stages 2, circular",
        "fsdp=4",
        "pipeline=2",
        "num_pipeline_repeats=2",
        "base_num_decoder_layers=4",
    ),
    _on_mesh(
        "data 4 fsdp 2, ZeRO-1", "data=4", "fsdp=2", "shard_optimizer_over_data=true"
    ),
    _on_mesh(
        "data 4 fsdp 2, DiLoCo",
        "data=4",
        "fsdp=2",
        "enable_diloco=true",
        "diloco_sync_period=2",
    ),
)
RESUMED = (
    _resumed(
        "on another mesh",
        (
            "ici_data_parallelism=2",
            "gradient_accumulation_steps=2",
            "global_batch_size=16",
        ),
        ("ici_tensor_parallelism=2", "global_batch_size=16"),
    ),
    _resumed(
        "of DiLoCo",
        ("ici_data_parallelism=2",),
        ("ici_data_parallelism=2", "ici_tensor_parallelism=2"),
        shared=("enable_diloco=true", "diloco_sync_period=2"),
    ),
)
POST_TRAINED = (
    _post_trained("sft", "sft.yml", "sums.jsonl", "max_target_length=32"),
    _post_trained(
        "dpo",
        "dpo.yml",
        "pairs.jsonl",
        "max_target_length=16",
        "dpo_label_smoothing=0.1",
    ),
    _post_trained(
        "dpo with lora",
        "dpo.yml",
        "pairs.jsonl",
        "max_target_length=32",
        "packing=true",
        "lora_rank=2",
        "ici_data_parallelism=2",
        devices=8,
    ),
    _grpo("in turns", "grpo_beta=0.1", "num_iterations=2", "steps=4"),
    _grpo(
        "on devices of its own",
        "trainer_devices_fraction=0.5",
        "sampler_devices_fraction=0.5",
        "loss_algo=gspo",
        "loss_aggregation=token_mean",
        "steps=3",
        "eval_interval=3",
        "eval_fraction=0.1",
    ),
)
RUNS = {
    run.name: run for run in (*FAMILIES, *TRAINING, *MESHES, *RESUMED, *POST_TRAINED)
}
