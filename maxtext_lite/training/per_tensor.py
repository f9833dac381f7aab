"""Optimizers that treat each tensor by itself: adafactor and muon on stacks of layers and of experts."""

import jax
import optax
from jax import Array

from maxtext_lite.config import OptimizerConfig
from maxtext_lite.models import is_matrix, num_inputs, per_tensor_axes, unstacked
from maxtext_lite.parallel import Tree, TreePath
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


def _vmap_dim(name: str, inner: optax.GradientTransformation, axes: Tree) -> optax.GradientTransformation:
    """Maps `inner` over the dim `name` of the parameters that have one, and keeps the dim's sharding.

    The state is `inner`'s. Counts are shared by all parameters.
    """
    places = map_axes(lambda leaf: leaf.index(name) if name in leaf else None, axes)
    dim_of = dict(jax.tree_util.tree_leaves_with_path(places))
    if not dim_of:
        return inner

    def dim(path: TreePath, _: Array) -> int | None:
        for start in range(len(path)):  # the state's paths end in those of the parameters
            if path[start:] in dim_of:
                return dim_of[path[start:]]
        return None

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        in_axes = tuple(jax.tree_util.tree_map_with_path(dim, tree) for tree in (updates, state, params))
        return jax.vmap(inner.update, in_axes=in_axes, out_axes=in_axes[:2])(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def muon(config: OptimizerConfig, axes: Tree) -> optax.GradientTransformation:
    """Muon on the layers' matrices, each expert by itself, and Adam on embeddings, head and norms. Both have Nesterov's
    momentum, which Optax applies to both or neither.

    Source: Jordan et al. 2024.
    """

    def dimension_numbers(
        leaf: tuple[str, ...],
    ) -> optax.contrib.MuonDimensionNumbers | None:
        """The input and output dims of a stacked projection; None where Muon does not apply."""
        if unstacked(leaf) == leaf or not is_matrix(leaf):
            return None
        matrix = per_tensor_axes(leaf)
        dims = tuple(range(-len(matrix), 0))
        split = num_inputs(matrix)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=dims[:split], output_axis=dims[split:])

    # Optax's muon applies a learning rate: 1 leaves it to the train step, and -1 undoes the sign.
    both = optax.contrib.muon(
        learning_rate=1.0,
        beta=config.adam_b1,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        eps=config.adam_eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=map_axes(dimension_numbers, axes),
    )
    # It merges all dims before a matrix. Only the first of them can stay split: it must be the layers'.
    for name in ("repeats", "experts"):
        both = _vmap_dim(name, both, axes)
    return optax.chain(both, optax.scale(-1.0))
