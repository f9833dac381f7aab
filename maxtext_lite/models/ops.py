"""The arithmetic of a layer, with derivatives written by hand.

Each function keeps only its arguments for the backward pass, in their dtypes: automatic derivatives would keep float32
copies of bfloat16 activations, and move more memory than the arithmetic needs. Matmuls state float32 for their sums in
both directions, which also makes bfloat16 fast on CPUs that have it, except for sums that cross the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.config import Quantization
from maxtext_lite.config.keys import OutputGate
from maxtext_lite.config.registry import load
from maxtext_lite.config.weights import halves, num_inputs
from maxtext_lite.parallel import AS_IT_IS, Tree, axes_in_use, constrain, num_shards

Rotation = tuple[Array, Array]
"""Cosines and sines [B, T, R/2] of R rotated dims, float32."""

TokenAxes = tuple[str, str | None, str | None]
"""Logical axes that a batch is split over: two for its rows, `fsdp` first, and one for their tokens."""


def number_format(quantization: Quantization) -> Any:
    """The number format of matmuls with layers' weights, such as `EightBits`; None: the activations' dtype."""
    return None if quantization == "none" else load("quantization", quantization)


def dtype_of_totals(dtype: DTypeLike) -> DTypeLike:
    """The dtype for sums of products in `dtype`: int32, exact for 133,000 of the largest products, or float32."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight [..., *in, *out] that means weight + scale x a b; or any other values for the three.

    Attributes:
      a: [..., *in, r].
      b: [..., r, *out].
    """

    weight: Tree
    a: Tree
    b: Tree
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, _: Any) -> "Adapted":
        """Itself: modules read all of a parameter as `parameter[...]`."""
        return self

    @property
    def num_stacked(self) -> int:
        """The number of dims before `in`: of layers and of experts."""
        return self.a.ndim + self.b.ndim - 2 - self.weight.ndim

    def merged(self) -> Array:
        """The sum, computed in float32, in the weight's dtype."""
        stack = self.weight.shape[: self.num_stacked]
        r = self.a.shape[-1]
        added = jnp.matmul(
            self.a.reshape(*stack, -1, r),
            self.b.reshape(*stack, r, -1),
            preferred_element_type=jnp.float32,
        )
        total = self.weight.astype(jnp.float32) + self.scale * added.reshape(self.weight.shape)
        return total.astype(self.weight.dtype)


def project(x: Array, weight: nnx.Param) -> Array:
    """x [B, T, *in] times a weight [*in, *out], declared by `layers.declare`: [B, T, *out] in the dtype of x.

    Each use gathers the weight over `fsdp`, in the dtype of x or in the eight bits of its `quantization`: by itself the
    compiler makes a loop over the weight's shards, which writes the product again and again. The gradient is reduced to
    the weight's shards in the weight's `grad_dtype`. Adapters are not quantized.
    """
    value = weight[...]
    axes = tuple(weight.axes)
    if not isinstance(value, Adapted):
        return project_array(x, value, axes, TOKENS, weight.grad_dtype, weight.quantization)
    a_axes, b_axes = halves(axes, axes, "lora_rank")
    added: Any = project_array(x, value.a, a_axes, TOKENS, weight.grad_dtype, "none")
    added = project_array(added, value.b, b_axes, TOKENS, weight.grad_dtype, "none")
    plain: Any = project_array(x, value.weight, axes, TOKENS, weight.grad_dtype, weight.quantization)
    return (plain.astype(jnp.float32) + value.scale * added.astype(jnp.float32)).astype(x.dtype)


