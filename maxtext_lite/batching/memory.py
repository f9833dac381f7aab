"""Bytes per device: exact for what the optimizer step holds, estimated for what the compiler decides.

Exact, but for counters: parameters, optimizer state and gradient accumulators, from the shapes and their shards.
Estimated: optimizer state of muon, and of adafactor with shard_optimizer_over_data, activations and logits. XLA fuses,
reuses and pads, and its own figures (`memory_analysis()`) are the truth; these tell 10 GB from 100 before there is a
machine.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.batching.parameters import ParameterCount, count_factored, count_parameters
from maxtext_lite.batching.pipeline import Schedule
from maxtext_lite.config import Config, remat_of
from maxtext_lite.config.experts import exchanged_rows
from maxtext_lite.config.kernels import Accelerator, planned_kernel
from maxtext_lite.config.problem import divisors

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GPU = Accelerator.planned("gpu")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device while a step runs.

    Attributes:
      total: on the device; `limit` is what it has, where that is known.
      offloaded: in the host's pinned memory, which is not part of the total.
    """

    params: int
    optimizer_state: int
    gradients: int
    activations: int
    logits: int
    total: int
    limit: int | None
    offloaded: int = 0

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return dataclasses.asdict(self)


_TILE_LOGITS_BYTES = 2**29


