"""The comparison of kernels and number formats with plain arithmetic, forward and backward.

Documents, padding, targets and weights come from the first batch, one row of each batch shard, on the run's mesh.
Activations and weights are drawn from normal distributions: those of new parameters would score all keys alike and hide
a wrong scale.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# jax declares some of its functions in part.

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxtext_lite.config import UserError
from maxtext_lite.config.keys import ATTENTION_KINDS
from maxtext_lite.config.records import without_infinities
from maxtext_lite.models import DecoderShape, ExpertShape, Scoring, soft_capped
from maxtext_lite.models.attention import attention
from maxtext_lite.models.layers import HEADS_AXES, OutputHead
from maxtext_lite.models.ops import TOKENS, project_array
from maxtext_lite.parallel import (
    constrain,
    in_context_order,
    num_shards,
    sharding,
    vmap_over_data,
)
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES
from maxtext_lite.training.loss import HEAD_AXES, Readout, cross_entropy
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import StepContext

_TIMES_PLAIN = 4.0
"""A kernel's error against float32 may be this multiple of plain arithmetic's error in the run's dtype."""
LEAST = {"float32": 1e-5, "bfloat16": 2**-5, "float16": 2**-8}
"""The least bounds: eight roundings of two bytes, and the meaning of "two runs agree" in float32."""
_OF_FORMAT = {"none": 0.0, "int8": 0.05, "fp8": 0.15, "fp8_full": 0.15}
"""The bounds of eight-bit formats. For normal numbers, whose largest are 4 to 5 standard deviations, a step of int8 is
about 4.5 / 127 and its rounding 1 % of a standard deviation; that of e4m3, with three bits of mantissa, is 2.6 %. Of
two operands together these are 1.4 % and 3.7 %. The bounds are about four times that."""
_QUICKLY_COMPILED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""The plain arithmetic runs once: on a GPU, autotuning its matmuls would take most of the check. Eight-bit formats are
checked as the step compiles them: without autotuning, XLA gave twice the product of int8 on an H200."""
_BLOCK = 128
_MOST_EXPERTS = 8
_MOST_WIDTH = 1024

Kernel = Callable[..., jax.Array]


class Normal(NamedTuple):
    """An array of normal numbers of variance 1 / `of`, sharded by its axes."""

    axes: Sequence[str | None]
    sizes: Sequence[int]
    dtype: DTypeLike
    of: int = 1

    def draw(self, key: jax.Array) -> jax.Array:
        """Draws the numbers."""
        return constrain((jax.random.normal(key, tuple(self.sizes)) / self.of**0.5).astype(self.dtype), self.axes)


class Piece(NamedTuple):
    """A kernel or a number format, and the plain arithmetic that it must match.

    Attributes:
      setting: the setting that selects it; `instead`: one to use in its place.
      arrays: (rows) -> the arrays to differentiate by, in the run's dtype, by name.
      kernel, plain: (rows) -> the function of those arrays.
      least: the least bound of its error.
    """

    setting: str
    instead: str
    arrays: Callable[[Rows], Mapping[str, Normal]]
    kernel: Callable[[Rows], Kernel]
    plain: Callable[[Rows], Kernel]
    least: float


def compare(kernel: Kernel, plain: Kernel, arrays: Sequence[jax.Array], least: float, key: jax.Array) -> jax.Array:
    """The error of `kernel` and its bound, for the result and the gradient of each array: [1 + arrays, 2].

    The error is the 2-norm of the difference in the worst block of 128 tokens (or other entries of the second dim) of a
    row, relative to the norm of the block plus a tenth of the mean block's. The truth is `plain` in float32; the bound
    is four times the error of `plain` in the arrays' dtype, and at least `least`.
    """

    def with_gradients(function: Kernel, arrays: Sequence[jax.Array], g: jax.Array | None) -> list[jax.Array]:
        y, backward = jax.vjp(function, *arrays)
        g = jnp.ones_like(y) if g is None else g.astype(y.dtype)
        return [y, *backward(g)]

    like = jax.eval_shape(kernel, *arrays)
    g = jax.random.normal(key, like.shape).astype(like.dtype) if like.ndim else None
    with jax.default_matmul_precision("highest"):
        right = with_gradients(plain, [x.astype(jnp.float32) for x in arrays], g)
    found = with_gradients(kernel, arrays, g)
    rounded = with_gradients(plain, arrays, g)
    return jnp.stack([
        jnp.stack([_error(a, exact), jnp.maximum(least, _TIMES_PLAIN * _error(b, exact))])
        for a, b, exact in zip(found, rounded, right, strict=True)
    ])  # fmt: skip


def _error(found: jax.Array, right: jax.Array) -> jax.Array:
    def squares(x: jax.Array) -> jax.Array:
        """[rows, blocks]."""
        x = jnp.square(x.astype(jnp.float32))
        x = x.reshape(*x.shape[:2], -1).sum(axis=-1) if x.ndim > 1 else x.reshape(1, -1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK)))
        return x.reshape(len(x), -1, _BLOCK).sum(axis=-1)

    of_right = squares(right)
    of_difference = squares(found.astype(jnp.float32) - right)
    mean = jnp.sqrt(jnp.mean(of_right))
    return jnp.max(jnp.sqrt(of_difference) / (jnp.sqrt(of_right) + mean / 10 + 1e-30))


def check_kernels(run: TrainingRun, batch: Rows, chosen: Mapping[str, int], say: Callable[[str], None]) -> None:
    """Checks a run's kernels and number formats on rows of its first batch [A, B, T]; says and stores the errors.

    Args:
      chosen: as in `kernel_check.kernels_of`.
    Raises:
      UserError: an error exceeds its bound.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for piece in _pieces(run.parts, chosen):
        began = time.perf_counter()
        numbers = np.asarray(jax.device_get(errors_of(piece, run.parts, batch)))
        seconds = time.perf_counter() - began
        results = ("result", *(f"d{name}" for name in piece.arrays(batch)))
        errors = dict(zip(results, numbers.tolist(), strict=True))
        said = ", ".join(f"{name} {error:.2g} of {bound:.2g}" for name, (error, bound) in errors.items())
        say(f"{piece.setting} beside plain arithmetic in float32, relative errors and bounds: {said} ({seconds:.1f} s)")
        found[piece.setting] = errors
        beyond = [name for name, (error, bound) in errors.items() if not error <= bound]
        if beyond:
            wrong.append(
                f"{piece.setting} is further from plain arithmetic than its bound, in {' and '.join(beyond)}, with the "
                f"documents of the first batch ({said}). Use {piece.instead}."
            )
    run.note_environment(kernels=without_infinities(found))
    if wrong:
        raise UserError(wrong)


