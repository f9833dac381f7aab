"""Bytes per device: exact for what the optimizer step holds, estimated for what the compiler decides.

Exact: parameters, optimizer state (sgd, adamw, lion) and gradient accumulators, from the shapes and their shards.
Estimated: optimizer state of muon and adafactor, activations and logits. XLA fuses, reuses and pads, and its own
figures (`memory_analysis()`) are the truth; these tell 10 GB from 100 before there is a machine.
"""

import dataclasses
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
      norms: elements of the norm scales.
    """

    matrices: int
    tables: int
    norms: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.matrices + self.tables + self.norms


def count_parameters(config: Config, *, fsdp: int = 1, tensor: int = 1, stage: int = 1) -> ParameterCount:
    """Parameters per device, exactly: matrices are split over fsdp and tensor, layers over stages, norms not."""
    emb, heads, kv_heads = config.base_emb_dim, config.base_num_query_heads, config.base_num_kv_heads
    layers = config.base_num_decoder_layers // stage
    attention = 2 * emb * heads * config.head_dim + 2 * emb * kv_heads * config.head_dim
    mlp = 3 * emb * config.base_mlp_dim
    tables = config.vocab_size * emb * (1 if config.logits_via_embedding else 2)
    shards = fsdp * tensor
    return ParameterCount(layers * (attention + mlp) // shards, tables // shards, (2 * layers + 1) * emb)


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
    count = count_parameters(config, fsdp=mesh["fsdp"], tensor=mesh["tensor"], stage=mesh["stage"])
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
    mlp = config.base_mlp_dim // tensor
    dtype_bytes = _BYTES[config.dtype]
    scores, attending = _attention_bytes(config, mesh)
    projections = (query + key_value + emb + 2 * mlp) * dtype_bytes
    everything = projections + (3 * emb + query + mlp) * dtype_bytes
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
    recomputed = 0 if config.remat_policy == "none" else everything
    rows = tokens * mesh["context"] // config.max_target_length
    return kept + (tokens * recomputed + rows * attending) // num_pipeline_microbatches


def _attention_bytes(config: Config, mesh: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of all scores per token of a device, and of what attention in one layer works with per row.

    cuDNN's and splash attention hold no scores. Plain attention has three float32 copies of them at once, of the half
    of the square that it computes; on context shards, of one tile of at most about 512 x 512 (models/
    context_attention.py). There it has other shards' keys and values too, and their float32 gradients: of all shards
    with all_gather, of two with ring.
    """
    shards, tensor, length = mesh["context"], mesh["tensor"], config.max_target_length
    heads = config.base_num_query_heads // tensor
    scores = 4 * heads * length // 2
    if shards > 1:
        others = length if config.context_parallel_strategy == "all_gather" else 2 * length // shards
        keys_and_values = 2 * (config.base_num_kv_heads // tensor) * config.head_dim
        tile = min(length // (2 * shards), 512)
        return scores, 3 * 4 * heads * tile**2 + others * keys_and_values * (_BYTES[config.dtype] + 4)
    flash = config.attention in ("cudnn_flash", "splash") or (config.attention == "auto" and config.dtype != "float32")
    return (0, 0) if flash else (scores, 3 * length * scores)
