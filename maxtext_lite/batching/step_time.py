"""The least time of a train step, predicted from shapes: matmuls, memory, collectives of each axis, pipeline bubble.

A layer is a list of operations, each with what one token reads and writes and what it multiplies. The backward pass
does each twice, and again those whose results remat_policy did not keep.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxtext_lite.batching.activations import BYTES, kept_bytes, offloaded_activations, tokens_of_device
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.memory import loss_tiles
from maxtext_lite.batching.parameters import attended_pairs, count_parameters, flops_per_example
from maxtext_lite.batching.pipeline_shape import PipelineShape
from maxtext_lite.batching.roofline import matmul_peak
from maxtext_lite.batching.topology import MESH_AXES, MeshSizes
from maxtext_lite.config import Config, remat_of
from maxtext_lite.config.weight_axes import num_inputs, num_parts, of_one
from maxtext_lite.config.weights import Weight, model_shape, stacks_of

_NAMES = {
    "query": "query_proj", "query_up": "query_proj", "key": "key_proj", "key_up": "key_proj", "value": "value_proj",
    "value_up": "value_proj", "out": "out_proj", "gate": "mlpwi_0", "up": "mlpwi_1", "down": "mlpwo",
}  # fmt: skip
"""What the results of a layer's matmuls are called by remat_policy, by the last word of the weight's path."""
_OPERANDS = {"int8": "int8", "fp8": "f8", "fp8_full": "f8"}
_EMBED_AXES = ("fsdp", "expert", "context")
"""Those that split `embed` of a weight."""


class Operation(NamedTuple):
    """What is done in all layers of a device, forwards.

    Attributes:
      name: of its result in remat policies; "": it has none, and is made again wherever anything is.
      moved: numbers that one token reads and writes.
      products: multiplications of one token.
      weights: numbers of matrices that are read, once for all tokens.
      backward: how often its backward pass does as much.
      results: numbers that a token's matmul gives, on average of forwards and backwards.
      beside: numbers of a token on the side of the matrix that is not split over shards.
    """

    name: str
    moved: float
    products: float = 0
    weights: float = 0
    backward: float = 2
    results: float = 0
    beside: float = 0


@dataclasses.dataclass(frozen=True)
class StepTime:
    """What one step takes on one device at least, each resource as if the others took no time.

    Attributes:
      attention_seconds: of the matmuls', those of scores and values.
      host_seconds: to and from the host's memory.
      bubble_seconds: of stages that wait for each other.
      seconds: of the whole step.
      mfu: of a step of these `seconds`.
    """

    matmul_seconds: float
    attention_seconds: float
    memory_seconds: float
    collectives_seconds: float
    host_seconds: float
    bubble_seconds: float
    seconds: float
    mfu: float


class StepModel:
    """The step of a config on a mesh, for any split into micro-batches and pieces, and any remat_policy.

    Args:
      held: a plan's memory on this mesh, for the bytes of parameters and of the optimizer's state.
    Raises:
      ValueError: the device's peak, or the rate of links to others or to the host that are needed, is not known.
    """

    def __init__(self, config: Config, mesh: MeshSizes, device: Device, held: MemoryEstimate) -> None:
        plain = matmul_peak(device, config.dtype)
        peak = matmul_peak(device, _OPERANDS.get(config.quantization, config.dtype))
        if peak is None or plain is None:
            raise ValueError(f"its peak in {config.dtype} is not known")
        remat = remat_of(config)
        if device.host_bytes_per_second is None and (
            config.optimizer_memory_host_offload or (remat and remat.offloaded)
        ):
            raise ValueError("what it sends to its host is not known")
        self._config, self._device, self._mesh, self._sizes = config, device, mesh, mesh.total
        for axis in MESH_AXES:
            self._ring((axis,), 1)  # whatever it is that crosses, its rate must be known
        nothing = {"remat_policy": "none", "optimizer_memory_host_offload": False}
        self._repeating_nothing = config.model_copy(update=nothing)
        self._peak, self._plain_peak, self._rate = peak, plain, device.memory_bytes_per_second
        capacity = 1.0 if config.capacity_factor == -1 else float(config.capacity_factor)
        self._rows = config.num_experts_per_tok * capacity
        self._width, trains = BYTES[config.dtype], config.lora_rank == 0
        on_tpu = device.platform == "tpu"
        operations = list(_operations(config, self._sizes, self._rows, on_tpu=on_tpu))
        self._operations = [each for _, each in operations]
        # Gathered forwards and backwards; of their gradients the sum crosses.
        grad_width = trains * BYTES[config.grad_dtype]
        width = 2 * self._width + grad_width
        self._weights_sent = self._gathered = 0.0
        self._head_gradient = grad_width * config.vocab_size * config.base_emb_dim / self._sizes["tensor"]
        for of_experts, axes in ((False, _EMBED_AXES), (True, ("fsdp", "context"))):
            size = width * sum(each.weights for kind, each in operations if kind == of_experts)
            self._weights_sent += self._ring(axes, size)
            self._gathered += size * 2 * self._width / width if self._shards(axes) > 1 else 0
        shards = self._shards(_EMBED_AXES)
        # A TPU makes a gradient shard by shard: for each it reads the side that is not split again, and a sum that
        # crosses is read, added to, sent and received. Others make all of it in float32, which is then shared out.
        self._windows = self._width * (shards - 1) * trains if on_tpu else 0
        self._gradient_bytes = (4 * grad_width if on_tpu else 4 + grad_width) if shards > 1 else 4 * trains
        self._float32_results = 0 if on_tpu else 8  # cuBLAS writes results in float32, from which `dtype` is made
        count = count_parameters(config, tiled=False, **self._sizes)
        shard = count.total if trains else count.adapters
        self._accumulated = 12 * shard  # a float32 sum is read and written, a gradient is read
        self._state = held.optimizer_state
        self._updated = 2 * (held.params + held.optimizer_state) + 8 * shard
        period = config.diloco_sync_period if config.enable_diloco else 1
        self._synchronised = self._ring(("data",), 2 * BYTES[config.grad_dtype] * shard) / period
        self._layers = config.base_num_decoder_layers / self._sizes["stage"]
        self._flops = flops_per_example(config, config.max_target_length) * config.rows_per_example

    def step(self, config: Config, rows: int, examples: int, shape: PipelineShape) -> StepTime:
        """The time of a step.

        Args:
          config: as the model's, but for remat_policy and whether the optimizer's state is offloaded.
          rows: of one micro-batch over all devices, empty slots included.
          examples: of a step.
        """
        per_token = kept_bytes(config, self._sizes, tokens_of_device(config, self._sizes, rows))
        offloaded = offloaded_activations(config, self._sizes, rows, shape.num_microbatches)
        return self._step(config, rows, examples, shape, per_token=per_token, offloaded=offloaded)

    def least(self, rows: int, examples: int, shape: PipelineShape) -> StepTime:
        """The time of a step that does nothing again and stores nothing: no remat_policy has a shorter one."""
        return self._step(self._repeating_nothing, rows, examples, shape, per_token=0, offloaded=0)

    def _step(
        self, config: Config, rows: int, examples: int, shape: PipelineShape, *, per_token: int, offloaded: int
    ) -> StepTime:
        sizes, passes, pieces = self._sizes, shape.gradient_accumulation_steps, shape.num_microbatches
        tokens, runs = tokens_of_device(config, sizes, rows), pieces if sizes["stage"] > 1 else 1
        kept = kept_names(config)
        matmul = attention = memory = compute = 0.0
        for each in self._operations:
            times = 1 + each.backward + (each.name not in kept if kept is not None else 0)
            quantized = each.name not in ("context", "logits")
            products = 2 * tokens * each.products / (self._peak if quantized else self._plain_peak)
            attention += times * products if each.name == "context" else 0
            traffic = (tokens * self._token_bytes(each) + runs * self._width * each.weights) / self._rate
            gradient = (tokens * self._windows * each.beside + runs * self._gradient_bytes * each.weights) / self._rate
            matmul, memory = matmul + times * products, memory + times * traffic + gradient
            compute += (times - 1) * max(products, traffic) + max(products, traffic + gradient)
        stored = 2 * (tokens * self._layers * per_token + offloaded)  # what is kept is copied to where it waits
        alone = (runs * self._gathered + stored + (self._accumulated if passes > 1 else 0)) / self._rate
        weights = runs * self._weights_sent
        if self._head_gradient and self._shards(_EMBED_AXES) > 1:  # it crosses once for all tiles that wait together
            _, tiles, together = loss_tiles(config, sizes, rows, pieces if config.pipeline_schedule == "1f1b" else 1)
            weights += (tiles // together - 1) * self._ring(_EMBED_AXES, self._head_gradient)
        blocking = self._blocking(tokens, kept)
        to_host = self._to_host(offloaded)
        busy = max(compute + alone, weights, to_host) + blocking
        update = self._updated / self._rate
        state = self._to_host(self._state if config.optimizer_memory_host_offload else 0)
        share = float(shape.bubble_fraction(config.pipeline_schedule))
        bubble = passes * busy * share / (1 - share)
        seconds = passes * busy + bubble + max(update, state) + self._synchronised
        return StepTime(
            matmul_seconds=passes * matmul,
            attention_seconds=passes * attention,
            memory_seconds=passes * (memory + alone) + update,
            collectives_seconds=passes * (weights + blocking) + self._synchronised,
            host_seconds=passes * to_host + state,
            bubble_seconds=bubble,
            seconds=seconds,
            mfu=self._flops * examples / math.prod(sizes.values()) / self._plain_peak / seconds,
        )

    def _shards(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _token_bytes(self, operation: Operation) -> float:
        return self._width * operation.moved + self._float32_results * operation.results

    def _ring(self, axes: tuple[str, ...], size: float) -> float:
        """Seconds in which arrays that are `size` bytes together go once round the devices along neighbouring axes."""
        parts = self._shards(axes)
        if parts == 1 or not size:
            return 0.0
        rate = ring_bytes_per_second(self._device, self._mesh, axes)
        if rate is None:
            raise ValueError("what it sends to others on a machine of so many is not known")
        return size * (parts - 1) / parts / rate

    def _to_host(self, size: int) -> float:
        """Seconds in which so many bytes go to the host while as many come back."""
        return size / (self._device.host_bytes_per_second or 1) if size else 0.0

    def _blocking(self, tokens: int, kept: frozenset[str] | None) -> float:
        """Seconds of a micro-batch for what matmuls and attention must wait for: tokens over tensor, keys and values
        over context, rows over expert, pieces between stages."""
        config, sizes, width = self._config, self._sizes, self._width
        again = [kept is not None and name not in kept for name in ("out_proj", "context", "mlpwi_1")]
        stream = tokens * config.base_emb_dim * width
        # Four forwards, five backwards, and the inputs of both halves again, as they are not kept whole.
        total = self._ring(("tensor",), (11 + again[0]) * stream)
        keys = tokens * sizes["context"] * config.base_num_kv_heads / sizes["tensor"]
        keys *= config.head_dim + config.value_dim
        total += self._ring(("context",), keys * ((2 + again[1]) * width + 4))  # gradients in float32
        if config.num_experts > 1:  # there and back, forwards and backwards
            total += self._ring(("expert",), (4 + again[2]) * stream * self._rows)
        stages, at_once = sizes["stage"], config.num_layers_per_pipeline_stage
        rounds = 1 if config.pipeline_schedule == "1f1b" else config.num_stacked_layers / (stages * at_once)
        between = self._ring(("stage",), 2 * rounds * stream * stages / max(stages - 1, 1))
        return self._layers * total + between


def ring_bytes_per_second(device: Device, mesh: MeshSizes, axes: tuple[str, ...]) -> float | None:
    """What a device can send in a ring along neighbouring axes of a mesh; None where it is not known."""
    ici, dcn = mesh.ici, mesh.dcn
    faster = MESH_AXES[max(map(MESH_AXES.index, axes)) + 1 :]
    return device.axis_bytes_per_second(
        math.prod(ici[axis] for axis in axes),
        stride=math.prod(ici[axis] for axis in faster),
        in_slice=math.prod(ici.values()),
        slices=math.prod(dcn[axis] for axis in axes),
    )


def kept_names(config: Config) -> frozenset[str] | None:
    """Results of operations that the backward pass has or does not ask for; None: it has all."""
    remat = remat_of(config)
    if remat is None:
        return None
    unasked = ("logits", *(("mlpwo",) if config.norm_placement == "pre" else ()))
    return frozenset((*remat.saved, *remat.offloaded, *unasked))


def _used(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """The parts of a matrix as matmuls use it: over tensor, and of experts over expert."""
    there = {axis: sizes[axis] for axis in ("tensor", "expert")}
    return math.prod(num_parts(axis, there) for axis in axes if not axis.endswith("embed"))


def _operations(
    config: Config, sizes: Mapping[str, int], rows: float, *, on_tpu: bool
) -> Iterator[tuple[bool, Operation]]:
    """A token's way through all layers of a device and the head; with each whether its weights are experts'."""
    layers, tensor = config.base_num_decoder_layers / sizes["stage"], sizes["tensor"]
    heads, kv_heads = config.base_num_query_heads / tensor, config.base_num_kv_heads / tensor
    queries, keys, values = heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.value_dim
    # Each norm reads and writes, each sum reads two and writes one; rotated heads are read and written.
    stream = (14 if config.norm_placement == "both" else 10) * config.base_emb_dim / tensor
    gathered = 4 * config.base_emb_dim if tensor > 1 else 0
    # Heads with a norm of their own are read once more; on a TPU they are written and read in float32 for it.
    headed = 2 + (0 if config.qk_norm == "none" else 4 if on_tpu else 1)
    yield False, Operation("", layers * (stream + gathered + headed * (queries + keys)))
    pairs = float(attended_pairs(config, config.max_target_length)) / config.max_target_length / sizes["stage"]
    scores = pairs * heads * (config.head_dim + config.value_dim)
    attended = queries + keys + values + heads * config.value_dim
    yield False, Operation("context", layers * attended, scores, backward=2.5)  # the scores are made again
    for stack, (count, table) in stacks_of(model_shape(config)).items():
        here = count / (num_parts(stack.partition("/")[0], sizes) if stack else 1)
        for path, weight in table.items():
            if stack and weight.is_normal:
                of_experts = weight.axes[0] == "experts"
                yield of_experts, _matmul(path, weight, here, sizes, rows if of_experts else 1)
    # Logits are written and read twice in float32, and so is their gradient in `dtype`, by both of its matmuls.
    shard = config.vocab_size / tensor
    moved = (12 / BYTES[config.dtype] + 3) / 3 * shard + config.base_emb_dim
    emb = config.base_emb_dim
    yield False, Operation("logits", moved / sizes["stage"], shard * emb / sizes["stage"], shard * emb, beside=shard)


def _matmul(path: str, weight: Weight, layers: float, sizes: Mapping[str, int], rows: float) -> Operation:
    """The product with one of a layer's matrices of each of a token's rows, and what is made of an mlp's inner ones."""
    axes = of_one(weight.axes)
    dims, cut = weight.sizes[len(weight.sizes) - len(axes) :], num_inputs(axes)
    into = math.prod(dims[:cut]) / _used(axes[:cut], sizes)
    out = math.prod(dims[cut:]) / _used(axes[cut:], sizes)
    name = path.rpartition("/")[2]
    activated = {"gate": 1, "up": 2}.get(name, 0) * out
    elements = layers * math.prod(weight.sizes) / _used(weight.axes, sizes)
    moved, products = layers * rows * (into + out + activated), layers * rows * into * out
    beside = {"embed": out}.get(axes[0], into if axes[-1] == "embed" else 0)
    return Operation(
        _NAMES.get(name, ""), moved, products, elements,
        results=layers * rows * (into + out) / 2, beside=layers * beside,
    )  # fmt: skip
