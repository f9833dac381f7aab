"""What kernels are compared with: attention, experts and routing in numpy's float64, with derivatives by hand."""

import jax
import numpy as np

from maxtext_lite.models import ExpertShape, Scoring

B, N, K, H = 2, 4, 2, 16
SINK = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
EVERYTHING = Scoring(scale=0.4, window=9, soft_cap=1.5)


def inputs(num_tokens, *, seed=0, num_kv_heads=K, value_dim=H, rows=B):
    """q, k, v, documents and a cotangent of the context.

    The first row is one document up to the padding, so that windows end inside of it; the others are several.
    """
    rng = np.random.default_rng(seed)
    shapes = (N, H), (num_kv_heads, H), (num_kv_heads, value_dim), (N, value_dim)
    q, k, v, g = (
        rng.normal(size=(rows, num_tokens, *shape)).astype(np.float32)
        for shape in shapes
    )
    segment = np.cumsum(rng.random((rows, num_tokens)) < 0.05, axis=1) + 1
    segment[0] = 1
    segment[1:, num_tokens // 3 :] += 1
    segment[:, -num_tokens // 8 :] = 0
    return q, k, v, segment.astype(np.int32), g


def attention(q, k, v, segment, g, sink=None, scoring=Scoring()):  # noqa: B008
    """Context, and the gradients of its product with g for q, k, v and, where there are any, sinks."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    num_queries, num_kv_heads = q.shape[1], k.shape[2]
    k, v = (x.repeat(q.shape[2] // num_kv_heads, axis=2) for x in (k, v))
    scale = 1 / np.sqrt(q.shape[3]) if scoring.scale is None else scoring.scale
    distance = np.arange(num_queries)[:, None] - np.arange(num_queries)
    seen = (distance >= 0) & (distance < (scoring.window or num_queries))
    seen = seen & (segment[:, :, None] == segment[:, None, :])
    score, slope = scale * np.einsum("btnh,bsnh->bnts", q, k), scale
    if scoring.soft_cap is not None:
        bounded = np.tanh(score / scoring.soft_cap)
        score, slope = scoring.soft_cap * bounded, scale * (1 - bounded**2)
    score = np.where(seen[:, None], score, -np.inf)
    # The sink is one more key, whose value is 0.
    last = np.full(q.shape[2], -np.inf) if sink is None else np.float64(sink)
    score = np.concatenate(
        [score, np.broadcast_to(last[:, None, None], (*score.shape[:3], 1))], axis=-1
    )
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    context = np.einsum("bnts,bsnh->btnh", weight[..., :-1], v)
    dweight = np.einsum("btnh,bsnh->bnts", g, v)
    dweight = np.concatenate([dweight, np.zeros((*dweight.shape[:3], 1))], axis=-1)
    dscore = weight * (dweight - np.sum(weight * dweight, -1, keepdims=True))
    dproduct = dscore[..., :-1] * slope

    def shared(x):
        return x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[3]).sum(axis=3)

    dq = np.einsum("bnts,bsnh->btnh", dproduct, k)
    dk = shared(np.einsum("bnts,btnh->bsnh", dproduct, q))
    dv = shared(np.einsum("bnts,btnh->bsnh", weight[..., :-1], g))
    return (
        context,
        dq,
        dk,
        dv,
        *(() if sink is None else (dscore[..., -1].sum(axis=(0, 2)),)),
    )


def with_gradients(attend):
    """(q, k, v, segment, g, sink) -> context and the gradients of its product with g."""

    def run(q, k, v, segment, g, sink=None):
        context, back = jax.vjp(
            lambda q, k, v, sink: attend(q, k, v, segment, sink), q, k, v, sink
        )
        return context, *(dx for dx in back(g.astype(context.dtype)) if dx is not None)

    return run


def assert_close(found, expected, *, atol=2e-5, share=None):
    """Array by array; with `share`, the norm of the difference is that share of the norm at most."""
    for got, want in zip(found, expected, strict=True):
        if share is None:
            np.testing.assert_allclose(
                np.reshape(got, want.shape), want, rtol=1e-4, atol=atol
            )
        else:
            assert np.linalg.norm(
                np.reshape(np.float64(got), want.shape) - want
            ) <= share * np.linalg.norm(want)


# ---- Experts --------------------------------------------------------------------------------------------------------


def _hidden(gate, up, activation):
    """Of a gated mlp, with its derivatives by gate and up."""
    most, steepness, one = (
        (7.0, 1.702, 1.0) if activation == "clamped_silu" else (np.inf, 1.0, 0.0)
    )
    a, b = np.minimum(gate, most), np.clip(up, -most, most) + one
    sigmoid = 1 / (1 + np.exp(-steepness * a))
    by_gate = b * sigmoid * (1 + steepness * a * (1 - sigmoid)) * (gate < most)
    return a * sigmoid * b, by_gate, a * sigmoid * (np.abs(up) < most)


def experts(x, expert, share, weights, g, *, activation="silu", on_input=False):
    """y, and the derivatives of <y, g> with respect to x, share and the weights: every expert on every token.

    Args:
      expert: numbers [B, T, J]; one that is no expert's counts for nothing.
      weights: gate, up and down, with or without their biases.
    """
    x, share, g, *weights = (np.float64(array) for array in (x, share, g, *weights))
    y, dx, dshare = np.zeros_like(x), np.zeros_like(x), np.zeros_like(share)
    dweights = [np.zeros_like(weight) for weight in weights]
    for j in range(share.shape[-1]):
        for e in range(len(weights[0])):
            gate, up, down, *biases = (weight[e] for weight in weights)
            gate_bias, up_bias, down_bias = biases or (0, 0, 0)
            is_chosen = (expert[..., j] == e)[..., None]
            s = share[..., j, None] * is_chosen
            given, factor = (s * x, is_chosen) if on_input else (x, s)
            hidden, by_gate, by_up = _hidden(
                given @ gate + gate_bias, given @ up + up_bias, activation
            )
            out = hidden @ down + down_bias
            y += factor * out
            dout = factor * g
            dgate, dup = dout @ down.T * by_gate, dout @ down.T * by_up
            dgiven = dgate @ gate.T + dup @ up.T
            dx += s * dgiven if on_input else dgiven
            dshare[..., j] += (is_chosen * (dgiven * x if on_input else out * g)).sum(
                -1
            )
            for which, (left, right) in enumerate(
                ((given, dgate), (given, dup), (hidden, dout))
            ):
                dweights[which][e] += np.einsum("BTi,BTo->io", left, right)
                if biases:
                    dweights[3 + which][e] += right.sum((0, 1))
    return y, dx, dshare, *dweights


def _score(logits, shape):
    if shape.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def _shares(logits, expert, shape):
    if shape.score == "sparsemixer":
        # Each choice by a softmax over the experts that are left and near the best.
        is_chosen = expert[..., None] == np.arange(logits.shape[-1])
        is_gone = np.cumsum(is_chosen, 2) - is_chosen > 0
        left = np.where(is_gone, -np.inf, logits[:, :, None])
        most = left.max(-1, keepdims=True)
        size = np.maximum(np.abs(logits[:, :, None]), most)
        far = (most - logits[:, :, None]) / size > 0.02
        each = np.exp(np.where(far, -np.inf, left))
        return (each * is_chosen).sum(-1) / each.sum(-1)
    chosen = np.take_along_axis(_score(logits, shape), expert, -1)
    if shape.normalised:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return shape.scaling * chosen


def routing(x, router, shape: ExpertShape, bias=0.0):
    """Of each token its experts [B, T, J], their shares, these by the logits [B, T, J, E], scores and logits."""
    logits = np.float64(x) @ np.float64(router)
    score = _score(logits, shape)
    judged = score + bias
    if shape.num_groups > 1:
        groups = judged.reshape(*judged.shape[:2], shape.num_groups, -1)
        best = (
            np.sort(groups)[..., -2:].sum(-1)
            if shape.score == "sigmoid"
            else groups.max(-1)
        )
        rank = np.argsort(np.argsort(-best))
        judged = np.where(
            (rank < shape.groups_per_token)[..., None], groups, -np.inf
        ).reshape(judged.shape)
    expert = np.argsort(-judged, kind="stable")[..., : shape.num_per_token]
    moves = 1e-5 * np.eye(logits.shape[-1])
    by_logits = [
        _shares(logits + move, expert, shape) - _shares(logits - move, expert, shape)
        for move in moves
    ]
    share = _shares(logits, expert, shape)
    return expert, share, np.stack(by_logits, -1) / 2e-5, score, logits
