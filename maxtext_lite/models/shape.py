"""DecoderShape: everything that decides a decoder's parameters and arithmetic."""

import dataclasses
import math
from fractions import Fraction
from typing import Literal, Self

import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext_lite.config import PositionTemperature, Quantization, RopeScaling
from maxtext_lite.config.kernels import GroupedMatmul
from maxtext_lite.config.keys import LOCAL_KINDS
from maxtext_lite.config.weights import ExpertSizes, ModelShape
from maxtext_lite.models.attention import Scoring
from maxtext_lite.models.ops import Activation
from maxtext_lite.models.rotary import Rope, score_factor

BALANCE, ROUTER_Z, DROPPED = "moe_balance", "router_z", "moe_dropped_fraction"
"""Names of a layer's entries in the stream's `aux`, float32: the balance loss of each example [B]; the squared
log-partition of the router for each token [B, T]; and the share of each example's choices that were dropped [B]."""

EXPERT_COUNTS = "expert_counts"
"""Likewise, int32: the tokens of each example that chose each expert; [B, E] of a layer, [B, L, E] in the stream, for
the L layers with experts."""

LARGEST_LOGITS = "largest_logits"
"""Likewise, float32, without gradients: each head's largest score before softmax and soft cap, or 0; [B, N] of a layer,
[B, L, N] in the stream."""


