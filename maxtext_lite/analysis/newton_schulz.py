"""What Muon's Newton-Schulz steps cost a device: products, and elements that its neighbours send.

Each of five steps maps a matrix X of m x n, m <= n, to a X + (b A + c A A) X with A = X X^T, all split as X is.
Source: Jordan et al. 2024.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxtext_lite.batching.parameters import STACKED, axis_over_data, trained_matrices
from maxtext_lite.config import Config
from maxtext_lite.config.weight_axes import MESH_AXES_OF_WEIGHTS, num_inputs, num_parts, of_one

_STEPS = 5


class Orthogonalized(NamedTuple):
    """The work of one stack of matrices on a device, in one update.

    Attributes:
      products: multiplications, each with an addition.
      matrix, square: elements of X and of A once they are gathered over `rows`, the mesh axes that split m.
      reduced: elements of A, summed over `columns`, the mesh axes that split n.
    """

    products: float
    matrix: float
    square: float
    rows: tuple[str, ...]
    reduced: float
    columns: tuple[str, ...]


def orthogonalized(config: Config, mesh: Mapping[str, int]) -> Iterator[Orthogonalized]:
    """Every stack of trained matrices of the layers.

    Args:
      mesh: size of each mesh axis. Replicas along `data` all do the same, or with shard_optimizer_over_data each its
        share; a device does it for each replica of local updates that it holds.
    """
    copies = max(1, config.diloco_num_replicas // mesh["data"]) if config.enable_diloco else 1
    for count, weight in trained_matrices(config, mesh):
        axes, over_data = of_one(weight.axes), axis_over_data(config, mesh, count, weight)
        dims, cut = weight.sizes[len(weight.sizes) - len(axes) :], num_inputs(axes)
        inputs, outputs = (math.prod(dims[:cut]), axes[:cut]), (math.prod(dims[cut:]), axes[cut:])
        (m, of_rows), (n, of_columns) = sorted((inputs, outputs), key=lambda side: side[0])
        row_axes, column_axes = (_mesh_axes(side, over_data) for side in (of_rows, of_columns))
        rows, columns = (math.prod(mesh[axis] for axis in side) for side in (row_axes, column_axes))
        experts = math.prod(weight.sizes) // (m * n) // (num_parts("experts", mesh) if "experts" in weight.axes else 1)
        times = _STEPS * copies * count * experts / (mesh["data"] if over_data == STACKED else 1)
        products = times * (2 * m * m * n / (rows * columns) + m**3 / rows)
        square = times * m * m
        yield Orthogonalized(products, times * m * n / columns, square, row_axes, square / rows, column_axes)


def _mesh_axes(axes: tuple[str, ...], over_data: str | None) -> tuple[str, ...]:
    """The mesh axes that split one side of a matrix; over `data` only by the first of the side's own axes, as XLA
    gathers the others before it merges them."""
    of_weights = (mesh_axis for axis in axes for mesh_axis in MESH_AXES_OF_WEIGHTS[axis])
    return (*(("data",) if over_data == axes[0] else ()), *of_weights)
