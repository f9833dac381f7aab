"""LoRA: matrices of low rank that are trained beside frozen weights.

The frozen parameters are one tree, the adapters another. Only the adapters are trained and have gradients and optimizer
state. In the joined tree a weight is replaced by the weight with its adapters, which layers use as the sum of the two.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.config.weights import halves
from maxtext_lite.models.ops import Adapted
from maxtext_lite.models.shape import Lora
from maxtext_lite.parallel import Params, Tree

_OWN_KEY = int.from_bytes(b"LoRA")  # parameters' keys are folded with their numbers, from 0


def _is_adapted(node: Tree) -> bool:
    return isinstance(node, Adapted)


def adapters_for(lora: Lora, axes: Tree, make: Callable[..., tuple[Tree, Tree]], *trees: Tree) -> Tree:
    """A tree with only {"a", "b"}, at the path of every weight that has adapters.

    Args:
      axes: logical axes of all parameters.
      make: (a weight's axes, and the other trees' values at its path) -> (a's, b's).
    """

    def below(axes: Tree, trees: tuple[Tree, ...]) -> dict[str, Tree]:
        found = {}
        for name, child in axes.items():
            others = tuple(tree[name] for tree in trees)
            if isinstance(child, dict):
                if inside := below(child, others):
                    found[name] = inside
            elif name in lora.targets:
                found[name] = dict(zip("ab", make(child, *others), strict=True))
        return found

    in_layers = [name for name in ("layers", "dense_layers") if name in axes]
    return below({name: axes[name] for name in in_layers}, trees)


def adapter_axes(lora: Lora, axes: Tree) -> Tree:
    """The adapters' logical axes, taken from their weights: both are sharded alike."""
    return adapters_for(lora, axes, lambda weight: halves(weight, weight, "lora_rank"))


def new_adapters(lora: Lora, axes: Tree, abstract: Tree, key: Array) -> Tree:
    """New adapters, which add nothing yet: a uniform within 1 / sqrt(in), b zero.

    They are float32 for weights of any dtype, because their steps are small.

    Args:
      abstract: shapes of all parameters.
      key: may be the key that the parameters were drawn with; the draws here are independent of theirs.
    Source: b is Hu et al.'s; a as in their code and in PEFT, He et al. 2015, arXiv:1502.01852, with a = sqrt(5).
    """
    key = jax.random.fold_in(key, _OWN_KEY)
    number = itertools.count()

    def make(axes: tuple[str, ...], weight: Tree) -> tuple[Array, Array]:
        a_shape, b_shape = halves(axes, weight.shape, lora.rank)
        fan_in = math.prod(weight.shape) * lora.rank // math.prod(b_shape)
        bound = 1 / math.sqrt(fan_in)
        a = jax.random.uniform(jax.random.fold_in(key, next(number)), a_shape, jnp.float32, -bound, bound)
        return a, jnp.zeros(b_shape, jnp.float32)

    return adapters_for(lora, axes, make, abstract)


def joined(lora: Lora, adapters: Tree, frozen: Tree) -> Tree:
    """All parameters: the frozen ones, with `Adapted` in place of the weights that have adapters."""

    def below(adapters: Tree, frozen: Tree) -> Tree:
        if not isinstance(frozen, dict):
            return Adapted(frozen, adapters["a"], adapters["b"], lora.scale)
        return frozen | {name: below(inside, frozen[name]) for name, inside in adapters.items()}

    return below(adapters, frozen)


def adapters_of(tree: Tree) -> Tree:
    """The adapters of a joined tree."""
    found = {}
    for name, child in tree.items():
        if isinstance(child, Adapted):
            found[name] = {"a": child.a, "b": child.b}
        elif isinstance(child, dict) and (inside := adapters_of(child)):
            found[name] = inside
    return found


def frozen_of(tree: Tree) -> Tree:
    """The frozen parameters of a joined tree."""
    return jax.tree.map(
        lambda node: node.weight if _is_adapted(node) else node,
        tree,
        is_leaf=_is_adapted,
    )


def merged(tree: Tree) -> Tree:
    """A joined tree, with weights and adapters replaced by their sums."""
    return jax.tree.map(
        lambda node: node.merged() if _is_adapted(node) else node,
        tree,
        is_leaf=_is_adapted,
    )


def with_merged_experts(layer_params: Params) -> Params:
    """One layer's parameters with experts' adapters merged: kernels that group rows by expert need arrays.

    While the layer runs there is a second copy of its experts, and in the backward pass their gradient.
    """

    def merge(node: Tree) -> Tree:
        return node.merged() if _is_adapted(node) and node.num_stacked else node

    return jax.tree.map(merge, layer_params, is_leaf=_is_adapted)
