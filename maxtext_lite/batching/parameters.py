"""Parameters and FLOPs of the model that a config describes, counted from the tables that the decoder is made of."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from typing import Any

from maxtext_lite.batching.topology import MESH_AXES
from maxtext_lite.config import ModelConfig, adapted_weights
from maxtext_lite.config.weight_axes import num_parts
from maxtext_lite.config.weights import Weight, model_shape, stacks_of


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model, or of one device's shard.

    Attributes:
      matrices: elements of the layers' matrices.
      tables: elements of the tables of embeddings and positions, and of the output projection where it is not tied.
      norms: elements of norms, biases and whatever else is a vector.
      adapters: elements of LoRA's matrices, which are then all that is trained.
    """

    matrices: int
    tables: int
    norms: int
    adapters: int = 0

    @property
    def total(self) -> int:
        """All elements but the adapters'."""
        return self.matrices + self.tables + self.norms


def weight_shards(mesh: Mapping[str, int]) -> int:
    """The parts into which the embedding dim of a weight is split: over every axis that splits tokens but `data`."""
    return num_parts("embed", mesh)


def count_parameters(config: ModelConfig, *, tiled: bool = False, **mesh: int) -> ParameterCount:
    """Parameters per device, exactly; `tiled`, with what fills the tiles of a TPU's memory up.

    Matrices are split over fsdp, context, expert and tensor, of experts each whole over the expert axis, routers not
    over tensor, layers over stages, biases as what they are added to, norms and routers' biases over nothing else.

    Args:
      mesh: size of each mesh axis, 1 where it is not named.
    """
    elements = Counter[str]()
    for part, count, weight in _weights(config, mesh):
        elements[part] += count * _elements(weight, mesh, tiled)
    return ParameterCount(elements["matrices"], elements["tables"], elements["norms"], elements["adapters"])


def count_factored(config: ModelConfig, **mesh: int) -> int:
    """Elements per device of Adafactor's second moments, of what is trained; those of its means lie as the parameter
    does, but for the dim that they are over."""
    weights, lora = _weights(config, mesh), config.lora_rank > 0
    return sum(count * _factored(weight, mesh) for part, count, weight in weights if (part == "adapters") == lora)


def count_orthogonalized(config: ModelConfig, **mesh: int) -> int:
    """Elements per device that Muon's Newton-Schulz steps work with, as a compiler runs those of all stacks side by
    side: of what is trained each matrix before and after a step, whole but for tensor, expert and stage, and where it
    is split further its own part in two layouts."""
    whole = {axis: mesh.get(axis, 1) for axis in ("tensor", "expert")}
    elements = 0
    for part, count, weight in _weights(config, mesh):
        if part == ("adapters" if config.lora_rank else "matrices"):
            here = math.prod(_parts(weight, mesh))
            parts = [1 if axis.endswith("embed") else num_parts(axis, whole) for axis in weight.axes]
            gathered = math.prod(weight.sizes) // math.prod(parts)
            elements += count * (2 * gathered + (2 * here if here < gathered else 0))
    return elements


def active_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied by: all but the experts that it does not go to."""
    matrices = [(count, weight) for part, count, weight in _weights(config, {}) if part == "matrices"]
    unmet = sum(count * (1 - _met(config, weight)) * math.prod(weight.sizes) for count, weight in matrices)
    return count_parameters(config).total - int(unmet)


def flops_per_example(config: ModelConfig, num_tokens: int) -> float:
    """FLOPs of one forward and backward pass over an example of `num_tokens` tokens, without recomputation.

    6 per matmul weight that a token goes through, of the experts those that it goes to, the output projection among
    them, or 4 where it is frozen and has no gradient of its own; and causal attention's 6 per head, key that is seen,
    and dim of keys and of values: see `attended_pairs`.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    met = Counter({"matrices": config.base_emb_dim * config.vocab_size})
    for part, count, weight in _weights(config, {}):
        met[part] += count * int(_met(config, weight) * math.prod(weight.sizes))
    of_weights = (4 if config.lora_rank else 6) * met["matrices"] + 6 * met["adapters"]
    attention = 6 * config.base_num_query_heads * (config.head_dim + config.value_dim)
    return float(num_tokens) * of_weights + attention * attended_pairs(config, num_tokens)


