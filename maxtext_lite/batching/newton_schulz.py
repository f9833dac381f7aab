"""What Muon's Newton-Schulz steps cost a device: products, and elements that its neighbours send.

Each of five steps maps a matrix X of m x n, m <= n, to a X + (b A + c A A) X with A = X X^T, all split as X is.
Source: Jordan et al. 2024.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxtext_lite.batching.parameters import trained_matrices
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
      mesh: size of each mesh axis; replicas along `data` all do the same, and a device does it for each replica of local
        updates that it holds.
    """
    copies = max(1, config.diloco_num_replicas // mesh["data"]) if config.enable_diloco else 1
    for count, weight in trained_matrices(config, mesh):
        axes = of_one(weight.axes)
        dims, cut = weight.sizes[len(weight.sizes) - len(axes) :], num_inputs(axes)
        inputs, outputs = (math.prod(dims[:cut]), axes[:cut]), (math.prod(dims[cut:]), axes[cut:])
        (m, of_rows), (n, of_columns) = sorted((inputs, outputs), key=lambda side: side[0])
        rows, columns = (math.prod(num_parts(axis, mesh) for axis in side) for side in (of_rows, of_columns))
        experts = math.prod(weight.sizes) // (m * n) // (num_parts("experts", mesh) if "experts" in weight.axes else 1)
        times = _STEPS * copies * count * experts
        products = times * (2 * m * m * n / (rows * columns) + m**3 / rows)
        yield Orthogonalized(
            products,
            times * m * n / columns,
            times * m * m,
            _mesh_axes(of_rows),
            times * m * m / rows,
            _mesh_axes(of_columns),
        )


def _mesh_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(mesh_axis for axis in axes for mesh_axis in MESH_AXES_OF_WEIGHTS[axis])
