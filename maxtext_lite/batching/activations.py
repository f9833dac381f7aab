"""Bytes per device of layers' tensors: those that wait for the backward pass, and those in use while a layer goes back.

All follow from shapes. What waits is what remat_policy keeps and the backward pass asks for. What is in use at a time
is what the widest moment of a layer's way back needs: that of its mlp or experts, or that of its attention.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from maxtext_lite.batching.ledger import LAYERS, PASSES, MemoryLine, Moment
from maxtext_lite.batching.parameters import count_parameters, weight_shards
from maxtext_lite.batching.pipeline_shape import Schedule
from maxtext_lite.config import Config, remat_of
from maxtext_lite.config.experts import exchanged_rows
from maxtext_lite.config.kernels import Accelerator, planned_kernel

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LANES = 128  # a TPU's tiles are so wide
_PLAIN = Accelerator("cpu")


def tokens_of_device(config: Config, mesh: Mapping[str, int], micro_batch_slots: int) -> int:
    """Tokens of one micro-batch that a device has."""
    rows = micro_batch_slots // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    return rows * config.max_target_length // mesh["context"]


def activation_lines(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    num_pipeline_microbatches: int,
    schedule: Schedule,
    accelerator: Accelerator,
) -> Iterator[MemoryLine]:
    """What the forward pass keeps, until a layer goes back, and what is in use while it does.

    Kept is what remat_policy saves in each layer: with gpipe of every tick of a micro-batch, idle ones too; with 1f1b
    of one pipeline microbatch, beside the inputs of the last 2 S - 1 ticks.
    """
    tokens = tokens_of_device(config, mesh, micro_batch_slots)
    piece = tokens // num_pipeline_microbatches
    stages, first = mesh["stage"], config.first_num_dense_layers
    layers = (config.base_num_decoder_layers - first) // stages
    of_experts, dense = (kept_bytes(each, mesh, piece, accelerator) for each in (config, _without_experts(config)))
    share = _dense_share(config)
    kept = int((1 - share) * of_experts + share * dense)
    yield _line("kept of first layers", tokens * kept * first, "as below, on every stage")
    if schedule == "1f1b":
        whole = piece * kept * layers
        inputs = piece * tensor_bytes(config, mesh, piece)["decoder_layer_input"]
        yield _line("inputs under way", (2 * stages + 1) * inputs, "a piece for each of 2 S - 1 ticks, and to and fro")
        yield _line("kept of layers", whole, "what remat_policy keeps: of a stage's layers, of one piece", LAYERS)
    else:
        repeats, ticks = _repeats_and_ticks(config, stages, num_pipeline_microbatches)
        whole = piece * kept * (layers // repeats) * ticks
        yield _line("kept of layers", whole, "what remat_policy keeps, x layers x ticks")
        if repeats > 1:  # each tick looks its layers up, and has a copy of them wait
            matrices = count_parameters(config, tiled=False, **mesh).matrices
            copies = matrices // repeats * ticks * BYTES[config.dtype]
            yield MemoryLine("weights of ticks", "weights", copies, "those of a tick's layers x ticks", PASSES)
        if stages > 1:
            dims = config.rotary_dim // 2
            dims = -(-dims // _LANES) * _LANES if accelerator.platform == "tpu" and dims else dims
            yield _line("rotations of ticks", 2 * 4 * dims * piece * ticks, "cosines and sines in float32 x ticks")
            rounds = 2 * tokens * tensor_bytes(config, mesh, piece)["decoder_layer_input"]
            why = "a micro-batch as it goes round the stages, before and after a tick"
            yield _line("pieces", rounds, why, LAYERS)
    yield from _in_use(config, mesh, piece, accelerator)


def _dense_share(config: Config) -> Fraction:
    """Of the layers after the first dense ones, the share that has no experts: 0, where the pattern does not mix."""
    kinds, layers = config.mlp_kinds, config.base_num_decoder_layers
    if config.num_experts == 1:
        return Fraction(0)
    return Fraction(sum(kinds[layer % len(kinds)] == "dense" for layer in range(layers)), layers)


def _without_experts(config: Config) -> Config:
    """What the layers are that have an mlp in the place of experts."""
    return config.model_copy(update={"num_experts": 1}) if _dense_share(config) else config


def _repeats_and_ticks(config: Config, stages: int, num_pipeline_microbatches: int) -> tuple[int, int]:
    """Of gpipe, how often a micro-batch goes round the stages, and how often all of them run for it."""
    repeats = config.num_stacked_layers // (stages * config.num_layers_per_pipeline_stage) if stages > 1 else 1
    return repeats, repeats * num_pipeline_microbatches + stages - 1


def _line(name: str, size: int, why: str, moments: tuple[Moment, ...] = PASSES) -> MemoryLine:
    return MemoryLine(name, "activations", size, why, moments)


def offloaded_activations(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    num_pipeline_microbatches: int,
    accelerator: Accelerator = _PLAIN,
) -> int:
    """Bytes per device of the layers' tensors that wait for the backward pass in pinned host memory."""
    remat = remat_of(config)
    if remat is None:
        return 0
    piece, stages = tokens_of_device(config, mesh, micro_batch_slots) // num_pipeline_microbatches, mesh["stage"]
    sizes, share = tensor_bytes(config, mesh, piece, accelerator), _dense_share(config)
    dense = tensor_bytes(_without_experts(config), mesh, piece, accelerator)
    of_layer = sum((1 - share) * sizes[name] + share * dense[name] for name in remat.offloaded)
    of_stage = int(of_layer * config.base_num_decoder_layers / stages)
    if config.pipeline_schedule == "1f1b":
        return piece * of_stage
    repeats, ticks = _repeats_and_ticks(config, stages, num_pipeline_microbatches)
    return piece * of_stage // repeats * ticks


