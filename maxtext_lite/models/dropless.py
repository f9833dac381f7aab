"""Experts without a capacity: rows sorted by expert, grouped matmuls, and a sum over each token's choices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext_lite.models.expert_rows import ExchangedRows, GatheredRows, Queues, gather_rows, queue_up, rows_of_round
from maxtext_lite.models.grouped_matmul import (
    Layout,
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_weight_gradient,
)
from maxtext_lite.models.moe import TOKEN_AXES, ExpertShape, ExpertWeights
from maxtext_lite.models.ops import mlp_hidden, number_format
from maxtext_lite.parallel import axes_in_use, gathered, num_shards, over_shards, scattered_sum, shard_index, summed

FURTHER_ROUNDS = "further_rounds"
"""Part of the names of operations after an exchange's first round, which evenly chosen experts never need."""

# ---- Experts on rows ------------------------------------------------------------------------------------------------


def _expert_of_rows(size_E: jax.Array, num_rows: int) -> jax.Array:
    """Number of each row's expert among this device's; the last one for rows without an expert."""
    return jnp.minimum(jnp.searchsorted(jnp.cumsum(size_E), jnp.arange(num_rows), side="right"), len(size_E) - 1)


def _out_bias(w: ExpertWeights, size_E: jax.Array, num_rows: int) -> jax.Array:
    """The bias of each row's output, [U, D]; zero on all but one of the devices whose outputs are summed."""
    assert w.down_ED is not None
    bias_UD = w.down_ED.astype(jnp.float32)[_expert_of_rows(size_E, num_rows)]
    return jnp.where(shard_index("mlp") == 0, bias_UD, 0)


_INWARDS, _OUTWARDS = ("expert_embed", "mlp"), ("mlp", "expert_embed")
_LAYOUTS: dict[tuple[str, str], Layout] = {_INWARDS: "io", _OUTWARDS: "oi"}