@dataclasses.dataclass(frozen=True)
class ExpertShape(ExpertSizes):
    """Everything that decides a layer's experts and routing.

    Attributes: those of ExpertSizes, and
      score: of an expert's logit: the softmax over all experts, or its own sigmoid; with sparsemixer, for a token's
        first expert and then for its second, a softmax over the experts near the largest.
      normalised: a token's chosen scores are divided by their sum.
      scaling: a factor of the chosen scores.
      on_input: they multiply an expert's input, not its output.
      capacity_factor: an expert takes the first ceil(factor x tokens of the example x J / E) tokens of each example;
        None: all (dropless).
      num_groups: groups of neighbouring experts.
      groups_per_token: a token chooses among the experts of this many groups, those whose best expert (softmax) or best
        two together (sigmoid) score highest.
      activation: of the experts' gated mlps.
      matmul: kernel of the grouped matmuls of `experts`.
      grad_dtype: of their weights' gradients as these cross `fsdp`.
      quantization: of the matmuls with their weights.
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    on_input: bool = False
    capacity_factor: Fraction | None = None
    num_groups: int = 1
    groups_per_token: int = 1
    activation: Activation = "silu"
    matmul: GroupedMatmul = "ragged_dot"
    grad_dtype: DTypeLike = jnp.float32
    quantization: Quantization = "none"

    @property
    def judges_logits(self) -> bool:
        """Whether experts are chosen by logits, because several scores may round to 1; groups need sums of scores."""
        return self.score == "sparsemixer" or (self.on_input and self.num_groups == 1)

    @property
    def counts(self) -> bool:
        """Whether the tokens that chose each expert are counted."""
        return self.biased or self.keeps_load

    @property
    def aux_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the entries of the stream's `aux`."""
        axes: dict[str, tuple[str | None, ...]] = {BALANCE: ("batch",), ROUTER_Z: ("batch", "length")}
        if self.capacity_factor is not None:
            axes[DROPPED] = ("batch",)
        if self.counts:
            axes[EXPERT_COUNTS] = ("batch", None, None)
        return axes


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which weights have adapters.

    Attributes:
      rank: r, the width between an adapter's two matrices.
      alpha: their product is multiplied by alpha / r.
      targets: names of layers' weights: attention's, the mlp's and the experts'.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of the product of an adapter's two matrices."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class DecoderShape(ModelShape):
    """Everything that decides a decoder's parameters and arithmetic; the defaults make it a Llama.

    Attributes: those of ModelShape, and
      dtype: of activations and matmul inputs; norms, softmax and rotary angles are always float32.
      weight_dtype: of the parameters in the optimizer.
      grad_dtype: of a matrix's gradient as it crosses `fsdp`.
      activation: of the mlp and of experts.
      window: tokens that a local layer's query sees.
      chunk: tokens of the chunks of a document within which chunked layers attend.
      soft_cap, final_soft_cap: c of c tanh(x / c), of scores and of logits; 0: none.
      query_scalar: scores are divided by its square root; 0: head_dim.
      inverse_layer_scaling: scores of layer l, counted from 1, are divided by l too.
      position_temperature: how queries grow with their positions; None: they do not.
      keeps_largest_logits: the stream has LARGEST_LOGITS.
      clip_qkv: c: queries, keys and values are clipped to -c ... c; 0: they are not.
      residual_multiplier: of the outputs of attention and mlp before they are added to the stream.
      logits_multiplier: of logits, before their soft cap.
      rope_local_max_timescale: base of local layers, which then have no `rope_scaling`; 0: that of the other layers.
      scaled_embeddings: embeddings are multiplied by the square root of emb_dim.
      embedding_multiplier: embeddings are multiplied by this.
      initializer_range: standard deviation of the normal initial weights; norms start at 1, biases at 0.
      width_ratio: layers' matrices start with that standard deviation over the root of this.
      attention: name of the kernel, a name of the registry's kind `attention`.
      global_kernel: that of layers without a window, where `global_attention` gives them other heads.
      quantization: of the matmuls with layers' weights.
      saved: names (`checkpoint_name`) of a layer's tensors that the forward pass keeps for the backward pass, beside
        the layer's input; the others are recomputed. None: all are kept.
      offloaded: names of the tensors that it keeps in pinned host memory.
      context_strategy: how the shards of a context axis exchange keys, one of `attention.STRATEGIES`.
      experts: sizes and routing, in place of each layer's mlp; None: the mlp.
      lora: the adapters that are trained beside frozen weights; None: the weights are trained.
    """

    norm_epsilon: float = 1e-5
    activation: Activation = "silu"
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    query_scalar: float = 0.0
    inverse_layer_scaling: bool = False
    position_temperature: PositionTemperature | None = None
    keeps_largest_logits: bool = False
    clip_qkv: float = 0.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    rope_max_timescale: float = 10_000.0
    rope_local_max_timescale: float = 0.0
    rope_scaling: RopeScaling | None = None
    scaled_embeddings: bool = False
    embedding_multiplier: float = 1.0
    final_soft_cap: float = 0.0
    initializer_range: float = 0.02
    width_ratio: float = 1.0
    dtype: DTypeLike = jnp.float32
    weight_dtype: DTypeLike = jnp.float32
    grad_dtype: DTypeLike = jnp.float32
    quantization: Quantization = "none"
    saved: tuple[str, ...] | None = None
    offloaded: tuple[str, ...] = ()
    attention: str = "dot_product"
    global_kernel: str = "dot_product"
    context_strategy: str = "all_gather"
    experts: ExpertShape | None = None
    lora: Lora | None = None

    def of_stack(self, path: str) -> Self:
        initial = self.initializer_range / math.sqrt(self.width_ratio)
        return dataclasses.replace(super().of_stack(path), initializer_range=initial, width_ratio=1.0)

    def layers_from(self, first: int) -> tuple[tuple[str, str | None], ...]:
        """The kind and the name of the stack of each of a period of layers from `first` on; see `stack_name`."""
        period = math.lcm(len(self.pattern), len(self.mlp_kinds) if self.is_mixed else 1)
        layers = range(first, first + period)
        return tuple((self.pattern[layer % len(self.pattern)], self.stack_name(layer)) for layer in layers)

    def of_mixer(self, mixer: str) -> Self:
        """The shape with the heads of layers with one of `mixers`, and their kernel."""
        shape = super().of_mixer(mixer)
        return shape if shape is self else dataclasses.replace(shape, attention=self.global_kernel)

    def rope(self, kind: str) -> Rope | None:
        """The rotation of queries and keys in layers of this kind; None: they are not rotated."""
        if self.num_positions or kind in ("nope", "local_nope"):
            return None
        shape = self.of_kind(kind)
        dim = shape.head_dim if shape.rotary_dim is None else shape.rotary_dim
        if kind == "local" and self.rope_local_max_timescale:
            return Rope(dim, self.rope_local_max_timescale)
        return Rope(dim, self.rope_max_timescale, self.rope_scaling)

    @property
    def follows_length(self) -> bool:
        """Whether a token's result depends on how many tokens follow it in its document."""
        return any(rope is not None and rope.follows_length for rope in map(self.rope, self.pattern))

    def scoring(self, kind: str) -> Scoring:
        """How queries score keys in layers of this kind."""
        factor = 1.0 if self.latent is None else score_factor(self.rope_scaling)
        head_dim = self.of_kind(kind).head_dim
        scalar = self.query_scalar or head_dim
        return Scoring(
            scale=None if factor == 1 and scalar == head_dim else factor / math.sqrt(scalar),
            window=self.window if kind in LOCAL_KINDS else None,
            chunk=self.chunk if kind == "chunked" else None,
            soft_cap=self.soft_cap or None,
        )
