"""Bytes per device: exact for the optimizer step's state, estimated for what the compiler decides.

Exact, counters aside: parameters, optimizer state and gradient accumulators, from the shapes and their shards.
Estimated: the optimizer state of muon, and of adafactor with shard_optimizer_over_data, activations and logits. Every
line follows from shapes; XLA fuses, reuses and copies, so its own figures (`memory_analysis()`) are the truth.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from maxtext_lite.batching.ledger import LAYERS, MOMENTS, PASSES, MemoryEstimate, MemoryLine, Moment
from maxtext_lite.batching.parameters import (
    BYTES,
    ParameterCount,
    count_parameters,
    master_bytes,
    vocab_tiles,
)
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.batching.topology import Schedule, num_repeats, splits_residual
from maxtext_lite.config import Config, remat_of
from maxtext_lite.config.errors import bytes_text
from maxtext_lite.config.kernels import Accelerator, exchanged_rows, planned_kernel
from maxtext_lite.config.weights import layer_kind, model_shape, num_parts

_LANES = 128  # the width of a TPU's tiles
_PLAIN = Accelerator("cpu")


def tokens_of_device(config: Config, mesh: Mapping[str, int], micro_batch_slots: int) -> int:
    """Tokens of one micro-batch on a device."""
    rows = micro_batch_slots // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    return rows * config.max_target_length // mesh["context"]


@dataclasses.dataclass(frozen=True)
class LayerOnDevice:
    """One decoder layer as a device runs it.

    Attributes:
      mesh: size of each mesh axis.
      tokens: tokens of the device in one pass.
      mixer: what the layer has as attention or in its place: see `config.keys.mixer_of`.
    """

    config: Config
    mesh: Mapping[str, int]
    tokens: int
    accelerator: Accelerator = _PLAIN
    mixer: str = "attention"

    def of_mixer(self, mixer: str) -> "LayerOnDevice":
        """The layer with this as attention or in its place."""
        if mixer == "global_attention":
            return dataclasses.replace(self, config=self.config.of_global_layers)
        return dataclasses.replace(self, mixer=mixer)

    @property
    def without_keys(self) -> "LayerOnDevice":
        """The layer with an earlier layer's keys and values, and the width that its mlp then has."""
        shared = self.config.shared_kv
        factor = 2 if shared is not None and shared.use_double_wide_mlp else 1
        changes = {"base_num_kv_heads": 0, "base_mlp_dim": factor * self.config.base_mlp_dim}
        return dataclasses.replace(self, config=self.config.model_copy(update=changes))

    @property
    def without_experts(self) -> "LayerOnDevice":
        """The layer with an mlp in place of its experts, if the model has such layers."""
        if not _dense_share(self.config):
            return self
        return dataclasses.replace(self, config=self.config.model_copy(update={"num_experts": 1}))

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.mesh["tensor"]

    @property
    def width(self) -> int:
        """Bytes of one element in `dtype`."""
        return BYTES[self.config.dtype]

    @property
    def stream(self) -> int:
        """Elements of a token between blocks, where `tensor` splits the tokens of a row if they divide."""
        return self.config.base_emb_dim // (self.tensor if splits_residual(self.config, self.mesh) else 1)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.config.base_num_query_heads // self.tensor

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.config.base_num_kv_heads // self.tensor

    @property
    def head_dim(self) -> int:
        """Elements of a query or key in the kernel's arrays."""
        return self.lanes(self.config.head_dim)

    @property
    def value_dim(self) -> int:
        """Elements of a value in the kernel's arrays."""
        return self.lanes(self.config.value_dim)

    @property
    def gate(self) -> int:
        """Elements of attention's output gate."""
        match self.config.attention_output_gate:
            case "none":
                return 0
            case "sigmoid_per_head" | "softplus_per_head":
                return self.heads
            case _:
                return self.heads * self.config.value_dim

    def lanes(self, dim: int) -> int:
        """Elements of the last dim of a kernel's array: whole tiles on a TPU."""
        return -(-dim // _LANES) * _LANES if self.accelerator.platform == "tpu" else dim

    @property
    def kernel(self) -> str:
        """Name of the attention kernel."""
        return planned_kernel(self.config, self.accelerator, self.mesh["context"]).name

    @property
    def rows_per_token(self) -> Fraction:
        """Rows that fit into a device's expert matmuls, per token of its own; 0 without experts.

        Dropless experts hold one round of the exchange (`config.kernels`). Without rounds, all tokens of the devices
        along the expert axis may arrive, each with as many choices as there are experts here.
        """
        config = self.config
        chosen = self.config.num_experts_per_tok
        shards = self.mesh["expert"]
        if config.num_experts == 1:
            return Fraction(0)
        if config.capacity_factor != -1:
            length = config.max_target_length
            slots = math.ceil(Fraction(config.capacity_factor) * chosen * length / config.num_experts)
            return Fraction(min(slots, length) * config.num_experts, length)  # each expert has `slots` for an example
        rows = exchanged_rows(
            num_tokens=self.tokens,
            num_per_token=chosen,
            num_experts=config.num_experts,
            num_shards=shards,
            element_bytes=self.width,
        )
        if rows is None:
            rows = self.tokens * min(chosen, config.num_experts // shards)
        return Fraction(shards * rows, self.tokens)

    @property
    def mlp_width(self) -> Fraction:
        """Width of the mlps that a token passes through, as far as their rows fit on the device."""
        if self.config.num_experts == 1:
            return Fraction(self.config.base_mlp_dim)
        return self.rows_per_token * self.config.moe_mlp_dim + self.config.shared_mlp_dim

    @property
    def choices(self) -> int:
        """Expert outputs per token kept apart until they are summed: the gradients of their weights need them."""
        config = self.config
        return 0 if config.num_experts == 1 or config.capacity_factor == -1 else config.num_experts_per_tok

    def named_bytes(self) -> dict[str, int]:
        """Bytes per token of each tensor that the remat keys name.

        A tensor counts 0 if no backward pass asks for it, or if no policy can keep it.
        """
        config = self.config
        after = 0 if config.norm_placement == "pre" else self.stream  # the next layer's input, kept anyway, serves too
        gated = self.stream if config.shared_expert_gate and config.num_experts > 1 else 0  # for the gate's gradient
        # Latent attention projects only a part of each key; the rest is the same for all heads.
        key_dim = config.head_dim if config.mla is None else config.mla.qk_nope_head_dim
        mlp = self.mlp_width / self.tensor
        # A context comes with float32 log-partitions. jax's call of cuDNN names neither, so they are always recomputed.
        context = self.heads * (self.value_dim + Fraction(4, self.width))
        elements = {
            "decoder_layer_input": self.stream,
            "query_proj": self.heads * self.head_dim + self.gate,
            "key_proj": self.kv_heads * self.lanes(key_dim),
            "value_proj": self.kv_heads * self.value_dim,
            "context": 0 if self.kernel.startswith("cudnn") else context,
            "out_proj": self.stream if config.parallel_block == "none" else after,  # the norm before the mlp needs it
            "mlpwi_0": mlp if config.gated_mlp else 0,
            "mlpwi_1": mlp,
            "mlpwo": after + gated + self.choices * config.base_emb_dim,
            "expert_rows": self.rows_per_token * config.base_emb_dim,
        }
        if (kind := layer_kind(self.mixer)) is not None:
            named = kind.named_elements(model_shape(config))
            of_mixer = ("query_proj", "key_proj", "value_proj", "context", "out_proj")
            elements |= {name: Fraction(named.get(name, 0), self.tensor) for name in of_mixer}
        return {name: int(size * self.width) for name, size in elements.items()}

    def offloaded_bytes(self) -> int:
        """Bytes per token kept for the backward pass in the host's memory."""
        remat = remat_of(self.config)
        if remat is None or not remat.offloaded:
            return 0
        sizes = self.named_bytes()
        return sum(sizes[name] for name in remat.offloaded)

    def kept_bytes(self) -> int:
        """Bytes per token kept for the backward pass on the device."""
        config = self.config
        sizes = self.named_bytes()
        remat = remat_of(self.config)
        if remat is not None:  # the layer's input is always kept, here or on the host
            return sum(sizes[name] for name in {*remat.saved, "decoder_layer_input"} - {*remat.offloaded})
        # Everything: of the stream the inputs of both halves, and the input and output of each norm.
        streams = {"none": 4, "one_norm": 2, "two_norms": 3}[config.parallel_block]
        stream = (streams + 2 * (config.norm_placement in ("both", "each"))) * self.stream * self.width
        blocks = sizes["mlpwi_0"] + sizes["mlpwi_1"] + sizes["expert_rows"] + self._kept_heads()
        if config.num_experts == 1:
            return stream + blocks + self.width * config.base_mlp_dim // self.tensor
        # The shared mlp's hidden values and, in float32, the input of its gate, the router's input and, with a
        # capacity, the output of each choice; and per slot the input of the last matmul.
        blocks += self.width * config.shared_mlp_dim // self.tensor + 4 * config.shared_expert_gate * self.stream
        if config.capacity_factor != -1:
            blocks += int(self.width * self.rows_per_token * config.moe_mlp_dim / self.tensor)
        return stream + blocks + 4 * (1 + self.choices) * config.base_emb_dim

    def _kept_heads(self) -> int:
        """Bytes per token that attention keeps where everything is kept.

        These are its kernel's inputs and outputs with log-partitions in float32, the inputs of the norms of queries and
        keys, latent vectors before and after their norms, and the output gate and its product with the context. On a
        TPU the kernel's heads fill whole tiles, the context is kept a second time as the next matmul takes it, and the
        kernel takes the keys and values of all shards.
        """
        config = self.config
        if (kind := layer_kind(self.mixer)) is not None:
            return kind.kept_elements(model_shape(config)) * self.width // self.tensor
        elements = (self.heads + self.kv_heads) * (self.head_dim + self.value_dim)
        if self.accelerator.platform == "tpu":
            elements += self.heads * config.value_dim
            if self.kernel == "splash" and config.context_parallel_strategy == "all_gather":
                elements += (self.mesh["context"] - 1) * self.kv_heads * (self.head_dim + self.value_dim)
        if config.qk_norm != "none":
            elements += (self.heads + self.kv_heads) * config.head_dim
        if config.mla is not None:
            elements += 2 * (config.mla.kv_lora_rank + config.mla.q_lora_rank)
        if self.gate:
            elements += self.gate + self.heads * config.value_dim
        return elements * self.width + 4 * self.heads

    def mlp_bytes(self) -> int:
        """Bytes that the backward pass through the mlp or the experts works with.

        For an mlp: its projections, their product and the gradients, 6 times its width, or 4 without a gate. For
        experts: the rows and their gradients, three products in float32 as the kernels return them and in `dtype` as
        the next ones take them, and what an exchange sends and receives.
        """
        config = self.config
        width = self.width
        tensor = self.tensor
        dense = (6 if config.gated_mlp else 4) * self.tokens * width
        if config.num_experts == 1:
            return dense * config.base_mlp_dim // tensor
        rows = self.rows_per_token * self.tokens
        shards = self.mesh["expert"]
        apart = 0
        if self.accelerator.platform == "cpu" and config.capacity_factor == -1:
            # There XLA's ragged dot has all rows for each expert, zero except for its own: operands of six matmuls, or
            # of five where the products of the forward pass are kept.
            remat = remat_of(config)
            of_stream = 2 if remat is None or "mlpwi_1" in (*remat.saved, *remat.offloaded) else 3
            numbers = of_stream * config.base_emb_dim + 3 * config.moe_mlp_dim // tensor
            apart = config.num_experts // shards * rows * numbers * 4
        crossing = 2 * width * rows * config.base_emb_dim if shards > 1 else 0
        products = 5 if config.expert_bias else 3  # including the biases of each row's two projections
        of_width = products * 4 + 3 * width
        if config.capacity_factor != -1:  # on a TPU like an mlp; elsewhere matmuls and what follows write float32
            of_width = 6 * width if self.accelerator.platform == "tpu" else 5 * 4 + 2 * width
        of_rows = rows * (2 * config.base_emb_dim * width + of_width * config.moe_mlp_dim // tensor)
        router = 4 * self.tokens * config.base_emb_dim
        return int(of_rows + crossing + apart) + router + dense * config.shared_mlp_dim // tensor

    def attention_bytes(self) -> int:
        """Bytes that the backward pass through attention works with: the gradients, and the kernel's own arrays."""
        if (kind := layer_kind(self.mixer)) is not None:
            return self.tokens * self.width * kind.used_elements(model_shape(self.config)) // self.tensor
        rows = Fraction(self.tokens * self.mesh["context"], self.config.max_target_length)
        elements = (self.heads + self.kv_heads) * (self.head_dim + self.value_dim)
        if self.gate:
            elements += self.gate + self.heads * self.value_dim
        return int(rows * self._kernel_bytes()) + self.tokens * self.width * elements

    def _kernel_bytes(self) -> int:
        """Bytes per row of the attention kernel's own arrays.

        Fused kernels have no scores; pallas_mha has keys, values and their gradients for every query head, and
        cudnn_masked a mask the size of the scores and a bias made from it. Plain attention has scores, probabilities
        and the gradients of both in float32, for a tile of at most 512 x 512, or for a strip of 128 queries where there
        is only one tile (models/attention.py). Context shards add the keys and values of other shards and their
        float32 gradients: of all shards with all_gather, of two with ring.
        """
        config = self.config
        shards = self.mesh["context"]
        length = self.config.max_target_length
        match self.kernel:
            case "dot_product":
                run = length if shards == 1 else length // (2 * shards)
                tile = min(run, 512)
                queries = min(tile, 128) if shards == 1 and run == tile else tile
                held = 4 * 4 * self.heads * queries * tile
            case "cudnn_masked":
                held = (1 + self.width) * length**2
            case "pallas_mha":
                held = 4 * self.width * self.heads * config.head_dim * length
            case _:
                held = 0
        if shards == 1:
            return held
        others = length if config.context_parallel_strategy == "all_gather" else 2 * length // shards
        keys_and_values = self.kv_heads * (config.head_dim + config.value_dim)
        return held + others * keys_and_values * (self.width + 4)


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """A training step on a device: every line of the estimate follows from it.

    Attributes:
      mesh: size of each mesh axis.
      slots: rows of one micro-batch over all devices.
      pieces: pipeline microbatches of a micro-batch.
      accumulation: micro-batches.
      replicas: copies of local updates, or None. A device then holds replicas / data copies of parameters, optimizer
        state and gradients, besides the outer parameters and their float32 momentum; frozen parameters once.
    """

    config: Config
    mesh: Mapping[str, int]
    slots: int
    pieces: int = 1
    accelerator: Accelerator = _PLAIN
    accumulation: int = 1
    replicas: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on the device."""
        return tokens_of_device(self.config, self.mesh, self.slots)

    @property
    def layer(self) -> LayerOnDevice:
        """A layer in the pass of one pipeline microbatch."""
        return LayerOnDevice(self.config, self.mesh, self.tokens // self.pieces, self.accelerator)

    @functools.cached_property
    def count(self) -> ParameterCount:
        """Parameters of the device; on a TPU including the padding of tiles."""
        return count_parameters(self.config, **self.mesh, tiled=self.accelerator.platform == "tpu")

    @property
    def trained(self) -> ParameterCount:
        """Those that are trained."""
        return ParameterCount(self.count.adapters, tables=0, norms=0) if self.config.lora_rank else self.count

    @property
    def copies(self) -> int:
        """Replicas of local updates on the device; 1 without them."""
        return 1 if self.replicas is None else self.replicas // self.mesh["data"]

    @property
    def repeats_and_ticks(self) -> tuple[int, int]:
        """With gpipe, how often a micro-batch goes round the stages, and how often all of them run for it."""
        stages = self.mesh["stage"]
        repeats = num_repeats(self.config, stages)
        return repeats, repeats * self.pieces + stages - 1


def offloaded_activations(step: DeviceStep) -> int:
    """Bytes per device of the layers' tensors kept for the backward pass in pinned host memory."""
    config = step.config
    piece = step.tokens // step.pieces
    of_layer = _mean(step.layer, LayerOnDevice.offloaded_bytes)
    of_mtp = int(step.tokens * config.mtp_num_layers * of_layer)
    of_stage = int(of_layer * config.base_num_decoder_layers / step.mesh["stage"])
    if config.pipeline_schedule == "1f1b":
        return piece * of_stage + of_mtp // step.pieces
    repeats, ticks = step.repeats_and_ticks
    return piece * of_stage // repeats * ticks + of_mtp


def activation_lines(step: DeviceStep, schedule: Schedule) -> Iterator[MemoryLine]:
    """The layers' tensors kept by the forward pass, and those in use in the backward pass of a layer.

    Each layer keeps what remat_policy saves: with gpipe for every tick of a micro-batch, including idle ones; with 1f1b
    for one pipeline microbatch, besides the layer inputs of the last 2 S - 1 ticks.
    """
    config = step.config
    layer = step.layer
    piece = layer.tokens
    stages = step.mesh["stage"]
    first = config.first_num_dense_layers
    layers = (config.base_num_decoder_layers - first) // stages
    kept = int(_mean(layer, LayerOnDevice.kept_bytes))
    input_bytes = layer.named_bytes()["decoder_layer_input"]
    yield _line("kept of first layers", step.tokens * kept * first, "as below, on every stage")
    ahead = piece if schedule == "1f1b" else step.tokens
    ahead *= config.mtp_num_layers * (kept + 5 * layer.stream * layer.width)
    yield _line("kept of mtp layers", ahead, "as below, and the inputs of norms and projections, on every stage")
    if schedule == "1f1b":
        inputs = (2 * stages + 1) * piece * input_bytes
        yield _line("inputs under way", inputs, "a microbatch for each of 2 S - 1 ticks, one sent and one received")
        why = "what remat_policy keeps, of a stage's layers and one microbatch"
        yield _line("kept of layers", piece * kept * layers, why, LAYERS)
    else:
        repeats, ticks = step.repeats_and_ticks
        whole = piece * kept * (layers // repeats) * ticks
        yield _line("kept of layers", whole, "what remat_policy keeps, x layers x ticks")
        if repeats > 1:  # each tick selects its layers, and keeps a copy of them
            matrices = count_parameters(config, tiled=False, **step.mesh).matrices
            copies = matrices // repeats * ticks * layer.width
            yield MemoryLine("weights of ticks", "weights", copies, "those of a tick's layers x ticks", PASSES)
        if stages > 1:
            rotations = 2 * 4 * layer.lanes(config.rotary_dim // 2) * piece * ticks
            yield _line("rotations of ticks", rotations, "cosines and sines in float32 x ticks")
            why = "a micro-batch going round the stages, before and after a tick"
            yield _line("pieces", 2 * step.tokens * input_bytes, why, LAYERS)
    if config.per_layer_inputs_dim:
        inputs = 2 * piece * config.per_layer_inputs_dim // layer.tensor * layer.width
        yield _line("inputs of layers", inputs, "each token's own to all layers, and their gradients")
    if config.shared_kv is not None:
        mixers = model_shape(config).layers_of
        kv_dim = sum(own.kv_heads * (own.head_dim + own.value_dim) for own in map(layer.of_mixer, mixers))
        yield _line("keys that layers share", 2 * piece * kv_dim * layer.width, "and values, with their gradients")
    yield from _in_use(layer)


def _dense_share(config: Config) -> Fraction:
    """The share of layers, after the first dense ones, without experts; 0 if the pattern does not mix."""
    kinds = config.mlp_kinds
    layers = config.base_num_decoder_layers
    if config.num_experts == 1:
        return Fraction(0)
    return Fraction(sum(kinds[layer % len(kinds)] == "dense" for layer in range(layers)), layers)


def _mean(layer: LayerOnDevice, bytes_of: Callable[[LayerOnDevice], int]) -> Fraction:
    """The mean over the model's layers, with and without experts, with attention and others."""
    config = layer.config
    mlps = config.mlp_kinds
    total = Fraction(0)
    shape = model_shape(config)
    kinds = Counter[tuple[str, str, bool]]()
    for number in range(config.base_num_decoder_layers):
        mixer = shape.mixers[number % len(shape.mixers)]
        kinds[mixer, mlps[number % len(mlps)], number >= shape.num_caching_layers] += 1
    for (mixer, mlp, shares_kv), count in kinds.items():
        of_kind = layer.of_mixer(mixer)
        if shares_kv:
            of_kind = of_kind.without_keys
        total += count * bytes_of(of_kind.without_experts if mlp == "dense" else of_kind)
    return total / config.base_num_decoder_layers


def _line(name: str, size: int, why: str, moments: tuple[Moment, ...] = PASSES) -> MemoryLine:
    return MemoryLine(name, "activations", size, why, moments)


_HEADS = "queries and keys before and after rotation, values, context as the kernel returns it and a matmul takes it"


def _in_use(layer: LayerOnDevice) -> Iterator[MemoryLine]:
    """What the backward pass of a layer uses."""
    config = layer.config
    tokens = layer.tokens
    width = layer.width
    why = "the inputs of its halves and their norms, and the gradient before and after a half"
    yield _line("stream of a layer", 6 * tokens * layer.stream * width, why, LAYERS)
    largest: list[MemoryLine] = []
    for mixer in model_shape(config).layers_of:
        own = layer.of_mixer(mixer)
        size = own.attention_bytes()
        lines = [_line(f"{mixer} of a layer", size, "as its package says", ("attention",))]
        if own.mixer == "attention":
            of_heads = 2 * own.heads * (own.head_dim + own.value_dim)
            of_heads += own.kv_heads * (2 * own.head_dim + own.value_dim)
            lines = [
                _line("heads of a layer", tokens * of_heads * width, _HEADS, LAYERS),
                _line("attention of a layer", size, "gradients, and the kernel's own arrays", ("attention",)),
            ]
        if sum(line.bytes for line in lines) > sum(line.bytes for line in largest):
            largest = lines
    yield from largest
    if config.qk_clip_threshold:
        size = 2 * 4 * tokens * layer.heads * min(512, config.max_target_length)
        yield _line(
            "scores of a tile of keys", size, "for qk_clip_threshold, before and after the mask", ("attention",)
        )
    why = "projections or rows, hidden values and their gradients"
    mlps = (layer, layer.without_experts, layer.without_keys)
    yield _line("mlp of a layer", max(each.mlp_bytes() for each in mlps), why, ("mlp",))
    if layer.tensor > 1 and layer.accelerator.platform == "gpu" and splits_residual(config, layer.mesh):
        whole = 4 * tokens * config.base_emb_dim * width
        yield _line("tokens, gathered", whole, "a half's input and gradient, each also transposed", LAYERS)
        why = "contributions of queries, keys, values and the mlp to the gradient of the stream"
        yield _line("tokens, to be shared out", whole, why, ("attention",))
    yield from _gathered(layer)


def _gathered(layer: LayerOnDevice) -> Iterator[MemoryLine]:
    """A layer's matrices in use, split over tensor only."""
    config = layer.config
    mesh = layer.mesh
    tensor = layer.tensor
    emb = layer.config.base_emb_dim
    if num_parts("embed", mesh) == 1:
        return
    if config.num_experts == 1:
        of_heads = [each.base_num_query_heads * each.head_dim for each in (config, config.of_global_layers)]
        widest = max(config.base_mlp_dim, *of_heads) // tensor
        why = "the widest matrix of a layer, and the next on its way"
        yield MemoryLine("weights, gathered", "weights", 2 * emb * widest * layer.width, why, LAYERS)
    elif mesh["fsdp"] * mesh["context"] > 1:
        matrix = config.num_experts // mesh["expert"] * emb * config.moe_mlp_dim // tensor
        if layer.accelerator.platform == "gpu" and config.capacity_factor == -1:
            in_a_round = math.lcm(len(config.pattern), len(config.mlp_kinds))
            if 2 * in_a_round > config.base_num_decoder_layers:  # no round repeats but, at most, one of the pattern
                in_a_round = len(config.pattern)
            gradients = int(3 * in_a_round * (1 - _dense_share(config))) * matrix * BYTES[config.grad_dtype]
            why = "of the layers that one iteration of the scan runs, as shards exchange them"
            yield MemoryLine("experts' gradients, whole", "gradients", gradients, why, ("mlp",))
        else:
            why = "two of a layer's three in use together, or a float32 gradient of one"
            yield MemoryLine("experts' weights, gathered", "weights", 2 * matrix * layer.width, why, ("mlp",))


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
      device_memory_gb: memory of a device in GB (1e9 bytes), or None.
      accelerator: what the devices are, which decides the attention kernel and whether arrays fill tiles.
    """
    step = DeviceStep(
        config,
        mesh,
        micro_batch_slots,
        num_pipeline_microbatches,
        accelerator,
        gradient_accumulation_steps,
        diloco_num_replicas,
    )
    lines = [
        *_state_lines(step),
        *_gradient_lines(step),
        *activation_lines(step, config.pipeline_schedule),
        *_loss_lines(step),
    ]
    offloaded = offloaded_activations(step)
    if config.optimizer_memory_host_offload:
        offloaded += sum(line.bytes for line in lines if line.part == "optimizer_state")
    limit = None if device_memory_gb is None else int(device_memory_gb * 1e9)
    return MemoryEstimate(tuple(line for line in lines if line.bytes), limit, offloaded)


def evaluation_warnings(config: Config, plan: BatchPlan, accelerator: Accelerator) -> Iterator[str]:
    """Warns of an evaluation batch, larger than a micro-batch, that exceeds the devices' memory though one example
    fits."""
    examples = plan.eval_batch_examples
    limit = plan.memory.limit
    is_off = plan.rl is not None or config.eval_interval == -1
    if limit is None or is_off or examples <= plan.micro_batch_to_train:
        return

    def needed_for(examples: int) -> int:
        rows = plan.slots_for(examples) * config.rows_per_example
        step = DeviceStep(config, plan.mesh, rows, plan.num_pipeline_microbatches, accelerator)
        return plan.memory.held + _evaluation_bytes(step)

    if (needed := needed_for(examples)) > limit >= needed_for(1):
        yield (
            f"at least {bytes_text(needed)} per device are needed in an evaluation, more than the {bytes_text(limit)} "
            "it has: lower eval_per_device_batch_size."
        )


def _evaluation_bytes(step: DeviceStep) -> int:
    """Bytes per device that an evaluation needs at least, beside the state of training.

    That is the more of two: the layers' matrices in `dtype`, the stream before and after a layer and the projections of
    its mlp or of its heads; or the logits of a tile.
    """
    config = step.config
    mesh = step.mesh
    layer = step.layer
    sizes = layer.named_bytes()
    heads = sizes["query_proj"] + sizes["key_proj"] + sizes["value_proj"]
    projections = layer.tokens * max(sizes["mlpwi_0"] + sizes["mlpwi_1"], heads)
    of_loss, tiles = loss_tiles(config, mesh, step.slots, 1)
    logits = _float32_logits(step) * of_loss * (config.vocab_size // mesh["tensor"]) // tiles
    cast = 0
    if config.dtype != config.weight_dtype:
        cast = BYTES[config.dtype] * count_parameters(config, **mesh, tiled=False).matrices
    return max(cast + 2 * step.tokens * layer.stream * layer.width + projections, logits)


def estimate_activations(
    config: Config,
    mesh: Mapping[str, int],
    micro_batch_slots: int,
    num_pipeline_microbatches: int,
    schedule: Schedule,
    accelerator: Accelerator,
) -> int:
    """Bytes per device of the layers' tensors under this schedule."""
    step = DeviceStep(config, mesh, micro_batch_slots, num_pipeline_microbatches, accelerator)
    return MemoryEstimate(tuple(activation_lines(step, schedule)), None).most("activations")


def _state_lines(step: DeviceStep) -> Iterator[MemoryLine]:
    """Parameters, their copies in `dtype`, and the optimizer's state."""
    config = step.config
    mesh = step.mesh
    count = step.count
    trained = step.trained
    copies = step.copies
    weight_bytes = BYTES[config.weight_dtype]
    has_outer = step.replicas is not None
    if config.lora_rank:  # adapters are float32 whatever the weights are
        yield MemoryLine("frozen parameters", "params", count.total * weight_bytes, "in weight_dtype")
        weight_bytes = 4
    yield MemoryLine("parameters", "params", copies * trained.total * weight_bytes, "a device's shards of each")
    if has_outer:
        yield MemoryLine("outer parameters", "params", trained.total * weight_bytes, "what replicas last agreed on")
    if config.dtype != config.weight_dtype:
        cast = copies * trained.matrices + (count.matrices if config.lora_rank else 0)
        why = "matrices of layers in `dtype`, from which they are gathered"
        yield MemoryLine("weights in dtype", "weights", cast * BYTES[config.dtype], why, PASSES)
    # Whatever the weights are.
    dtype = config.optimizer_state_dtype
    elements = _optimizer_elements(config, mesh, trained)
    state = BYTES[dtype] * elements
    if dtype == "int8":
        from maxtext_lite.analysis.optimizer_state import count_scales

        state += 4 * _optimizer_elements(config, mesh, count_scales(config, mesh))
    shares = mesh["data"] if config.shard_optimizer_over_data else 1
    state = copies * (state // shares)
    when = ("update",) if config.optimizer_memory_host_offload else MOMENTS
    yield MemoryLine("optimizer state", "optimizer_state", state, f"of {config.optimizer}, in {dtype}", when)
    if config.optimizer == "muon":
        from maxtext_lite.analysis.optimizer_state import count_orthogonalized

        work = 4 * count_orthogonalized(config, mesh)
        why = "before and after a step, in float32"
        yield MemoryLine("matrices made orthogonal", "weights", work, why, ("update",))
    if has_outer and config.diloco_outer_momentum:
        yield MemoryLine("outer momentum", "optimizer_state", trained.total * 4, "of local updates, in float32", when)
    masters = master_bytes(config, mesh, step.replicas) if config.master_weights else 0
    if masters:
        yield MemoryLine("masters", "optimizer_state", masters, "float32 beside narrower weights", when)
    if config.ema_decay:
        average = 4 * trained.total // (mesh["data"] if config.shard_optimizer_over_data else 1)
        yield MemoryLine("average of parameters", "optimizer_state", average, "of ema_decay, in float32", when)
    if step.accelerator.platform == "cpu":
        # XLA's loops there write one array each: the new moment, while the parameter's loop still reads the old one.
        copied = copies * (4 * elements // shares) + masters
        yield MemoryLine("state, copied", "weights", copied, "old moments while new are written", ("update",))


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
            from maxtext_lite.analysis.optimizer_state import count_factored

            return count_factored(config, **mesh)


def _gradient_lines(step: DeviceStep) -> Iterator[MemoryLine]:
    """The float32 sum over micro-batches, if there is more than one pass, and the gradient of one pass."""
    config = step.config
    count = step.trained
    copies = step.copies
    adds_up = step.accumulation > 1 or config.pipeline_schedule == "1f1b"
    if adds_up:
        why = "of micro-batches, or of pipeline microbatches, in float32"
        yield MemoryLine("sum of gradients", "gradients", 4 * copies * count.total, why)
    when = LAYERS if adds_up else (*LAYERS, "update")
    # XLA fills the stacked gradients of the layers with zeros before the loss, but allocates them unfilled on a TPU.
    filled = when if step.accelerator.platform == "tpu" else ("loss", *when)
    of_layers = count.matrices * BYTES[config.dtype]
    rest = count.tables + count.norms
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


def _float32_logits(step: DeviceStep) -> int:
    """Bytes of a logit in float32, on a CPU also of its exponential."""
    return 8 if step.accelerator.platform == "cpu" else 4


def _loss_lines(step: DeviceStep) -> Iterator[MemoryLine]:
    """What the loss uses, tile by tile of the sequence; stages share the tokens."""
    config = step.config
    mesh = step.mesh
    width = BYTES[step.config.dtype]
    shards = num_parts("embed", mesh)  # every axis except `data` that splits tokens
    tokens, tiles = loss_tiles(config, mesh, step.slots, step.pieces if config.pipeline_schedule == "1f1b" else 1)
    vocab_size = config.vocab_size // mesh["tensor"]
    head = vocab_size * config.base_emb_dim
    logits = (_float32_logits(step) + width) * (tokens * vocab_size // tiles)
    reduced = 0
    if config.lora_rank == 0:
        yield _loss_line("head's gradient", 4 * head, "of the device's own tokens, summed over tiles in float32")
        if shards * mesh["stage"] > 1:
            narrow = config.grad_dtype != "float32" and shards > 1
            reduced = 4 * (head // shards) + (BYTES[config.grad_dtype] * head if narrow else 0)
    if reduced > logits:
        yield _loss_line("head's gradient, reduced", reduced, "over the devices' tokens; no logits then")
    else:
        why = "in float32, and on a CPU their exponentials; their gradient in `dtype`"
        yield _loss_line("logits of a tile", logits, why)
    if shards > 1 or config.dtype != config.weight_dtype:
        yield MemoryLine("head as used", "weights", width * head, "split over tensor only, in `dtype`", ("loss",))
    hidden = 4 * tokens * config.base_emb_dim * width
    yield _loss_line("last hidden states", hidden, "as they come, normed, in tiles, and their gradient")


def _loss_line(name: str, size: int, why: str) -> MemoryLine:
    return MemoryLine(name, "logits", size, why, ("loss",))
