"""The keys of every run and their types, in sections. Only configs/base.yml has their defaults and meanings."""

import os
from typing import Literal, NamedTuple, cast

from maxtext_lite.config.field_types import (
    AutoOrFlag,
    BelowHalf,
    Count,
    CountOrMinusOne,
    CountOrZero,
    Decay,
    Exact,
    ExactOrDerived,
    ExactOrOne,
    ExactOrSame,
    ExactOrUnlimited,
    ExactOrZero,
    Flag,
    HangTimeout,
    Name,
    NotNegative,
    ObjectiveName,
    Packing,
    ParametersPath,
    PathName,
    PathText,
    Port,
    Positive,
    PositiveShare,
    RunsPath,
    Section,
    Seed,
    SeedOrMinusOne,
    Share,
    SourceName,
    SpecialInText,
    StepsOrPartOfEpoch,
    StepsOrPartOfEpochOrMinusOne,
    StepsOrPartOfRun,
    Text,
)
from maxtext_lite.config.kinds import ObjectiveKind, objective_kind, objective_name
from maxtext_lite.config.model_parts import LayerKind, MlaOrNone, MlpKind, PositionTemperatureOrNone, RopeScalingOrNone
from maxtext_lite.config.shown import StepsToTrace, TrackerNames
from maxtext_lite.config.source_list import PathOrHeldOut, PathOrSources

Normalization = Literal[
    "rms_norm", "rms_norm_plus_one", "layer_norm", "layer_norm_plus_one", "layer_norm_no_bias", "layer_norm_plain"
]
"""The divisor of a norm, the root mean square or the standard deviation around the mean, and its learned weights."""

Quantization = Literal["none", "int8", "fp8", "fp8_full"]
"""The number format of matmuls with layers' weights: the activations' dtype, or eight bits (kernels/eight_bits.py)."""


class RunConfig(Section):
    """The run: its directory, length, checkpoints and reports."""

    run_name: PathName
    base_output_directory: RunsPath
    overwrite: Flag
    steps: CountOrMinusOne
    num_epochs: ExactOrZero
    last_batch: Literal["drop", "train"]
    seed: Seed
    log_period: StepsOrPartOfEpoch
    enable_checkpointing: Flag
    checkpoint_period: StepsOrPartOfEpoch
    max_num_checkpoints_to_keep: Count
    async_checkpointing: Flag
    load_parameters_path: ParametersPath
    eval_interval: StepsOrPartOfEpochOrMinusOne
    eval_steps: CountOrMinusOne
    profiler_steps: StepsToTrace
    log_to: TrackerNames
    prometheus_port: Port
    prometheus_host: Name
    hang_timeout_seconds: HangTimeout

    @property
    def starts_over(self) -> bool:
        """Whether the earlier run in the directory is removed: not by a job that SLURM has queued again."""
        return self.overwrite and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


class BatchConfig(Section):
    """The keys from which batch sizes follow; only `batching.make_plan` derives them."""

    per_device_batch_size: ExactOrDerived
    gradient_accumulation_steps: CountOrMinusOne
    global_batch_size: CountOrZero
    eval_per_device_batch_size: ExactOrSame
    expansion_factor_real_data: ExactOrOne
    enable_rampup_batch_size: Flag
    rampup_mode: Literal["per_device_batch_size", "gradient_accumulation_steps"]
    per_device_batch_size_start: Exact
    per_device_batch_size_increment: Exact
    global_rampup_samples: Count
    num_pipeline_microbatches: CountOrMinusOne


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "lion"]
    learning_rate: NotNegative
    learning_rate_schedule: Literal["cosine", "wsd", "linear", "constant"]
    learning_rate_final_fraction: Share
    warmup_steps: StepsOrPartOfRun
    schedule_unit: Literal["steps", "examples", "tokens"]
    learning_rate_scaling: Literal["none", "linear", "sqrt"]
    base_global_batch_size: CountOrZero
    scale_adam_with_batch: Flag
    wsd_decay_steps_fraction: Share
    adam_b1: Decay
    adam_b2: Decay
    adam_eps: NotNegative
    sgd_momentum: Decay
    routed_bias_update_rate: NotNegative
    weight_decay: NotNegative
    weight_decay_on_norms_and_embeddings: Flag
    gradient_clipping_threshold: NotNegative
    skip_nonfinite_updates: Flag
    max_skipped_updates: Count
    max_loss_spike: NotNegative
    loss_spike_action: Literal["exclude", "stop"]
    optimizer_memory_host_offload: Flag


