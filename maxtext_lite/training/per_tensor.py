"""Optimizers that treat each tensor by itself: adafactor and muon on stacks of layers and of experts."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from maxtext_lite.config import Config
from maxtext_lite.models import is_matrix, num_inputs, per_tensor_axes, unstacked
from maxtext_lite.parallel import Tree, TreePath, sharding, zero1_sharding
from maxtext_lite.parallel.whole_matrices import over_whole_matrices
from maxtext_lite.training.arrays import map_axes


def per_tensor(inner: optax.GradientTransformation, axes: Tree) -> optax.GradientTransformation:
    """Applies `inner` to every tensor by itself: each layer of a stack, each expert, as if unstacked.

    Its state is a tree like the parameters with one state of `inner` per stack: arrays have the stack's dims before
    their own; scalars, which are counts, are shared by the stack.
    """
    stacked = map_axes(lambda leaf: len(leaf) - len(per_tensor_axes(leaf)), axes)
    num_stacked = dict(jax.tree_util.tree_leaves_with_path(stacked))

    def over(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: 0 if x.ndim else None, tree)

    def init(params: Tree) -> Tree:
        def of_stack(path: TreePath, p: Array) -> Tree:
            one = jax.ShapeDtypeStruct(p.shape[num_stacked[path] :], p.dtype)
            out_axes = over(jax.eval_shape(inner.init, one))
            init_stack = inner.init
            for _ in range(num_stacked[path]):
                init_stack = jax.vmap(init_stack, out_axes=out_axes)
            return init_stack(p)

        return jax.tree_util.tree_map_with_path(of_stack, params)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        def of_stack(path: TreePath, update: Array, state: Tree, p: Array) -> tuple[Tree, Tree]:
            update_stack = inner.update
            for _ in range(num_stacked[path]):
                update_stack = jax.vmap(update_stack, in_axes=(0, over(state), 0), out_axes=(0, over(state)))
            return update_stack(update, state, p)

        tree = jax.tree.structure(updates)
        found = tree.flatten_up_to(jax.tree_util.tree_map_with_path(of_stack, updates, state, params))
        return tuple(tree.unflatten(part) for part in zip(*found, strict=True))

    return optax.GradientTransformation(init, update)


def adafactor(axes: Tree) -> optax.GradientTransformation:
    """Adafactor without its learning rate."""
    inner = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return per_tensor(inner, axes)


class MomentumState(NamedTuple):
    """The number of updates, and the mean of their gradients."""

    count: Any
    mu: Tree


def _nesterov(beta: float) -> optax.GradientTransformation:
    """Nesterov's momentum as Optax's Muon has it, with both means corrected for their start at zero."""

    def init(params: Tree) -> MomentumState:
        return MomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, MomentumState]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, count + 1)
        now = optax.tree.bias_correction(updates, beta, count)
        return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now), MomentumState(count, mu)

    return optax.GradientTransformation(init, update)


def muon(config: Config, axes: Tree) -> optax.GradientTransformation:
    """Muon on the layers' matrices, each expert by itself, and Adam on embeddings, head and norms, both with Nesterov's
    momentum.

    Source: Jordan et al. 2024; the updates' size by Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """

    # Without a mean of its own, Optax's Muon is the Newton-Schulz steps.
    steps = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, eps=config.adam_eps, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )

    def label(leaf: tuple[str, ...]) -> str:
        return "muon" if unstacked(leaf) != leaf and is_matrix(leaf) else "adam"

    def orthogonalize(x: Any, axes: tuple[str, ...]) -> Any:
        if label(axes) == "adam":
            return x
        matrix = per_tensor_axes(axes)
        num_stacked = len(axes) - len(matrix)
        cut = num_stacked + num_inputs(matrix)
        rows = math.prod(x.shape[num_stacked:cut])
        columns = math.prod(x.shape[cut:])

        def of_stack(stack: Array) -> Array:
            flat = stack.reshape(-1, rows, columns)
            found: Any = steps.update(flat, steps.init(flat))[0]
            return found.reshape(stack.shape)

        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            x = of_stack(x)
        else:
            where = sharding(mesh, axes)
            if config.shard_optimizer_over_data:
                where = zero1_sharding(where, x.shape)
            apart = ("data",) if config.enable_diloco else ()
            x = over_whole_matrices(of_stack, x, where, num_stacked, apart)
        return 0.2 * jnp.sqrt(max(rows, columns)) * x

    def orthogonalize_all(updates: Tree, _: Tree) -> Tree:
        return jax.tree.map(orthogonalize, updates, axes, is_leaf=lambda node: isinstance(node, optax.MaskedNode))

    return optax.partition(
        {
            "muon": optax.chain(_nesterov(config.adam_b1), optax.stateless(orthogonalize_all)),
            "adam": optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps, nesterov=True),
        },
        map_axes(label, axes),
    )
