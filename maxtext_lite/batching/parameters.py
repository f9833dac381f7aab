"""Parameters and FLOPs of the model that a config describes, counted from the decoder's own tables of weights."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from typing import Any

from maxtext_lite.batching.topology import MESH_AXES
from maxtext_lite.config import Config, ModelConfig, adapted_weights
from maxtext_lite.config.errors import divisors
from maxtext_lite.config.keys import ATTENTION_KINDS, LOCAL_KINDS, mixer_of
from maxtext_lite.config.weights import Weight, layer_kind, model_shape, num_parts, stacks_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of an element of each dtype."""


def moment_block(size: int) -> int:
    """Elements that share a scale along a last dim of `size`, of moments in eight bits: its largest divisor from 32 to
    256, or else all."""
    return next((block for block in range(256, 31, -1) if size % block == 0), size)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model, or of one device's shard.

    Attributes:
      matrices: elements of the layers' matrices.
      tables: elements of the embedding and position tables, and of the output projection if it is not tied.
      norms: elements of norms, biases and other vectors.
      adapters: elements of LoRA's matrices, the only ones trained if there are any.
    """

    matrices: int
    tables: int
    norms: int
    adapters: int = 0

    @property
    def total(self) -> int:
        """All elements except the adapters'."""
        return self.matrices + self.tables + self.norms


def count_parameters(config: ModelConfig, *, tiled: bool = False, **mesh: int) -> ParameterCount:
    """Exact parameters per device.

    Matrices are split over fsdp, context, expert and tensor; an expert is whole on its part of the expert axis; routers
    are not split over tensor. Layers are split over stages. Biases are split like the output they are added to. Norms
    and router biases are split over stages only.

    Args:
      tiled: whether to count the padding of tiles in a TPU's memory.
      mesh: size of each mesh axis, 1 where it is not named.
    """
    elements = Counter[str]()
    for part, count, weight in weights_by_part(config, mesh):
        elements[part] += count * elements_on_device(weight, mesh, tiled)
    return ParameterCount(elements["matrices"], elements["tables"], elements["norms"], elements["adapters"])


def active_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied by: all except the experts that it is not sent to."""
    unmet = Fraction(0)
    for part, count, weight in weights_by_part(config, {}):
        if part == "matrices":
            unmet += count * (1 - _met(config, weight)) * math.prod(weight.sizes)
    return count_parameters(config).total - int(unmet)


def flops_per_example(config: ModelConfig, num_tokens: int) -> float:
    """FLOPs of one forward and backward pass over an example of one document of `num_tokens` tokens, without
    recomputation: see `flops_of_documents`."""
    return float(flops_of_documents(config, num_tokens))


def flops_of_documents(config: ModelConfig, num_tokens: Any) -> Any:
    """FLOPs of one forward and backward pass over a document of `num_tokens` tokens, without recomputation.

    A matmul weight takes 6 FLOPs each time that a token passes through it, or 4 where it is frozen and has no gradient
    of its own; of experts, only the chosen ones count. Causal attention takes 6 per head,
    visible key, and dim of keys and of values: see `attended_pairs`. What layers of other packages add, they say.

    Args:
      num_tokens: a number, or an array for several documents, whose shape the result has.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    outputs = (1 + config.mtp_num_layers) * config.vocab_size + config.per_layer_inputs_dim
    met = Counter({"matrices": config.base_emb_dim * outputs})
    for part, count, weight in weights_by_part(config, {}):
        met[part] += count * int(_met(config, weight) * math.prod(weight.sizes))
    of_weights = (4 if config.lora_rank else 6) * met["matrices"] + 6 * met["adapters"]
    attention = 6 * config.base_num_query_heads * (config.head_dim + config.value_dim)
    flops = num_tokens * float(of_weights) + attention * attended_pairs(config, num_tokens)
    shape = model_shape(config)
    for mixer, count in Counter(map(mixer_of, config.trained_kinds)).items():
        kind = layer_kind(mixer)
        if kind is not None:
            flops += count * kind.flops(shape, num_tokens)
    return flops