def errors_of(piece: Piece, parts: StepContext, batch: Rows) -> jax.Array:
    """`compare` of a piece on one row per batch shard of a batch [A, B, T]: the worst replica's errors."""
    mesh = parts.mesh

    def of_replica(key: jax.Array, rows: Rows) -> jax.Array:
        normals = piece.arrays(rows).values()
        of_gradient, *keys = jax.random.split(key, len(normals) + 1)
        arrays = [normal.draw(each) for normal, each in zip(normals, keys, strict=True)]
        return compare(piece.kernel(rows), piece.plain(rows), arrays, piece.least, of_gradient)

    def of_batch(key: jax.Array, batch: Rows) -> jax.Array:
        rows = in_context_order(parts.objective.rows(batch, TRAIN_BATCH_AXES), TRAIN_BATCH_AXES)
        shards = num_shards("global_batch")
        rows = {name: x[0].reshape(shards, -1, x.shape[-1])[:, 0] for name, x in rows.items()}
        numbers = vmap_over_data(of_replica, mesh.shape["data"], rows=(1,))(key, rows)
        worst = jnp.argmax(numbers[..., 0] / numbers[..., 1], axis=0)  # NaN counts as the largest
        return jnp.take_along_axis(numbers, worst[None, :, None], axis=0)[0]

    is_quick = mesh.devices.flat[0].platform == "gpu" and parts.config.quantization == "none"
    options = _QUICKLY_COMPILED if is_quick else None
    with jax.set_mesh(mesh):
        return jax.jit(of_batch, out_shardings=sharding(mesh), compiler_options=options)(jax.random.key(0), batch)


