"""Parameters and FLOPs of the model that a config describes, before there is a machine; the decoder's are the same."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from typing import TypedDict

from maxtext_lite.config import ModelConfig, adapted_weights


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


_FACTORED_FROM = 128  # min_dim_size_to_factor of Optax's Adafactor


@dataclass(frozen=True)
class _Weight:
    """A parameter of a layer.

    Attributes:
      sizes: of its dims.
      axes: for each of them, the word for what splits it, or "".
      met: share of it that a token is multiplied by; 0 for vectors.
      name: what `lora_targets` calls it; "" where adapters cannot stand beside it.
    """

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    met: Fraction = Fraction(1)
    name: str = ""

    def elements(self, shards: Mapping[str, int], tiled: bool = False) -> int:
        """Those of one device; `tiled`, with what fills a TPU's tiles of 8 x 128 up.

        The two dims that make the tiles are those with which least is filled up.
        """
        if not tiled or len(self.sizes) < 2:
            return math.prod(self.sizes) // math.prod(shards.get(axis, 1) for axis in self.axes)
        parts = [size // shards.get(axis, 1) for size, axis in zip(self.sizes, self.axes, strict=True)]
        pairs = permutations(parts, 2)
        return min(math.prod(parts) // (rows * columns) * _tiled(rows, columns) for rows, columns in pairs)

    def factored(self, shards: Mapping[str, int]) -> int:
        """Elements on one device of Adafactor's second moments: of a layer's tensor, or an expert's, whose two largest
        dims are both at least `_FACTORED_FROM`, the means over each of them; of any other, all of it.
        """
        parts = [size // shards.get(axis, 1) for size, axis in zip(self.sizes, self.axes, strict=True)]
        first = 1 if self.axes[0] == "expert" else 0
        by_size = sorted(range(first, len(parts)), key=lambda dim: self.sizes[dim])
        if len(by_size) < 2 or self.sizes[by_size[-2]] < _FACTORED_FROM:
            return math.prod(parts)

        def without(dim: int) -> int:
            while dim + 1 < len(parts) and self.sizes[dim + 1] == self.sizes[dim]:
                dim += 1  # of equal dims next to each other, the shape does not tell which is gone: the last
            return math.prod(parts[:dim] + parts[dim + 1 :])

        return sum(without(dim) for dim in by_size[-2:])

    def adapters(self, rank: int) -> tuple["_Weight", "_Weight"]:
        """[.., in, rank] and [.., rank, out], split as this is."""
        dims = tuple(zip(self.sizes, self.axes, strict=True))
        stack = dims[:1] if self.axes[0] == "expert" else ()
        dims = dims[len(stack) :]
        # What a weight gives is one dim wide where that is the embedding, and so are its inputs in all others.
        num_inputs = len(dims) - 1 if self.name in ("out", "down") else 1
        between = (rank, "")
        first = _matrix(*stack, *dims[:num_inputs], between, met=self.met)
        return first, _matrix(*stack, between, *dims[num_inputs:], met=self.met)


def _tiled(rows: int, columns: int) -> int:
    """Elements of a matrix whose columns are filled up to 128s and its rows to 8s, or few rows to a power of two."""
    filled = -(-rows // 8) * 8 if rows >= 8 else 1 << (rows - 1).bit_length()
    return filled * -(-columns // 128) * 128


def _matrix(*dims: tuple[int, str], met: Fraction = Fraction(1), name: str = "") -> _Weight:
    return _Weight(tuple(size for size, _ in dims), tuple(axis for _, axis in dims), met, name)


def _vector(*dims: tuple[int, str]) -> _Weight:
    return _matrix(*dims, met=Fraction(0))


def _attention(config: ModelConfig) -> Iterator[_Weight]:
    emb, width = (config.base_emb_dim, "embed"), (config.head_dim, "")
    heads, kv_heads = (config.base_num_query_heads, "tensor"), (config.base_num_kv_heads, "tensor")
    if config.mla is not None:
        yield from _latent_attention(config)
        return
    yield _matrix(emb, heads, width, name="query")
    yield from (_matrix(emb, kv_heads, width, name=name) for name in ("key", "value"))
    yield _matrix(heads, width, emb, name="out")
    if config.attention_bias != "none":
        yield from (_vector(heads, width), _vector(kv_heads, width), _vector(kv_heads, width))
    if config.attention_bias == "all":
        yield _vector((config.base_emb_dim, ""))
    if config.qk_norm != "none":
        whole = config.qk_norm == "all_heads"
        for norm in ((heads, width), (kv_heads, width)):
            yield from _norm(config, *(norm if whole else norm[1:]))
    if config.attention_sinks:
        yield _vector(heads)


def _latent_attention(config: ModelConfig) -> Iterator[_Weight]:
    widths, emb, heads = config.mla, (config.base_emb_dim, "embed"), (config.base_num_query_heads, "tensor")
    assert widths is not None
    rank, query_rank = (widths.kv_lora_rank, ""), (widths.q_lora_rank, "")
    if widths.q_lora_rank:
        yield from (_matrix(emb, query_rank, name="query_down"), _vector(query_rank))
        yield _matrix(query_rank, heads, (config.head_dim, ""), name="query_up")
    else:
        yield _matrix(emb, heads, (config.head_dim, ""), name="query")
    yield _matrix(emb, (widths.kv_lora_rank + widths.qk_rope_head_dim, ""), name="kv_down")
    yield _vector(rank)
    yield _matrix(rank, heads, (widths.qk_nope_head_dim, ""), name="key_up")
    yield _matrix(rank, heads, (widths.v_head_dim, ""), name="value_up")
    yield _matrix(heads, (widths.v_head_dim, ""), emb, name="out")


def _norm(config: ModelConfig, *dims: tuple[int, str]) -> Iterator[_Weight]:
    yield from [_vector(*dims)] * (2 if config.normalization == "layer_norm" else 1)


def _mlp(config: ModelConfig, mlp_dim: int) -> Iterator[_Weight]:
    emb, width, projections = (config.base_emb_dim, "embed"), (mlp_dim, "tensor"), ("gate", "up")
    projections = projections if config.gated_mlp else projections[1:]
    yield from (_matrix(emb, width, name=name) for name in projections)
    yield _matrix(width, emb, name="down")
    if config.mlp_bias:
        yield from [_vector(width)] * len(projections)
        yield _vector((config.base_emb_dim, ""))


def _experts(config: ModelConfig) -> Iterator[_Weight]:
    emb, width, count = (config.base_emb_dim, "expert_embed"), (config.moe_mlp_dim, "tensor"), config.num_experts
    experts, chosen = (count, "expert"), Fraction(config.num_experts_per_tok, count)
    yield _matrix((config.base_emb_dim, "embed"), (count, ""))
    yield from (_matrix(experts, emb, width, met=chosen, name=name) for name in ("gate", "up"))
    yield _matrix(experts, width, emb, met=chosen, name="down")
    if config.routed_bias:
        yield _vector((count, ""))
    if config.expert_bias:
        yield _vector((count, ""))
        yield from [_vector(experts, width)] * 2
        yield _vector(experts, (config.base_emb_dim, ""))
    if config.shared_experts:
        yield from _mlp(config, config.shared_experts * config.moe_mlp_dim)


def _layer(config: ModelConfig, *, dense: bool) -> list[_Weight]:
    norms = 4 if config.norm_placement == "both" else 2
    weights = [norm for _ in range(norms) for norm in _norm(config, (config.base_emb_dim, ""))]
    has_mlp = dense or config.num_experts == 1
    return [*weights, *_attention(config), *(_mlp(config, config.base_mlp_dim) if has_mlp else _experts(config))]


def _layers(config: ModelConfig) -> list[tuple[int, bool, list[_Weight]]]:
    """The layers that are alike: how many, whether pipeline stages share them out, and one's parameters."""
    first = config.first_num_dense_layers
    stacked = (config.base_num_decoder_layers - first, True, _layer(config, dense=False))
    return [(first, False, _layer(config, dense=True)), stacked] if first else [stacked]