def _times(
    shape: ExpertShape,
    x_Ui: jax.Array,
    weight: Any,
    size_E: jax.Array,
    axes: tuple[str, str],
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Each row times its expert's weight from `_whole_weights`: [U, o] in `dtype`, or in float32 with eight bits."""

    numbers = number_format(shape.quantization)

    def matmul(x_Ui: jax.Array, weight_Eio: jax.Array) -> jax.Array:
        return grouped_matmul(x_Ui, weight_Eio, size_E, shape.matmul, _LAYOUTS[axes], jnp.float32 if numbers else dtype)

    if numbers is None:
        return matmul(x_Ui, weight)
    expert_U = _expert_of_rows(size_E, len(x_Ui))
    return numbers.rows_times(x_Ui, weight, expert_U, matmul, axes_in_use(axes)[0])


def _times_transposed(
    shape: ExpertShape, g_Uo: jax.Array, weight: Any, size_E: jax.Array, axes: tuple[str, str]
) -> jax.Array:
    """Each row times its expert's transposed weight: [U, i] in float32."""

    def matmul(g_Uo: jax.Array, weight_Eio: jax.Array) -> jax.Array:
        return grouped_matmul_transposed(g_Uo, weight_Eio, size_E, shape.matmul, _LAYOUTS[axes])

    numbers = number_format(shape.quantization)
    if numbers is None:
        return matmul(g_Uo, weight)
    expert_U = _expert_of_rows(size_E, len(g_Uo))
    return numbers.rows_times_transposed(g_Uo, weight, expert_U, matmul, axes_in_use(axes)[1])


def _inner(shape: ExpertShape, x_UD: jax.Array, w: ExpertWeights, size_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two projections of each row, in the dtype of x_UD."""
    dtype = x_UD.dtype if w.gate_EF is None else jnp.float32  # biases are added before sums are rounded
    gate_UF: Any = _times(shape, x_UD, w.gate_EDF, size_E, _INWARDS, dtype)
    up_UF: Any = _times(shape, x_UD, w.up_EDF, size_E, _INWARDS, dtype)
    if w.gate_EF is not None and w.up_EF is not None:
        expert_U = _expert_of_rows(size_E, len(x_UD))
        gate_UF, up_UF = gate_UF + w.gate_EF[expert_U], up_UF + w.up_EF[expert_U]
    return gate_UF.astype(x_UD.dtype), up_UF.astype(x_UD.dtype)


def _outer(shape: ExpertShape, gate_UF: jax.Array, up_UF: jax.Array, w: ExpertWeights, size_E: jax.Array) -> jax.Array:
    """Each row's output from its two projections, [U, D] in float32."""
    hidden_UF: Any = mlp_hidden(shape.activation, gate_UF, up_UF)
    y_UD: Any = _times(shape, hidden_UF, w.down_EFD, size_E, _OUTWARDS)
    return y_UD if w.down_ED is None else y_UD + _out_bias(w, size_E, len(gate_UF))


class _RowGradients(NamedTuple):
    """Gradients of rows' x and shares, in float32, and of the weights over all rows, in the dtype asked for."""

    dx_UD: jax.Array
    dshare_U: jax.Array
    dweights: list[jax.Array]


def _rows_backward(
    shape: ExpertShape,
    w: ExpertWeights,
    size_E: jax.Array,
    x_UD: jax.Array,
    gate_UF: jax.Array,
    up_UF: jax.Array,
    g_UD: jax.Array,
    share_U: jax.Array,
    weight_dtype: DTypeLike,
) -> _RowGradients:
    """The gradients of share_U x `_outer(*_inner(x_UD))`, given g_UD, the derivatives of these products.

    Args:
      weight_dtype: of the matrices' gradients.
    """
    dtype, kernel, share_U1 = x_UD.dtype, shape.matmul, share_U[:, None]
    hidden_UF, hidden_backward = jax.vjp(functools.partial(mlp_hidden, shape.activation), gate_UF, up_UF)
    # <y, g> = <hidden, g down^T>: the share's derivative needs no y.
    unweighted_UF = _times_transposed(shape, g_UD, w.down_EFD, size_E, _OUTWARDS)
    dshare_U = jnp.sum(hidden_UF.astype(jnp.float32) * unweighted_UF, axis=-1)
    if w.down_ED is not None:
        dshare_U += jnp.sum(_out_bias(w, size_E, len(g_UD)) * g_UD.astype(jnp.float32), axis=-1)
    dgate_UF, dup_UF = hidden_backward((share_U1 * unweighted_UF).astype(dtype))
    dx_UD = _times_transposed(shape, dgate_UF, w.gate_EDF, size_E, _INWARDS)
    dx_UD += _times_transposed(shape, dup_UF, w.up_EDF, size_E, _INWARDS)
    dy_UD = (share_U1 * g_UD).astype(dtype)
    # Never in eight bits: an expert's rows are of many examples, so their scales would depend on how these are split.
    dweights = [
        grouped_weight_gradient(x_UD, dgate_UF, size_E, kernel, "io", weight_dtype),
        grouped_weight_gradient(x_UD, dup_UF, size_E, kernel, "io", weight_dtype),
        grouped_weight_gradient(hidden_UF, dy_UD, size_E, kernel, "oi", weight_dtype),
    ]
    if w.down_ED is not None:
        one_U1 = jnp.ones_like(x_UD[:, :1])
        dweights += [grouped_weight_gradient(one_U1, d, size_E, kernel)[:, 0] for d in (dgate_UF, dup_UF, dy_UD)]
    return _RowGradients(dx_UD, dshare_U, dweights)


# ---- One device -----------------------------------------------------------------------------------------------------


def _whole_weights(weights: ExpertWeights, shape: ExpertShape) -> ExpertWeights:
    """This device's experts, gathered along `expert_embed`, with matrices in the form that `_times` takes."""
    numbers = number_format(shape.quantization)

    def whole(weight: jax.Array, axes: tuple[str, ...]) -> Any:
        if "expert_embed" not in axes:
            return weight
        if numbers:
            return numbers.whole_weight(weight, axes)
        return gathered(weight, "expert_embed", axes.index("expert_embed"))

    return ExpertWeights(*map(whole, weights.arrays(), weights.axes()))


def _weight_sum(dw: jax.Array, axes: tuple[str, ...], dtype: DTypeLike) -> jax.Array:
    """The sum over devices with other tokens, on the device with this part of the weight."""
    if "expert_embed" not in axes:
        return summed(dw, "expert_embed")
    parts = dw.astype(dtype) if num_shards("expert_embed") > 1 else dw
    return scattered_sum(parts, "expert_embed", axes.index("expert_embed"))


def _local_forward(
    shape: ExpertShape, x_BTD: jax.Array, expert_BTJ: jax.Array, share_BTJ: jax.Array, *weights: jax.Array
) -> tuple[jax.Array, ...]:
    """The tokens' outputs, and the first round's rows with the values that the backward pass needs again."""
    w, dtype = _whole_weights(ExpertWeights(*weights), shape), x_BTD.dtype
    num_here, num_rows = len(weights[0]), rows_of_round(_num_tokens(expert_BTJ), shape, dtype)

    def run(rows: GatheredRows | ExchangedRows) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_UD = rows.of_tokens(x_BTD)
        inner = _inner(shape, _given(shape, x_UD, rows, share_BTJ), w, rows.size_E)
        share = None if shape.on_input else share_BTJ
        return rows.sum_of_choices(_outer(shape, *inner, w, rows.size_E), share, x_BTD), (x_UD, *inner)

    queues = None if num_rows is None else queue_up(expert_BTJ, num_here, num_rows)
    rows = gather_rows(expert_BTJ, num_here) if queues is None else queues.round(0)
    y_BTD, kept = run(rows)

    def next_round(rows: ExchangedRows, y_BTD: jax.Array) -> jax.Array:
        return y_BTD + run(rows)[0]

    y_BTD = _further_rounds(queues, next_round, y_BTD)
    return summed(y_BTD, "mlp").astype(dtype), *rows, *kept


def _given(shape: ExpertShape, x_UD: jax.Array, rows: GatheredRows | ExchangedRows, share_BTJ: jax.Array) -> jax.Array:
    """The experts' inputs: rows' tokens, multiplied by their shares if these belong to the input."""
    return x_UD * rows.of_choices(share_BTJ)[:, None].astype(x_UD.dtype) if shape.on_input else x_UD


def _num_tokens(expert_BTJ: jax.Array) -> int:
    return expert_BTJ.shape[0] * expert_BTJ.shape[1]


_Sums = TypeVar("_Sums")


def _further_rounds(queues: Queues | None, run: Callable[[ExchangedRows, _Sums], _Sums], start: _Sums) -> _Sums:
    """The sums after `run(rows, sums)` for each round but the first; `start` if there can be no further round."""
    if queues is None or not queues.may_need_more_rounds:
        return start

    def step(number: jax.Array, sums: _Sums) -> _Sums:
        return run(queues.round(number), sums)

    num_rounds = queues.num_rounds()
    with jax.named_scope(FURTHER_ROUNDS):
        return jax.lax.fori_loop(1, num_rounds, step, start)


def _local_backward(
    shape: ExpertShape,
    x_BTD: jax.Array,
    expert_BTJ: jax.Array,
    share_BTJ: jax.Array,
    g_BTD: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    dtype, num_rows = x_BTD.dtype, rows_of_round(_num_tokens(expert_BTJ), shape, x_BTD.dtype)
    count = 6 if shape.with_bias else 3
    weights, (*rows, x_UD, gate_UF, up_UF) = ExpertWeights(*rest[:count]), rest[count:]
    w = _whole_weights(weights, shape)
    num_here = len(weights.gate_EDF)
    queues = None if num_rows is None else queue_up(expert_BTJ, num_here, num_rows)
    # A device's own sums, if nothing is added to them, are rounded as they are written, not in an extra pass.
    is_whole = queues is None or not queues.may_need_more_rounds
    weight_dtype = shape.grad_dtype if is_whole and num_shards("expert_embed") > 1 else jnp.float32

    def run(
        rows: GatheredRows | ExchangedRows, x_UD: jax.Array, gate_UF: jax.Array, up_UF: jax.Array
    ) -> list[jax.Array]:
        g_UD, share_U = rows.of_tokens(g_BTD), rows.of_choices(share_BTJ)
        given_UD, of_output_U = _given(shape, x_UD, rows, share_BTJ), jnp.ones_like(share_U)
        of_output_U = of_output_U if shape.on_input else share_U
        found = _rows_backward(shape, w, rows.size_E, given_UD, gate_UF, up_UF, g_UD, of_output_U, weight_dtype)
        if shape.on_input:
            dshare_U = jnp.sum(x_UD.astype(jnp.float32) * found.dx_UD, axis=-1)
            found = found._replace(dx_UD=share_U[:, None] * found.dx_UD, dshare_U=dshare_U)
        dx_BTD = rows.sum_of_choices(found.dx_UD, None, x_BTD)
        return [dx_BTD, rows.to_choices(found.dshare_U, share_BTJ), *found.dweights]

    kind = GatheredRows if num_rows is None else ExchangedRows
    sums = run(kind(*rows), x_UD, gate_UF, up_UF)

    def next_round(rows: ExchangedRows, sums: list[jax.Array]) -> list[jax.Array]:
        x_UD = rows.of_tokens(x_BTD)
        more = run(rows, x_UD, *_inner(shape, _given(shape, x_UD, rows, share_BTJ), w, rows.size_E))
        return [total + part for total, part in zip(sums, more, strict=True)]

    sums = _further_rounds(queues, next_round, sums)
    dx_BTD, dshare_BTJ, *dweights = sums
    return (
        summed(dx_BTD, "mlp").astype(dtype),
        summed(dshare_BTJ, "mlp"),
        *(
            _weight_sum(dw, axes, shape.grad_dtype).astype(like.dtype)
            for dw, axes, like in zip(dweights, weights.axes(), weights.arrays(), strict=True)
        ),
    )


# ---- All devices ----------------------------------------------------------------------------------------------------

_FLAT, _PER_TOKEN = ("routed_rows",), ("routed_rows", None)
_INNER_AXES = ("routed_rows", "activation_mlp")


def _kept_axes(expert_BTJ: jax.Array, shape: ExpertShape, dtype: DTypeLike) -> list[tuple[str | None, ...]]:
    """Logical axes of `GatheredRows` or `ExchangedRows`, of the rows' tokens and of the two inner results."""
    num_tokens = _num_tokens(expert_BTJ) // (num_shards("batch") * num_shards("length"))
    is_gathered = rows_of_round(num_tokens, shape, dtype) is None
    rows = [_FLAT, _PER_TOKEN, _PER_TOKEN, *([_FLAT] if is_gathered else [_FLAT, _FLAT])]
    return [*rows, _PER_TOKEN, _INNER_AXES, _INNER_AXES]


_Residuals = tuple[jax.Array, jax.Array, jax.Array, ExpertWeights, list[jax.Array]]


def _forward(
    x_BTD: jax.Array, expert_BTJ: jax.Array, share_BTJ: jax.Array, weights: ExpertWeights, shape: ExpertShape
) -> tuple[jax.Array, _Residuals]:
    axes = _kept_axes(expert_BTJ, shape, x_BTD.dtype)
    local = functools.partial(_local_forward, shape)
    run = over_shards(local, [TOKEN_AXES] * 3 + weights.axes(), [TOKEN_AXES, *axes])
    y_BTD, *rows, gate, up = run(x_BTD, expert_BTJ, share_BTJ, *weights.arrays())
    kept = [checkpoint_name(array, "expert_rows") for array in rows]
    kept += [checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")]
    return y_BTD, (x_BTD, expert_BTJ, share_BTJ, weights, kept)


def _backward(
    shape: ExpertShape, residuals: _Residuals, g_BTD: jax.Array
) -> tuple[jax.Array, None, jax.Array, ExpertWeights]:
    x_BTD, expert_BTJ, share_BTJ, weights, kept = residuals
    run = over_shards(
        functools.partial(_local_backward, shape),
        [TOKEN_AXES] * 4 + [*weights.axes(), *_kept_axes(expert_BTJ, shape, x_BTD.dtype)],
        [TOKEN_AXES, TOKEN_AXES, *weights.axes()],
    )
    dx_BTD, dshare_BTJ, *dweights = run(x_BTD, expert_BTJ, share_BTJ, g_BTD, *weights.arrays(), *kept)
    return dx_BTD, None, dshare_BTJ, ExpertWeights(*dweights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def dropless(
    x_BTD: jax.Array, expert_BTJ: jax.Array, share_BTJ: jax.Array, weights: ExpertWeights, shape: ExpertShape
) -> jax.Array:
    """Sum over each token's experts of share x mlp(x), or of mlp(share x), [B, T, D] in the dtype of x_BTD.

    No choice is ever dropped.

    Each device sorts rows by expert and runs grouped matmuls. The derivatives are written by hand: both directions look
    rows up, where automatic ones would scatter-add them in an undefined order, and the backward pass gathers sharded
    weights again instead of keeping them whole. Its residuals have names for rematerialisation: expert_rows, mlpwi_0
    and mlpwi_1.

    Args:
      expert_BTJ: distinct for a token; E for no expert.
    Source: sorting and grouped matmuls are Gale et al. 2022, arXiv:2211.15841.
    """
    return _forward(x_BTD, expert_BTJ, share_BTJ, weights, shape)[0]


dropless.defvjp(_forward, _backward)
