"""The logical axes of weights, and the mesh axes that split them. Imports no jax.

The sharding rules of weights are here because the plan needs them without jax.
"""

import math
from collections.abc import Mapping
from typing import Any

MESH_AXES_OF_WEIGHTS: dict[str, tuple[str, ...]] = {
    "repeats": (),
    "layers": ("stage",),
    "dense_layers": (),
    "latent": (),
    "lora_rank": (),
    "positions": (),
    "embed": ("expert", "context", "fsdp"),  # every axis that splits tokens, except data
    "expert_embed": ("context", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
    "experts": ("expert",),
    "router": (),
    "router_bias": (),
}
"""The sharding rules of parameters: the mesh axes over which each logical axis is split."""


def num_parts(axis: str, mesh: Mapping[str, int]) -> int:
    """The number of parts into which a mesh splits a logical axis.

    Args:
      mesh: size of each mesh axis; 1 where it is not named.
    """
    return math.prod(mesh.get(mesh_axis, 1) for mesh_axis in MESH_AXES_OF_WEIGHTS[axis])


def unstacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's parameter, from those of a stack of layers; other axes unchanged."""
    return tuple(axis for axis in axes if axis not in ("repeats", "layers", "dense_layers"))


def of_one(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's and one expert's tensor, from those of a stack, whose dims come first."""
    return tuple(axis for axis in unstacked(axes) if axis != "experts")


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix that multiplies vectors: not a norm, a bias or a lookup table."""
    axes = unstacked(axes)
    contracted = {"embed", "expert_embed", "latent", "lora_rank"}
    return not contracted.isdisjoint(axes) and len(axes) > 1 and axes[0] not in ("vocab", "positions")


def num_inputs(axes: tuple[str, ...]) -> int:
    """The number of a matrix's first dims that a matmul sums over; its other dims are those of the result.

    Args:
      axes: of one layer's matrix, or of one expert's.
    """
    # Other matrices have one output dim.
    return 1 if axes[0] in ("embed", "expert_embed", "latent", "lora_rank") else len(axes) - 1


def halves(axes: tuple[str, ...], dims: tuple[Any, ...], between: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """An entry for each dim of a weight, rearranged for LoRA's a [..., *in, r] and b [..., r, *out]."""
    matrix = of_one(axes)
    first = len(axes) - len(matrix)
    cut = first + num_inputs(matrix)
    return (*dims[:cut], between), (*dims[:first], between, *dims[cut:])
