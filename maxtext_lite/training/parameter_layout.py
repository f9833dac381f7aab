"""A checkpoint's layout of parameters: its items, and its layers' first dims, which depend on the pipeline."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import NamedSharding, Sharding

from maxtext_lite.config import MlpKind
from maxtext_lite.config.bucket import absolute
from maxtext_lite.parallel import Params, Tree, TreePath, with_dims
from maxtext_lite.training.saving import FORMAT

AVERAGE = "average"
"""The item of a checkpoint that has the moving average of the parameters."""


def parameter_items(params: Params) -> dict[str, Any]:
    """The items of a checkpoint of parameters alone."""
    return {
        "params": ocp.args.StandardSave(params),
        "about": ocp.args.JsonSave({"format": FORMAT}),
    }


def has_average(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the moving average of the parameters."""
    return (checkpoint / AVERAGE).is_dir()


def frozen_directory(run_directory: Path) -> Path:
    """The directory of a LoRA run's frozen parameters, a checkpoint of parameters alone."""
    return absolute(run_directory / "frozen")


class StageLayout(NamedTuple):
    """The first dims of the layers' parameters, [L] or [repeats, L / repeats], here and in a checkpoint.

    Attributes:
      here, saved: those of all layers together.
      stacks: those of each stack of layers, here.
    """

    here: tuple[int, ...]
    saved: tuple[int, ...]
    stacks: list[tuple[int, ...]]

    @staticmethod
    def of(params: Params, saved: tuple[int, ...]) -> "StageLayout":
        """The layout of parameters here beside the dims that `layer_dims_of` found in a checkpoint."""
        return StageLayout(layer_dims_of(params), saved, _stack_dims(params))

    def as_saved(self, abstract: Params, before: int = 0) -> Params:
        """A tree of shapes and shardings, in the checkpoint's stage layout.

        Args:
          before: the number of dims before those of the layers.
        """
        if self.here == self.saved or math.prod(self.here) != math.prod(self.saved):
            return abstract
        end = before + len(self.here)

        def change(path: TreePath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            in_layers = any(isinstance(entry, jax.tree_util.DictKey) and entry.key == "layers" for entry in path)
            if not in_layers or leaf.shape[before:end] not in self.stacks:
                return leaf
            assert isinstance(leaf.sharding, NamedSharding)
            # In the checkpoint's layout, the stages need not divide that dim.
            where = with_dims(leaf.sharding, leaf.ndim, before, end, len(self.saved))
            num_layers = math.prod(leaf.shape[before:end])
            saved = (*self.saved[:-1], num_layers // math.prod(self.saved[:-1]))
            shape = (*leaf.shape[:before], *saved, *leaf.shape[end:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(change, abstract)


def layer_dims_of(params: Params) -> tuple[int, ...]:
    """The first dims of the layers' parameters, all stacks together."""
    dims = _stack_dims(params)
    return (*dims[0][:-1], sum(each[-1] for each in dims))


def _stack_dims(params: Params) -> list[tuple[int, ...]]:
    """The first dims of each stack of layers. Its norms' scales are vectors, with one more dim."""
    layers = params["layers"]
    stacks = [layers[kind] for kind in get_args(MlpKind) if kind in layers] or [layers]
    return [min((tuple(leaf.shape) for leaf in jax.tree.leaves(stack)), key=len)[:-1] for stack in stacks]


def reshaped(tree: Tree, abstract: Tree) -> Tree:
    """The arrays in the shapes and shardings of `abstract`; only those of other shapes are touched."""

    def reshape(x: Array, wanted: jax.ShapeDtypeStruct) -> Array:
        return x if x.shape == wanted.shape else _reshape(wanted.shape, wanted.sharding)(x)

    return jax.tree.map(reshape, tree, abstract)


@functools.cache  # one compilation for all parameters of one shape
def _reshape(shape: tuple[int, ...], where: Sharding) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x.reshape(shape), out_shardings=where)
