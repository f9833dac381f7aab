"""Which tensors a decoder's parameters are made of: a family's table laid over the tree of parameters."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.weights import ModelShape, WeightTable, stacks_of
from maxtext_lite.hf.names import Name, Table


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a table with the parameters of one stack that it is about.

    Attributes:
      name: the line, laid.
      paths: the parameters, from the root of the tree.
      layer_dims: the leading dims that count layers: (), (L,), or (repeats, L / repeats).
      layers: those layers' numbers in the model; (0,) of what is outside.
      num_experts: tensors of each layer, of experts or heads; 1 where they share one or there are none.
    """

    name: Name
    paths: tuple[str, ...]
    layer_dims: tuple[int, ...]
    layers: tuple[int, ...]
    num_experts: int

    def tensor_names(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor's name, with the layer's number in the stack and the expert's; 0 where there are none."""
        for layer in range(math.prod(self.layer_dims)):
            for expert in range(self.num_experts):
                yield self.tensor_name(layer, expert), layer, expert

    def tensor_name(self, layer: int, expert: int) -> str:
        """The name of one layer's, and expert's, tensor."""
        return self.name.theirs.format(layer=self.layers[layer], expert=expert)


def flat(params: Any) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths, `layers/attention/query`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}


def entries_of(table: Table, shapes: Mapping[str, tuple[int, ...]], model: ModelShape, where: str) -> list[Entry]:
    """The lines that a decoder needs.

    Args:
      shapes: of its parameters, by path.
      model: the checkpoint's.
      where: what messages call the checkpoint.
    Raises:
      UserError: a parameter's shape is not what the checkpoint's sizes make it, or the family has no name for it.
    """
    entries, problems, named = [], [], set()
    for stack, (_, weights) in stacks_of(model).items():
        layer_dims = _layer_dims(shapes, stack, weights) if stack else ()
        for line in table.layer if stack else table.root:
            paths = [f"{stack}/{path}" if stack else path for path in line.ours]
            held = [weights[path] for path in line.ours if path in weights]
            name = line.laid(held) if len(held) == len(paths) and shapes.keys() >= {*paths} else None
            if name is None:
                continue
            experts = held[0].sizes[0] if name.per_expert else 1
            entries.append(Entry(name, tuple(paths), layer_dims, model.stacks[stack] if stack else (0,), experts))
            for path, weight in zip(paths, held, strict=True):
                named.add(path)
                there = (*layer_dims, *weight.sizes)
                if shapes[path] != there:
                    problems.append(f"{where}: parameter {path} is {there} there and {shapes[path]} here.")
    problems += [f"{where}: its family has no tensor for parameter {path}." for path in shapes if path not in named]
    if problems:
        raise UserError(problems)
    return entries


def _layer_dims(shapes: Mapping[str, tuple[int, ...]], stack: str, weights: WeightTable) -> tuple[int, ...]:
    """The first dims of a stack's parameters, before those of one layer's; () where it has none."""
    for path, weight in weights.items():
        if (shape := shapes.get(f"{stack}/{path}")) is not None:
            return shape[: len(shape) - len(weight.sizes)]
    return ()