class LocalUpdatesConfig(Section):
    """DiLoCo: replicas that update their own copies of the parameters between synchronizations."""

    enable_diloco: Flag
    diloco_num_replicas: CountOrMinusOne
    diloco_sync_period: Count
    diloco_outer_lr: NotNegative
    diloco_outer_momentum: Decay


class MeshConfig(Section):
    """The axes of the mesh, and how layers are split over pipeline stages."""

    dcn_data_parallelism: CountOrMinusOne
    dcn_fsdp_parallelism: CountOrMinusOne
    dcn_tensor_parallelism: CountOrMinusOne
    dcn_context_parallelism: CountOrMinusOne
    dcn_expert_parallelism: CountOrMinusOne
    dcn_pipeline_parallelism: CountOrMinusOne
    ici_data_parallelism: CountOrMinusOne
    ici_fsdp_parallelism: CountOrMinusOne
    ici_tensor_parallelism: CountOrMinusOne
    ici_context_parallelism: CountOrMinusOne
    ici_expert_parallelism: CountOrMinusOne
    ici_pipeline_parallelism: CountOrMinusOne
    context_parallel_strategy: Literal["all_gather", "ring"]
    shard_optimizer_over_data: Flag
    pipeline_schedule: Literal["gpipe", "1f1b"]
    num_layers_per_pipeline_stage: Count
    num_pipeline_repeats: CountOrMinusOne


class ModelConfig(Section):
    """The architecture."""

    model_name: PathName
    vocab_size: Count
    base_emb_dim: Count
    base_num_query_heads: Count
    base_num_kv_heads: Count
    head_dim: Count
    base_mlp_dim: Count
    base_num_decoder_layers: Count
    normalization: Normalization
    norm_placement: Literal["pre", "post", "both"]
    normalization_layer_epsilon: Positive
    parallel_block: Literal["none", "one_norm", "two_norms"]
    residual_multiplier: Positive
    mlp_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "xielu", "clamped_silu"]
    gated_mlp: Flag
    mlp_bias: Flag
    attention_bias: Literal["none", "qkv", "all"]
    qk_norm: Literal["none", "head", "each_head", "all_heads", "head_after_rope", "l2_after_rope"]
    clip_qkv: NotNegative
    layer_pattern: Name
    sliding_window_size: CountOrZero
    chunk_attn_window_size: CountOrZero
    attn_logits_soft_cap: NotNegative
    attention_sinks: Flag
    query_pre_attn_scalar: NotNegative
    inverse_layer_scaling: Flag
    position_temperature: PositionTemperatureOrNone
    mla: MlaOrNone
    rope_max_timescale: Positive
    rope_local_max_timescale: NotNegative
    rope_scaling: RopeScalingOrNone
    partial_rotary_factor: PositiveShare
    trainable_position_size: CountOrZero
    scale_embeddings: Flag
    embedding_multiplier: Positive
    logits_via_embedding: Flag
    logits_bias: Flag
    logits_multiplier: Positive
    final_logits_soft_cap: NotNegative
    initializer_range: NotNegative
    num_experts: Count
    num_experts_per_tok: Count
    base_moe_mlp_dim: CountOrMinusOne
    shared_experts: CountOrZero
    base_shared_mlp_dim: CountOrMinusOne
    shared_expert_gate: Flag
    routed_score_func: Literal["softmax", "sigmoid", "sparsemixer"]
    norm_topk_prob: Flag
    routed_scaling_factor: Positive
    apply_router_weight_on_input: Flag
    capacity_factor: ExactOrUnlimited
    n_routing_groups: Count
    topk_routing_group: Count
    routed_bias: Flag
    expert_bias: Flag
    first_num_dense_layers: CountOrZero
    mlp_pattern: Name
    lora_rank: CountOrZero
    lora_alpha: Positive
    lora_targets: Name

    @property
    def moe_mlp_dim(self) -> int:
        """Width of one expert."""
        return self.base_mlp_dim if self.base_moe_mlp_dim == -1 else self.base_moe_mlp_dim

    @property
    def shared_mlp_dim(self) -> int:
        """Width of the shared expert's mlp, which every token passes through; 0: there is none."""
        as_experts = self.base_shared_mlp_dim == -1 or not self.shared_experts
        return self.shared_experts * self.moe_mlp_dim if as_experts else self.base_shared_mlp_dim

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """Which of the first layers have experts; the layers after them repeat the pattern."""
        return cast("tuple[MlpKind, ...]", tuple(kind.strip() for kind in self.mlp_pattern.split(",")))

    @property
    def num_stacked_layers(self) -> int:
        """Layers after the dense ones, which are split over pipeline stages."""
        return self.base_num_decoder_layers - self.first_num_dense_layers

    @property
    def pattern(self) -> tuple[LayerKind, ...]:
        """The kinds of the first layers; the layers after them repeat the pattern."""
        return cast("tuple[LayerKind, ...]", tuple(kind.strip() for kind in self.layer_pattern.split(",")))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        pattern = self.pattern
        return tuple(pattern[layer % len(pattern)] for layer in range(self.base_num_decoder_layers))

    @property
    def rotary_dim(self) -> int:
        """The rotated dims of a head; 0 where positions are learned."""
        if self.trainable_position_size:
            return 0
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim


