"""The least time of a train step, predicted from shapes: matmuls, memory, collectives of each axis, pipeline bubble.

A layer is a list of operations, each with its matmul and its memory traffic. The backward pass costs twice the forward
pass, or as much where the weights are frozen, and repeats those operations whose results remat_policy does not keep.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from maxtext_lite.analysis.memory import DeviceStep, loss_tiles, offloaded_activations, tokens_of_device
from maxtext_lite.analysis.optimizer_state import orthogonalized
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.ledger import MemoryEstimate
from maxtext_lite.batching.parameters import (
    BYTES,
    attended_pairs,
    count_parameters,
    flops_per_example,
)
from maxtext_lite.batching.topology import MESH_AXES, MeshSizes, PipelineShape
from maxtext_lite.config import Config, adapted_weights, remat_of
from maxtext_lite.config.weights import (
    Weight,
    layer_kind,
    model_shape,
    num_inputs,
    num_parts,
    per_tensor_axes,
    stacks_of,
)

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Roofline:
    """Least seconds of a step by each resource of a device; NaN if the amount or the rate is unknown.

    Attributes:
      matmul_seconds: all matmuls at the device's peak for their dtype.
      memory_seconds: all memory traffic at the full rate.
      link_seconds: all bytes sent within a slice or host, over all links at once.
      peak_flops: FLOP/s of MFU's denominator.
      model_flops: of one device and step, by the model.
    """

    matmul_seconds: float
    memory_seconds: float
    link_seconds: float
    peak_flops: float
    model_flops: float

    @property
    def bound(self) -> tuple[str, float] | None:
        """The slowest resource with its seconds, among those known; None if none is."""
        seconds = {"matmuls": self.matmul_seconds, "memory": self.memory_seconds, "links": self.link_seconds}
        known = [each for each in seconds.items() if not math.isnan(each[1])]
        return max(known, key=lambda each: each[1], default=None)

    @property
    def most_mfu(self) -> float:
        """The MFU of a step as short as `bound`, at most 1; NaN if that is unknown."""
        return math.nan if self.bound is None else self.mfu_of(self.bound[1])

    def mfu_of(self, seconds: float) -> float:
        """The MFU of a step of this many seconds, at most 1; NaN if the peak is unknown."""
        mfu = self.model_flops / self.peak_flops / seconds if seconds else 1.0
        return mfu if math.isnan(mfu) else min(1.0, mfu)


def roofline(
    device: Device | None,
    *,
    dtype: str,
    model_flops: float,
    matmul_flops: Mapping[str, float],
    memory_bytes: float,
    sent_bytes: float,
) -> Roofline:
    """The least time of one step on one device.

    Args:
      device: None if its figures are unknown.
      dtype: of the activations; MFU is relative to its peak.
      model_flops: of one device, forward and backward, without recomputation.
      matmul_flops: of one device by the operands' dtypes (HLO's names, joined by x), with those of kernels if known. A
        dtype without a peak of its own counts at bfloat16's, because such dtypes are never faster.
      memory_bytes: between one device and its memory.
      sent_bytes: by one device over links.
    """
    if device is None:
        return Roofline(math.nan, math.nan, math.nan, math.nan, model_flops)
    matmul_seconds = 0.0
    for operands, flops in matmul_flops.items():
        matmul_seconds += flops / (matmul_peak(device, operands) or math.nan)
    return Roofline(
        matmul_seconds,
        memory_bytes / device.memory_bytes_per_second,
        sent_bytes / (device.link_bytes_per_second or math.nan) if sent_bytes else 0.0,
        device.peak(dtype) or math.nan,
        model_flops,
    )


def matmul_peak(device: Device, operands: str) -> float | None:
    """FLOP/s of a matmul by its operands' dtypes, as in `step_time`; of two, the slower. None: unknown."""
    peaks: list[float] = []
    for dtype in operands.split("x"):
        name = "float8" if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)
        peak = device.peak(name) or device.peak("bfloat16")
        if peak is not None:
            peaks.append(peak)
    return min(peaks, default=None)


_NAMES = {
    "query": "query_proj", "query_up": "query_proj", "key": "key_proj", "key_up": "key_proj", "value": "value_proj",
    "value_up": "value_proj", "output_gate": "query_proj", "out": "out_proj", "gate": "mlpwi_0", "up": "mlpwi_1",
    "down": "mlpwo",
}  # fmt: skip
"""Names in remat_policy of the results of a layer's matmuls, by the last word of the weight's path."""
_OPERANDS = {"int8": "int8", "fp8": "f8", "fp8_full": "f8"}
_EMBED_AXES = ("fsdp", "expert", "context")
"""Mesh axes that shard the `embed` dim of weights."""


