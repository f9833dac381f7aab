"""Each parameter's name and layout in a family's checkpoints.

A parameter's dims are those of `config.weights`. In a checkpoint a matrix [*in, *out] is stored as torch's Linear has
it, [out, in], a vector in one dim, a table unchanged. For any other layout a line has a pattern such as "D (N H)": the
letters of the tensor's dims, in parentheses for those that are stored as one, with () for a dim of 1. Every line works
in both directions, so what is imported can always be exported.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import Mla, ModelConfig
from maxtext_lite.config.weight_axes import num_inputs
from maxtext_lite.config.weights import ModelShape, Weight, model_shape
from maxtext_lite.hf.copying import assign

INPUTS_FIRST = ("gpt2",)
"""Families whose matrices are [in, out] in a checkpoint, in place of torch's [out, in]."""

Sizes = Mapping[str, int]
"""How long each dim is: `ModelShape.sizes`. In a line with parts, Z is these one after another."""


def model_of(keys: Mapping[str, Any]) -> ModelShape:
    """The shape of a model with these keys of the Model section."""
    mla = Mla(**keys["mla"]) if keys["mla"] else None
    return model_shape(ModelConfig.model_construct(**{**keys, "mla": mla}))


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor of a checkpoint, or one of each layer or expert.

    Attributes:
      ours: the parameters in it, by their paths below a layer or the root of the parameters' tree.
      theirs: its name, in which {layer} and {expert} are numbers.
      pattern: its dims, if they are not the usual ones.
      parts: of several parameters, how much of the dim Z each has: a letter or a number.
      pairs: a dim of the parameter with O rotated dims, the first ones or, in latent attention, the last; the tensor
        has these as pairs where the parameter has halves.
      our_dims: letters of the parameter's dims in one layer (and expert), with Z for its part; see `laid`.
      their_dims: for each of the tensor's dims, the letters that it consists of.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str = ""
    parts: tuple[str, ...] = ()
    pairs: str = ""
    our_dims: tuple[str, ...] = ()
    their_dims: tuple[tuple[str, ...], ...] = ()

    @property
    def per_expert(self) -> bool:
        """Whether each expert or head has a tensor of its own; the parameter then has a leading dim for them."""
        return "{expert}" in self.theirs

    def laid(self, weights: Sequence[Weight]) -> "Name | None":
        """The line with the dims of these parameters; None if it is about others."""
        first, own = weights[0], int(self.per_expert)
        is_bias = first.dims == ("E",)  # the router's: one tensor for all experts in every layout
        per_expert = self.per_expert and first.is_normal
        if not is_bias and (first.axes[0] == "experts") != (per_expert or "E" in self.pattern):
            return None
        part = self.parts[0] if self.parts else ""
        dims = tuple("Z" if letter == part else letter for letter in first.dims[own:])
        if self.pattern:
            theirs = _parsed(self.pattern)
        elif not first.is_normal:
            theirs = (dims,)
        elif first.axes[0] in ("vocab", "positions"):
            theirs = tuple((letter,) for letter in dims)
        else:
            inputs = num_inputs(first.axes[own:])
            theirs = (dims[inputs:], dims[:inputs])
        return dataclasses.replace(self, our_dims=dims, their_dims=theirs)

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The tensor's shape."""
        whole = self._whole(sizes)
        return tuple(int(np.prod([whole[letter] for letter in group])) for group in self.their_dims)

    def our_shape(self, part: int, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a parameter in one layer (and expert)."""
        of_part = self._whole(sizes) | ({"Z": _length(self.parts[part], sizes)} if self.parts else {})
        return tuple(of_part[letter] for letter in self.our_dims)

    def to_ours(self, tensor: np.ndarray, part: int, sizes: Sizes) -> np.ndarray:
        """A parameter of one layer (and expert) from a tensor: a view, unless dims must be reordered."""
        left, right = self._letters
        whole = self._whole(sizes)
        dims = tensor.reshape([whole[letter] for letter in left])
        if self.parts:
            lengths = [_length(each, sizes) for each in self.parts]
            start = sum(lengths[:part])
            dims = np.moveaxis(np.moveaxis(dims, left.index("Z"), 0)[start : start + lengths[part]], 0, left.index("Z"))
            if "Z" not in right:  # each parameter has one number of it
                dims = dims.squeeze(left.index("Z"))
                left.remove("Z")
        ours = dims.transpose([left.index(letter) for letter in right])
        if self.pairs:
            ours = np.take(ours, _halves(sizes, ours.shape[right.index(self.pairs)]), axis=right.index(self.pairs))
        return ours

    def to_theirs(self, parameters: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
        """The tensor that holds these parameters of one layer (and expert)."""
        left, right = self._letters
        whole = self._whole(sizes)
        dims = np.empty([whole[letter] for letter in left], parameters[0].dtype)
        end = 0
        for part, ours in enumerate(parameters):
            if self.pairs:
                order = np.argsort(_halves(sizes, ours.shape[right.index(self.pairs)]))
                ours = np.take(ours, order, axis=right.index(self.pairs))
            letters = list(right)
            if self.parts and "Z" not in right:
                ours, letters = ours[..., None], [*right, "Z"]
            into = dims
            if self.parts:
                start, end = end, end + _length(self.parts[part], sizes)
                into = dims[(slice(None),) * left.index("Z") + (slice(start, end),)]
            assign(into, ours.transpose([letters.index(letter) for letter in left]))
        return dims.reshape(self.their_shape(sizes))

    def reach(self, part: int, sizes: Sizes, of_part: tuple[slice, ...]) -> tuple[slice, ...]:
        """The stretch of each of the tensor's dims that `to_ours(...)[of_part]`, which is not empty, comes from."""
        shape = self.their_shape(sizes)
        if self.pairs:  # a half comes from all over the dim
            return tuple(slice(0, size) for size in shape)
        stretches = []
        for dim, size in enumerate(shape):
            numbers = np.arange(size).reshape([-1 if other == dim else 1 for other in range(len(shape))])
            found = self.to_ours(np.broadcast_to(numbers, shape), part, sizes)[of_part]
            found = found[tuple(slice(None if stride else 1) for stride in found.strides)]
            stretches.append(slice(int(found.min()), int(found.max()) + 1))
        return tuple(stretches)

    @property
    def _letters(self) -> tuple[list[str], tuple[str, ...]]:
        """The letters of the tensor's and of the parameter's dims."""
        return [letter for group in self.their_dims for letter in group], self.our_dims

    def _whole(self, sizes: Sizes) -> dict[str, int]:
        return {**sizes, "Z": sum(_length(part, sizes) for part in self.parts)}


def _length(part: str, sizes: Sizes) -> int:
    return int(part) if part.isdigit() else sizes[part]


@functools.cache
def _parsed(pattern: str) -> tuple[tuple[str, ...], ...]:
    groups = re.findall(r"\(([^)]*)\)|(\w)", pattern)
    return tuple((one,) if one else tuple(many.split()) for many, one in groups)


def _halves(sizes: Sizes, length: int) -> np.ndarray:
    """Each dim's place before pairs became halves: of the rotated dims the even ones, then the odd ones."""
    first = length - sizes["O"] if "P" in sizes else 0
    pairs, end = np.arange(first, first + sizes["O"]), first + sizes["O"]
    return np.concatenate([np.arange(first), pairs[0::2], pairs[1::2], np.arange(end, length)])


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
    passed_over: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    def named(self, theirs: str) -> "Table":
        """The table itself for a name with the prefix; for any other, the table without it."""
        if not self.prefix or theirs.startswith(self.prefix):
            return self
        cut = functools.partial(_without, self.prefix)
        passed_over = self.passed_over.replace(self.prefix.replace(".", r"\."), "")
        constants = {name.removeprefix(self.prefix): value for name, value in self.constants.items()}
        return Table("", tuple(map(cut, self.root)), tuple(map(cut, self.layer)), passed_over, constants)


def _without(prefix: str, name: Name) -> Name:
    return dataclasses.replace(name, theirs=name.theirs.removeprefix(prefix))
