"""Each parameter's name and layout in a family's checkpoints: how the lines of families.yml are read.

A parameter has the dims of `config.weights`. In a checkpoint a matrix [*in, *out] is stored as torch's Linear has it,
[out, in], a vector in one dim, a table unchanged. For any other layout a line has `dims` such as "D (N H)": the letters
of the tensor's dims, in parentheses for those that are stored as one, with () for a dim of 1. Every line works in both
directions, so what is imported can always be exported.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import Mla, ModelConfig, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.keys import GlobalAttention, SharedKv
from maxtext_lite.config.weights import MTP_LAYERS, ModelShape, Weight, model_shape, num_inputs, stacks_of
from maxtext_lite.hf.fields import TABLE, JsonObject, Keys
from maxtext_lite.hf.safetensors import Shape, assign

LOAD = "/router_load"
"""The end of the path of experts' loads, which belong to a training run."""

Shapes = Mapping[str, Shape]
"""Of parameters or tensors, by path or name."""

Leaves = dict[str, Any]
"""Of a tree of parameters, by path."""

INPUTS_FIRST = ("gpt2",)
"""Families whose matrices are [in, out] in a checkpoint, in place of torch's [out, in]."""


_PARTS = {"mla": Mla, "global_attention": GlobalAttention, "shared_kv": SharedKv}