class Operation(NamedTuple):
    """An operation of the forward pass, over all layers of a device.

    Attributes:
      name: of its result in remat policies; "": unnamed, recomputed under every policy but `none`.
      arrays: of each array: (its elements per token, how often it is read or written, all layers together).
      apart: likewise of what instructions without a matmul read or write.
      products: multiplications per token.
      weights: elements of its matrices, which are read once for all tokens.
      backward: cost of its backward pass, relative to the forward pass.
      beside: elements per token on the side of the matrix that is not sharded over `embed`.
      of_experts: its weights are the experts'.
    """

    name: str
    arrays: tuple[tuple[float, float], ...]
    products: float = 0
    weights: float = 0
    backward: float = 2
    apart: tuple[tuple[float, float], ...] = ()
    beside: float = 0
    of_experts: bool = False


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A lower bound on a device's step time by each resource, as if the others took no time.

    Attributes:
      attention_seconds: the part of `matmul_seconds` for scores and values.
      host_seconds: transfers to and from host memory.
      bubble_seconds: pipeline stages waiting for each other.
      seconds: the whole step.
      mfu: model FLOPs utilization of such a step.
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
    """Step times of a config on a mesh, for any split into micro-batches and pieces, and any remat_policy.

    Args:
      held: a plan's memory on this mesh, for the bytes of parameters and optimizer state; None: for `bound` alone.
      flops: `flops_of_example` of the config.
    Raises:
      ValueError: the device's peak, or a rate it needs of links to other devices or to the host, is unknown.
    """

    def __init__(
        self, config: Config, mesh: MeshSizes, device: Device, held: MemoryEstimate | None, *, flops: float
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._sizes = mesh.total
        self._device = device
        self._held = held
        self._flops = flops
        self._plain_peak = self._peak_of(config.dtype)
        self._peak = self._peak_of(_OPERANDS.get(config.quantization, config.dtype))
        remat = remat_of(config)
        offloads = config.optimizer_memory_host_offload or (remat and remat.offloaded)
        if offloads and device.host_bytes_per_second is None:
            raise ValueError("what it sends to its host is not known")
        for axis in MESH_AXES:
            self._ring((axis,), 1)  # raises if the rate of an axis is unknown
        self._without_remat = config.model_copy(update={"remat_policy": "none", "optimizer_memory_host_offload": False})
        capacity = 1.0 if config.capacity_factor == -1 else float(config.capacity_factor)
        self._rows = config.num_experts_per_tok * capacity
        self._width = BYTES[config.dtype]
        self._on_tpu = device.platform == "tpu"
        self._layers = config.base_num_decoder_layers / self._sizes["stage"] + config.mtp_num_layers
        self._operations = list(_operations(config, self._sizes, self._rows, on_tpu=self._on_tpu))

    def _peak_of(self, operands: str) -> float:
        peak = matmul_peak(self._device, operands)
        if peak is None:
            raise ValueError(f"its peak in {self._config.dtype} is not known")
        return peak

    def step(self, config: Config, rows: int, examples: int, shape: PipelineShape) -> StepTime:
        """The time of a step.

        Args:
          config: the model's, but for remat_policy and optimizer_memory_host_offload.
          rows: of one micro-batch over all devices, empty slots included.
          examples: of a step.
        """
        per_token = DeviceStep(config, self._sizes, rows).layer.kept_bytes()
        offloaded = offloaded_activations(DeviceStep(config, self._sizes, rows, shape.num_microbatches))
        return self._step(config, rows, examples, shape, per_token=per_token, offloaded=offloaded)

    def least(self, rows: int, examples: int, shape: PipelineShape) -> StepTime:
        """A lower bound for every remat_policy: nothing is recomputed, and storing activations costs nothing."""
        return self._step(self._without_remat, rows, examples, shape)

    def bound(self, examples: int) -> float:
        """A lower bound on the seconds of a step of these examples, for any split into micro-batches and pieces.

        It is the time of one micro-batch in one piece, with a loss in one tile. Memory traffic counts only on devices
        without on-chip memory, from which smaller arrays would be read.
        """
        config = self._without_remat.model_copy(update={"num_vocab_tiling": 1})
        rows = examples * config.rows_per_example
        on_chip = self._device.on_chip_bytes and sys.maxsize
        return self._step(config, rows, examples, PipelineShape(1, 1, 1, 1), on_chip_bytes=on_chip).seconds

    def _step(
        self,
        config: Config,
        rows: int,
        examples: int,
        shape: PipelineShape,
        *,
        per_token: int = 0,
        offloaded: int = 0,
        on_chip_bytes: int | None = None,
    ) -> StepTime:
        """The time of a step that keeps `per_token` bytes of each token for the backward pass, and offloads others."""
        sizes = self._sizes
        width = self._width
        ring = self._ring
        rate = self._device.memory_bytes_per_second
        on_chip = on_chip_bytes or self._device.on_chip_bytes
        on_tpu = self._on_tpu
        trains = config.lora_rank == 0
        grad_width = trains * BYTES[config.grad_dtype]
        passes = shape.gradient_accumulation_steps
        pieces = shape.num_microbatches
        tokens = tokens_of_device(config, sizes, rows)
        runs = pieces if sizes["stage"] > 1 else 1
        losses = pieces if config.pipeline_schedule == "1f1b" else 1
        _, tiles = loss_tiles(config, sizes, rows, losses)

        # Layers: weights are gathered in both passes, their gradients reduced in one.
        weights_sent = gradients_sent = gathered_weights = weights = 0.0
        for of_experts, axes in ((False, _EMBED_AXES), (True, ("fsdp", "context"))):
            own = (each for each in self._operations if each.of_experts == of_experts and each.name != "logits")
            numbers = sum(each.weights for each in own)
            weights += width * numbers / self._shards(axes)
            weights_sent += ring(axes, 2 * width * numbers)
            gradients_sent += ring(axes, grad_width * numbers)
            gathered_weights += 2 * width * numbers if self._shards(axes) > 1 else 0
        # For more than two shards a TPU computes a gradient shard by shard: each shard rereads the unsharded side, and
        # its sum is read, added to, sent and received. GPUs compute all of it in float32 before the reduce-scatter; so
        # does a TPU for two shards, with an all-reduce that nothing overlaps.
        shards = self._shards(_EMBED_AXES)
        waits = on_tpu and shards == 2
        windows = 0
        bytes_of_gradient = 4 * trains
        if on_tpu and shards > 2:
            windows = width * (shards - 1) * trains
            bytes_of_gradient = 4 * grad_width
        elif shards > 1:
            bytes_of_gradient += grad_width

        # The head, and its gradient over the stages' rows. Tiles add to the device's own sum in float32, which starts
        # at zero and is read when it is reduced.
        head = config.vocab_size * config.base_emb_dim / sizes["tensor"]
        head_sent = ring(_EMBED_AXES, (2 * width + grad_width) * head)
        head_sent += ring(("stage",), 2 * grad_width * head / shards)
        head_gathered = 2 * width * head if shards > 1 else 0
        head_summed = (8 if shards * sizes["stage"] > 1 else 4) * trains * head
        # Each micro-batch casts the head, and scatters into zeros for the embedding's gradient.
        cast = BYTES[config.weight_dtype] + width if config.weight_dtype != config.dtype else 0
        tables = (cast + 8 * trains) * head / shards

        def moved(arrays: tuple[tuple[float, float], ...]) -> float:
            """Seconds that arrays of tokens, as in `Operation`, take to be read from or written to memory.

            A compiler decides array by array what stays on the chip; the share by size is the average of programs that
            libtpu compiled.
            """
            total = 0.0
            for elements, times in arrays:
                size = tokens * width * elements
                total += times * size * (min(1.0, size / on_chip) if on_chip else 1.0)
            return total / rate

        kept = kept_names(config)
        matmul = attention = memory = compute = 0.0
        for each in self._operations:
            times = 1 + each.backward + (each.name not in kept if kept is not None else 0)
            quantized = each.name not in ("context", "logits", "largest logits")
            products = 2 * tokens * each.products / (self._peak if quantized else self._plain_peak)
            attention += times * products if each.name == "context" else 0
            reads = runs
            gradient_bytes = runs * bytes_of_gradient
            window = windows
            if each.name == "logits":  # every tile reads the head and adds to its gradient
                reads = losses * tiles
                gradient_bytes = losses * tiles * 8 * trains
                window = 0
            beside = moved(each.arrays)
            apart = moved(each.apart)
            # One pass computes the gradient of weights that are trained, the others read weights and compute tokens.
            forth = reads * width * each.weights / rate
            gradient = (tokens * window * each.beside + gradient_bytes * each.weights) / rate
            matmul += times * products
            of_tokens = times - trains
            memory += times * (beside + apart) + of_tokens * forth + gradient
            compute += of_tokens * max(products, beside + forth) + trains * max(products, beside + gradient)
            compute += times * apart

        # Copied to where it is kept, with zeros written there before on a GPU, and a copy of what is read on a TPU.
        stored = 3 * (tokens * self._layers * per_token + offloaded)
        gathered = runs * gathered_weights + losses * (head_gathered + head_summed)
        # With several repeats, each tick picks its weights, keeps them, and adds to their gradients where they lie: as
        # compiled, 10 reads and writes on a GPU. A TPU keeps half of these arrays on the chip.
        if shape.num_repeats > 1:
            gathered += (4 if on_tpu else 10) * runs * weights
        parameters = count_parameters(config, tiled=False, **sizes)
        shard = parameters.total if trains else parameters.adapters
        accumulated = 12 * shard if passes > 1 else 0  # reads and writes a float32 sum, reads a gradient
        alone = (gathered + stored + tables + accumulated) / rate
        sent = runs * (weights_sent + (0 if waits else gradients_sent))
        blocking = losses * head_sent + self._blocking(tokens, kept)  # the head is used between loops over layers
        gathered_keys, reduced_keys = self._keys(tokens, kept)
        blocking += reduced_keys + (0 if on_tpu else gathered_keys)
        sent += gathered_keys if on_tpu else 0
        blocking += 2 * runs * gradients_sent if waits else 0
        to_host = self._to_host(offloaded)
        busy = max(compute + alone, sent, to_host) + blocking
        ticks = passes / (1 - float(shape.bubble_fraction(config.pipeline_schedule)))  # idle ticks compute too

        state = self._held.most("optimizer_state") if self._held else 0
        held = self._held.most("params") + state if self._held else 0
        update = (8 * shard + 2 * held) / rate
        state_to_host = self._to_host(state if config.optimizer_memory_host_offload else 0)
        period = config.diloco_sync_period if config.enable_diloco else 1
        synchronised = ring(("data",), 2 * BYTES[config.grad_dtype] * shard) / period
        orthogonal, orthogonal_sent = self._newton_schulz() if config.optimizer == "muon" else (0.0, 0.0)
        seconds = ticks * busy + max(update, state_to_host) + orthogonal + orthogonal_sent + synchronised
        return StepTime(
            matmul_seconds=ticks * matmul + orthogonal,
            attention_seconds=ticks * attention,
            memory_seconds=ticks * (memory + alone) + update,
            collectives_seconds=ticks * (sent + blocking) + orthogonal_sent + synchronised,
            host_seconds=ticks * to_host + state_to_host,
            bubble_seconds=(ticks - passes) * busy,
            seconds=seconds,
            mfu=self._flops * examples / math.prod(sizes.values()) / self._plain_peak / seconds,
        )

    def _newton_schulz(self) -> tuple[float, float]:
        """Seconds of the products and of the collectives of Muon's update, which cross in float32.

        GPUs compute it in float32, TPUs in bfloat16.
        """
        peak = matmul_peak(self._device, "bfloat16" if self._on_tpu else "float32") or self._plain_peak
        products = 0
        sent = 0.0
        for stack in orthogonalized(self._config, self._sizes):
            products += stack.products
            for axes in stack.exchanged:
                sent += 2 * self._ring(axes, 4 * stack.matrices * stack.elements)
            sent += self._ring(stack.shared, 4 * stack.gathered)
        return 2 * products / peak, sent

    def _shards(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _ring(self, axes: tuple[str, ...], size: float) -> float:
        """Seconds of a ring all-gather or reduce-scatter of `size` bytes over neighbouring axes."""
        parts = self._shards(axes)
        if parts == 1 or not size:
            return 0.0
        rate = ring_bytes_per_second(self._device, self._mesh, axes)
        if rate is None:
            raise ValueError("what it sends to others on a machine of so many is not known")
        return size * (parts - 1) / parts / rate

    def _to_host(self, size: int) -> float:
        """Seconds to send `size` bytes to the host while receiving as many."""
        return size / (self._device.host_bytes_per_second or 1) if size else 0.0

    def _keys(self, tokens: int, kept: frozenset[str] | None) -> tuple[float, float]:
        """Seconds per micro-batch to gather keys and values over context and to reduce their gradients. A GPU reduces
        in float32."""
        config = self._config
        sizes = self._sizes
        shape = model_shape(config)
        elements = 0.0
        for mixer, numbers in shape.layers_of.items():
            own = shape.of_mixer(mixer)
            elements += len(numbers) * own.num_kv_heads * (own.head_dim + own.value_dim)
        elements *= tokens * sizes["context"] / (sizes["tensor"] * sizes["stage"])
        gathers = 2 + (kept is not None and "context" not in kept)
        width = self._width if self._on_tpu else 4
        return self._ring(("context",), gathers * self._width * elements), self._ring(("context",), width * elements)

    def _blocking(self, tokens: int, kept: frozenset[str] | None) -> float:
        """Seconds per micro-batch of collectives that block computation: tokens over tensor, rows over expert, pieces
        between stages."""
        config = self._config
        sizes = self._sizes
        width = self._width
        again = [kept is not None and name not in kept for name in ("out_proj", "mlpwi_1")]
        stream = tokens * config.base_emb_dim * width
        # Four in the forward pass, five in the backward pass, and the gathered inputs of both halves again.
        total = self._ring(("tensor",), (11 + again[0]) * stream)
        if config.num_experts > 1:  # to the experts and back, in both passes
            total += self._ring(("expert",), (4 + again[1]) * stream * self._rows)
        stages = sizes["stage"]
        at_once = config.num_layers_per_pipeline_stage
        rounds = 1 if config.pipeline_schedule == "1f1b" else config.num_stacked_layers / (stages * at_once)
        # Between blocks each device along `tensor` has its part of the tokens. Rows are gathered and scattered over
        # stages before and after the layers, five times in all.
        between = self._ring(("stage",), (2 * rounds * stages / max(stages - 1, 1) + 5) * stream / sizes["tensor"])
        return self._layers * total + between


def flops_of_example(config: Config) -> float:
    """FLOPs of training on an example, all its rows."""
    return flops_per_example(config, config.max_target_length) * config.rows_per_example


def ring_bytes_per_second(device: Device, mesh: MeshSizes, axes: tuple[str, ...]) -> float | None:
    """Send rate of a device in a ring along neighbouring mesh axes; None if unknown."""
    ici = mesh.ici
    dcn = mesh.dcn
    faster = MESH_AXES[max(map(MESH_AXES.index, axes)) + 1 :]
    return device.axis_bytes_per_second(
        math.prod(ici[axis] for axis in axes),
        stride=math.prod(ici[axis] for axis in faster),
        in_slice=math.prod(ici.values()),
        slices=math.prod(dcn[axis] for axis in axes),
    )


def kept_names(config: Config) -> frozenset[str] | None:
    """Results that the backward pass has or does not need; None: it has all of them."""
    remat = remat_of(config)
    if remat is None:
        return None
    unasked = ("logits", "largest logits", *(("mlpwo",) if config.norm_placement == "pre" else ()))
    return frozenset((*remat.saved, *remat.offloaded, *unasked))


def _used(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Shards of a matrix as matmuls use it: over tensor, and for experts over expert."""
    there = {axis: sizes[axis] for axis in ("tensor", "expert")}
    return math.prod(num_parts(axis, there) for axis in axes if not axis.endswith("embed"))


def _operations(config: Config, sizes: Mapping[str, int], rows: float, *, on_tpu: bool) -> Iterator[Operation]:
    """The operations of a device's layers and of the head."""
    layers = config.base_num_decoder_layers / sizes["stage"] + config.mtp_num_layers
    tensor = sizes["tensor"]
    length = config.max_target_length
    shape = model_shape(config)
    # A norm reads and writes, a residual sum reads two and writes one; rotary embedding reads and writes heads.
    emb = config.base_emb_dim
    norms = 14 if config.norm_placement in ("both", "each") else 10
    gathers = 4 if tensor > 1 else 0
    # A norm per head reads the heads once more; on a TPU they pass through memory in float32 for it.
    headed = 2
    if config.qk_norm != "none":
        headed += 4 if on_tpu else 1
    yield Operation("", ((emb / tensor, norms * layers), (emb, gathers * layers)))
    attended: list[tuple[float, float]] = []
    merged: list[tuple[float, float]] = []
    # For each other shard's keys, in bytes as compiled: gathers what sees each other, and merges it in float32.
    others = (sizes["context"] - 1) / BYTES[config.dtype]
    stages = sizes["stage"]
    count_of = {mixer: len(numbers) / stages for mixer, numbers in shape.layers_of.items()}
    count_of[shape.mixers[(shape.num_layers - 1) % len(shape.mixers)]] += config.mtp_num_layers  # on all stages
    for mixer, here in count_of.items():
        if (kind := layer_kind(mixer)) is not None:
            yield Operation("context", ((kind.used_elements(shape) / tensor, here),))
            continue
        own = shape.of_mixer(mixer)
        heads = own.num_query_heads / tensor
        queries = heads * own.head_dim
        keys = own.num_kv_heads / tensor * own.head_dim
        values = own.num_kv_heads / tensor * own.value_dim
        yield Operation("", ((queries, headed * here), (keys, headed * here)))
        attended += [(size, here) for size in (queries, keys, values, heads * own.value_dim)]
        if config.qk_clip_threshold:  # scores of all keys, written and read, in the forward pass alone
            yield Operation("largest logits", ((length * heads, 2 * here),), length * queries * here, backward=0)
        merged += [(queries, 15 * others * here), (keys + values, 14 * others * here)]
    of_layers = float(attended_pairs(config.model_copy(update={"mtp_num_layers": 0}), length))
    pairs = of_layers / length / stages + (float(attended_pairs(config, length)) - of_layers) / length
    scores = pairs * config.base_num_query_heads / tensor * (config.head_dim + config.value_dim)
    yield Operation("context", tuple(attended), scores, backward=2.5)  # recomputes the scores
    if not on_tpu and sizes["context"] > 1:
        yield Operation("context", (), backward=2.2, apart=tuple(merged))
    backward = 1 if config.lora_rank else 2
    adapted = adapted_weights(config)
    for stack, (count, table) in stacks_of(model_shape(config)).items():
        here = count / (num_parts(stack.partition("/")[0], sizes) if stack else 1)
        for path, weight in table.items():
            if stack and weight.is_normal:
                tokens = rows if weight.axes[0] == "experts" else 1
                yield from _matmul(path, weight, here, sizes, tokens, backward)
                for adapter in weight.adapters(config.lora_rank) if path.rpartition("/")[2] in adapted else ():
                    yield from _matmul("", adapter, here, sizes, tokens, 2)
    # Matmuls write logits in float32, and read their gradient twice. In between, a TPU reads logits once, and once more
    # in a matmul that also writes the gradient; a GPU reads them three times, and writes the gradient.
    shard = config.vocab_size / tensor
    wide = 4 / BYTES[config.dtype]
    with_matmuls, apart = (2 * wide + 3, wide) if on_tpu else (wide + 2, 3 * wide + 1)
    times = stages * (1 + backward)
    arrays = ((shard, (with_matmuls + backward - 2) / times), (emb, 1 / stages))
    for _ in range(1 + config.mtp_num_layers):
        yield Operation(
            "logits", arrays, shard * emb / stages, shard * emb, backward, apart=((shard, apart / times),), beside=shard
        )


def _matmul(
    path: str, weight: Weight, layers: float, sizes: Mapping[str, int], rows: float, backward: int
) -> Iterator[Operation]:
    """The matmul with one of a layer's matrices, for `rows` rows per token; and what the
    mlp's activation and attention's output gate do with it."""
    axes = per_tensor_axes(weight.axes)
    dims = weight.sizes[len(weight.sizes) - len(axes) :]
    cut = num_inputs(axes)
    into = math.prod(dims[:cut]) / _used(axes[:cut], sizes)
    out = math.prod(dims[cut:]) / _used(axes[cut:], sizes)
    name = path.rpartition("/")[2]
    elements = layers * math.prod(weight.sizes) / _used(weight.axes, sizes)
    beside = {"embed": out}.get(axes[0], into if axes[-1] == "embed" else 0)
    yield Operation(
        _NAMES.get(name, ""), ((rows * into, layers), (rows * out, layers)), layers * rows * into * out, elements,
        backward, beside=layers * beside, of_experts=weight.axes[0] == "experts",
    )  # fmt: skip
    if name in ("up", "output_gate"):  # two arrays are read, and the input of the next matmul is written
        yield Operation("", ((rows * out, 3 * layers),))