def _pieces(parts: StepContext, chosen: Mapping[str, int]) -> Iterator[Piece]:
    """The pieces of a run to compare."""
    shape = parts.decoder.shape
    least = LEAST[jnp.dtype(shape.dtype).name]
    if "attention" in chosen:
        kinds = [kind for kind in shape.pattern if kind in ATTENTION_KINDS]
        pieces = [(shape.of_kind(kind), dataclasses.replace(shape.scoring(kind), chunk=None)) for kind in kinds]
        for of_kind, scoring in dict.fromkeys(pieces):
            yield attention_piece(of_kind, scoring, least)
    if "experts" in chosen:
        assert shape.experts is not None
        yield experts_piece(shape, shape.experts, least)
    if "quantization" in chosen:
        yield projection_piece(shape, max(least, _OF_FORMAT[shape.quantization]))
    if "num_vocab_tiling" in chosen:
        yield loss_piece(shape, chosen["num_vocab_tiling"], parts.config.z_loss_multiplier, least)


def attention_piece(shape: DecoderShape, scoring: Scoring, least: float) -> Piece:
    """The attention kernel in layers with this scoring. Results at padding are unused and not compared."""
    N = shape.num_query_heads
    H = shape.head_dim
    K = N if shape.latent else shape.num_kv_heads

    def arrays(rows: Rows) -> dict[str, Normal]:
        tokens = rows["segments"].shape
        widths = {"q": (N, H), "k": (K, H), "v": (K, shape.value_dim)}
        found = {name: Normal(HEADS_AXES, (*tokens, *width), shape.dtype) for name, width in widths.items()}
        return found | ({"sink": Normal(("activation_heads",), (N,), jnp.float32)} if shape.sinks else {})

    def by(kernel: str, rows: Rows) -> Kernel:
        segment_BT = rows["segments"]

        def of_tokens(q: jax.Array, k: jax.Array, v: jax.Array, *sink: jax.Array) -> jax.Array:
            how: Any = {"kernel": kernel, "strategy": shape.context_strategy, "scoring": scoring}
            return jnp.where((segment_BT > 0)[..., None, None], attention(q, k, v, segment_BT, *sink, **how), 0)

        return of_tokens

    setting = f"attention={shape.attention}" + ("" if scoring.window is None else f" with windows of {scoring.window}")
    kernel, plain = (functools.partial(by, name) for name in (shape.attention, "dot_product"))
    return Piece(setting, "attention=dot_product", arrays, kernel, plain, least)


