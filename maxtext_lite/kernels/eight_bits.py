"""Matmuls in eight bits, with scales that do not depend on how a batch is split.

An operand becomes eight-bit numbers times float32 scales: the largest magnitude among the numbers that share a scale
becomes the format's largest number. A largest magnitude is the same in any order and over any shards. Products are
added up in int32 or float32, and then multiplied by their scales:

    y  = x W     x per token, W per output
    dx = g W^T   the same numbers of W, whose scales go to g first; then g per token
    dW = x^T g   sums over tokens: x per (row, input) and g per (row, output), and rows are added up in float32

Micro-batches, devices, hosts and pipeline stages never split a row of a batch except along its tokens, and its largest
magnitude is found over all of them; a scale of a whole micro-batch would depend on its other rows. dx uses the same
numbers of W as y, so it is the derivative of what was computed, and W need not be rounded twice.

Source: scales per token and per channel are Dettmers et al. 2022, arXiv:2208.07339, section 2.1; e4m3 is of
Micikevicius et al. 2022, arXiv:2209.05433. Gradients are e4m3 too, not their e5m2, as in DeepSeek-AI 2024,
arXiv:2412.19437, section 3.3.2: where scales are fine, another bit of mantissa is worth more than range.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.models.ops import TokenAxes, dtype_of_totals
from maxtext_lite.parallel import AS_IT_IS, axes_in_use, constrain, gathered, largest, num_shards

_LEAST = 1e-30  # the least magnitude that is distinguished from 0; keeps scales normal numbers in float32


class Scaled(NamedTuple):
    """An array as `numbers` x `scale`.

    Attributes:
      numbers: int8 or float8.
      scale: float32, of size 1 along the dims that share one.
    """

    numbers: Array
    scale: Array


def largest_magnitude(x: Array, dims: tuple[int, ...]) -> Array:
    """The largest magnitude over `dims`, which keep size 1, in float32; NaN if a number is NaN."""
    return jnp.max(jnp.abs(x), axis=dims, keepdims=True).astype(jnp.float32)


def in_eight_bits(x: Array, largest: Array, dtype: DTypeLike) -> Scaled:
    """x rounded to the nearest numbers of `dtype`, ties to even; `largest` becomes the largest number of `dtype`.

    Args:
      largest: magnitude, of size 1 along the dims that share a scale.
    """
    is_int = dtype == jnp.int8
    most = 127.0 if is_int else float(jnp.finfo(dtype).max)
    scale = jnp.maximum(largest, _LEAST) / most
    numbers = x.astype(jnp.float32) / scale
    if is_int:
        numbers = jnp.round(numbers)
    return Scaled(numbers.astype(dtype), scale)


Matmul = Callable[[Array, Array], Array]
"""(rows, numbers of weights) -> products, in `dtype_of_totals`."""


class EightBits(NamedTuple):
    """A number format of matmuls with layers' weights: eight bits with scales.

    Attributes:
      dtype: of x, W and g.
      quantizes_weight_gradient: dW uses it for x and g too; False: dW uses x and g unquantized.
    """

    dtype: Any
    quantizes_weight_gradient: bool

    def scaled(self, x: Array, dims: tuple[int, ...]) -> Scaled:
        """x with a scale for its numbers along `dims` together."""
        return in_eight_bits(x, largest_magnitude(x, dims), self.dtype)

    # ---- A projection

    def scaled_weight(self, weight_io: Array, axes: tuple[str, str]) -> Scaled:
        """A weight ready for use, whole over `fsdp`, with a scale for each output.

        It is rounded in its shards, so eight bits and the scales cross `fsdp`.
        """
        lying = constrain(weight_io, axes)
        scaled = self.scaled(lying, (0,))
        in_axis, out_axis = axes_in_use(axes)
        whole = (in_axis, out_axis)
        numbers_io = _sent(scaled.numbers, lambda numbers_io: constrain(constrain(numbers_io, axes), whole))
        return Scaled(numbers_io, constrain(scaled.scale, (None, out_axis)))

    def times(self, x_BTi: Array, weight: Scaled, axes: tuple[str, str]) -> Array:
        """x W, [B, T, o] in the dtype of x."""
        x = self.scaled(x_BTi, (2,))
        total_nBTo = _totals(x.numbers, weight.numbers, axes[0])
        return _added_up(total_nBTo.astype(jnp.float32) * x.scale * weight.scale, x_BTi.dtype)

    def times_transposed(self, g_BTo: Array, weight: Scaled, axes: tuple[str, str]) -> Array:
        """g W^T, [B, T, i] in the dtype of g."""
        g = self.scaled(g_BTo.astype(jnp.float32) * weight.scale, (2,))
        total_nBTi = _totals(g.numbers, weight.numbers.T, axes[1])
        return _added_up(total_nBTi.astype(jnp.float32) * g.scale, g_BTo.dtype)

    def weight_gradient(
        self,
        x_BTi: Array,
        g_BTo: Array,
        axes: tuple[str, str],
        tokens: TokenAxes,
        grad_dtype: DTypeLike,
    ) -> Array:
        """x^T g [i, o]. Each device sums over its rows and tokens in float32. If `fsdp` splits weights, these sums
        cross it in `grad_dtype` and are added up in float32.

        Rows run one after another: a device never has the products of several rows, each as large as the weight.
        """
        in_axis, out_axis = axes_in_use(axes)
        x_rnmcti = _rows_first(x_BTi, tokens, in_axis)
        g_rnmcto = _rows_first(g_BTo, tokens, out_axis)

        def of_row(x: Array, g: Array) -> Array:
            x_nmcti = self.scaled(x, (2, 3))
            g_nmcto = self.scaled(g, (2, 3))
            totals = dtype_of_totals(self.dtype)
            total = jnp.einsum("nmcti,nmcto->nmcio", x_nmcti.numbers, g_nmcto.numbers, preferred_element_type=totals)
            sums_nmcio = total.astype(jnp.float32) * x_nmcti.scale.swapaxes(3, 4) * g_nmcto.scale
            return constrain(sums_nmcio, (*tokens, in_axis, out_axis))

        def add_row(sums: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
            return sums + of_row(*row), None

        sums_nmcio = of_row(x_rnmcti[0], g_rnmcto[0])
        if len(x_rnmcti) > 1:
            rest = (x_rnmcti[1:], g_rnmcto[1:])
            sums_nmcio, _ = jax.lax.scan(add_row, sums_nmcio, rest)
        dtype = grad_dtype if num_shards("embed") > 1 else jnp.float32
        sums_cnmio = sums_nmcio.swapaxes(0, 2).swapaxes(0, 1)
        sums_nio = _added_up(sums_cnmio, dtype, num_dims=2)
        # An all-to-all whose parts are added one by one: on 16 and more TPU chips XLA would turn a scattered sum into
        # an all-reduce, with twice the bytes.
        parts = list(constrain(sums_nio, (None, *axes)))
        return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))

    # ---- Rows of experts, inside `over_shards`

    def whole_weight(self, weight_Eio: Array, axes: tuple[str, ...]) -> Scaled:
        """This device's experts, whole over `fsdp`, with a scale for each expert's output, [E, 1, o]."""
        in_axis, out_axis = axes[1:]
        largest_E1o = largest(largest_magnitude(weight_Eio, (1,)), in_axis)
        scaled = in_eight_bits(weight_Eio, largest_E1o, self.dtype)
        dim = axes.index("expert_embed")
        numbers = _sent(scaled.numbers, lambda numbers: gathered(numbers, "expert_embed", dim))
        scale = gathered(scaled.scale, "expert_embed", 2) if out_axis == "expert_embed" else scaled.scale
        return Scaled(numbers, scale)

    def rows_times(self, x_Ui: Array, weight: Scaled, expert_U: Array, matmul: Matmul, axis: str | None) -> Array:
        """Each row times its expert's weight, [U, o] in float32.

        Args:
          axis: logical axis of rows' entries; a row's largest magnitude is found over its shards.
        """
        x = in_eight_bits(x_Ui, _largest_of_rows(x_Ui, axis), self.dtype)
        return matmul(x.numbers, weight.numbers).astype(jnp.float32) * x.scale * weight.scale[expert_U, 0]

    def rows_times_transposed(
        self, g_Uo: Array, weight: Scaled, expert_U: Array, matmul: Matmul, axis: str | None
    ) -> Array:
        """Each row times its expert's transposed weight, [U, i] in float32.

        Args:
          axis: as in `rows_times`.
        """
        scaled_Uo = g_Uo.astype(jnp.float32) * weight.scale[expert_U, 0]
        g = in_eight_bits(scaled_Uo, _largest_of_rows(scaled_Uo, axis), self.dtype)
        return matmul(g.numbers, weight.numbers).astype(jnp.float32) * g.scale


INT8 = EightBits(jnp.int8, quantizes_weight_gradient=True)
FP8 = EightBits(jnp.float8_e4m3fn, quantizes_weight_gradient=False)
FP8_FULL = EightBits(jnp.float8_e4m3fn, quantizes_weight_gradient=True)


def _sent(numbers: Array, send: Callable[[Array], Array]) -> Array:
    """Numbers sent to other devices as bytes: XLA would widen float8 first on a platform without it."""
    sent = send(jax.lax.bitcast_convert_type(numbers, jnp.int8))
    return jax.lax.bitcast_convert_type(sent, numbers.dtype)


def _totals(left_BTk: Array, right_kj: Array, axis: str) -> Array:
    """left x right [n, B, T, j], with a part of k on each of n devices along a logical axis.

    The parts are kept apart until they have their scales: the all-reduce then takes two bytes a number, not four.
    """
    parts = 1 if axes_in_use((axis,)) == (None,) else num_shards(axis)
    B, T, k = left_BTk.shape
    left_BTnk = left_BTk.reshape(B, T, parts, k // parts)
    right_nkj = right_kj.reshape(parts, k // parts, -1)
    if parts > 1:
        left_BTnk = constrain(left_BTnk, (AS_IT_IS, AS_IT_IS, axis, None))
        right_nkj = constrain(right_nkj, (axis, None, AS_IT_IS))
    return jnp.einsum("BTnk,nkj->nBTj", left_BTnk, right_nkj, preferred_element_type=dtype_of_totals(left_BTk.dtype))


def _added_up(parts: Array, dtype: DTypeLike, num_dims: int = 1) -> Array:
    """The sum over the first dims in `dtype`; `jnp.sum` would add, and all-reduce, in float32."""
    parts = parts.astype(dtype)
    dims = tuple(range(num_dims))
    if all(size == 1 for size in parts.shape[:num_dims]):
        return parts.reshape(parts.shape[num_dims:])
    return jax.lax.reduce(parts, jnp.zeros([], dtype), jax.lax.add, dims)


def _rows_first(x_BTi: Array, tokens: TokenAxes, axis: str | None) -> Array:
    """[rows of a device, devices along each of `tokens`, tokens of a device, i]."""
    B, T, width = x_BTi.shape
    n, m, c = (1 if name is None else num_shards(name) for name in tokens)
    first, second, length = tokens
    x_nmrcti = x_BTi.reshape(n, m, B // (n * m), c, T // c, width)
    x_nmrcti = constrain(x_nmrcti, (first, second, None, length, None, axis))
    return jnp.moveaxis(x_nmrcti, 2, 0)


def _largest_of_rows(x_Ui: Array, axis: str | None) -> Array:
    largest_U1 = largest_magnitude(x_Ui, (1,))
    return largest_U1 if axis is None else largest(largest_U1, axis)