TOKENS: TokenAxes = ("exchanged_batch", "experts", "length")  # "batch" and "length"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def project_array(
    x: Array,
    weight: Array,
    axes: tuple[str, ...],
    tokens: TokenAxes,
    grad_dtype: DTypeLike,
    quantization: Quantization,
) -> Array:
    """`project` with an array of these logical axes."""
    del tokens, grad_dtype
    numbers = number_format(quantization)
    ends = _ends(axes)
    x_BTi, weight_io = _as_matrices(x, weight, axes)
    if numbers:
        y_BTo = numbers.times(x_BTi, numbers.scaled_weight(weight_io, ends), ends)
    else:
        y_BTo = product("BTi,io->BTo", x_BTi, _in_use(weight_io, ends, x.dtype), axes[0])
    return y_BTo.astype(x.dtype).reshape(*x.shape[:2], *weight.shape[num_inputs(axes) :])


def _ends(axes: tuple[str, ...]) -> tuple[str, str]:
    """The axes of a weight as a matrix: of dims that become one, only the first is ever split."""
    return axes[0], axes[num_inputs(axes)]


def _as_matrices(x: Array, weight: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    x_BTi = x.reshape(*x.shape[:2], -1)
    return x_BTi, weight.reshape(x_BTi.shape[-1], -1)


def _in_use(weight_io: Array, ends: tuple[str, str], dtype: DTypeLike) -> Array:
    return constrain(weight_io.astype(dtype), axes_in_use(ends))


def product(equation: str, x: Array, weight: Array, axis: str) -> Array:
    """An einsum of two arrays of one dtype, in that dtype: sums in float32, rounded once.

    A CPU's matmuls are two times faster with float32 results that are cast, and a TPU casts within the matmul. A GPU
    would write float32, for a kernel of its own to cast. Sums that devices along `tensor` add up cross the mesh in the
    arrays' dtype on all.

    Args:
      axis: of the weight, over which it sums.
    """
    plain = functools.partial(jnp.einsum, equation)
    if x.dtype == jnp.float32 or (axes_in_use((axis,)) != (None,) and num_shards(axis) > 1):
        return plain(x, weight)

    def cast(x: Array, weight: Array) -> Array:
        return plain(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)

    return jax.lax.platform_dependent(x, weight, cuda=plain, rocm=plain, default=cast)


def weight_gradient(x: Array, g: Array, grad_dtype: DTypeLike = jnp.float32) -> Array:
    """x^T g [in, out] of x [B, T, in] and g [B, T, out], in float32. If `fsdp` splits weights, it is in `grad_dtype`,
    in which the devices' sums are then reduced."""
    dtype = grad_dtype if num_shards("embed") > 1 else jnp.float32
    return jnp.einsum("BTi,BTo->io", x, g, preferred_element_type=dtype)


def _project_backward(
    axes: tuple[str, ...],
    tokens: TokenAxes,
    grad_dtype: DTypeLike,
    quantization: Quantization,
    residuals: tuple[Array, Array],
    g: Array,
) -> tuple[Array, Array]:
    x, weight = residuals
    numbers = number_format(quantization)
    ends = _ends(axes)
    x_BTi, weight_io = _as_matrices(x, weight, axes)
    g_BTo = g.reshape(*g.shape[:2], -1)
    if tokens == TOKENS and num_shards("residual_length") > num_shards("length"):
        # XLA would gather tokens over `tensor` for each matmul by itself, and for the weight's gradient over `context`.
        x_BTi = constrain(x_BTi, ("batch", "length", AS_IT_IS))
        g_BTo = constrain(g_BTo, ("batch", "length", AS_IT_IS))
    if numbers:
        dx_BTi = numbers.times_transposed(g_BTo, numbers.scaled_weight(weight_io, ends), ends)
    else:
        dx_BTi = product("BTo,io->BTi", g_BTo, _in_use(weight_io, ends, x.dtype), ends[1])
    if numbers and numbers.quantizes_weight_gradient:
        dweight_io = numbers.weight_gradient(x_BTi, g_BTo, ends, tokens, grad_dtype)
    else:
        dweight_io = weight_gradient(x_BTi, g_BTo, grad_dtype)
    dweight = dweight_io.astype(weight.dtype).reshape(weight.shape)
    return dx_BTi.astype(x.dtype).reshape(x.shape), constrain(dweight, axes)


project_array.defvjp(
    lambda x, weight, *how: (project_array(x, weight, *how), (x, weight)),
    _project_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_BTD: Array, scale_D: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim, in float32, returned in the dtype of x.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    return _rms_norm_forward(x_BTD, scale_D, epsilon)[0]


def _rms_norm_forward(x_BTD: Array, scale_D: Array, epsilon: float) -> tuple[Array, tuple[Array, ...]]:
    x_f32 = x_BTD.astype(jnp.float32)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    return (x_f32 * inverse_BT1 * scale_D.astype(jnp.float32)).astype(x_BTD.dtype), (
        x_BTD,
        scale_D,
        inverse_BT1,
    )


def _rms_norm_backward(epsilon: float, residuals: tuple[Array, Array, Array], g_BTD: Array) -> tuple[Array, Array]:
    del epsilon
    x_BTD, scale_D, inverse_BT1 = residuals
    unit_BTD = x_BTD.astype(jnp.float32) * inverse_BT1
    g_f32 = g_BTD.astype(jnp.float32)
    scaled_BTD = g_f32 * scale_D.astype(jnp.float32)
    along_BT1 = jnp.mean(scaled_BTD * unit_BTD, axis=-1, keepdims=True)
    dx_BTD = inverse_BT1 * (scaled_BTD - unit_BTD * along_BT1)
    dscale_D = jnp.sum(g_f32 * unit_BTD, axis=tuple(range(g_f32.ndim - 1)))
    return dx_BTD.astype(x_BTD.dtype), dscale_D.astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _recomputed(function: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps a float32 function of arrays to return the first array's dtype. The backward pass keeps the arrays and
    computes it again."""

    @jax.custom_vjp
    def narrow(x: Array, *others: Array | None) -> Array:
        return function(x, *others).astype(x.dtype)

    def backward(arrays: tuple[Array | None, ...], g: Array) -> tuple[Array | None, ...]:
        return jax.vjp(function, *arrays)[1](g.astype(jnp.float32))

    narrow.defvjp(lambda *arrays: (narrow(*arrays), arrays), backward)
    return narrow


def layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * scale + bias, in float32, returned in the dtype of x.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return _recomputed(functools.partial(_layer_norm, epsilon=epsilon))(x_BTD, scale_D, bias_D)


def _layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    x_f32 = x_BTD.astype(jnp.float32)
    x_f32 = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    return x_f32 * inverse_BT1 * scale_D.astype(jnp.float32) + bias_D.astype(jnp.float32)


Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "xielu", "clamped_silu"]
"""The function of an mlp's first projection. clamped_silu is gpt-oss's, which clamps the other projection too; xielu
has learned numbers."""

_CLAMP, _STEEPNESS = 7.0, 1.702


def _clamped_silu(x: Array) -> Array:
    x = jnp.minimum(x, _CLAMP)
    return x * jax.nn.sigmoid(_STEEPNESS * x)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "clamped_silu": _clamped_silu,
}


def _hidden(activation: Activation, gate: Array, up: Array | None) -> Array:
    gate = gate.astype(jnp.float32)
    if up is None:
        return _ACTIVATIONS[activation](gate)
    up = up.astype(jnp.float32)
    if activation == "clamped_silu":
        up = jnp.clip(up, -_CLAMP, _CLAMP) + 1
    return _ACTIVATIONS[activation](gate) * up


def mlp_hidden(activation: Activation, gate: Array, up: Array | None) -> Array:
    """activation(gate) * up, or activation(gate) if `up` is None, in float32, returned in their dtype.

    Source: Shazeer 2020, arXiv:2002.05202, section 2; clamped_silu is (clip(up) + 1) times a steeper silu of the
    clipped gate, of OpenAI 2025, arXiv:2508.10925.
    """
    return _recomputed(functools.partial(_hidden, activation))(gate, up)


_BETA, _SMALLEST = 0.5, -1e-6


def xielu(x: Array, alpha_p_U: Array, alpha_n_U: Array) -> Array:
    """p x^2 + x / 2 above 0, and n (exp(x) - 1 - x) + x / 2 below, in x's dtype. Here p is the softplus of alpha_p, and
    n that of alpha_n, plus 1 / 2.

    Source: Huang & Schlag 2024, arXiv:2411.13010.
    """
    return _recomputed(_xielu)(x, alpha_p_U, alpha_n_U)


def _xielu(x: Array, alpha_p_U: Array, alpha_n_U: Array) -> Array:
    x = x.astype(jnp.float32)
    p = jax.nn.softplus(alpha_p_U[0].astype(jnp.float32))
    n = jax.nn.softplus(alpha_n_U[0].astype(jnp.float32))
    below = (n + _BETA) * (jnp.expm1(jnp.minimum(x, _SMALLEST)) - x)
    return jnp.where(x > 0, p * jnp.square(x), below) + _BETA * x


def gated(context_BTNH: Array, gate_BTNG: Array, function: OutputGate) -> Array:
    """The context times the sigmoid or softplus of its gate, in float32, returned in the context's dtype.

    Args:
      gate_BTNG: a number for each element of a head, or one for the head.
    Source: Qiu et al. 2025, arXiv:2505.06708.
    """
    activation = jax.nn.sigmoid if function.startswith("sigmoid") else jax.nn.softplus

    def product(context_BTNH: Array, gate_BTNG: Array) -> Array:
        return context_BTNH.astype(jnp.float32) * activation(gate_BTNG.astype(jnp.float32))

    return _recomputed(product)(context_BTNH, gate_BTNG)


def soft_capped(x: Array, cap: float) -> Array:
    """cap x tanh(x / cap), which never leaves (-cap, cap). Source: Gemma Team 2024, arXiv:2408.00118, section 2."""
    return cap * jnp.tanh(x / cap)


@jax.custom_vjp
def rotate(x_BTNH: Array, rotation: Rotation) -> Array:
    """Heads with their first R dims rotated, where `rotation` has R/2 planes; the other dims are unchanged.

    Plane h is dims h and h + R/2, as in Llama's published weights.
    """
    cosine, sine = (angle_BTH[:, :, None, :] for angle_BTH in rotation)
    planes = cosine.shape[-1]
    first, second, rest = jnp.split(x_BTNH.astype(jnp.float32), (planes, 2 * planes), axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _rotate_backward(rotation: Rotation, g_BTNH: Array) -> tuple[Array, None]:
    cosine_BTH, sine_BTH = rotation
    return rotate(g_BTNH, (cosine_BTH, -sine_BTH)), None  # the transpose of a rotation, scaled or not, turns back


rotate.defvjp(lambda x, rotation: (rotate(x, rotation), rotation), _rotate_backward)


_ROWS_OF_BLOCK = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_at(table_VD: Array, index_BT: Array, num_rows: int) -> Array:
    """The rows [B, T, D] of a table of `num_rows` rows."""
    del num_rows
    return table_VD[index_BT]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sums_at(x_BTD: Array, index_BT: Array, num_rows: int) -> Array:
    """Row v of the result [num_rows, D] is the sum of the x[b, t] with index[b, t] = v. B, T: any dims."""

    def scattered(x_BTD: Array, index_BT: Array) -> Array:
        zeros_VD = jnp.zeros((num_rows, x_BTD.shape[-1]), x_BTD.dtype)
        return jax.vjp(lambda table_VD: table_VD[index_BT], zeros_VD)[1](x_BTD)[0]

    def ordered(x_BTD: Array, index_BT: Array) -> Array:
        return _in_order(x_BTD.reshape(-1, x_BTD.shape[-1]), index_BT.reshape(-1), num_rows)

    return jax.lax.platform_dependent(x_BTD, index_BT, cuda=ordered, rocm=ordered, default=scattered)


rows_at.defvjp(
    lambda table, index, num_rows: (rows_at(table, index, num_rows), index),
    lambda num_rows, index, g: (sums_at(g, index, num_rows), None),
)
sums_at.defvjp(
    lambda x, index, num_rows: (sums_at(x, index, num_rows), index),
    lambda num_rows, index, g: (rows_at(g, index, num_rows), None),
)


def _in_order(x_ND: Array, index_N: Array, num_rows: int) -> Array:
    """`sums_at` of flat arrays without adding to one place twice.

    Rows are sorted by index and cut into blocks of n. Each block sums its rows of each index, a run, by a matmul with
    zeros and ones: one row that is not finite leaves no finite sum in its block. The sum of a run that continues in the
    next block is carried there, and written where it ends.
    """
    n = _ROWS_OF_BLOCK
    index_N = jnp.pad(index_N.astype(jnp.int32), (0, -len(index_N) % n), constant_values=num_rows)
    order_N = jnp.argsort(index_N, stable=True)
    index_cn = index_N[order_N].reshape(-1, n)
    x_cnD = x_ND.at[order_N].get(mode="fill", fill_value=0).reshape(*index_cn.shape, x_ND.shape[-1])

    starts_cn = jnp.diff(index_cn, axis=1, prepend=index_cn[:, :1]) != 0
    run_cn = jnp.cumsum(starts_cn, axis=1, dtype=jnp.int32)  # a block's runs are 0, 1, ..
    is_in_cmn = run_cn[:, None] == jnp.arange(n)[:, None]
    highest = jax.lax.Precision.HIGHEST
    sum_cmD = jnp.einsum("cmn,cnD->cmD", is_in_cmn.astype(x_ND.dtype), x_cnD, precision=highest)

    last_c = run_cn[:, -1]
    goes_on_c = index_cn[:, 0] == jnp.roll(index_cn[:, -1], 1)  # from the block before
    goes_on_c = goes_on_c.at[0].set(False)
    tail_cD = jnp.take_along_axis(sum_cmD, last_c[:, None, None], axis=1)[:, 0]
    tail_cD = jax.lax.associative_scan(_carry, ((goes_on_c & (last_c == 0))[:, None], tail_cD))[1]
    before_cD = jnp.roll(tail_cD, 1, axis=0)
    sum_cmD = sum_cmD.at[:, 0].add(jnp.where(goes_on_c[:, None], before_cD, 0))

    ends_at_c = last_c - jnp.roll(goes_on_c, -1)
    index_cm = jnp.max(jnp.where(is_in_cmn, index_cn[:, None], -1), axis=-1)
    is_whole_cm = (jnp.arange(n) <= ends_at_c[:, None]) & (index_cm < num_rows)
    # Places beyond the table are dropped; they differ, as a scatter of unique rows needs.
    place_cm = jnp.where(
        is_whole_cm,
        index_cm,
        num_rows + jnp.arange(index_cm.size).reshape(index_cm.shape),
    )
    zeros_VD = jnp.zeros((num_rows, x_ND.shape[-1]), x_ND.dtype)
    return zeros_VD.at[place_cm].set(sum_cmD, mode="drop", unique_indices=True)


def _carry(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins neighbouring ranges of blocks: (whether the last run spans the range and continues one from before it, its
    sum)."""
    left_spans, left_sum = left
    right_spans, right_sum = right
    return left_spans & right_spans, right_sum + jnp.where(right_spans, left_sum, 0)


_KEY_BITS = 32  # that a key takes of an integer; jax drops the others


def root_key(seed: int) -> jax.Array:
    """The key of a seed from 0 to 2**63 - 1; another for each seed."""
    low = seed % 2**_KEY_BITS
    high = seed >> _KEY_BITS
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