def weight_shards(mesh: Mapping[str, int]) -> int:
    """The parts into which the embedding dim of a weight is split: over every axis that splits tokens but `data`."""
    return mesh["fsdp"] * mesh["context"] * mesh["expert"]


class Split(TypedDict):
    """Sizes of the mesh axes that split parameters."""

    fsdp: int
    tensor: int
    stage: int
    context: int
    expert: int


def split_of(mesh: Mapping[str, int]) -> Split:
    """Those of a mesh."""
    return Split(
        fsdp=mesh["fsdp"],
        tensor=mesh["tensor"],
        stage=mesh["stage"],
        context=mesh["context"],
        expert=mesh["expert"],
    )


def _shards(fsdp: int, tensor: int, context: int, expert: int) -> dict[str, int]:
    split = {"fsdp": fsdp, "context": context, "expert": expert}
    return {"embed": weight_shards(split), "expert_embed": fsdp * context, "tensor": tensor, "expert": expert}


def count_parameters(
    config: ModelConfig,
    *,
    fsdp: int = 1,
    tensor: int = 1,
    stage: int = 1,
    context: int = 1,
    expert: int = 1,
    tiled: bool = False,
) -> ParameterCount:
    """Parameters per device, exactly; `tiled`, with what fills the tiles of a TPU's memory up.

    Matrices are split over fsdp, context, expert and tensor, of experts each whole over the expert axis, routers not
    over tensor, layers over stages, biases as what they are added to, norms and routers' biases over nothing else.
    """
    shards = _shards(fsdp, tensor, context, expert)
    matrices = vectors = adapters = 0
    for count, dealt, weights in _layers(config):
        here = count // stage if dealt else count
        matrices += here * sum(weight.elements(shards, tiled) for weight in weights if weight.met)
        vectors += here * sum(weight.elements(shards, tiled) for weight in weights if not weight.met)
        adapters += here * sum(matrix.elements(shards, tiled) for matrix in _adapters(config, weights))
    vectors += sum(weight.elements(shards, tiled) for weight in _norm(config, (config.base_emb_dim, "")))
    tables = sum(weight.elements(shards, tiled) for weight in _tables(config))
    return ParameterCount(matrices, tables, vectors, adapters)


