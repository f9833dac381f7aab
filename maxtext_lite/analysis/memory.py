"""Bytes per device: exact for the optimizer step's state, estimated for what the compiler decides.

Exact, counters aside: parameters, optimizer state and gradient accumulators, from the shapes and their shards.
Estimated: the optimizer state of muon, and of adafactor with shard_optimizer_over_data, activations and logits. Every
line follows from shapes; XLA fuses, reuses and copies, so its own figures (`memory_analysis()`) are the truth.
"""

from collections.abc import Iterator, Mapping

from maxtext_lite.analysis.activations import LayerOnDevice, activation_lines, offloaded_activations, tokens_of_device
from maxtext_lite.batching.batch_plan import BatchPlan
from maxtext_lite.batching.ledger import LAYERS, MOMENTS, PASSES, MemoryEstimate, MemoryLine
from maxtext_lite.batching.parameters import (
    BYTES,
    ParameterCount,
    count_factored,
    count_orthogonalized,
    count_parameters,
    master_bytes,
    vocab_tiles,
    weight_shards,
)
from maxtext_lite.batching.pipeline_shape import Schedule
from maxtext_lite.config import Config
from maxtext_lite.config.errors import bytes_text
from maxtext_lite.config.kernels import Accelerator

_GPU = Accelerator.planned("gpu")


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
        optimizer state and gradients, besides the outer parameters and their float32 momentum. Frozen parameters are
        held once.
      accelerator: what the devices are, which decides the attention kernel and whether arrays fill tiles.
    """
    schedule = config.pipeline_schedule
    pieces = num_pipeline_microbatches if schedule == "1f1b" else 1
    lines = [
        *_state_lines(config, mesh, diloco_num_replicas, accelerator),
        *_gradient_lines(config, mesh, gradient_accumulation_steps, diloco_num_replicas, accelerator),
        *activation_lines(config, mesh, micro_batch_slots, num_pipeline_microbatches, schedule, accelerator),
        *_loss_lines(config, mesh, micro_batch_slots, pieces, accelerator),
    ]
    offloaded = offloaded_activations(config, mesh, micro_batch_slots, num_pipeline_microbatches, accelerator)
    if config.optimizer_memory_host_offload:
        offloaded += sum(line.bytes for line in lines if line.part == "optimizer_state")
    limit = None if device_memory_gb is None else int(device_memory_gb * 1e9)
    return MemoryEstimate(tuple(line for line in lines if line.bytes), limit, offloaded)


def evaluation_warnings(config: Config, plan: BatchPlan, accelerator: Accelerator) -> Iterator[str]:
    """A warning of an evaluation batch, larger than a micro-batch, for which devices lack memory, though not for one
    example."""
    examples, limit = plan.eval_batch_examples, plan.memory.limit
    is_off = plan.rl is not None or config.eval_interval == -1
    if limit is None or is_off or examples <= plan.micro_batch_to_train:
        return

    def needed_for(examples: int) -> int:
        rows = plan.slots_for(examples) * config.rows_per_example
        needed = _evaluation_bytes(config, plan.mesh, rows, plan.num_pipeline_microbatches, accelerator)
        return plan.memory.held + needed

    if (needed := needed_for(examples)) > limit >= needed_for(1):
        yield (
            f"at least {bytes_text(needed)} per device are needed in an evaluation, more than the {bytes_text(limit)} "
            "it has: lower eval_per_device_batch_size."
        )


def _evaluation_bytes(
    config: Config, mesh: Mapping[str, int], rows: int, num_pipeline_microbatches: int, accelerator: Accelerator
) -> int:
    """Bytes per device that an evaluation of `rows` rows needs at least, beside the state of training.

    That is the more of two: the layers' matrices in `dtype`, the stream before and after a layer and the projections of
    its mlp or of its heads; or the logits of a tile.
    """
    tokens = tokens_of_device(config, mesh, rows)
    layer = LayerOnDevice(config, mesh, tokens // num_pipeline_microbatches, accelerator)
    sizes = layer.named_bytes()
    heads = sizes["query_proj"] + sizes["key_proj"] + sizes["value_proj"]
    projections = layer.tokens * max(sizes["mlpwi_0"] + sizes["mlpwi_1"], heads)
    of_loss, tiles = loss_tiles(config, mesh, rows, 1)
    logits = 4 * (2 if accelerator.platform == "cpu" else 1) * of_loss * (config.vocab_size // mesh["tensor"]) // tiles
    cast = BYTES[config.dtype] * _count(config, mesh).matrices if config.dtype != config.weight_dtype else 0
    return max(cast + 2 * tokens * layer.stream * layer.width + projections, logits)


def estimate_activations(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    num_pipeline_microbatches: int,
    schedule: Schedule,
    accelerator: Accelerator,
) -> int:
    """Bytes per device of the layers' tensors under this schedule."""
    lines = activation_lines(config, mesh, micro_batch_slots, num_pipeline_microbatches, schedule, accelerator)
    return MemoryEstimate(tuple(lines), None).activations