def attended_pairs(config: ModelConfig, num_tokens: Any) -> Any:
    """Pairs of a query and a key that it sees in a document of `num_tokens` tokens, summed over layers.

    Half of the full square in a global layer, less in a local or chunked one.

    Args:
      num_tokens: a number, or an array of those of several documents; what is returned has its shape.
    """

    def of_layer(kind: str) -> Any:
        if kind.startswith("local"):
            beyond = (num_tokens > config.sliding_window_size) * (num_tokens - config.sliding_window_size)
            return (num_tokens**2 - beyond**2) / 2
        if kind == "chunked":
            whole, rest = divmod(num_tokens, config.chunk_attn_window_size)
            return (whole * config.chunk_attn_window_size**2 + rest**2) / 2
        return num_tokens**2 / 2

    kinds = Counter(config.pattern[layer % len(config.pattern)] for layer in range(config.base_num_decoder_layers))
    return sum(count * of_layer(kind) for kind, count in kinds.items())


def _weights(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[tuple[str, int, Weight]]:
    """Each weight, with what it counts as and how many layers of a device have it."""
    assert mesh.keys() <= {*MESH_AXES}, f"{mesh} has axes that no mesh has"
    shape, adapted = model_shape(config), adapted_weights(config)
    for stack, (count, table) in stacks_of(shape).items():
        axis = stack.partition("/")[0]
        here, normal = (count // num_parts(axis, mesh), "matrices") if stack else (1, "tables")
        for path, weight in table.items():
            yield normal if weight.is_normal else "norms", here, weight
            if path.rpartition("/")[2] in adapted:
                yield from (("adapters", here, matrix) for matrix in weight.adapters(config.lora_rank))


def _met(config: ModelConfig, weight: Weight) -> Fraction:
    """The share of a layer's weight that a token is multiplied by."""
    return Fraction(config.num_experts_per_tok, config.num_experts) if weight.axes[0] == "experts" else Fraction(1)


def _parts(weight: Weight, mesh: Mapping[str, int]) -> list[int]:
    """Sizes of one device's part."""
    return [size // num_parts(axis, mesh) for size, axis in zip(weight.sizes, weight.axes, strict=True)]


def _elements(weight: Weight, mesh: Mapping[str, int], tiled: bool) -> int:
    """Those of one device; `tiled`, with what fills a TPU's tiles of 8 x 128 up.

    The two dims that make the tiles are those with which least is filled up.
    """
    if not tiled or len(weight.sizes) < 2:
        return math.prod(weight.sizes) // math.prod(num_parts(axis, mesh) for axis in weight.axes)
    parts = _parts(weight, mesh)
    pairs = permutations(parts, 2)
    return min(math.prod(parts) // (rows * columns) * _tiled(rows, columns) for rows, columns in pairs)


def _tiled(rows: int, columns: int) -> int:
    """Elements of a matrix whose columns are filled up to 128s and its rows to 8s, or few rows to a power of two."""
    filled = -(-rows // 8) * 8 if rows >= 8 else 1 << (rows - 1).bit_length()
    return filled * -(-columns // 128) * 128


_FACTORED_FROM = 128  # min_dim_size_to_factor of Optax's Adafactor


def _factored(weight: Weight, mesh: Mapping[str, int]) -> int:
    """Elements on one device of Adafactor's second moments: of a layer's tensor, or an expert's, whose two largest
    dims are both at least `_FACTORED_FROM`, the means over each of them; of any other, all of it.
    """
    parts, sizes = _parts(weight, mesh), weight.sizes
    first = 1 if weight.axes[0] == "experts" else 0
    by_size = sorted(range(first, len(parts)), key=lambda dim: sizes[dim])
    if len(by_size) < 2 or sizes[by_size[-2]] < _FACTORED_FROM:
        return math.prod(parts)

    def without(dim: int) -> int:
        while dim + 1 < len(parts) and sizes[dim + 1] == sizes[dim]:
            dim += 1  # of equal dims next to each other, the shape does not tell which is gone: the last
        return math.prod(parts[:dim] + parts[dim + 1 :])

    return sum(without(dim) for dim in by_size[-2:])