def splits_residual(config: Config, mesh: Mapping[str, int]) -> bool:
    """Whether the tokens of a row can be shared out over context x tensor."""
    return config.max_target_length % (mesh["context"] * mesh["tensor"]) == 0


def _stream_width(config: Config, mesh: Mapping[str, int]) -> int:
    """Of a token, between blocks, where `tensor` splits a row's tokens if it can."""
    return config.base_emb_dim // (mesh["tensor"] if splits_residual(config, mesh) else 1)


def tensor_bytes(
    config: Config, mesh: Mapping[str, int], tokens: int, accelerator: Accelerator = _PLAIN
) -> dict[str, int]:
    """Bytes per token of the tensors of a layer that remat keys name, of a device's `tokens` at once; 0 for
    those that no backward pass asks for, and that are not kept whatever a policy says."""
    tensor, emb = mesh["tensor"], _stream_width(config, mesh)
    heads, kv_heads = config.base_num_query_heads // tensor, config.base_num_kv_heads // tensor
    mlp = _mlp_width(config, mesh, tokens) / tensor
    after = 0 if config.norm_placement == "pre" else emb  # the next layer's input is kept, and says as much
    gated = emb if config.shared_expert_gate and config.num_experts > 1 else 0  # the gradient of the gate asks for it
    kernel = planned_kernel(config, accelerator, mesh["context"]).name
    elements = {
        "decoder_layer_input": emb,
        "query_proj": heads * _lanes(config.head_dim, accelerator),
        # Latent attention projects a part of each key; the rest is the same for all heads.
        "key_proj": kv_heads
        * _lanes(config.head_dim if config.mla is None else config.mla.qk_nope_head_dim, accelerator),
        "value_proj": kv_heads * _lanes(config.value_dim, accelerator),
        # With float32 log-partitions. jax's call of cuDNN names neither: they are made again whatever a policy says.
        "context": 0
        if kernel.startswith("cudnn")
        else heads * (_lanes(config.value_dim, accelerator) + Fraction(4, BYTES[config.dtype])),
        "out_proj": emb if config.parallel_block == "none" else after,  # asked for by the norm before the mlp
        "mlpwi_0": mlp if config.gated_mlp else 0,
        "mlpwi_1": mlp,
        "mlpwo": after + gated + _choices(config) * config.base_emb_dim,
        "expert_rows": _rows_per_token(config, mesh, tokens) * config.base_emb_dim,
    }
    return {name: int(size * BYTES[config.dtype]) for name, size in elements.items()}