def _count(config: Config, mesh: Mapping[str, int], accelerator: Accelerator | None = None) -> ParameterCount:
    """Parameters of a device; on a TPU including the padding of tiles."""
    tiled = accelerator is not None and accelerator.platform == "tpu"
    return count_parameters(config, **mesh, tiled=tiled)


def _copies(mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """Replicas of local updates on a device; 1 without them."""
    return 1 if diloco_num_replicas is None else diloco_num_replicas // mesh["data"]


def _trained(config: Config, count: ParameterCount) -> ParameterCount:
    return ParameterCount(matrices=count.adapters, tables=0, norms=0) if config.lora_rank else count


def _state_lines(
    config: Config, mesh: Mapping[str, int], diloco_num_replicas: int | None, accelerator: Accelerator
) -> Iterator[MemoryLine]:
    """Parameters, their copies in `dtype`, and the optimizer's state."""
    count = _count(config, mesh, accelerator)
    trained, weight_bytes = _trained(config, count), BYTES[config.weight_dtype]
    copies, outer = _copies(mesh, diloco_num_replicas), diloco_num_replicas is not None
    if config.lora_rank:  # adapters are float32 whatever the weights are
        yield MemoryLine("frozen parameters", "params", count.total * weight_bytes, "in weight_dtype")
        weight_bytes = 4
    yield MemoryLine("parameters", "params", copies * trained.total * weight_bytes, "a device's shards of each")
    if outer:
        yield MemoryLine("outer parameters", "params", trained.total * weight_bytes, "what replicas last agreed on")
    if config.dtype != config.weight_dtype:
        cast = copies * trained.matrices + (count.matrices if config.lora_rank else 0)
        why = "matrices of layers in `dtype`, from which they are gathered"
        yield MemoryLine("weights in dtype", "weights", cast * BYTES[config.dtype], why, PASSES)
    # In float32, whatever the weights are.
    state = _optimizer_elements(config, mesh, trained) * 4
    state = copies * (state // mesh["data"] if config.shard_optimizer_over_data else state)
    when = ("update",) if config.optimizer_memory_host_offload else MOMENTS
    yield MemoryLine("optimizer state", "optimizer_state", state, f"of {config.optimizer}, in float32", when)
    if config.optimizer == "muon":
        work, why = 4 * copies * count_orthogonalized(config, **mesh), "before and after a step, in float32"
        yield MemoryLine("matrices made orthogonal", "weights", work, why, ("update",))
    if outer and config.diloco_outer_momentum:
        yield MemoryLine("outer momentum", "optimizer_state", trained.total * 4, "of local updates, in float32", when)
    masters = master_bytes(config, mesh, diloco_num_replicas) if config.master_weights else 0
    if masters:
        yield MemoryLine("masters", "optimizer_state", masters, "float32 beside narrower weights", when)
    if accelerator.platform == "cpu":
        # XLA's loops there write one array each: the new moment, while the parameter's loop still reads the old one.
        yield MemoryLine("state, copied", "weights", state + masters, "old moments while new are written", ("update",))


def _optimizer_elements(config: Config, mesh: Mapping[str, int], count: ParameterCount) -> int:
    match config.optimizer:
        case "adamw":
            return 2 * count.total
        case "sgd":
            return count.total if config.sgd_momentum else 0
        case "lion":
            return count.total
        case "muon":  # one moment for the layers' matrices, Adam's two for everything else
            return count.matrices + 2 * (count.tables + count.norms)
        case "adafactor":
            return count_factored(config, **mesh)


def _gradient_lines(
    config: Config,
    mesh: Mapping[str, int],
    gradient_accumulation_steps: int,
    diloco_num_replicas: int | None,
    accelerator: Accelerator,
) -> Iterator[MemoryLine]:
    """The float32 sum over micro-batches, if there is more than one pass, and the gradient of one pass."""
    count = _trained(config, _count(config, mesh, accelerator))
    copies = _copies(mesh, diloco_num_replicas)
    adds_up = gradient_accumulation_steps > 1 or config.pipeline_schedule == "1f1b"
    if adds_up:
        why = "of micro-batches, or of pipeline microbatches, in float32"
        yield MemoryLine("sum of gradients", "gradients", 4 * copies * count.total, why)
    when = LAYERS if adds_up else (*LAYERS, "update")
    # XLA fills the stacked gradients of the layers with zeros before the loss, but allocates them unfilled on a TPU.
    filled = when if accelerator.platform == "tpu" else ("loss", *when)
    of_layers, rest = count.matrices * BYTES[config.dtype], count.tables + count.norms
    why = "of one micro-batch, in `dtype`"
    yield MemoryLine("gradients of matrices", "gradients", copies * of_layers, why, filled)
    why = "of one micro-batch, in weight_dtype"
    yield MemoryLine("gradients of tables", "gradients", copies * rest * BYTES[config.weight_dtype], why, when)


def loss_tiles(config: Config, mesh: Mapping[str, int], micro_batch_slots: int, num_pieces: int) -> tuple[int, int]:
    """(tokens whose loss a device computes at once, their tiles)."""
    tokens = tokens_of_device(config, mesh, micro_batch_slots) // num_pieces // mesh["stage"]  # stages share them
    parts = mesh["stage"] if config.pipeline_schedule == "1f1b" else 1  # that schedule splits rows for the loss
    in_a_row = config.max_target_length // (mesh["context"] * parts)
    vocab_size = config.vocab_size // mesh["tensor"]
    tiles = vocab_tiles(
        config.num_vocab_tiling, rows=max(tokens // in_a_row, 1), tokens=in_a_row, vocab_size=vocab_size
    )
    return tokens, tiles


def _loss_lines(
    config: Config, mesh: Mapping[str, int], micro_batch_slots: int, num_pieces: int, accelerator: Accelerator
) -> Iterator[MemoryLine]:
    """What the loss works with, tile by tile of the sequence; stages share the tokens."""
    tokens, tiles = loss_tiles(config, mesh, micro_batch_slots, num_pieces)
    vocab_size, width = config.vocab_size // mesh["tensor"], BYTES[config.dtype]
    head, shard = vocab_size * config.base_emb_dim, vocab_size * config.base_emb_dim // weight_shards(mesh)
    tile = tokens * vocab_size // tiles
    logits = (4 * (2 if accelerator.platform == "cpu" else 1) + width) * tile
    narrow = config.grad_dtype != "float32" and weight_shards(mesh) > 1
    reduced = 0
    if config.lora_rank == 0:
        yield _loss_line("head's gradient", 4 * head, "of the device's own tokens, summed over tiles in float32")
        if weight_shards(mesh) * mesh["stage"] > 1:
            reduced = 4 * shard + (BYTES[config.grad_dtype] * head if narrow else 0)
    if reduced > logits:
        yield _loss_line("head's gradient, reduced", reduced, "over the devices' tokens; no logits then")
    else:
        why = "in float32, and on a CPU their exponentials; their gradient in `dtype`"
        yield _loss_line("logits of a tile", logits, why)
    if weight_shards(mesh) > 1 or config.dtype != config.weight_dtype:
        yield MemoryLine("head as used", "weights", width * head, "split over tensor only, in `dtype`", ("loss",))
    hidden = 4 * tokens * config.base_emb_dim * width
    yield _loss_line("last hidden states", hidden, "as they come, normed, in tiles, and their gradient")


def _loss_line(name: str, size: int, why: str) -> MemoryLine:
    return MemoryLine(name, "logits", size, why, ("loss",))