def attended_pairs(config: ModelConfig, num_tokens: Any) -> Any:
    """Pairs of a query and a key visible to it in a document of `num_tokens` tokens, summed over layers.

    A global layer has half of the full square, a local or chunked one less, and a layer without attention none. A pair
    in heads of another number or width counts by its share of theirs.

    Args:
      num_tokens: a number, or an array for several documents, whose shape the result has.
    """

    def of_layer(kind: str) -> Any:
        if kind not in ATTENTION_KINDS:
            return 0 * num_tokens
        if kind in LOCAL_KINDS:
            beyond = (num_tokens > config.sliding_window_size) * (num_tokens - config.sliding_window_size)
            return (num_tokens**2 - beyond**2) / 2
        if kind == "chunked":
            whole, rest = divmod(num_tokens, config.chunk_attn_window_size)
            return (whole * config.chunk_attn_window_size**2 + rest**2) / 2
        return num_tokens**2 / 2

    shape = model_shape(config)
    total = 0 * num_tokens
    for kind, count in Counter(config.trained_kinds).items():
        own = shape.of_kind(kind)
        width = own.num_query_heads * own.head_dim / (shape.num_query_heads * shape.head_dim)
        total = total + count * of_layer(kind) * width
    return total


def master_bytes(config: Config, mesh: Mapping[str, int], diloco_num_replicas: int | None) -> int:
    """Bytes per device of the float32 masters of narrower weights, which `master_weights=false` saves.

    Each replica of local updates has its own masters, and so do the outer parameters.
    """
    if config.weight_dtype == "float32" or config.lora_rank:  # adapters are float32; frozen weights need no masters
        return 0
    copies = 1 if diloco_num_replicas is None else diloco_num_replicas // mesh["data"] + 1
    parts = mesh["data"] if config.shard_optimizer_over_data else 1
    return 4 * copies * count_parameters(config, tiled=False, **mesh).total // parts


_TILE_LOGITS_BYTES = 2**29


def vocab_tiles(num_vocab_tiling: int, *, rows: int, tokens: int, vocab_size: int) -> int:
    """Pieces in which a device computes its logits.

    These are `num_vocab_tiling`, or for -1 the fewest whose float32 logits take at most half a GiB, a 32nd of the
    memory of the smallest accelerator. The device at hand does not matter: any other computes the same.

    Args:
      rows: rows of a device.
      tokens: tokens of each of these rows, split into equal pieces.
      vocab_size: the device's part of the vocabulary.
    """
    if num_vocab_tiling != -1:
        return num_vocab_tiling
    for pieces in divisors(tokens):
        if 4 * rows * (tokens // pieces) * vocab_size <= _TILE_LOGITS_BYTES:
            return pieces
    return tokens


def weights_by_part(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[tuple[str, int, Weight]]:
    """Each weight with the name it counts under and the number of a device's layers that have it."""
    assert mesh.keys() <= {*MESH_AXES}, f"{mesh} has axes that no mesh has"
    adapted = adapted_weights(config)
    for stack, (count, table) in stacks_of(model_shape(config)).items():
        normal = "matrices" if stack else "tables"
        if stack:
            count //= num_parts(stack.partition("/")[0], mesh)
        for path, weight in table.items():
            yield normal if weight.is_normal else "norms", count, weight
            if path.rpartition("/")[2] in adapted:
                for matrix in weight.adapters(config.lora_rank):
                    yield "adapters", count, matrix


def _met(config: ModelConfig, weight: Weight) -> Fraction:
    """The share of a layer's weight that a token is multiplied by."""
    return Fraction(config.num_experts_per_tok, config.num_experts) if weight.axes[0] == "experts" else Fraction(1)


def parts_on_device(weight: Weight, mesh: Mapping[str, int]) -> list[int]:
    """Sizes of one device's part of a weight."""
    return [size // num_parts(axis, mesh) for size, axis in zip(weight.sizes, weight.axes, strict=True)]


def elements_on_device(weight: Weight, mesh: Mapping[str, int], tiled: bool = False) -> int:
    """Elements of a weight on one device; if `tiled`, including the padding of a TPU's tiles of 8 x 128.

    Of all pairs of dims that could form the tiles, the one with the least padding counts.
    """
    if not tiled or len(weight.sizes) < 2:
        return math.prod(weight.sizes) // math.prod(num_parts(axis, mesh) for axis in weight.axes)
    parts = parts_on_device(weight, mesh)
    tiled_sizes: list[int] = []
    for rows, columns in permutations(parts, 2):
        tiled_sizes.append(math.prod(parts) // (rows * columns) * _tiled(rows, columns))
    return min(tiled_sizes)


def _tiled(rows: int, columns: int) -> int:
    """Elements of a matrix padded to tiles: columns to multiples of 128, rows to multiples of 8 (few rows: to 2^k)."""
    filled = -(-rows // 8) * 8 if rows >= 8 else 1 << (rows - 1).bit_length()
    return filled * -(-columns // 128) * 128