def count_factored(
    config: ModelConfig, *, fsdp: int = 1, tensor: int = 1, stage: int = 1, context: int = 1, expert: int = 1
) -> int:
    """Elements per device of Adafactor's second moments, of what is trained; those of its means lie as the parameter
    does, but for the dim that they are over."""
    shards = _shards(fsdp, tensor, context, expert)
    total = 0
    for count, dealt, weights in _layers(config):
        trained = _adapters(config, weights) if config.lora_rank else weights
        total += (count // stage if dealt else count) * sum(weight.factored(shards) for weight in trained)
    if config.lora_rank:
        return total
    ends = (*_norm(config, (config.base_emb_dim, "")), *_tables(config))
    return total + sum(weight.factored(shards) for weight in ends)


def _tables(config: ModelConfig) -> Iterator[_Weight]:
    """The tables of embeddings and positions, and the output projection where it is not tied."""
    vocab, emb = (config.vocab_size, "tensor"), (config.base_emb_dim, "embed")
    yield _matrix(vocab, emb)
    if not config.logits_via_embedding:
        yield _matrix(emb, vocab)
    if config.trainable_position_size:
        yield _matrix((config.trainable_position_size, ""), emb)


def _adapters(config: ModelConfig, weights: list[_Weight]) -> list[_Weight]:
    """LoRA's matrices in a layer with these weights; none without it."""
    adapted = adapted_weights(config)
    return [matrix for weight in weights if weight.name in adapted for matrix in weight.adapters(config.lora_rank)]


def active_parameters(config: ModelConfig) -> int:
    """Parameters that a token meets: all but the experts that it does not go to."""
    unmet = sum(
        count * (1 - weight.met) * math.prod(weight.sizes)
        for count, _, weights in _layers(config)
        for weight in weights
        if weight.met
    )
    return count_parameters(config).total - int(unmet)


def flops_per_example(config: ModelConfig, num_tokens: int) -> float:
    """FLOPs of one forward and backward pass over an example of `num_tokens` tokens, without recomputation.

    6 per matmul weight that a token meets, of the experts those that it goes to, the output projection among them, or 4
    where it is frozen and has no gradient of its own; and causal attention's 6 per head, key that is seen, and dim of
    keys and of values: half of the full square in a global layer, less in a local one.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    weights = config.base_emb_dim * config.vocab_size + _met(_layers(config))
    adapters = _met([(count, dealt, _adapters(config, layer)) for count, dealt, layer in _layers(config)])
    of_weights = 4 * weights + 6 * adapters if config.lora_rank else 6 * weights
    layers = config.base_num_decoder_layers
    kinds = [config.pattern[layer % len(config.pattern)] for layer in range(layers)]
    window = min(config.sliding_window_size, num_tokens)
    local_keys = window * (1 - window / (2 * num_tokens))
    keys = sum(local_keys if kind == "local" else num_tokens / 2 for kind in kinds)
    attention = 6 * config.base_num_query_heads * (config.head_dim + config.value_dim) * keys
    return float(num_tokens) * (of_weights + attention)


def _met(layers: list[tuple[int, bool, list[_Weight]]]) -> int:
    """Elements of layers' matrices that a token is multiplied by."""
    return sum(count * int(weight.met * math.prod(weight.sizes)) for count, _, layer in layers for weight in layer)
