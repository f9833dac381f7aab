"""The tensors behind a decoder's parameters: a family's table applied to the tree of parameters."""

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
    """A line of a table, with its parameters in one stack of layers.

    Attributes:
      name: the line, with the dims of its parameters.
      paths: the parameters, from the root of the tree.
      layer_dims: the leading dims that count layers: (), (L,), or (repeats, L / repeats).
      layers: those layers' numbers in the model; (0,) outside of the layers.
      num_experts: tensors of each layer, one for each expert or head; 1 if they share one or there are none.
    """

    name: Name
    paths: tuple[str, ...]
    layer_dims: tuple[int, ...]
    layers: tuple[int, ...]
    num_experts: int

    def tensor_names(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor's name, with the numbers of the layer in the stack and of the expert; 0 if there are none."""
        for layer in range(math.prod(self.layer_dims)):
            for expert in range(self.num_experts):
                yield self.tensor_name(layer, expert), layer, expert

    def tensor_name(self, layer: int, expert: int) -> str:
        """The name of the tensor of a layer and an expert."""
        return self.name.theirs.format(layer=self.layers[layer], expert=expert)


def table_of(kind: str) -> Table:
    """The table of a model_type; a run without such a model makes none."""
    from maxtext_lite.hf.tables import TABLES

    return TABLES[kind]


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
      UserError: a parameter has another shape than in the checkpoint, or no name in the family.
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
    """The dims of a stack's parameters before those of one layer; () if the stack has none."""
    for path, weight in weights.items():
        if (shape := shapes.get(f"{stack}/{path}")) is not None:
            return shape[: len(shape) - len(weight.sizes)]
    return ()