def model_of(keys: Keys, params: Mapping[str, Any] = {}) -> ModelShape:
    """The shape of a model with these keys of the Model section, and the multi-token prediction of these parameters."""
    own: dict[str, Any] = {key: kind(**keys[key]) if keys[key] else None for key, kind in _PARTS.items()}
    own |= {"load_balance_over": "example", "mtp_num_layers": 0}
    if MTP_LAYERS in params:
        own["mtp_num_layers"] = params[MTP_LAYERS]["hidden_projection"].shape[0]
    return model_shape(ModelConfig.model_construct(**{**keys, **own}))


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor of a checkpoint, or one of each layer or expert.

    Attributes:
      ours: the parameters in it, by their paths below a layer or the root of the parameters' tree.
      tensor: its name, in which {layer} and {expert} are numbers.
      dims: its dims, if they are not the usual ones.
      parts: of several parameters, how much of the dim Z each has: a letter or a number.
      pairs: a dim of the parameter with O rotated dims, the first ones or, in latent attention, the last; the tensor
        has these as pairs where the parameter has halves.
      our_dims: letters of the parameter's dims in one layer (and expert), with Z for its part; see `laid`.
      their_dims: for each of the tensor's dims, the letters that it consists of.
      sizes: how long each dim is.
    """

    ours: tuple[str, ...]
    tensor: str
    dims: str = ""
    parts: tuple[str, ...] = ()
    pairs: str = ""
    our_dims: tuple[str, ...] = ()
    their_dims: tuple[tuple[str, ...], ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def per_expert(self) -> bool:
        """Whether each expert or head has a tensor of its own; the parameter then has a leading dim for them."""
        return "{expert}" in self.tensor

    def laid(self, weights: Sequence[Weight], sizes: Mapping[str, int]) -> "Name | None":
        """The line with the dims of these parameters; None if it is about others."""
        first = weights[0]
        own = int(self.per_expert)
        has_experts = "E" in self.dims or (self.per_expert and first.is_normal)
        is_router_bias = first.dims == ("E",)  # one tensor for all experts in every layout
        if not is_router_bias and has_experts != (first.axes[0] == "experts"):
            return None
        dims = list(first.dims[own:])
        if self.parts and self.parts[0] in dims:
            dims[dims.index(self.parts[0])] = "Z"
        if self.dims:
            groups = re.findall(r"\(([^)]*)\)|(\w)", self.dims)
            theirs = [(many or one).split() for many, one in groups]
        elif not first.is_normal:
            theirs = [dims]
        elif first.axes[0] in ("vocab", "positions"):
            theirs = [[letter] for letter in dims]
        else:
            inputs = num_inputs(first.axes[own:])
            theirs = [dims[inputs:], dims[:inputs]]
        return dataclasses.replace(self, our_dims=tuple(dims), their_dims=tuple(map(tuple, theirs)), sizes=sizes)

    @property
    def their_shape(self) -> Shape:
        """The tensor's shape."""
        return tuple(math.prod(map(self._length, group)) for group in self.their_dims)

    def our_shape(self, part: int) -> Shape:
        """The shape of a parameter in one layer (and expert)."""
        return tuple(self._length(self.parts[part] if letter == "Z" else letter) for letter in self.our_dims)

    def to_ours(self, tensor: np.ndarray, part: int) -> np.ndarray:
        """A parameter of one layer (and expert) from a tensor: a view, unless dims must be reordered."""
        ours = self._view(tensor, part)
        if not self.pairs:
            return ours
        axis = self.our_dims.index(self.pairs)
        return np.take(ours, self._halves(ours.shape[axis]), axis)

    def to_theirs(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds these parameters of one layer (and expert)."""
        tensor = np.empty(self.their_shape, parameters[0].dtype)
        for part, ours in enumerate(parameters):
            if self.pairs:
                axis = self.our_dims.index(self.pairs)
                ours = np.take(ours, np.argsort(self._halves(ours.shape[axis])), axis)
            assign(self._view(tensor, part), ours)
        return tensor

    def reach(self, part: int, of_part: tuple[slice, ...]) -> tuple[slice, ...]:
        """The range of each of the tensor's dims that `to_ours(...)[of_part]`, which is not empty, comes from."""
        shape = self.their_shape
        if self.pairs:  # a half comes from all over the dim
            return tuple(map(slice, shape))
        stretches: list[slice] = []
        for numbers in np.meshgrid(*map(np.arange, shape), indexing="ij", copy=False):
            found = self._view(numbers, part)[of_part]
            found = found[tuple(slice(None if stride else 1) for stride in found.strides)]
            stretches.append(slice(int(found.min()), int(found.max()) + 1))
        return tuple(stretches)

    def _view(self, tensor: np.ndarray, part: int) -> np.ndarray:
        """The part of a tensor that is a parameter, with that one's dims."""
        letters = list(itertools.chain(*self.their_dims))
        dims = tensor.reshape([self._length(letter) for letter in letters])
        if self.parts:
            lengths = [self._length(each) for each in self.parts]
            start = sum(lengths[:part])
            axis = letters.index("Z")
            dims = dims[(slice(None),) * axis + (slice(start, start + lengths[part]),)]
            if "Z" not in self.our_dims:  # each parameter has one number of it
                dims = dims.squeeze(axis)
                letters.remove("Z")
        return dims.transpose([letters.index(letter) for letter in self.our_dims])

    def _length(self, dim: str) -> int:
        if dim == "Z":
            return sum(map(self._length, self.parts))
        return int(dim) if dim.isdigit() else self.sizes[dim]

    def _halves(self, length: int) -> np.ndarray:
        """Each dim's place before pairs became halves: of the rotated dims the even ones, then the odd ones."""
        first = length - self.sizes["O"] if "P" in self.sizes else 0
        order = np.arange(length)
        pairs = order[first : first + self.sizes["O"]]
        pairs[:] = np.concatenate([pairs[0::2], pairs[1::2]])
        return order


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of a family.

    Attributes:
      prefix: of all names but the output projection's; a checkpoint of the model without that may lack it.
      root: tensors outside the layers.
      layer: tensors of each layer. Of two lines for one parameter, the one with its rank applies.
      passed_over: a pattern of the whole names of tensors with nothing learned.
      constants: tensors of one number in each layer, and the number that each must have.
    """

    prefix: str
    root: tuple[Name, ...]
    layer: tuple[Name, ...]
    passed_over: str
    constants: Mapping[str, float]

    def names_ahead(self, layers: Iterable[int]) -> list[str]:
        """A tensor of each of these layers of multi-token prediction; none in a family without them."""
        lines = [line for line in self.layer if "hidden_projection" in line.ours]
        return [line.tensor.format(layer=layer) for line in lines for layer in layers]


def _lines(rows: Any, prefix: str, *, paired: bool) -> Iterator[Name]:
    """The lines of names of families.yml, and of its groups."""
    for row in rows if isinstance(rows, list) else [rows]:
        if isinstance(row, list):
            yield from _lines(row, prefix, paired=paired)
        elif isinstance(row, str):
            yield from _lines(TABLE["tensors"][row], prefix, paired=paired)
        else:
            for ours, theirs in row.items():
                yield _line(ours, theirs, prefix, paired=paired)


def _line(ours: str, theirs: str | JsonObject, prefix: str, *, paired: bool) -> Name:
    line = {"tensor": theirs} if isinstance(theirs, str) else theirs
    is_turned = paired and ours.startswith(("attention/query", "attention/key"))
    return Name(
        tuple(ours.split()),
        prefix + line["tensor"],
        line.get("dims", ""),
        tuple(line.get("parts", ())),
        line.get("pairs", "H" if is_turned else ""),
    )


def _table(stated: JsonObject) -> Table:
    whole = TABLE["usual"] | stated
    layers = whole["layers"]
    return Table(
        prefix=whole["prefix"],
        root=tuple(_lines(whole["root"], "", paired=False)),
        layer=tuple(_lines(whole["tensors"], layers, paired=whole["paired"])),
        passed_over=whole["passed_over"],
        constants={layers + name: value for name, value in whole["constants"].items()},
    )


TABLES: Mapping[str, Table] = {kind: _table(stated) for kind, stated in TABLE["families"].items()}
"""The table of each model_type of `families.FAMILIES`."""


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
    layer_dims: Shape
    layers: tuple[int, ...]
    num_experts: int

    def tensor_names(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor's name, with its layer's number in the stack and its expert's; 0 without them."""
        for layer in range(math.prod(self.layer_dims)):
            for expert in range(self.num_experts):
                yield self.tensor_name(layer, expert), layer, expert

    def tensor_name(self, layer: int, expert: int) -> str:
        """The name of the tensor of a layer and an expert."""
        return self.name.tensor.format(layer=self.layers[layer], expert=expert)


def flat(params: Mapping[str, Any]) -> Leaves:
    """The leaves of a tree of parameters by their paths, `layers/attention/query`, in the order of jax."""
    leaves: Leaves = {}
    for name in sorted(params):
        part = params[name]
        if isinstance(part, Mapping):
            leaves |= {f"{name}/{path}": leaf for path, leaf in flat(part).items()}
        else:
            leaves[name] = part
    return leaves


def shapes_of(leaves: Leaves) -> dict[str, Shape]:
    """The shape of each leaf."""
    return {path: tuple(leaf.shape) for path, leaf in leaves.items()}


def nested(leaves: Leaves) -> dict[str, Any]:
    """The tree with these leaves by their paths: the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *steps, last = path.split("/")
        parent = tree
        for step in steps:
            parent = parent.setdefault(step, {})
        parent[last] = leaf
    return tree


_NAMED_AT_MOST = 10


def some_of(tensors: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    text = ", ".join(value_text(name) for name in tensors[:_NAMED_AT_MOST])
    more = len(tensors) - _NAMED_AT_MOST
    return f"{text}, and {more} more" if more > 0 else text


def entries_of(table: Table, shapes: Shapes, model: ModelShape, where: str) -> list[Entry]:
    """The lines that a decoder needs; the experts' load belongs to the training run and has none.

    Args:
      shapes: of its parameters, by path.
      model: the checkpoint's.
      where: what messages call the checkpoint.
    Raises:
      UserError: a parameter has another shape than in the checkpoint, or no name in the family.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    named: set[str] = set()
    for stack, (_, weights) in stacks_of(model).items():
        for line in table.layer if stack else table.root:
            below = f"{stack}/" if stack else ""
            paths = tuple(below + path for path in line.ours)
            if not (weights.keys() >= {*line.ours} and shapes.keys() >= {*paths}):
                continue
            held = [weights[path] for path in line.ours]
            name = line.laid(held, (model.of_stack(stack) if stack else model).sizes)
            if name is None:
                continue
            shape = shapes[paths[0]]
            layer_dims = shape[: len(shape) - len(held[0].sizes)]
            layers = model.stacks[stack] if stack else (0,)
            experts = held[0].sizes[0] if name.per_expert else 1
            entries.append(Entry(name, paths, layer_dims, layers, experts))
            named.update(paths)
            for path, weight in zip(paths, held, strict=True):
                there = (*layer_dims, *weight.sizes)
                if shapes[path] != there:
                    problems.append(f"{where}: parameter {path} is {there} there and {shapes[path]} here.")
    named.update(path for path in shapes if path.endswith(LOAD))
    problems += [f"{where}: its family has no tensor for parameter {path}." for path in shapes if path not in named]
    if problems:
        raise UserError(problems)
    return entries