def vocab_tiles(num_vocab_tiling: int, *, rows: int, tokens: int, vocab_size: int) -> int:
    """Pieces in which a device computes the logits of its tokens: `num_vocab_tiling`, or where that is -1 the fewest
    whose float32 logits take at most half a GiB, a 32nd of the smallest accelerator's memory.

    It does not ask which device it is, so that a run's arithmetic is the same on another.

    Args:
      rows: those of a device.
      tokens: of each of these rows; cut into equal pieces.
      vocab_size: the device's part.
    """
    if num_vocab_tiling != -1:
        return num_vocab_tiling
    fits = (pieces for pieces in divisors(tokens) if 4 * rows * (tokens // pieces) * vocab_size <= _TILE_LOGITS_BYTES)
    return next(fits, tokens)


def tiles_kept(num_tiles: int, *, tokens: int, emb_dim: int) -> int:
    """Tiles, a divisor of all, whose logits' gradients are kept until the head's gradient is taken of them together:
    the most that have no more tokens than `emb_dim`, and so take no more than the head itself as it is used.

    Args:
      tokens: of a device, in all tiles.
    """
    return max((count for count in divisors(num_tiles) if tokens * count // num_tiles <= emb_dim), default=1)


def bytes_text(size: int) -> str:
    """A number of bytes to read: 1.5 GB (1e9 bytes), 3.2 MB or 0.4 kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def estimate_memory(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    gradient_accumulation_steps: int,
    num_pipeline_microbatches: int,
    device_memory_gb: float | None,
    diloco_num_replicas: int | None = None,
    accelerator: Accelerator = _GPU,
) -> MemoryEstimate:
    """Bytes per device during a training step on this mesh.

    Args:
      mesh: size of each mesh axis.
      micro_batch_slots: rows of one micro-batch over all devices.
      device_memory_gb: memory of a device in GB (1e9 bytes), or None.
      diloco_num_replicas: copies of local updates, or None. A device then holds replicas / data copies of parameters,
        optimizer state and gradients, and beside them the outer parameters and their float32 momentum. Frozen
        parameters are there once.
      accelerator: what the devices are, which decides the attention kernel.
    """
    count = count_parameters(config, **_shards(mesh))
    weight_bytes = _BYTES[config.weight_dtype]
    frozen = 0
    if config.lora_rank:  # float32 whatever the weights are
        frozen, weight_bytes = count.total * weight_bytes, 4
        count = ParameterCount(matrices=count.adapters, tables=0, norms=0)
    params = count.total * weight_bytes
    state = _optimizer_elements(config, mesh, count) * 4  # float32, whatever the weights are
    masters = master_bytes(config, mesh, diloco_num_replicas) if config.master_weights else 0
    # With A > 1 a micro-batch's gradient stands beside the float32 sum of the earlier ones.
    gradients = count.total * (4 if gradient_accumulation_steps == 1 else 4 + weight_bytes)
    if config.shard_optimizer_over_data:
        state //= mesh["data"]
    if diloco_num_replicas is not None:
        copies = diloco_num_replicas // mesh["data"]
        outer_momentum = count.total * 4 if config.diloco_outer_momentum else 0
        params, state, gradients = (copies + 1) * params, copies * state + outer_momentum, copies * gradients
    params, state = params + frozen, state + masters
    schedule = config.pipeline_schedule
    activations = estimate_activations(
        config, mesh, micro_batch_slots, num_pipeline_microbatches, schedule, accelerator
    )
    logits = _logits_bytes(config, mesh, micro_batch_slots, num_pipeline_microbatches if schedule == "1f1b" else 1)
    offloaded = offloaded_activations(config, mesh, micro_batch_slots, num_pipeline_microbatches)
    total = params + state + gradients + activations + logits
    if config.optimizer_memory_host_offload:  # the state comes back when activations have gone
        offloaded += state
        total = params + gradients + max(state, activations + logits)
    limit = None if device_memory_gb is None else int(device_memory_gb * 1e9)
    return MemoryEstimate(params, state, gradients, activations, logits, total, limit, offloaded)


def master_bytes(config: Config, mesh: Mapping[str, int], diloco_num_replicas: int | None = None) -> int:
    """Bytes per device of the float32 masters of narrower weights: what `master_weights=false` saves.

    Each replica of local updates has its own, and so have the outer parameters.
    """
    if config.weight_dtype == "float32" or config.lora_rank:  # adapters are float32, frozen weights need none
        return 0
    copies = 1 if diloco_num_replicas is None else diloco_num_replicas // mesh["data"] + 1
    return (
        4
        * copies
        * count_parameters(config, **_shards(mesh)).total
        // (mesh["data"] if config.shard_optimizer_over_data else 1)
    )


def _shards(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh axes that parameters are split over."""
    return {axis: mesh[axis] for axis in ("fsdp", "tensor", "stage", "expert")}


def _optimizer_elements(config: Config, mesh: Mapping[str, int], count: ParameterCount) -> int:
    match config.optimizer:
        case "adamw":
            return 2 * count.total
        case "sgd":
            return count.total if config.sgd_momentum else 0
        case "lion":
            return count.total
        case "muon":  # one moment for the layers' matrices, Adam's two for the rest
            return count.matrices + 2 * (count.tables + count.norms)
        case "adafactor":
            return count_factored(config, **_shards(mesh))


def _tokens(config: Config, mesh: Mapping[str, int], micro_batch_slots: int) -> int:
    """Tokens of one micro-batch that a device has."""
    rows = micro_batch_slots // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    return rows * config.max_target_length // mesh["context"]


def _logits_bytes(config: Config, mesh: Mapping[str, int], micro_batch_slots: int, num_pieces: int) -> int:
    """Float32 logits of one tile of the sequence, and their gradient; stages share the tokens out.

    On shards of fsdp there are also the head, gathered, and the gradients of logits that wait to be its gradient.
    """
    tokens = _tokens(config, mesh, micro_batch_slots) // (mesh["stage"] * num_pieces)
    cuts = mesh["stage"] if config.pipeline_schedule == "1f1b" else 1  # that schedule cuts rows for the loss
    in_a_row = config.max_target_length // (mesh["context"] * cuts)
    vocab_size, width = config.vocab_size // mesh["tensor"], _BYTES[config.dtype]
    tiles = vocab_tiles(
        config.num_vocab_tiling, rows=max(tokens // in_a_row, 1), tokens=in_a_row, vocab_size=vocab_size
    )
    tile = 2 * 4 * tokens * vocab_size // tiles
    if mesh["fsdp"] == 1:
        return tile
    kept = tiles_kept(tiles, tokens=tokens, emb_dim=config.base_emb_dim)
    waiting = tokens * kept // tiles if kept > 1 else 0
    return tile + width * vocab_size * (waiting + config.base_emb_dim)


def estimate_activations(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    num_pipeline_microbatches: int,
    schedule: Schedule,
    accelerator: Accelerator = _GPU,
) -> int:
    """Bytes per device kept for the backward pass, and of what is recomputed in it at a time.

    Kept is what remat_policy saves in each layer: with gpipe of every tick of a micro-batch, idle ones too; with 1f1b
    of one pipeline microbatch, beside the inputs of the last 2 S - 1 ticks.
    """
    tokens = _tokens(config, mesh, micro_batch_slots)
    piece = tokens // num_pipeline_microbatches
    sizes = _tensor_bytes(config, mesh, piece)
    everything = sum(sizes.values()) + _unnamed_bytes(config, mesh, piece)
    remat = remat_of(config)
    if remat is None:
        kept_of_layer, recomputed = everything, 0
    else:  # the layer's input is always kept, here or on the host
        kept_of_layer = sum(sizes[name] for name in {*remat.saved, "decoder_layer_input"} - {*remat.offloaded})
        recomputed = everything
    stages = mesh["stage"]
    first = config.first_num_dense_layers
    layers = (config.base_num_decoder_layers - first) // stages
    outside = tokens * kept_of_layer * first  # of layers that all stages have
    rows = piece * mesh["context"] // config.max_target_length
    # And what comes out of the experts of a layer, in float32.
    routed = int(_rows_per_token(config, mesh, piece) * config.base_emb_dim * 4)
    at_once = piece * (recomputed + routed) + rows * _attention_bytes(config, mesh, accelerator)
    at_once += _gathered_bytes(config, mesh)
    if schedule == "1f1b":
        waiting = (2 * stages - 1) * sizes["decoder_layer_input"]
        return piece * (kept_of_layer * layers + waiting) + at_once + outside
    return piece * kept_of_layer * layers * (num_pipeline_microbatches + stages - 1) + at_once + outside


def _gathered_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Bytes of the widest matrices of a layer, experts' aside, without their split over fsdp: one in use, and the next
    on its way."""
    if mesh["fsdp"] == 1:
        return 0
    mlp = config.base_mlp_dim if config.num_experts == 1 else config.shared_experts * config.moe_mlp_dim
    width = max(mlp, config.base_num_query_heads * config.head_dim) // mesh["tensor"]
    return 2 * config.base_emb_dim * width * _BYTES[config.dtype]


def _attention_bytes(config: Config, mesh: Mapping[str, int], accelerator: Accelerator) -> int:
    """Bytes of what attention in one layer works with per row.

    Fused kernels hold no scores; pallas_mha has keys, values and their gradients for every query head, and cudnn_masked
    a mask as wide as the scores and a bias that is made of it. Plain attention has three float32 copies of those of a
    tile of at most 512 x 512, or of a strip of 128 queries where one tile is all there is (models/tile_layout.py). On
    context shards there are other shards' keys and values too, and their float32 gradients: of all shards with
    all_gather, of two with ring.
    """
    shards, tensor, length = mesh["context"], mesh["tensor"], config.max_target_length
    heads = config.base_num_query_heads // tensor
    match planned_kernel(config, accelerator, shards).name:
        case "dot_product":
            run = length if shards == 1 else length // (2 * shards)
            tile = min(run, 512)
            queries = min(tile, 128) if shards == 1 and run == tile else tile
            held = 3 * 4 * heads * queries * tile
        case "cudnn_masked":
            held = (1 + _BYTES[config.dtype]) * length**2
        case "pallas_mha":
            held = 4 * _BYTES[config.dtype] * heads * config.head_dim * length
        case _:
            held = 0
    if shards == 1:
        return held
    others = length if config.context_parallel_strategy == "all_gather" else 2 * length // shards
    keys_and_values = (config.base_num_kv_heads // tensor) * (config.head_dim + config.value_dim)
    return held + others * keys_and_values * (_BYTES[config.dtype] + 4)


def offloaded_activations(
    config: Config, mesh: Mapping[str, int], micro_batch_slots: int, num_pipeline_microbatches: int
) -> int:
    """Bytes per device of the layers' tensors that wait for the backward pass in pinned host memory."""
    remat = remat_of(config)
    if remat is None:
        return 0
    piece, stages = _tokens(config, mesh, micro_batch_slots) // num_pipeline_microbatches, mesh["stage"]
    sizes = _tensor_bytes(config, mesh, piece)
    of_layer = sum(sizes[name] for name in remat.offloaded) * config.base_num_decoder_layers // stages
    return piece * of_layer * (1 if config.pipeline_schedule == "1f1b" else num_pipeline_microbatches + stages - 1)


def _residual_parts(config: Config, mesh: Mapping[str, int]) -> int:
    """The parts of a device's tokens into which `tensor` splits what stands between blocks."""
    return mesh["tensor"] if splits_residual(config, mesh) else 1


def splits_residual(config: Config, mesh: Mapping[str, int]) -> bool:
    """Whether the tokens of a row can be shared out over context x tensor."""
    return config.max_target_length % (mesh["context"] * mesh["tensor"]) == 0


def _tensor_bytes(config: Config, mesh: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Bytes per token of the tensors of a layer that remat keys name, where a device has so many tokens at once."""
    tensor, emb = mesh["tensor"], config.base_emb_dim // _residual_parts(config, mesh)
    heads, kv_heads = config.base_num_query_heads // tensor, config.base_num_kv_heads // tensor
    mlp = _mlp_width(config, mesh, tokens) / tensor
    # With a capacity, what came back of each choice is kept apart until the choices' sum.
    choices = 0 if config.num_experts == 1 or config.capacity_factor == -1 else config.num_experts_per_tok
    elements = {
        "decoder_layer_input": emb,
        "query_proj": heads * config.head_dim,
        "key_proj": kv_heads * config.head_dim,
        "value_proj": kv_heads * config.value_dim,
        "context": heads * config.value_dim,
        "out_proj": emb,
        "mlpwi_0": mlp if config.gated_mlp else 0,
        "mlpwi_1": mlp,
        "mlpwo": emb + choices * config.base_emb_dim,
        "expert_rows": _rows_per_token(config, mesh, tokens) * config.base_emb_dim,
    }
    return {name: int(size * _BYTES[config.dtype]) for name, size in elements.items()}


def _unnamed_bytes(config: Config, mesh: Mapping[str, int], tokens: int) -> int:
    """Bytes per token of what else a layer's backward pass needs: normed inputs, rotated heads, the gated mlp."""
    tensor = mesh["tensor"]
    mlp = int(_mlp_width(config, mesh, tokens) / tensor)
    normed = 2 * config.base_emb_dim // _residual_parts(config, mesh)
    return (normed + mlp) * _BYTES[config.dtype] + 4 * config.base_num_query_heads // tensor


def _rows_per_token(config: Config, mesh: Mapping[str, int], tokens: int) -> Fraction:
    """Rows that a device has room for in its experts' matmuls, for each of its own tokens; 0 without experts.

    Dropless, they are those of one round of the exchange (`config.experts`); or all tokens of the devices along the
    expert axis may come, each with as many choices as there are experts here.
    """
    if config.num_experts == 1:
        return Fraction(0)
    chosen, experts, shards = config.num_experts_per_tok, config.num_experts, mesh["expert"]
    if config.capacity_factor != -1:
        return Fraction(math.ceil(min(config.capacity_factor * chosen, experts)))
    rows = exchanged_rows(
        num_tokens=tokens,
        num_per_token=chosen,
        num_experts=experts,
        num_shards=shards,
        element_bytes=_BYTES[config.dtype],
    )
    return Fraction(shards * (tokens * min(chosen, experts // shards) if rows is None else rows), tokens)


def _mlp_width(config: Config, mesh: Mapping[str, int], tokens: int) -> Fraction:
    """Width of the mlps that a token goes through, as far as a device has room for them."""
    if config.num_experts == 1:
        return Fraction(config.base_mlp_dim)
    return (_rows_per_token(config, mesh, tokens) + config.shared_experts) * config.moe_mlp_dim