def kept_bytes(config: Config, mesh: Mapping[str, int], tokens: int, accelerator: Accelerator = _PLAIN) -> int:
    """Bytes per token and layer that wait for the backward pass on the device."""
    sizes, remat = tensor_bytes(config, mesh, tokens, accelerator), remat_of(config)
    if remat is not None:  # the layer's input is always kept, here or on the host
        return sum(sizes[name] for name in {*remat.saved, "decoder_layer_input"} - {*remat.offloaded})
    # Everything: of the stream the inputs of both halves, and what goes into each norm and comes out of it.
    width, tensor = BYTES[config.dtype], mesh["tensor"]
    streams = {"none": 4, "one_norm": 2, "two_norms": 3}[config.parallel_block]
    stream = (streams + 2 * (config.norm_placement == "both")) * _stream_width(config, mesh) * width
    blocks = sum(sizes[name] for name in ("mlpwi_0", "mlpwi_1", "expert_rows")) + _kept_of_heads(
        config, mesh, accelerator
    )
    if config.num_experts == 1:
        return stream + blocks + width * config.base_mlp_dim // tensor
    # The shared mlp's hidden values and, in float32, what its gate multiplies, the router's input and, with a capacity,
    # what comes back of each choice; of each slot what goes into its last matmul.
    blocks += width * config.shared_mlp_dim // tensor + 4 * config.shared_expert_gate * _stream_width(config, mesh)
    if config.capacity_factor != -1:
        blocks += int(width * _rows_per_token(config, mesh, tokens) * config.moe_mlp_dim / tensor)
    return stream + blocks + 4 * (1 + _choices(config)) * config.base_emb_dim