class NumericsConfig(Section):
    """Number formats, kernels and rematerialization."""

    dtype: Literal["float32", "bfloat16", "float16"]
    weight_dtype: Literal["float32", "bfloat16"]
    master_weights: Flag
    grad_dtype: Literal["float32", "bfloat16"]
    quantization: Quantization
    loss_scale: NotNegative
    loss_scale_growth_interval: Count
    matmul_precision: Literal["default", "high", "highest"]
    remat_policy: Literal[
        "none",
        "save_dot_products",
        "minimal",
        "save_qkv_proj",
        "minimal_offloaded",
        "qkv_proj_offloaded",
        "full",
        "custom",
    ]
    remat_save: Text
    remat_offload: Text
    attention: Literal["auto", "dot_product", "pallas_mha", "cudnn_flash", "cudnn_masked", "tokamax_mosaic", "splash"]
    num_vocab_tiling: CountOrMinusOne
    z_loss_multiplier: NotNegative
    router_z_loss_multiplier: NotNegative
    load_balance_loss_weight: NotNegative


TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
"""A tokenizer's file in a directory, by tokenizer_type; where several are there, the first counts."""


class DataConfig(Section):
    """The data, its tokens and their order."""

    objective: ObjectiveName
    dataset_type: SourceName
    dataset_path: PathOrSources
    mixture_exhausted: Literal["error", "stop", "drop"]
    eval_dataset_path: PathOrHeldOut
    eval_fraction: Share
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"]
    tokenizer_path: PathText
    chat_template: PathText
    add_bos: AutoOrFlag
    add_eos: Flag
    special_tokens_in_text: SpecialInText
    max_target_length: Count
    long_examples: Literal["truncate", "drop", "refuse"]
    packing: Packing
    balance_attention: Flag
    data_shuffle_seed: SeedOrMinusOne
    excluded_rows: PathText
    grain_worker_count: CountOrZero

    @property
    def objective_kind(self) -> ObjectiveKind:
        """The objective, with `auto` replaced by that of the data."""
        return objective_kind(objective_name(self.objective, self.dataset_type))

    @property
    def rows_per_example(self) -> int:
        """Rows of max_target_length tokens in an example: in DPO two, the chosen and the rejected answer."""
        return self.objective_kind.rows_per_example

    @property
    def held_out_fraction(self) -> float:
        """The share of the training examples held out: none where held-out examples have a path of their own."""
        return 0.0 if self.eval_dataset_path else self.eval_fraction


class PreferenceConfig(Section):
    """The loss of DPO."""

    dpo_beta: Positive
    dpo_label_smoothing: BelowHalf


# ---- Rematerialization: the tensors of a layer that are kept on the device, kept on the host, or recomputed --------


QKV = ("query_proj", "key_proj", "value_proj")
PROJECTIONS = (*QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
REMAT_TENSORS = ("decoder_layer_input", *PROJECTIONS, "context", "expert_rows")
"""The tensors of a layer with names: its input, the results of its matmuls (experts' like an mlp's), the output of
attention, and the tokens at their experts."""


class Remat(NamedTuple):
    """The tensors that the forward pass keeps on the device, and those that it moves to pinned host memory."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...] = ()


REMAT_POLICIES: dict[str, Remat] = {
    "save_dot_products": Remat((*PROJECTIONS, "context")),
    "minimal": Remat(PROJECTIONS),
    "save_qkv_proj": Remat(QKV),
    "minimal_offloaded": Remat((), PROJECTIONS),
    "qkv_proj_offloaded": Remat((), QKV),
    "full": Remat(()),
}
"""What each remat_policy keeps besides the input of each layer; `none` keeps everything, `custom` what is listed."""


def remat_of(config: NumericsConfig) -> Remat | None:
    """The tensors that are kept of each layer; None: all."""
    match config.remat_policy:
        case "none":
            return None
        case "custom":
            return Remat(listed(config.remat_save), listed(config.remat_offload))
        case policy:
            return REMAT_POLICIES[policy]


def listed(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)
