"""Elements of a device's optimizer state and work, beside those of its parameters."""

import math
from collections.abc import Iterator, Mapping

from maxtext_lite.batching.parameters import parts_on_device, weights_by_part
from maxtext_lite.batching.pipeline_shape import num_repeats
from maxtext_lite.config import Config, ModelConfig
from maxtext_lite.config.weights import Weight, num_parts


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


def count_orthogonalized(config: Config, **mesh: int) -> int:
    """Elements per device that Muon's Newton-Schulz steps work with, if all stacks run side by side as compiled.

    Each trained matrix counts before and after a step, split over tensor, expert and stage only, and in two layouts of
    the device's own part where it is split further. With shard_optimizer_over_data a device has its share of the stack.
    """
    whole = {axis: mesh.get(axis, 1) for axis in ("tensor", "expert")}
    elements = 0
    for count, weight in trained_matrices(config, mesh):
        here = math.prod(parts_on_device(weight, mesh))
        parts = [1 if axis.endswith("embed") else num_parts(axis, whole) for axis in weight.axes]
        gathered = math.prod(weight.sizes) // math.prod(parts)
        over_data = axis_over_data(config, mesh, count, weight)
        if over_data:
            here //= mesh["data"]
        if over_data == STACKED:
            gathered //= mesh["data"]
        elements += count * 2 * gathered
        if here < gathered:
            elements += count * 2 * here
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
