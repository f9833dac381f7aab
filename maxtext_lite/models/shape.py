"""DecoderShape: everything that decides a decoder's parameters and arithmetic."""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp

from maxtext_lite.config import LayerKind, Mla, Quantization, RopeScaling
from maxtext_lite.models.attention import Scoring
from maxtext_lite.models.lora import Lora
from maxtext_lite.models.moe import ExpertShape
from maxtext_lite.models.ops import Activation
from maxtext_lite.models.rotary import Rope, score_factor


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """Everything that decides a decoder's parameters and arithmetic; the defaults make it a Llama.

    Attributes:
      dtype: of activations and matmul inputs; norms, softmax and rotary angles are float32 whatever it is.
      weight_dtype: of the parameters as the optimizer holds them.
      grad_dtype: of a matrix's gradient where it crosses `fsdp`.
      norm: of the root mean square, times scale or 1 + scale; or LayerNorm, with mean and bias.
      norm_placement: norms stand before each block, after it, or both.
      activation: of the mlp and of experts.
      gated: the mlp multiplies what it activates by another projection.
      attention_bias: which of attention's projections have a bias.
      qk_norm: norm of queries and keys, of each head by itself or of all together.
      pattern: kinds of the first layers, which those after them repeat.
      window: tokens that a local layer's query sees.
      soft_cap, final_soft_cap: c of c tanh(x / c), of scores and of logits; 0: none.
      sinks: each query head has a learned score that takes its share of the softmax and gives nothing.
      query_scalar: scores are divided by its root; 0: head_dim.
      latent: widths of latent attention; None: ordinary attention.
      rotary_dim: dims of a head that are rotated; None: all.
      rope_local_max_timescale: base of local layers, which `rope_scaling` then leaves alone; 0: as the others.
      num_positions: rows of the table of learned positions; 0: rotation.
      scaled_embeddings: embeddings are multiplied by the root of emb_dim.
      tied: the output projection is the embedding table.
      initializer_range: standard deviation of the normal initial weights; norms start at 1, biases at 0.
      attention: name of the kernel, one of `attention.KERNELS`.
      quantization: of what multiplies weights of layers.
      saved: names (`checkpoint_name`) of a layer's tensors that the forward pass keeps for the backward pass, beside
        the layer's input; the others are made again. None: all are kept.
      offloaded: names of those that it keeps in pinned host memory.
      context_strategy: how the shards of a context axis exchange keys, one of `tiled_attention.STRATEGIES`.
      experts: in place of each layer's mlp; None: the mlp.
      num_dense_layers: first layers that have an mlp all the same.
      lora: what is trained beside frozen weights; None: the weights are.
    """

    vocab_size: int
    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    norm: Literal["rms_norm", "rms_norm_plus_one", "layer_norm"] = "rms_norm"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    norm_epsilon: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    pattern: tuple[LayerKind, ...] = ("global",)
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    query_scalar: float = 0.0
    latent: Mla | None = None
    rope_max_timescale: float = 10_000.0
    rope_local_max_timescale: float = 0.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    num_positions: int = 0
    scaled_embeddings: bool = False
    tied: bool = False
    final_soft_cap: float = 0.0
    initializer_range: float = 0.02
    dtype: Any = jnp.float32
    weight_dtype: Any = jnp.float32
    grad_dtype: Any = jnp.float32
    quantization: Quantization = "none"
    saved: tuple[str, ...] | None = None
    offloaded: tuple[str, ...] = ()
    attention: str = "dot_product"
    context_strategy: str = "all_gather"
    experts: ExpertShape | None = None
    num_dense_layers: int = 0
    lora: Lora | None = None

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def num_expert_layers(self) -> int:
        """Layers after the dense ones: those that are stacked, and dealt to pipeline stages."""
        return self.num_layers - self.num_dense_layers

    def kinds_from(self, first: int) -> tuple[LayerKind, ...]:
        """The pattern as it goes on at layer `first`."""
        start = first % len(self.pattern)
        return self.pattern[start:] + self.pattern[:start]

    def rope(self, kind: LayerKind) -> Rope | None:
        """The rotation of queries and keys in layers of this kind; None: they are not rotated."""
        if self.num_positions or kind == "nope":
            return None
        dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if kind == "local" and self.rope_local_max_timescale:
            return Rope(dim, self.rope_local_max_timescale)
        return Rope(dim, self.rope_max_timescale, self.rope_scaling)

    @property
    def follows_length(self) -> bool:
        """Whether what a token comes to depends on how many tokens follow it in its document."""
        return any(rope is not None and rope.follows_length for rope in map(self.rope, self.pattern))

    def scoring(self, kind: LayerKind) -> Scoring:
        """How queries score keys in layers of this kind."""
        factor = 1.0 if self.latent is None else score_factor(self.rope_scaling)
        scalar = self.query_scalar or self.head_dim
        return Scoring(
            scale=None if factor == 1 and scalar == self.head_dim else factor / math.sqrt(scalar),
            window=self.window if kind == "local" else None,
            soft_cap=self.soft_cap or None,
        )