def _kept_of_heads(config: Config, mesh: Mapping[str, int], accelerator: Accelerator) -> int:
    """Bytes per token of what attention keeps where it keeps everything: what its kernel takes and gives, with
    log-partitions in float32, what goes into norms of queries and keys, and latent vectors before and after theirs.

    A TPU's kernel has heads as rows, which fill lanes up, and its context once more as the next matmul takes it.
    """
    heads, kv_heads = (each // mesh["tensor"] for each in (config.base_num_query_heads, config.base_num_kv_heads))
    head_dim, value_dim = (_lanes(dim, accelerator) for dim in (config.head_dim, config.value_dim))
    elements = (heads + kv_heads) * (head_dim + value_dim)
    if accelerator.platform == "tpu":
        elements += heads * config.value_dim
    if config.qk_norm != "none":
        elements += (heads + kv_heads) * config.head_dim
    if config.mla is not None:
        elements += 2 * (config.mla.kv_lora_rank + config.mla.q_lora_rank)
    return elements * BYTES[config.dtype] + 4 * heads


def _lanes(dim: int, accelerator: Accelerator) -> int:
    """What the last dim of a kernel's array takes: on a TPU whole tiles."""
    return -(-dim // _LANES) * _LANES if accelerator.platform == "tpu" else dim


def _choices(config: Config) -> int:
    """Of a token, results that are kept apart until their sum: with a capacity, the derivatives of shares need them."""
    return 0 if config.num_experts == 1 or config.capacity_factor == -1 else config.num_experts_per_tok


def _in_use(config: Config, mesh: Mapping[str, int], piece: int, accelerator: Accelerator) -> Iterator[MemoryLine]:
    """What a layer of one piece works with on its way back."""
    width, tensor = BYTES[config.dtype], mesh["tensor"]
    stream, heads = _stream_width(config, mesh), config.base_num_query_heads // tensor
    kv_heads = config.base_num_kv_heads // tensor
    head_dim, value_dim = (_lanes(dim, accelerator) for dim in (config.head_dim, config.value_dim))
    yield _line(
        "stream of a layer",
        6 * piece * stream * width,
        "the inputs of its halves and their norms, and the gradient before and after a half",
        LAYERS,
    )
    of_heads = 2 * heads * (head_dim + value_dim) + kv_heads * (2 * head_dim + value_dim)
    yield _line(
        "heads of a layer",
        piece * of_heads * width,
        "queries and keys before and after rotation, values, context as its kernel gives it and as a matmul takes it",
        LAYERS,
    )
    rows = Fraction(piece * mesh["context"], config.max_target_length)
    of_attention = int(rows * _attention_bytes(config, mesh, accelerator))
    of_attention += piece * width * (heads * (head_dim + value_dim) + kv_heads * (head_dim + value_dim))
    yield _line("attention of a layer", of_attention, "gradients, and what its kernel holds", ("attention",))
    why = "projections or rows, hidden values and their gradients"
    of_mlp = max(_mlp_bytes(each, mesh, piece, accelerator) for each in (config, _without_experts(config)))
    yield _line("mlp of a layer", of_mlp, why, ("mlp",))
    if tensor > 1 and accelerator.platform == "gpu" and splits_residual(config, mesh):
        whole = piece * config.base_emb_dim * width
        why = "a half's input and gradient, each once more transposed"
        yield _line("tokens, gathered", 4 * whole, why, LAYERS)
        why = "what queries, keys, values and the mlp give to the gradient of the stream"
        yield _line("tokens, to be shared out", 4 * whole, why, ("attention",))
    yield from _gathered(config, mesh, accelerator)


def _mlp_bytes(config: Config, mesh: Mapping[str, int], tokens: int, accelerator: Accelerator) -> int:
    """Bytes that the way back through an mlp or experts works with.

    An mlp's projections, what comes of them, and their gradients: 6 as wide as it, or 4 without a gate. Of experts the
    rows and the rows' gradients, three products in float32 as the kernels give them and in `dtype` as the next ones
    take them, and what an exchange sends while it receives as much.
    """
    width, tensor = BYTES[config.dtype], mesh["tensor"]
    dense = (6 if config.gated_mlp else 4) * tokens * width
    if config.num_experts == 1:
        return dense * config.base_mlp_dim // tensor
    rows, shards = _rows_per_token(config, mesh, tokens) * tokens, mesh["expert"]
    if accelerator.platform == "cpu" and config.capacity_factor == -1:
        # XLA's ragged dot there has all rows for each expert, zero but for its own: of six matmuls' operands, of five
        # where the forward pass's products are kept.
        remat = remat_of(config)
        of_stream = 2 if remat is None or "mlpwi_1" in (*remat.saved, *remat.offloaded) else 3
        numbers = of_stream * config.base_emb_dim + 3 * config.moe_mlp_dim // tensor
        apart = config.num_experts // shards * rows * numbers * 4
    else:
        apart = 0
    crossing = 2 * width * rows * config.base_emb_dim if shards > 1 else 0
    products = 5 if config.expert_bias else 3  # the biases of each row's two projections among them
    of_width = products * 4 + 3 * width
    if config.capacity_factor != -1:  # on a TPU as an mlp; elsewhere matmuls and what follows write float32
        of_width = 6 * width if accelerator.platform == "tpu" else 5 * 4 + 2 * width
    of_rows = rows * (2 * config.base_emb_dim * width + of_width * config.moe_mlp_dim // tensor)
    router = 4 * tokens * config.base_emb_dim
    return int(of_rows + crossing + apart) + router + dense * config.shared_mlp_dim // tensor


def _gathered(config: Config, mesh: Mapping[str, int], accelerator: Accelerator) -> Iterator[MemoryLine]:
    """Matrices of a layer as they are used: split over tensor only."""
    if weight_shards(mesh) == 1:
        return
    width, tensor, emb = BYTES[config.dtype], mesh["tensor"], config.base_emb_dim
    if config.num_experts > 1:
        if mesh["fsdp"] * mesh["context"] == 1:
            return
        matrix = config.num_experts // mesh["expert"] * emb * config.moe_mlp_dim // tensor
        if accelerator.platform == "gpu" and config.capacity_factor == -1:
            in_a_round = math.lcm(len(config.pattern), len(config.mlp_kinds))
            gradients = int(3 * in_a_round * (1 - _dense_share(config))) * matrix * BYTES[config.grad_dtype]
            why = "of the layers that a scan goes through at once, as shards send them to each other"
            yield MemoryLine("experts' gradients, whole", "gradients", gradients, why, ("mlp",))
            return
        why = "two of a layer's three as they are used together, or a float32 gradient of one"
        yield MemoryLine("experts' weights, gathered", "weights", 2 * matrix * width, why, ("mlp",))
        return
    widest = max(config.base_mlp_dim, config.base_num_query_heads * config.head_dim) // tensor
    why = "the widest matrix of a layer, and the next on its way"
    yield MemoryLine("weights, gathered", "weights", 2 * emb * widest * width, why, LAYERS)


def _attention_bytes(config: Config, mesh: Mapping[str, int], accelerator: Accelerator) -> int:
    """Bytes of what attention in one layer works with per row.

    Fused kernels hold no scores; pallas_mha has keys, values and their gradients for every query head, and cudnn_masked
    a mask as wide as the scores and a bias that is made of it. Plain attention has scores, probabilities and the
    gradients of both in float32, of a tile of at most 512 x 512, or of a strip of 128 queries where one tile is all
    there is (models/tile_layout.py). On context shards there are other shards' keys and values too, and their float32
    gradients: of all shards with all_gather, of two with ring.
    """
    shards, tensor, length = mesh["context"], mesh["tensor"], config.max_target_length
    heads = config.base_num_query_heads // tensor
    match planned_kernel(config, accelerator, shards).name:
        case "dot_product":
            run = length if shards == 1 else length // (2 * shards)
            tile = min(run, 512)
            queries = min(tile, 128) if shards == 1 and run == tile else tile
            held = 4 * 4 * heads * queries * tile
        case "cudnn_masked":
            held = (1 + BYTES[config.dtype]) * length**2
        case "pallas_mha":
            held = 4 * BYTES[config.dtype] * heads * config.head_dim * length
        case _:
            held = 0
    if shards == 1:
        return held
    others = length if config.context_parallel_strategy == "all_gather" else 2 * length // shards
    keys_and_values = (config.base_num_kv_heads // tensor) * (config.head_dim + config.value_dim)
    return held + others * keys_and_values * (BYTES[config.dtype] + 4)


def _rows_per_token(config: Config, mesh: Mapping[str, int], tokens: int) -> Fraction:
    """Rows that a device has room for in its experts' matmuls, for each of its own tokens; 0 without experts.

    Dropless, they are those of one round of the exchange (`config.experts`); or all tokens of the devices along the
    expert axis may come, each with as many choices as there are experts here.
    """
    if config.num_experts == 1:
        return Fraction(0)
    chosen, experts, shards = config.num_experts_per_tok, config.num_experts, mesh["expert"]
    if config.capacity_factor != -1:
        length = config.max_target_length
        slots = math.ceil(Fraction(config.capacity_factor) * chosen * length / experts)  # of an example, with an expert
        return Fraction(min(slots, length) * experts, length)
    rows = exchanged_rows(
        num_tokens=tokens,
        num_per_token=chosen,
        num_experts=experts,
        num_shards=shards,
        element_bytes=BYTES[config.dtype],
    )
    return Fraction(shards * (tokens * min(chosen, experts // shards) if rows is None else rows), tokens)


def _mlp_width(config: Config, mesh: Mapping[str, int], tokens: int) -> Fraction:
    """Width of the mlps that a token goes through, as far as a device has room for them."""
    if config.num_experts == 1:
        return Fraction(config.base_mlp_dim)
    return _rows_per_token(config, mesh, tokens) * config.moe_mlp_dim + config.shared_mlp_dim
