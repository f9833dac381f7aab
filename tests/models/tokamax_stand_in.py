"""Attention with the arguments and results of tokamax's op, which no CPU runs, by plain matmuls of whole squares."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Range:
    """tokamax's `Mask`, as far as it is used: each query's first key, and that none later is seen, or the end."""

    k_start: Any
    is_causal: bool
    k_end: Any = None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of blocks, as tokamax chooses them."""

    block_kv: int = 128
    num_stages: int = 2
    compute_wgs: int = 2


@dataclasses.dataclass
class Bound:
    """The arguments that an op was given."""

    kwargs: dict[str, Any]
    heuristics_config: Blocks = Blocks()


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The op. It is written from the definition of attention, its vjp from that of the gradient."""

    config: Blocks | None = None
    rows_of_calls: ClassVar[list[int]] = []

    def bind(self, q, k, v, *, return_residuals=False, **options):
        return Bound({**options, "return_residuals": return_residuals})

    def replace(self, *, config):
        return dataclasses.replace(self, config=config)

    @property
    def vjp(self):
        return StandInVjp()

    def __call__(self, q, k, v, *, return_residuals, **options):
        assert return_residuals
        assert options["mask"].k_start.shape == (q.shape[0], 1, q.shape[1])
        assert q.shape[1] % 256 == k.shape[1] % 256 == 0  # whole blocks
        self.rows_of_calls.append(q.shape[0])
        score = scores(q, k, **options)
        highest = score.max(-1)
        weight = jnp.exp(score - highest[..., None])
        total = weight.sum(-1)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        context = jnp.einsum("bnts,bsnh->btnh", weight / total[..., None], v)
        return context.astype(q.dtype), (highest, total)


class StandInVjp(StandIn):
    """Its gradient, with the residuals that it is given."""

    def bind(self, residuals, context, g, q, k, v, **options):
        return StandIn().bind(q, k, v, **options)

    def __call__(self, residuals, context, g, q, k, v, **options):
        highest, total = residuals
        cap, num_kv_heads = options["logits_soft_cap"], k.shape[2]
        score = scores(q, k, **options)
        slope = options["logits_scale"] * (1 if cap is None else 1 - (score / cap) ** 2)
        weight = jnp.exp(score - highest[..., None]) / total[..., None]
        k, v = (jnp.repeat(x, q.shape[2] // num_kv_heads, axis=2) for x in (k, v))
        delta = jnp.einsum("btnh,btnh->bnt", g, context)[..., None]
        dproduct = weight * (jnp.einsum("btnh,bsnh->bnts", g, v) - delta)
        dproduct = jnp.where(jnp.isfinite(score), dproduct * slope, 0)

        def shared(x):
            return (
                x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[3])
                .sum(3)
                .astype(q.dtype)
            )

        return {
            "q": jnp.einsum("bnts,bsnh->btnh", dproduct, k).astype(q.dtype),
            "k": shared(jnp.einsum("bnts,btnh->bsnh", dproduct, q)),
            "v": shared(jnp.einsum("bnts,btnh->bsnh", weight, g)),
        }


def scores(q, k, *, mask, logits_scale, logits_soft_cap):
    """[B, N, T, S], -inf where a query does not see a key."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    score = logits_scale * jnp.einsum(
        "btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32
    )
    score = (
        score
        if logits_soft_cap is None
        else logits_soft_cap * jnp.tanh(score / logits_soft_cap)
    )
    key = jnp.arange(k.shape[1])
    seen = key >= mask.k_start[..., None]
    if mask.is_causal:
        seen &= jnp.arange(q.shape[1])[:, None] >= key
    if mask.k_end is not None:
        seen &= key < mask.k_end[..., None]
    return jnp.where(seen, score, -jnp.inf)
