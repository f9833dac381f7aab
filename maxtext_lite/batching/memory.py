"""Bytes per device: exact for what the optimizer step holds, estimated for what the compiler decides.

Exact: parameters, optimizer state (sgd, adamw, lion) and gradient accumulators, from the shapes and their shards.
Estimated: optimizer state of muon and adafactor, activations and logits. XLA fuses, reuses and pads, and its own
figures (`memory_analysis()`) are the truth; these tell 10 GB from 100 before there is a machine.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.config import Config

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device while a step runs; `limit` is what a device has, where it is known."""

    params: int
    optimizer_state: int
    gradients: int
    activations: int
    logits: int
    total: int
    limit: int | None

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return dataclasses.asdict(self)


def bytes_text(size: int) -> str:
    """A number of bytes to read: 1.5 GB (1e9 bytes), 3.2 MB or 0.4 kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model, or of one device's shard.

    Attributes:
      matrices: elements of the layers' matrices.
      tables: elements of the embedding table and of the output projection where it is not tied.
      norms: elements of the norm scales and of the routers' biases.
    """

    matrices: int
    tables: int
    norms: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.matrices + self.tables + self.norms


def count_parameters(
    config: Config, *, fsdp: int = 1, tensor: int = 1, stage: int = 1, expert: int = 1
) -> ParameterCount:
    """Parameters per device, exactly.

    Matrices are split over fsdp and tensor, experts over the expert axis too, routers over fsdp only, layers over
    stages, norms and routers' biases over nothing else.
    """
    emb, heads, kv_heads = config.base_emb_dim, config.base_num_query_heads, config.base_num_kv_heads
    layers = config.base_num_decoder_layers // stage
    attention = 2 * emb * heads * config.head_dim + 2 * emb * kv_heads * config.head_dim
    mlp, norms = 3 * emb * config.base_mlp_dim // (fsdp * tensor), 2 * emb
    if config.num_experts > 1:
        shared, one = 3 * emb * config.shared_experts * config.moe_mlp_dim, 3 * emb * config.moe_mlp_dim
        routed = one * config.num_experts // expert
        mlp = (shared + routed) // (fsdp * tensor) + emb * config.num_experts // fsdp
        norms += config.num_experts if config.routed_bias else 0
    tables = config.vocab_size * emb * (1 if config.logits_via_embedding else 2)
    shards = fsdp * tensor
    return ParameterCount(layers * (attention // shards + mlp), tables // shards, layers * norms + emb)


def estimate_memory(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    gradient_accumulation_steps: int,
    num_pipeline_microbatches: int,
    device_memory_gb: float | None,
    diloco_num_replicas: int | None = None,
) -> MemoryEstimate:
    """Bytes per device during a training step on this mesh.

    Args:
      mesh: size of each mesh axis.
      micro_batch_slots: rows of one micro-batch over all devices.
      device_memory_gb: memory of a device in GB (1e9 bytes), or None.
      diloco_num_replicas: copies of local updates, or None. A device then holds replicas / data copies of parameters,
        optimizer state and gradients, and beside them the outer parameters and their float32 momentum.
    """
    count = count_parameters(
        config, fsdp=mesh["fsdp"], tensor=mesh["tensor"], stage=mesh["stage"], expert=mesh["expert"]
    )
    weight_bytes = _BYTES[config.weight_dtype]
    params = count.total * weight_bytes
    state = _optimizer_elements(config, count) * 4  # float32, whatever the weights are
    # With A > 1 a micro-batch's gradient stands beside the float32 sum of the earlier ones.
    gradients = count.total * (4 if gradient_accumulation_steps == 1 else 4 + weight_bytes)
    if config.shard_optimizer_over_data:
        master = 0 if config.weight_dtype == "float32" else count.total * 4
        state = (state + master) // mesh["data"]
    if diloco_num_replicas is not None:
        copies = diloco_num_replicas // mesh["data"]
        outer_momentum = count.total * 4 if config.diloco_outer_momentum else 0
        params, state, gradients = (copies + 1) * params, copies * state + outer_momentum, copies * gradients
    rows = micro_batch_slots // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    tokens = rows * config.max_target_length // mesh["context"]
    activations = _activation_bytes(config, mesh, tokens, num_pipeline_microbatches)
    # Float32 logits of one piece of the sequence, and their gradient.
    logits = 2 * 4 * tokens * config.vocab_size // (mesh["tensor"] * config.num_vocab_tiling)
    total = params + state + gradients + activations + logits
    limit = None if device_memory_gb is None else int(device_memory_gb * 1e9)
    return MemoryEstimate(params, state, gradients, activations, logits, total, limit)


def _optimizer_elements(config: Config, count: ParameterCount) -> int:
    match config.optimizer:
        case "adamw":
            return 2 * count.total
        case "sgd":
            return count.total if config.sgd_momentum else 0
        case "lion":
            return count.total
        case "muon":  # one moment for the layers' matrices, Adam's two for the rest
            return count.matrices + 2 * (count.tables + count.norms)
        case "adafactor":  # a row and a column of factors for each matrix: about 2/sqrt(its size) of it
            return count.norms + (count.matrices + count.tables) // max(config.base_emb_dim // 2, 1)


def _activation_bytes(config: Config, mesh: Mapping[str, int], tokens: int, num_pipeline_microbatches: int) -> int:
    """Values kept for the backward pass: those that remat_policy saves in each layer, and one layer recomputed."""
    emb, tensor = config.base_emb_dim, mesh["tensor"]
    query = config.base_num_query_heads * config.head_dim // tensor
    key_value = 2 * config.base_num_kv_heads * config.head_dim // tensor
    mlp, rows = _mlp_width(config, mesh) // tensor, _rows_per_token(config, mesh)
    dtype_bytes = _BYTES[config.dtype]
    # cuDNN and splash attention keep no [T, T] scores; plain attention keeps float32 scores and probabilities.
    flash = config.attention in ("cudnn_flash", "splash") or (config.attention == "auto" and config.dtype != "float32")
    scores = 0 if flash else 4 * (config.base_num_query_heads // tensor) * config.max_target_length // mesh["context"]
    projections = (query + key_value + emb + 2 * mlp) * dtype_bytes
    everything = projections + (3 * emb + query + mlp) * dtype_bytes + 2 * scores
    recomputed = everything + 2 * rows * emb * dtype_bytes  # what goes into the experts and comes out of them
    saved = {
        "none": everything,
        "minimal": projections,
        "save_dot_products": projections + query * dtype_bytes + scores,
        "save_qkv_proj": (query + key_value) * dtype_bytes,
        "full": 0,
    }[config.remat_policy] + emb * dtype_bytes  # the layer's input is always kept
    stages = mesh["stage"]
    layers = config.base_num_decoder_layers // stages
    # A pipeline's scan keeps the inputs of its idle ticks too.
    ticks = num_pipeline_microbatches + stages - 1
    kept = tokens * saved * layers * ticks // num_pipeline_microbatches
    once = 2 * rows * emb * dtype_bytes if config.remat_policy == "none" else recomputed
    return kept + tokens * once // num_pipeline_microbatches


def _rows_per_token(config: Config, mesh: Mapping[str, int]) -> int:
    """Rows that a device has room for in its experts' matmuls, for each of its own tokens; 0 without experts.

    Dropless, all tokens of the devices along the expert axis may come, each with as many choices as there are experts
    here.
    """
    if config.num_experts == 1:
        return 0
    chosen, experts = config.num_experts_per_tok, config.num_experts
    if config.capacity_factor == -1:
        return mesh["expert"] * min(chosen, experts // mesh["expert"])
    return math.ceil(min(config.capacity_factor * chosen, experts))


def _mlp_width(config: Config, mesh: Mapping[str, int]) -> int:
    """Width of the mlps that a token goes through, as far as a device has room for them."""
    if config.num_experts == 1:
        return config.base_mlp_dim
    return (_rows_per_token(config, mesh) + config.shared_experts) * config.moe_mlp_dim