def experts_piece(shape: DecoderShape, experts: ExpertShape, least: float) -> Piece:
    """The grouped matmuls of a few experts without biases; real tokens are routed at random."""
    from maxtext_lite.models.experts import ExpertWeights, dropless  # most models have no experts

    shards = num_shards("experts")
    count = min(experts.num_experts, shards * -(-_MOST_EXPERTS // shards))
    few = {"num_experts": count, "num_per_token": min(experts.num_per_token, count), "with_bias": False}
    few_experts = dataclasses.replace(experts, **few)
    D = shape.emb_dim
    F = experts.mlp_dim
    J = few_experts.num_per_token

    def arrays(rows: Rows) -> dict[str, Normal]:
        tokens = rows["segments"].shape
        of_tokens = ("batch", "length", None)
        inwards = Normal(("experts", "expert_embed", "mlp"), (count, D, F), shape.dtype, of=D)
        return {
            "x": Normal(of_tokens, (*tokens, D), shape.dtype),
            "share": Normal(of_tokens, (*tokens, J), jnp.float32),
            "gate": inwards,
            "up": inwards,
            "down": Normal(("experts", "mlp", "expert_embed"), (count, F, D), shape.dtype, of=F),
        }

    def by(experts: ExpertShape, rows: Rows) -> Kernel:
        segment_BT = rows["segments"]
        score_BTE = jax.random.uniform(jax.random.key(1), (*segment_BT.shape, count))
        chosen_BTJ = jnp.where((segment_BT > 0)[..., None], jax.lax.top_k(score_BTE, J)[1], count)
        return lambda x, share, *weights: dropless(x, chosen_BTJ, share, ExpertWeights(*weights), experts)

    plain = dataclasses.replace(few_experts, matmul="ragged_dot", quantization="none")
    return Piece(
        f"num_experts={experts.num_experts} by the kernel {experts.matmul}",
        "capacity_factor=2, whose experts need no such kernel",
        arrays,
        functools.partial(by, few_experts),
        functools.partial(by, plain),
        max(least, 2 * _OF_FORMAT[experts.quantization]),  # three matmuls in a row
    )


def projection_piece(shape: DecoderShape, least: float) -> Piece:
    """A matmul with a layer's weight in the run's eight-bit format."""
    axes = ("embed", "mlp")
    D = shape.emb_dim

    def arrays(rows: Rows) -> dict[str, Normal]:
        x = Normal(("batch", "length", None), (*rows["segments"].shape, D), shape.dtype)
        return {"x": x, "weight": Normal(axes, (D, shape.mlp_dim), shape.dtype, of=D)}

    def kernel(rows: Rows) -> Kernel:
        return lambda x, weight: project_array(x, weight, axes, TOKENS, shape.grad_dtype, shape.quantization)

    setting = f"quantization={shape.quantization}"
    return Piece(setting, "quantization=none", arrays, kernel, lambda rows: jnp.matmul, least)


def loss_piece(shape: DecoderShape, num_tiles: int, z_loss_multiplier: float, least: float) -> Piece:
    """The loss in `num_tiles` tiles of the tokens, for hidden states of at most 1024 dims."""
    D = min(shape.emb_dim, _MOST_WIDTH)
    cap = shape.final_soft_cap
    multiplier = shape.logits_multiplier

    def arrays(rows: Rows) -> dict[str, Normal]:
        x = Normal(("end_batch", "length", None), (*rows["targets"].shape, D), shape.dtype)
        return {"x": x, "head": Normal(HEAD_AXES, (D, shape.vocab_size), shape.dtype, of=D)}

    def kernel(rows: Rows) -> Kernel:
        how = Readout(num_tiles, cap, 1.0, shape.grad_dtype, z_loss_multiplier, multiplier)
        both: Any = cross_entropy  # only the first of its two results is differentiated
        return lambda x, head: both(x, OutputHead(head), rows["targets"], rows["weights"], how)[0]

    def plain(rows: Rows) -> Kernel:
        def loss(x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
            @functools.partial(jax.checkpoint, prevent_cse=False)
            def of_tile(tile: tuple[jax.Array, ...]) -> jax.Array:
                x_BtD, target_Bt, weight_Bt = tile
                logits: Any = jnp.einsum("BtD,DV->BtV", x_BtD, head_DV, preferred_element_type=jnp.float32)
                logits = soft_capped(multiplier * logits, cap) if cap else multiplier * logits
                partition_Bt: Any = jax.nn.logsumexp(logits, axis=-1)
                nll_Bt = partition_Bt - jnp.take_along_axis(logits, target_Bt[..., None], axis=-1)[..., 0]
                return jnp.sum(weight_Bt * (nll_Bt + z_loss_multiplier * jnp.square(partition_Bt)))

            pieces = [
                jnp.moveaxis(x.reshape(len(x), num_tiles, -1, *x.shape[2:]), 1, 0)
                for x in (x_BTD, rows["targets"], rows["weights"])
            ]
            return jnp.sum(jax.lax.map(of_tile, tuple(pieces)))

        return loss

    setting = f"num_vocab_tiling={num_tiles}"
    return Piece(setting, "num_vocab_tiling=1", arrays, kernel, plain, least)
