"""Elements of a device's optimizer state and work, beside those of its parameters."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxtext_lite.batching.parameters import ParameterCount, moment_block, parts_on_device, weights_by_part
from maxtext_lite.batching.topology import num_repeats
from maxtext_lite.config import Config, ModelConfig
from maxtext_lite.config.weights import MESH_AXES_OF_WEIGHTS, Weight, num_inputs, per_tensor_axes

NEWTON_SCHULZ_STEPS = 5  # of Optax's Muon


def count_factored(config: ModelConfig, **mesh: int) -> int:
    """Elements per device of Adafactor's second moments of the trained parameters.

    The means are split like the parameter, without the dim that they are taken over.
    """
    elements = 0
    for part, count, weight in weights_by_part(config, mesh):
        is_trained = (part == "adapters") == (config.lora_rank > 0)
        if is_trained:
            elements += count * _factored(weight, mesh)
    return elements


def count_scales(config: ModelConfig, mesh: Mapping[str, int]) -> ParameterCount:
    """The scales per device of one moment in eight bits of each trained parameter; no axis splits their last dim."""
    scales = Counter[str]()
    for part, count, weight in weights_by_part(config, mesh):
        last = weight.sizes[-1]
        part = part if config.lora_rank == 0 else {"adapters": "matrices"}.get(part, "frozen")
        scales[part] += count * math.prod(parts_on_device(weight, mesh)[:-1]) * (last // moment_block(last))
    return ParameterCount(scales["matrices"], scales["tables"], scales["norms"])


class Orthogonalized(NamedTuple):
    """One stack of matrices in an update of Muon, after the devices have exchanged their parts of it.

    Attributes:
      matrices: whole ones on each device, zeros that fill up the stack included.
      elements: of one matrix.
      products: multiplications on a device, each with an addition.
      exchanged: the mesh axes that split each dim of a matrix, for an all-to-all there and one back.
      shared: the mesh axes whose devices had the same parts and gather the updates.
      gathered: elements that each device then has.
    """

    matrices: int
    elements: int
    products: int
    exchanged: list[tuple[str, ...]]
    shared: tuple[str, ...]
    gathered: int


def orthogonalized(config: Config, mesh: Mapping[str, int]) -> Iterator[Orthogonalized]:
    """Every stack of trained matrices of the layers; a device does it for each replica of local updates it holds.

    Args:
      mesh: size of each mesh axis.
    """
    copies = max(1, config.diloco_num_replicas // mesh["data"]) if config.enable_diloco else 1
    for count, weight in trained_matrices(config, mesh):
        over_data = axis_over_data(config, mesh, count, weight)
        axes = per_tensor_axes(weight.axes)
        dims = weight.sizes[len(weight.sizes) - len(axes) :]
        cut = num_inputs(axes)
        m, n = sorted((math.prod(dims[:cut]), math.prod(dims[cut:])))
        exchanged = [(*MESH_AXES_OF_WEIGHTS[axis], *(["data"] if axis == over_data else [])) for axis in axes]
        exchanged = [names for names in exchanged if math.prod(mesh[name] for name in names) > 1]
        stack = count * math.prod(parts_on_device(weight, mesh)[: -len(axes)])
        taken = {"stage", *(name for names in exchanged for name in names)}
        if "experts" in weight.axes:
            taken.add("expert")
        if over_data == STACKED:
            stack //= mesh["data"]
        if over_data == STACKED or config.enable_diloco:
            taken.add("data")
        shared = tuple(name for name in mesh if name not in taken and mesh[name] > 1)
        parts = math.prod(mesh[name] for names in exchanged for name in names)
        num_shared = math.prod(mesh[name] for name in shared)
        matrices = copies * -(-stack // (parts * num_shared))
        products = NEWTON_SCHULZ_STEPS * matrices * (2 * m * m * n + m**3)
        yield Orthogonalized(matrices, m * n, products, exchanged, shared, num_shared * matrices * m * n)


def count_orthogonalized(config: Config, mesh: Mapping[str, int]) -> int:
    """Elements per device that Muon's Newton-Schulz steps work with, if all stacks run side by side as compiled: each
    matrix before and after a step, in two more layouts where parts are exchanged, and the updates where they are
    gathered."""
    elements = 0
    for each in orthogonalized(config, mesh):
        elements += (4 if each.exchanged or each.shared else 2) * each.matrices * each.elements
        elements += each.gathered if each.shared else 0
    return elements


def trained_matrices(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[tuple[int, Weight]]:
    """The trained matrices of a layer, each with the number of a device's layers that have it."""
    part = "adapters" if config.lora_rank else "matrices"
    for kind, count, weight in weights_by_part(config, mesh):
        if kind == part:
            yield count, weight


STACKED = "stacked"
"""The part of a stack of matrices that is split over `data` by whole matrices."""


def axis_over_data(config: Config, mesh: Mapping[str, int], count: int, weight: Weight) -> str | None:
    """The axis that shard_optimizer_over_data splits in a stack of `count` matrices on a device, or STACKED; None
    without that key, or where none divides. See `parallel.zero1_sharding`."""
    data = mesh.get("data", 1)
    if not config.shard_optimizer_over_data or data == 1:
        return None
    repeats = num_repeats(config, mesh.get("stage", 1))
    if repeats % data == 0 or count // repeats % data == 0:
        return STACKED
    for axis, size in zip(weight.axes, parts_on_device(weight, mesh), strict=True):
        if size % data == 0:
            return STACKED if axis == "experts" else axis
    return None


_FACTORED_FROM = 128  # min_dim_size_to_factor of Optax's Adafactor


def _factored(weight: Weight, mesh: Mapping[str, int]) -> int:
    """Elements on one device of Adafactor's second moments.

    A tensor of a layer or an expert has means over each of its two largest dims if both are at least `_FACTORED_FROM`;
    any other has all of its elements.
    """
    parts = parts_on_device(weight, mesh)
    sizes = weight.sizes
    first = 1 if weight.axes[0] == "experts" else 0
    by_size = sorted(range(first, len(parts)), key=lambda dim: sizes[dim])
    if len(by_size) < 2 or sizes[by_size[-2]] < _FACTORED_FROM:
        return math.prod(parts)

    def without(dim: int) -> int:
        while dim + 1 < len(parts) and sizes[dim + 1] == sizes[dim]:
            dim += 1  # among adjacent equal dims the shape does not tell which one is missing: the last
        return math.prod(parts[:dim] + parts[dim + 1 :])

    return sum(without(dim) for dim in by_size[-2:])
